"""Groups, pools, and how ranks find each other."""

import multiprocessing
import os
import subprocess
import sys

import numpy
import pytest
import ranks
import symmem


def subgroups_number_their_ranks(world):
    odd = world.subgroup([1, 2], name="some")
    assert (odd is None) == (world.rank == 0)
    if odd:
        assert odd.ranks == [1, 2] and odd.rank == world.rank - 1 and odd.name == "some"
        x = symmem.rendezvous(symmem.empty(4, "int32", odd), odd)
        x.local[:] = world.rank
        x.all_reduce()
        assert (x.local == 3).all()
    with pytest.raises(symmem.Usage):
        world.subgroup([0, 1, 2, 3])
    world.barrier()


def test_subgroups_number_their_ranks():
    ranks.run(3, subgroups_number_their_ranks)


def groups_by_color(world):
    me = world.rank
    group = world.split(me % 2, key=-me)
    assert group.ranks == [[2, 0], [1]][me % 2]
    x = numpy.array([me])
    group.all_reduce(x)
    assert x == [[2], [1]][me % 2]
    assert (world.split(None if me else 0) is None) == (me != 0)


def test_groups_by_color():
    ranks.run(3, groups_by_color)


def the_same_memory_in_two_groups(world):
    pair = world.subgroup([0, 1])
    array = symmem.empty(8, "int64", world)
    x, y = symmem.rendezvous(array, world), symmem.rendezvous(array, pair)
    assert x.handle.buffer_ptrs[world.rank] == y.handle.buffer_ptrs[world.rank] == array.address
    assert symmem.rendezvous(array, world).handle.buffer_ptrs == x.handle.buffer_ptrs


def test_the_same_memory_in_two_groups():
    ranks.run(2, the_same_memory_in_two_groups)


def memory_of_another_world(world):
    alone = symmem.World.connect(0, 1, backend="host")
    memory = alone.alloc(80)
    numpy.asarray(memory.view("int64"))[:] = world.rank + 1
    handle = memory.rendezvous(world)
    handle.collective("all_reduce", "int64", 0, 10)
    assert (numpy.asarray(memory.view("int64")) == 3).all()
    with pytest.raises(symmem.Usage, match="store"):
        symmem.World.connect(0, 2)


def test_memory_of_another_world_is_as_good():
    ranks.run(2, memory_of_another_world)


def pools_and_persistent_memory(world):
    pool = world.pool(1 << 20)
    first, second = pool.alloc(1000), pool.alloc(1000)
    assert second.address - first.address < 1 << 20
    assert pool.usage[0] >= 1 << 20
    handle = second.rendezvous(world)
    numpy.asarray(second.view("int8"))[:] = 1
    handle.collective("all_reduce", "int8", 0, 1000)
    assert (numpy.asarray(second.view("int8")) == world.size).all()

    kept = symmem.empty(100, "int32", world, persistent_id=7)
    kept.numpy()[:] = 5
    address = kept.address
    with pytest.raises(symmem.Usage, match="still active"):
        symmem.empty(100, "int32", world, persistent_id=7)
    del kept
    again = symmem.empty(100, "int32", world, persistent_id=7)
    assert again.address == address and (again.numpy() == 5).all()


def test_pools_and_persistent_memory():
    ranks.run(2, pools_and_persistent_memory)


def handles_say_where_everything_lies(world):
    memory = world.alloc(1000, pad_bytes=256)
    handle = memory.rendezvous(world)
    assert (handle.rank, handle.size, handle.nbytes) == (world.rank, world.size, 1000)
    assert handle.device == "cpu" and handle.multicast_ptr == 0
    assert handle.signal_pad_size == 256 and handle.group_name == world.name
    table = (numpy.ctypeslib.ctypes.c_size_t * world.size).from_address(handle.buffer_ptrs_dev)
    assert list(table) == handle.buffer_ptrs
    pad = numpy.asarray(handle.pad_view((world.rank + 1) % world.size).view("uint32"))
    handle.put_signal((world.rank + 1) % world.size, 2)
    assert pad[world.size * 2 + world.rank] in (0, 1)
    handle.wait_signal((world.rank - 1) % world.size, 2)
    handle.barrier()
    world.barrier()  # the peer has taken all signals by now
    assert not pad.any()


def test_handles_say_where_everything_lies():
    ranks.run(2, handles_say_where_everything_lies)


def a_group_waits_as_long_as_it_is_told(world):
    assert world.timeout == 30
    world.timeout = 0.05
    assert world.timeout == 0.05
    if world.rank == 0:
        with pytest.raises(TimeoutError) as raised:
            world.barrier()
        assert isinstance(raised.value, symmem.Timeout)
        assert raised.value.waiting_for == [1] and raised.value.op == "barrier"
        world.put_signal(1, timeout=30)
    else:
        world.wait_signal(0, timeout=30)
    world.timeout = None
    world.barrier()


def test_a_group_waits_as_long_as_it_is_told():
    ranks.run(2, a_group_waits_as_long_as_it_is_told)


def closed_worlds_refuse(world):
    memory = world.alloc(100)
    handle = memory.rendezvous(world)
    world.close()
    world.close()
    for wrong in (world.barrier, lambda: world.alloc(1), handle.barrier, lambda: memory.rendezvous(world)):
        with pytest.raises(symmem.Usage, match="not closed"):
            wrong()


def test_closed_worlds_refuse():
    ranks.run(2, closed_worlds_refuse)


def joined(rank, address, results):
    world = symmem.World.connect(rank, 2, store=address, timeout=30)
    total = numpy.array([rank + 1])
    world.all_reduce(total)
    results.put(int(total[0]))
    world.close()


def test_ranks_join_at_an_address(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    address = f"unix:{tmp_path}/store"
    processes = [context.Process(target=joined, args=(rank, address, results)) for rank in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [3, 3]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def joined_by_torch(rank, path, results):
    import torch.distributed

    store = torch.distributed.FileStore(path, 2)
    world = symmem.World.connect(rank, 2, store=store, timeout=30)
    total = numpy.array([rank + 1])
    world.all_reduce(total)
    results.put(int(total[0]))
    world.close()


def test_ranks_join_by_a_store_of_torch(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    path = f"{tmp_path}/store"
    processes = [context.Process(target=joined_by_torch, args=(rank, path, results)) for rank in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=120) for _ in processes] == [3, 3]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def test_one_process_alone_is_a_world():
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    code = "import symmem; w = symmem.World.from_env(); w.barrier(); print(w.rank, w.size, w.local_rank)"
    done = subprocess.run([sys.executable, "-c", code], env=alone, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0 1 0", done.stderr

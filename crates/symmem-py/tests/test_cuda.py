"""Memory of devices, as tensors of torch. Ranks share a device where there are more ranks than devices."""

import functools

import pytest
import ranks
import symmem

SIZES = (1, 2, 4)


@pytest.fixture(autouse=True)
def device():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


def place(world):
    """The device of this rank, and its current stream."""
    import torch

    number = world.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return f"cuda:{number}", torch.cuda.current_stream().cuda_stream


def tensors_are_the_devices_memory(world):
    import torch

    device, stream = place(world)
    array = symmem.empty((4, 1024), "float32", world, device=device)
    own = torch.from_dlpack(array)
    assert str(own.device) == device and own.data_ptr() == array.address
    assert array.device == device and symmem.find(own.data_ptr() + 4).address == array.address
    own.fill_(world.rank + 1)
    x = symmem.rendezvous(own, world)
    x.all_reduce("sum", stream=stream)
    x.handle.synchronize(stream)
    assert (own == sum(range(1, world.size + 1))).all()
    for rank in range(world.size):
        peer = torch.from_dlpack(x.peer_array(rank))
        assert (peer == own).all()
    torch.cuda.synchronize()
    world.barrier()


@pytest.mark.parametrize("n", SIZES)
def test_tensors_are_the_devices_memory(n):
    ranks.run(n, tensors_are_the_devices_memory)


def every_collective(world):
    import torch

    device, stream = place(world)
    n, me = world.size, world.rank
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        array = symmem.empty((n, 2 * n), dtype, world, device=device)
        own = torch.from_dlpack(array)
        every = [torch.arange(2 * n * n, device=device).reshape(n, 2 * n) % 5 + rank for rank in range(n)]
        every = [part.to(dtype) for part in every]
        own.copy_(every[me])
        x = symmem.rendezvous(own, world)
        total = sum(every)
        new = functools.partial(torch.empty, dtype=dtype, device=device)
        assert (x.all_reduce(out=new(n, 2 * n), stream=stream) == total).all()
        assert (x.reduce_scatter(out=new(2 * n), stream=stream) == total[me]).all()
        last = x.reduce_scatter(axis=-1, out=new(n, 2), stream=stream)
        assert (last == total[:, 2 * me : 2 * me + 2]).all()
        assert (x.all_gather(out=new(n, n, 2 * n), stream=stream) == torch.stack(every)).all()
        blocks = torch.stack([part[me] for part in every])
        assert (x.all_to_all(out=new(n, 2 * n), stream=stream) == blocks).all()
        assert (x.scatter(0, out=new(2 * n), stream=stream) == every[0][me]).all()
        gathered = x.gather(0, out=new(n, n, 2 * n) if me == 0 else None, stream=stream)
        assert me != 0 or (gathered == torch.stack(every)).all()
        reduced = x.reduce("max", 0, out=new(n, 2 * n) if me == 0 else None, stream=stream)
        assert me != 0 or (reduced == torch.stack(every).amax(0)).all()
        x.broadcast(0, stream=stream)
        x.handle.synchronize(stream)
        assert (own == every[0]).all()
        torch.cuda.synchronize()
        world.barrier()


@pytest.mark.parametrize("n", SIZES)
def test_every_collective_of_a_device(n):
    ranks.run(n, every_collective)


def signals_and_words_in_streams(world):
    import torch

    device, stream = place(world)
    n, me = world.size, world.rank
    x = symmem.rendezvous(symmem.empty(1024, "float32", world, device=device), world)
    own, right, left = torch.from_dlpack(x.array), (me + 1) % n, (me - 1) % n
    data = torch.full((16,), float(me), device=device)
    x.put(right, data, at=4, stream=stream)
    x.handle.put_signal(right, 1, stream=stream)
    x.handle.wait_signal(left, 1, stream=stream)
    x.handle.synchronize(stream)
    assert (own[4:20] == left).all()
    x.handle.barrier(2, stream=stream)
    got = x.get(right, torch.empty(16, device=device), at=4, stream=stream)
    x.handle.synchronize(stream)
    assert (got == me).all()
    x.handle.barrier(2, stream=stream)
    x.handle.fill32(me, 0, 7, 2, stream=stream)
    x.handle.write32(me, 2, 9, stream=stream)
    x.handle.synchronize(stream)
    assert own.view(torch.int32)[:3].tolist() == [7, 7, 9]
    torch.cuda.synchronize()
    world.barrier()


@pytest.mark.parametrize("n", SIZES)
def test_signals_and_words_in_streams(n):
    ranks.run(n, signals_and_words_in_streams)


def parts_and_tables(world):
    import torch

    device, stream = place(world)
    memory = world.alloc(4096, device=device)
    handle = memory.rendezvous(world)
    table = symmem.empty(2 * world.size, "int64", world, device=device)
    assert handle.buffer_ptrs_dev != 0
    assert handle.signal_pad_ptrs_dev == handle.buffer_ptrs_dev + 8 * world.size
    own = torch.from_dlpack(memory.view("int32"))
    own.fill_(1)
    torch.cuda.synchronize()
    world.barrier()
    handle.collective("all_reduce", "int32", 256, 64, stream=stream)
    handle.synchronize(stream)
    assert (own[64:128] == world.size).all() and (own[:64] == 1).all() and (own[128:] == 1).all()
    for wrong in (lambda: table.numpy(), lambda: handle.collective("all_gather", "int32", 0, 4, bytearray(64))):
        with pytest.raises(symmem.Usage):
            wrong()
    torch.cuda.synchronize()
    world.barrier()


@pytest.mark.parametrize("n", SIZES)
def test_parts_and_tables_of_a_device(n):
    ranks.run(n, parts_and_tables)

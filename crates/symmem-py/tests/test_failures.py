"""Peers that die, Ctrl-C, and ends of the interpreter in any order."""

import multiprocessing
import os
import random
import signal
import sys
import threading
import time

import numpy
import pytest
import ranks
import symmem


def a_peer_is_killed_in_a_wait(world):
    x = symmem.rendezvous(symmem.empty(4, "int64", world), world)
    x.local[:] = world.rank
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(symmem.PeerLost) as raised:
        world.barrier()
    assert raised.value.rank == 1 and raised.value.during == "barrier"
    assert "rank 1" in str(raised.value)
    with pytest.raises(symmem.PeerLost):
        world.check()
    survivors = world.shrink()
    assert survivors.ranks == [0, 2]
    x = symmem.rendezvous(x.array, survivors)
    x.all_reduce("sum")
    assert (x.local == 2).all()


def test_a_peer_killed_in_a_wait_is_named_and_the_others_go_on():
    codes = [code for code, _ in ranks.run_apart(3, a_peer_is_killed_in_a_wait)]
    assert codes == [0, -signal.SIGKILL, 0]


def a_peer_is_killed_in_a_collective(world):
    x = symmem.rendezvous(symmem.empty(100_000, "int64", world), world)
    if world.rank == 1:
        # Not while others are still at the rendezvous.
        for peer in (0, 2):
            world.wait_signal(peer)
        os.kill(os.getpid(), signal.SIGKILL)
    world.put_signal(1)
    with pytest.raises(symmem.PeerLost, match="rank 1"):
        x.all_reduce(algorithm="two_shot")
    with pytest.raises(symmem.PeerLost, match="rank 1"):
        x.all_reduce()
    x = symmem.rendezvous(x.array, world.shrink())
    x.all_reduce()


def test_memory_goes_on_after_a_collective_that_failed():
    codes = [code for code, _ in ranks.run_apart(3, a_peer_is_killed_in_a_collective)]
    assert codes == [0, -signal.SIGKILL, 0]


def interrupted(world, wait):
    """Whether Ctrl-C ends a wait that no peer would."""
    if world.rank == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert time.monotonic() - start < 20
        world.put_signal(1, 5)
    else:
        world.wait_signal(0, 5)


def ctrl_c_ends_every_wait(world):
    x = symmem.rendezvous(symmem.empty(100_000, "int64", world), world)
    y = symmem.rendezvous(symmem.empty(4, "int64", world), world)
    unused = symmem.empty(4, "int64", world)
    pair = world.subgroup([0, 1], name="pair")
    interrupted(world, lambda: world.wait_signal(1))
    interrupted(world, lambda: x.handle.wait_signal(1, 0, 0))
    interrupted(world, world.barrier)
    world.barrier()  # goes on with the one that was interrupted
    for call in (y.all_reduce, lambda: x.all_reduce(algorithm="two_shot"), lambda: world.all_reduce(numpy.ones(4))):
        interrupted(world, call)
        with pytest.raises(symmem.OutOfStepError) as raised:
            y.all_reduce()
        assert raised.value.rank == 0 and "all_reduce" in raised.value.what
        world.resync()
        x.local[:] = y.local[:] = world.rank + 1
        x.all_reduce()
        y.all_reduce()
        assert (x.local == 3).all() and (y.local == 3).all()
    interrupted(world, lambda: symmem.rendezvous(unused, pair))
    pair.resync()
    symmem.rendezvous(unused, pair).all_reduce()


def a_group_comes_back_after_a_timeout(world):
    x = symmem.rendezvous(symmem.empty(50_000, "float64", world), world)
    data = numpy.ones(100_000)
    for count in (1, 100, 5_000, 50_000):
        part = symmem.rendezvous(x.array.view("float64", (count,)), world)
        for call, *arguments in ((part.all_reduce,), (part.broadcast, 0), (world.all_reduce, data[:count])):
            if world.rank == 0:
                world.timeout = 0.2
                with pytest.raises(symmem.Timeout) as raised:
                    call(*arguments)
                assert raised.value.waiting_for == [1] and isinstance(raised.value.doing, list)
                world.timeout = 30
                world.put_signal(1, 5)
            else:
                world.wait_signal(0, 5)
            new = symmem.empty(1, "int8", world)
            for other, *given in ((part.all_reduce,), (world.broadcast, data), (symmem.rendezvous, new, world)):
                with pytest.raises(symmem.OutOfStepError, match="rank 0 gave up"):
                    other(*given)
            world.resync(timeout=20)
            part.local[:] = world.rank + 1
            part.all_reduce()
            assert (part.local == 3).all()
            data[:] = world.rank + 1
            world.all_reduce(data)
            assert (data == 3).all()


def test_a_group_comes_back_after_a_timeout():
    ranks.run(2, a_group_comes_back_after_a_timeout)


def test_ctrl_c_ends_every_wait():
    ranks.run(2, ctrl_c_ends_every_wait)


def joins_alone(rank, address, results):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        symmem.World.connect(rank, 2, store=address, timeout=60)
    except KeyboardInterrupt:
        results.put("interrupted")


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_joining(rank, tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=joins_alone, args=(rank, f"unix:{tmp_path}/store", results))
    process.start()
    assert results.get(timeout=50) == "interrupted"
    process.join(50)
    assert process.exitcode == 0


def forks_leave_the_world_alone(world):
    if world.rank == 0:
        child = os.fork()
        if child == 0:
            with pytest.raises(symmem.Usage, match="forked"):
                world.barrier()
            sys.exit(0)  # by way of the world's end, and the interpreter's
        assert os.waitpid(child, 0) == (child, 0)
    world.barrier()
    sleeping = os.fork()
    if sleeping == 0:
        signal.pause()
    world.barrier()
    world.close()
    os.kill(sleeping, signal.SIGKILL)
    os.waitpid(sleeping, 0)


def test_forks_leave_the_world_alone():
    ranks.run(2, forks_leave_the_world_alone)


def forks_join_worlds_of_their_own(world):
    child = os.fork()
    if child == 0:
        own = symmem.World.connect(0, 1)
        own.barrier()
        own.close()
        sys.exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    world.barrier()


def test_forks_join_worlds_of_their_own():
    ranks.run(1, forks_join_worlds_of_their_own)


def others_run_while_one_waits(world):
    if world.rank == 1:
        time.sleep(0.5)
        world.barrier()
        return
    ticks = []
    waiting = threading.Thread(target=world.barrier)
    waiting.start()
    while waiting.is_alive():
        ticks.append(time.monotonic())
        time.sleep(0.01)
    assert len(ticks) > 5


def test_other_threads_run_while_one_waits():
    ranks.run(2, others_run_while_one_waits)


def things_go_in_any_order(world):
    memory = world.alloc(1000)
    handle = memory.rendezvous(world)
    view = handle.view(0)
    things = {
        "world": world,
        "group": world.subgroup(list(range(world.size))),
        "pool": world.pool(1 << 16),
        "memory": memory,
        "handle": handle,
        "view": view,
        "array": numpy.asarray(view),
        "dlpack": numpy.from_dlpack(memory.view("float32")),
        "capsule": view.__dlpack__(max_version=(1, 0)),
        "old capsule": view.__dlpack__(),
        "symmetric": symmem.rendezvous(memory.view(), world),
    }
    del memory, handle, view
    world.barrier()
    seed = int(os.environ["SEED"])
    order = random.Random(seed + world.rank).sample(sorted(things), len(things))
    kept = order[: seed % len(order)]
    for name in order[len(kept) :]:
        del things[name]
    if seed % 3 == 0:  # the rest goes with the interpreter, some of it in a cycle
        cycle = [things.pop(name) for name in kept[:2]]
        cycle.append(cycle)
    sys.modules["kept by the interpreter"] = things


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_things_go_in_any_order(first, monkeypatch):
    for seed in range(first, first + 10):
        monkeypatch.setenv("SEED", str(seed))
        ranks.run(2, things_go_in_any_order)


def test_exceptions_are_those_of_python_too():
    assert issubclass(symmem.Error, RuntimeError)
    for kind, other in ((symmem.Timeout, TimeoutError), (symmem.Usage, ValueError), (symmem.System, OSError)):
        assert issubclass(kind, symmem.Error) and issubclass(kind, other)
    for kind in (
        symmem.Driver,
        symmem.Interrupted,
        symmem.Mismatch,
        symmem.OutOfStepError,
        symmem.PeerFailed,
        symmem.PeerLost,
        symmem.Protocol,
        symmem.Unavailable,
    ):
        assert issubclass(kind, symmem.Error) and kind.__module__ == "symmem" and kind.__doc__


def memory_that_is_not_there(world):
    with pytest.raises(symmem.Unavailable) as raised:
        world.alloc(1 << 60)
    assert "memory" in raised.value.what and raised.value.why
    world.alloc(100)


def test_memory_that_is_not_there_is_named():
    ranks.run(1, memory_that_is_not_there)

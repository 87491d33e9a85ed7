"""Queues: collectives in the background."""

import contextlib
import gc
import os
import signal
import threading
import time

import numpy
import pytest
import ranks
import symmem


def every_collective(world):
    n, me = world.size, world.rank
    with world.queue() as queue:
        data = numpy.full(1000, me + 1.0)
        reduced = queue.all_reduce(data)
        gathered = numpy.empty((n, 4), "int32")
        gathering = queue.all_gather(numpy.full(4, me, "int32"), gathered)
        block = numpy.empty(2)
        scattering = queue.reduce_scatter(numpy.arange(2.0 * n), block, "max")
        copied = numpy.full(3, me)
        copying = queue.broadcast(copied, root=1)
        swapped = numpy.empty(n, "int64")
        swapping = queue.all_to_all(numpy.arange(n) + 10 * me, swapped)
        at_root = numpy.zeros(2) if me == 1 else None
        reducing = queue.reduce(numpy.ones(2), at_root, root=1)
        collected = numpy.zeros((n, 1)) if me == 0 else None
        collecting = queue.gather(numpy.full(1, me + 0.5), collected)
        mine = numpy.zeros(1)
        dealing = queue.scatter(numpy.arange(1.0 * n) if me == 0 else None, mine)
        scanned, before = numpy.array([me + 1]), numpy.array([me + 1])
        scanning = [queue.scan(scanned), queue.exclusive_scan(before)]
        pieces = queue.all_gather_v(numpy.full(me, me))
        sent = queue.all_to_all_v(numpy.arange(n), [1] * n)
        buffer = bytearray(b"\1" * 8)
        bytewise = queue.all_reduce(buffer, "max", dtype="uint8")
        last = queue.barrier()

        assert last.wait() is None and last.done()
        for pending in (reduced, gathering, scattering, copying, swapping, reducing, collecting, dealing, *scanning, bytewise):
            assert pending.done() and pending.wait() is None and pending.wait(timeout=5) is None
        assert (data == n * (n + 1) / 2).all() and (gathered == numpy.arange(n)[:, None]).all()
        assert (block == [2 * me, 2 * me + 1]).all() and (copied == 1).all()
        assert (swapped == numpy.arange(n) * 10 + me).all()
        assert at_root is None or (at_root == n).all()
        assert collected is None or (collected[:, 0] == numpy.arange(n) + 0.5).all()
        assert mine == me and scanned == (me + 1) * (me + 2) / 2
        assert before == (me * (me + 1) / 2 if me else 1)
        for received, counts in (pieces.wait(), pieces.wait()):
            assert counts == list(range(n))
            assert (numpy.asarray(received) == numpy.repeat(numpy.arange(n), range(n))).all()
        assert (numpy.asarray(sent.wait()[0]) == me).all()
        assert buffer == b"\1" * 8
        assert repr(last) == "symmem.Pending(done)" and "0 jobs are not done" in repr(queue)
    assert repr(queue) == "symmem.Queue(closed)"
    with pytest.raises(symmem.Usage, match="closed"):
        queue.barrier()
    queue.close()


def test_a_queue_has_all_collectives_on_arrays():
    ranks.run(3, every_collective)


def calls_and_jobs_overlap(world):
    queue = world.queue()
    for step in range(20):
        background, own = numpy.full(50_000, step), numpy.full(10, step)
        if world.rank:
            world.all_reduce(own)
        pending = queue.all_reduce(background)
        if not world.rank:
            world.all_reduce(own)
        pending.wait()
        assert (background == 2 * step).all() and (own == 2 * step).all()


def test_calls_of_the_group_are_independent_of_its_queue():
    ranks.run(2, calls_and_jobs_overlap)


def buffers_are_kept_and_locked(world):
    queue = world.queue()
    if world.rank:
        world.wait_signal(0)
    # Nobody else holds the array.
    forgotten = queue.all_reduce(numpy.ones(100_000))
    buffer = bytearray(b"\1" * 100_000)
    pending = queue.all_reduce(buffer, "max", dtype="uint8")
    gc.collect()
    if not world.rank:
        with pytest.raises(BufferError):
            buffer.append(1)  # the call still uses it
        world.put_signal(1)
    del forgotten
    pending.wait()
    buffer.append(1)
    with pytest.raises(symmem.Usage, match="overlaps"):
        queue.all_gather(numpy.frombuffer(buffer, "uint8")[:1], numpy.frombuffer(buffer, "uint8")[:2])
    with pytest.raises(symmem.Usage, match="operators"):
        queue.all_reduce(numpy.ones(1), "median")
    queue.barrier().wait()  # what was refused has not begun


def test_a_call_keeps_and_locks_its_buffers():
    ranks.run(2, buffers_are_kept_and_locked)


def waits_end(world):
    queue = world.queue()
    if world.rank:
        world.wait_signal(0)
        assert queue.all_gather_v(numpy.ones(2)).wait()[1] == [2, 2]
        return
    pending = queue.all_gather_v(numpy.ones(2))
    doing = ""
    while "all_gather_v" not in doing:  # once the call waits, a timeout says so
        with pytest.raises(symmem.Timeout) as raised:
            pending.wait(timeout=0.1)
        assert raised.value.op == "wait" and raised.value.waiting_for == [0]
        doing = raised.value.doing[0]
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    assert time.monotonic() - start < 20
    # A signal's handler may look at the call, and wait for others.
    seen = []

    def handler(*_):
        seen.append(pending.done())
        with pytest.raises(symmem.Timeout):
            pending.wait(timeout=0.1)

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(symmem.Timeout):
        pending.wait(timeout=1)
    signal.signal(signal.SIGALRM, before)
    assert seen == [False]
    # Others wait, too, and the GIL is free.
    results = []
    threads = [threading.Thread(target=lambda: results.append(pending.wait()[1])) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert not pending.done()
    world.put_signal(1)
    for thread in threads:
        thread.join()
    assert results == [[2, 2]] * 4


def test_a_wait_ends_by_its_timeout_and_by_ctrl_c_and_the_call_goes_on():
    ranks.run(2, waits_end)


def failures(world):
    queue, me = world.queue(), world.rank
    order = [lambda: queue.all_reduce(numpy.ones(1)), lambda: queue.broadcast(numpy.ones(1))]
    for pending in [call() for call in (order if me else reversed(order))]:
        for _ in range(2):
            with pytest.raises(symmem.Mismatch):
                pending.wait()
    # What one rank refuses, the others do not wait for.
    with pytest.raises(symmem.PeerFailed) if me else contextlib.nullcontext():
        (queue.barrier if me else queue.refuse)().wait()
    # An output of the wrong length: nothing was sent, and nothing is taken for it.
    out = numpy.zeros(2 if me else 3)
    wrong = queue.all_gather(numpy.ones(1), out)
    later = queue.all_gather(numpy.ones(1), numpy.zeros(2))
    with pytest.raises(symmem.OutOfStepError if me else symmem.Usage):
        wrong.wait()
    with pytest.raises(symmem.OutOfStepError) as raised:
        later.wait()
    assert raised.value.rank == 0
    queue.resync().wait()
    if not me:
        running, behind = queue.barrier(), queue.barrier()
        time.sleep(0.05)
        queue.abort()
        for pending in (running, behind):
            with pytest.raises(symmem.Aborted) as raised:
                pending.wait()
            assert raised.value.rank == 0
    world.barrier()
    with pytest.raises(symmem.OutOfStepError):
        queue.barrier().wait()
    queue.resync().wait()
    with pytest.raises(ValueError, match="by design"), world.queue() as other:
        pending = other.barrier() if not me else world.wait_signal(0)
        raise ValueError("by design")
    if not me:
        world.put_signal(1)
        with pytest.raises(symmem.Aborted):
            pending.wait()
    queue.barrier().wait()


def test_failures_are_the_exceptions_of_blocking_calls():
    ranks.run(2, failures)


def a_peer_dies(world):
    queue = world.queue()
    queue.barrier().wait()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for pending in [queue.all_reduce(numpy.ones(10)) for _ in range(5)]:
        with pytest.raises(symmem.PeerLost) as raised:
            pending.wait()
        assert raised.value.rank == 1
    queue.close()
    data = numpy.ones(3)
    world.shrink().queue().all_reduce(data).wait()
    assert (data == 2).all()


def test_the_death_of_a_peer_ends_all_calls():
    codes = [code for code, _ in ranks.run_apart(3, a_peer_dies)]
    assert codes == [0, -signal.SIGKILL, 0]


def the_end_comes_early(world):
    """Ends with calls that no peer makes, in several ways."""
    dropped = world.queue()
    kept = world.queue()
    if world.rank:
        time.sleep(1)
        return
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    forgotten = dropped.barrier()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        dropped.close()
    with pytest.raises(symmem.Aborted):
        forgotten.wait()
    pending = kept.all_reduce(numpy.ones(10))
    child = os.fork()
    if not child:
        try:
            for call in (pending.wait, kept.barrier):
                with pytest.raises(symmem.Usage, match="process"):
                    call()
        except BaseException as error:
            print(error)
            os._exit(1)
        kept.close()  # there is nobody to wait for
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    world.close()
    assert time.monotonic() - start < 20
    with pytest.raises(symmem.Aborted):
        pending.wait()
    with pytest.raises(symmem.Usage, match="closed"):
        kept.barrier()


def test_closing_a_world_or_a_queue_never_hangs():
    for code, output in ranks.run_apart(2, the_end_comes_early):
        assert code == 0, output


def the_world_is_left_at_exit(world):
    queue = world.queue()
    if not world.rank:
        globals()["leaked"] = queue, queue.barrier()


def test_a_program_ends_with_calls_under_way():
    for code, output in ranks.run_apart(2, the_world_is_left_at_exit):
        assert code == 0, output

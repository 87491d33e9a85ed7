"""Messages from one rank to another."""

import threading
import time

import numpy
import pytest
import ranks
import symmem


def messages_arrive(world):
    me, other = world.rank, 1 - world.rank
    for dtype in ["float32", "int64", "bool", "complex128", "uint8"]:
        for count in [0, 1, 1000, 1_000_000]:
            data = (numpy.arange(count) % 97 + me).astype(dtype).reshape(-1, 1)
            out = numpy.zeros((count, 1), dtype)
            world.send(data, other, tag=3)
            world.recv(out, other, tag=3)
            assert (out == (numpy.arange(count) % 97 + other).astype(dtype).reshape(-1, 1)).all()
    # What other collectives take as well: symmetric memory, buffers, addresses.
    x = symmem.rendezvous(symmem.empty(4, "int32", world), world)
    x.local[:] = me
    world.send(x.local, other)
    world.recv(x.local, other)
    assert (x.local == other).all()
    world.send(b"to " + bytes([48 + other]), other, dtype="uint8")
    text = bytearray(4)
    world.recv(text, other, dtype="uint8")
    assert text == b"to " + bytes([48 + me])
    raw = numpy.full(3, me, "float64")
    world.send((raw.ctypes.data, raw.nbytes, raw), other, dtype="float64")
    world.recv((raw.ctypes.data, raw.nbytes, raw), other, dtype="float64")
    assert (raw == other).all()


def test_messages_arrive():
    ranks.run(2, messages_arrive)


def test_messages_arrive_between_hosts():
    ranks.run_on_hosts(["a", "b"], messages_arrive)


def senders_and_tags(world):
    if world.rank:
        for tag in [2, 1, 0]:
            world.send(numpy.array([10 * world.rank + tag]), 0, tag)
    else:
        got = numpy.zeros(1, "int64")
        for tag in range(3):
            senders = set()
            for _ in range(1, world.size):
                sender = world.recv_any(got, tag)
                assert got[0] == 10 * sender + tag
                senders.add(sender)
            assert senders == {1, 2}
    world.barrier()


def test_senders_and_tags():
    ranks.run(3, senders_and_tags)


def threads_send_and_receive(world):
    other = 1 - world.rank
    wrong = []

    def send(tag):
        for i in range(50):
            world.send(numpy.full(20_000, i + tag), other, tag)

    def receive(tag):
        out = numpy.zeros(20_000, "int64")
        for i in range(50):
            world.recv(out, other, tag)
            if not (out == i + tag).all():
                wrong.append((i, tag))

    threads = [threading.Thread(target=what, args=(1000 * t,)) for what in (send, receive) for t in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    world.barrier()


def test_threads_send_and_receive():
    ranks.run(2, threads_send_and_receive)


def mistakes_are_told(world):
    me, other = world.rank, 1 - world.rank
    world.send(numpy.zeros(3), other)
    with pytest.raises(symmem.Mismatch, match="here 4 x f64, on rank . 3 x f64") as raised:
        world.recv(numpy.zeros(4), other)
    assert raised.value.rank == other and raised.value.op == "recv" and raised.value.what == "length"
    world.send(numpy.zeros(3), other)
    with pytest.raises(symmem.Mismatch, match="element type"):
        world.recv(numpy.zeros(3, "int64"), other)
    with pytest.raises(symmem.Timeout) as raised:
        world.recv(numpy.zeros(1), other, tag=1, timeout=0.05)
    assert raised.value.waiting_for == [other]
    with pytest.raises(symmem.Timeout):
        world.recv_any(numpy.zeros(1), timeout=0.05)
    with pytest.raises(symmem.Usage, match="send: expected a rank in"):
        world.send(numpy.zeros(1), 2)
    with pytest.raises(symmem.Usage, match="read-only"):
        world.recv(b"abc", other, dtype="uint8")
    with pytest.raises(symmem.Usage, match="dtype"):
        world.send(bytearray(3), other)
    with pytest.raises(OverflowError):
        world.send(numpy.zeros(1), other, tag=-1)
    world.barrier()
    # A rank to itself.
    world.send(numpy.full(5, me), me, tag=7)
    out = numpy.zeros(5, "int64")
    assert world.recv_any(out, tag=7) == me and (out == me).all()
    world.barrier()


def test_mistakes_are_told():
    ranks.run(2, mistakes_are_told)


def one_is_interrupted(world):
    import os
    import signal

    if world.rank == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            world.recv(numpy.zeros(1), 1)
        assert time.monotonic() - begin < 10
        world.send(numpy.zeros(1), 1)
    else:
        world.recv(numpy.zeros(1), 0)
    world.barrier()


def test_ctrl_c_ends_a_wait_for_a_message():
    ranks.run(2, one_is_interrupted)

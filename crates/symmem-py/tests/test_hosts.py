"""Worlds that span hosts: 2 × 2 ranks, each pair with a SYMMEM_HOST of its own, connected over TCP."""

import os
import signal

import numpy
import pytest
import ranks
import symmem

HOSTS = ["a", "a", "b", "b"]


def far_ranks(world):
    return [rank for rank in range(world.size) if not world.is_local(rank)]


def refused(rank, call):
    """A pointer to the memory of a rank on another host: the error names the rank, its host, and what works."""
    with pytest.raises(symmem.Unavailable) as raised:
        call()
    text = f"it is on another host ({HOSTS[rank]}); get and put reach it, and so do signals and collectives"
    assert raised.value.why == text and f"rank {rank}" in raised.value.what, raised.value


def who_is_where(world):
    assert world.hosts() == [[0, 1], [2, 3]]
    mine = [0, 1] if world.rank < 2 else [2, 3]
    assert [rank for rank in range(5) if world.is_local(rank)] == mine
    here = world.host_group()
    assert here.ranks == mine and here.hosts() == [[0, 1]] and here.is_local(0) and here.is_local(1)
    x = symmem.rendezvous(symmem.empty(4, "int32", here), here)
    assert x.handle.is_within_direct_access and 0 not in x.handle.buffer_ptrs
    x.local[:] = world.rank
    here.barrier()
    assert (x.peer(1 - here.rank) == mine[1 - here.rank]).all()
    here.barrier()
    crossing = world.subgroup([1, 2])
    assert (crossing is None) == (world.rank in (0, 3))
    if crossing:
        assert crossing.hosts() == [[0], [1]] and crossing.host_group().size == 1
        data = numpy.full(3, world.rank, "float64")
        crossing.all_reduce(data)
        assert (data == 3).all()
    world.barrier()


def test_ranks_know_which_of_them_share_a_host():
    ranks.run_on_hosts(HOSTS, who_is_where)


def only_what_needs_an_address_is_refused(world):
    memory = world.alloc(1024, pad_bytes=256)
    handle = memory.rendezvous(world)
    near = world.rank ^ 1
    assert not handle.is_within_direct_access and handle.is_reachable(near) and handle.is_reachable(world.rank)
    for rank in range(world.size):
        assert (handle.buffer_ptrs[rank] == 0) == (handle.signal_pad_ptrs[rank] == 0) == (not world.is_local(rank))
    table = (numpy.ctypeslib.ctypes.c_size_t * world.size).from_address(handle.buffer_ptrs_dev)
    assert list(table) == handle.buffer_ptrs
    x = symmem.rendezvous(memory.view("float32"), world)
    assert x.peer(near).shape == (256,)
    for far in far_ranks(world):
        assert not handle.is_reachable(far)
        for call in (
            lambda: handle.view(far),
            lambda: handle.view(far, 8, 16),
            lambda: handle.pad_view(far),
            lambda: x.peer(far),
            lambda: x.peer_array(far),
        ):
            refused(far, call)
        with pytest.raises(symmem.Usage):
            handle.view(far, 2000)
    with pytest.raises(symmem.Usage):
        handle.view(4)
    world.barrier()


def test_only_what_needs_an_address_is_refused():
    ranks.run_on_hosts(HOSTS, only_what_needs_an_address_is_refused)


def one_rank_alone_moves_data(world):
    n, me = world.size, world.rank
    for dtype in ("float32", "float64", "uint8", "int16"):
        x = symmem.rendezvous(symmem.empty((n, 5000), dtype, world), world)
        x.local[:] = 0
        x.barrier()
        for rank in range(n):
            x.put(rank, numpy.full(5000, me + 1, dtype), at=5000 * me)
        x.barrier()
        expected = numpy.repeat(numpy.arange(1, n + 1), 5000).astype(dtype).reshape(n, 5000)
        assert (x.local == expected).all()
        x.barrier()
        for rank in range(n):
            assert (x.get(rank, numpy.empty((n, 5000), dtype)) == expected).all()
            assert (x.get(rank, numpy.empty(3, dtype), at=4999) == [1, 2, 2]).all()
        x.barrier()
    data = bytearray(8)
    x.get((me + 2) % n, data, at=5000)
    assert data == b"\x02\0" * 4
    with pytest.raises(symmem.Usage):
        x.put((me + 2) % n, bytes(8), at=4 * 5000 - 3)
    words = symmem.rendezvous(symmem.empty(16, "uint32", world), world)
    to = (me + 2) % n
    words.handle.fill32(to, 4, 7, 8)
    words.handle.write32(to, 0, 42)
    words.barrier()
    assert list(words.local) == [42, 0, 0, 0] + [7] * 8 + [0] * 4
    world.barrier()


def test_one_rank_alone_moves_data():
    ranks.run_on_hosts(HOSTS, one_rank_alone_moves_data)


def signals_and_barriers(world):
    n, me = world.size, world.rank
    x = symmem.rendezvous(symmem.empty(1000, "int64", world), world)
    for turn in range(20):
        for step in range(1, n):
            x.put((me + step) % n, numpy.full(100, turn), at=100 * me)
            x.put_signal((me + step) % n, channel=3)
        for step in range(1, n):
            peer = (me - step) % n
            x.wait_signal(peer, channel=3)
            assert (x.local[100 * peer : 100 * peer + 100] == turn).all()
        x.barrier(channel=1)
        world.put_signal((me + 1) % n, 2)
        world.wait_signal((me - 1) % n, 2)
        world.barrier(channel=1)
    far = far_ranks(world)[0]
    with pytest.raises(symmem.Timeout) as raised:
        x.wait_signal(far, timeout=0.05)
    assert raised.value.waiting_for == [far]
    with pytest.raises(symmem.Timeout):
        world.wait_signal(far, timeout=0.05)
    world.barrier()
    if me == 0:
        with pytest.raises(symmem.Timeout) as raised:
            x.barrier(timeout=0.05)
        assert set(raised.value.waiting_for) <= {1, 2, 3}
    world.barrier()
    x.barrier()  # on rank 0, the one that it gave up


def test_signals_and_barriers():
    ranks.run_on_hosts(HOSTS, signals_and_barriers)


def collectives(world):
    n, me = world.size, world.rank
    for rows in (n, 20_000 * n):
        every = [numpy.random.default_rng([rows, rank]).random((rows, 3), "float32") for rank in range(n)]
        total = ((every[0] + every[1]) + every[2]) + every[3]  # in rank order: the same bits on every rank
        x = symmem.rendezvous(symmem.empty((rows, 3), "float32", world), world)

        def fresh():
            x.local[...] = every[me]
            return x

        for algorithm in ("auto", "staged"):
            assert (numpy.asarray(fresh().all_reduce(algorithm=algorithm)) == total).all()
        out = numpy.empty_like(total)
        assert (fresh().all_reduce("max", out=out) == numpy.max(every, axis=0)).all()
        assert (fresh().reduce_scatter() == numpy.split(total, n)[me]).all()
        assert (fresh().all_gather() == numpy.stack(every)).all()
        assert (fresh().all_to_all() == numpy.concatenate([numpy.split(part, n)[me] for part in every])).all()
        assert (numpy.asarray(fresh().broadcast(2)) == every[2]).all()
        reduced, gathered = fresh().reduce(root=3), fresh().gather(3)
        assert (reduced is None) == (gathered is None) == (me != 3)
        assert me != 3 or ((reduced == total).all() and (gathered == numpy.stack(every)).all())
        assert (fresh().scatter(1) == numpy.split(every[1], n)[me]).all()
        data = every[me].copy()
        world.all_reduce(data)
        assert (data == total).all()
        out = numpy.empty((n, rows, 3), "float32")
        world.all_gather(every[me], out)
        assert (out == numpy.stack(every)).all()
    splits = symmem.rendezvous(symmem.empty(n, "int64", world), world)
    splits.local[:] = [me + peer for peer in range(n)]
    rows = symmem.rendezvous(symmem.empty((40, 2), "int32", world), world)
    rows.local[:] = me
    out = numpy.full((40, 2), -1, "int32")
    received = rows.all_to_all_v(splits, out)
    assert list(received[:n]) == [peer + me for peer in range(n)]
    expected = numpy.repeat(numpy.arange(n), [peer + me for peer in range(n)])
    assert (out[: len(expected)] == expected[:, None]).all() and (out[len(expected) :] == -1).all()
    with pytest.raises(symmem.Mismatch):
        x.broadcast(root=0 if me == 1 else 2)
    world.barrier()


def test_collectives():
    ranks.run_on_hosts(HOSTS, collectives)


def a_rank_on_another_host_is_killed(world):
    x = symmem.rendezvous(symmem.empty(4, "int64", world), world)
    x.local[:] = 1
    world.barrier()
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(symmem.PeerLost) as raised:
        world.barrier()
    assert raised.value.rank == 2
    survivors = world.shrink()
    assert survivors.ranks == [0, 1, 3] and survivors.hosts() == [[0, 1], [2]]
    x = symmem.rendezvous(x.array, survivors)
    x.all_reduce()
    assert (x.local == 3).all()


def test_a_rank_killed_on_another_host_is_named_and_the_others_go_on():
    codes = ranks.run_apart(4, a_rank_on_another_host_is_killed, HOSTS)
    assert [code for code, _ in codes] == [0, 0, -signal.SIGKILL, 0], codes

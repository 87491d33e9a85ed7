"""Every collective, against what numpy makes of the same numbers."""

import numpy
import pytest
import ranks
import symmem

TYPES = ["float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"]


def parts(world, shape, dtype="int64", seed=0):
    """What each rank has: the same on all."""
    every = [numpy.random.default_rng([seed, rank]) for rank in range(world.size)]
    return [rng.integers(0, 9, shape).astype(dtype) for rng in every]


def symmetric(world, shape, dtype="int64", seed=0):
    """An array of this rank's part of them, and all of them."""
    x = symmem.rendezvous(symmem.empty(shape, dtype, world), world)
    every = parts(world, shape, dtype, seed)
    x.local[...] = every[world.rank]
    return x, every


def reductions(world):
    expected = {
        "sum": lambda all: sum(all),
        "prod": lambda all: numpy.prod(all, axis=0, dtype=all[0].dtype),
        "min": lambda all: numpy.min(all, axis=0),
        "max": lambda all: numpy.max(all, axis=0),
    }
    for dtype in TYPES:
        for op, result in expected.items():
            x, every = symmetric(world, (3, 7), dtype)
            assert (numpy.asarray(x.all_reduce(op)) == result(every)).all(), (dtype, op)


def test_all_reduce_of_every_type_and_operator():
    ranks.run(3, reductions)


def ways_to_all_reduce(world):
    for count in (1, 1000, 100_000):
        for how in ("auto", "staged", "one_shot", "two_shot"):
            x, every = symmetric(world, count)
            x.all_reduce(algorithm=how)
            assert (x.local == sum(every)).all()
        x, every = symmetric(world, count)
        out = x.all_reduce("max", out=numpy.empty(count, "int64"))
        assert (out == numpy.max(every, axis=0)).all()
        assert (x.local == every[world.rank]).all()


def test_all_reduce_in_every_way_and_size():
    ranks.run(2, ways_to_all_reduce)


def everything_but_all_reduce(world):
    n, me = world.size, world.rank
    for seed, rows in enumerate((n, 1000 * n)):
        x, every = symmetric(world, (rows, 2 * n), seed=seed)
        total = sum(every)
        assert (x.reduce_scatter() == total.reshape(n, -1, 2 * n)[me]).all()
        assert (x.reduce_scatter(axis=-1) == total[:, 2 * me : 2 * me + 2]).all()
        assert (x.all_gather() == numpy.stack(every)).all()
        blocks = [part.reshape(n, -1)[me] for part in every]
        assert (x.all_to_all().reshape(n, -1) == numpy.stack(blocks)).all()
        assert (x.scatter(1) == every[1].reshape(n, -1, 2 * n)[me]).all()
        gathered, reduced = x.gather(1), x.reduce("max", 1)
        assert (gathered is None) == (reduced is None) == (me != 1)
        if me == 1:
            assert (gathered == numpy.stack(every)).all()
            assert (reduced == numpy.max(every, axis=0)).all()
        assert (numpy.asarray(x.broadcast(1)) == every[1]).all()


def test_everything_but_all_reduce():
    ranks.run(3, everything_but_all_reduce)


def collectives_on_ordinary_arrays(world):
    n, me = world.size, world.rank
    every = parts(world, (n, 5))
    data = every[me].copy()
    world.all_reduce(data)
    assert (data == sum(every)).all()
    data = every[me].copy()
    world.broadcast(data, 1)
    assert (data == every[1]).all()
    out = numpy.empty((n, n, 5), "int64")
    world.all_gather(every[me], out)
    assert (out == numpy.stack(every)).all()
    out = numpy.empty(5, "int64")
    world.reduce_scatter(every[me], out, "max")
    assert (out == numpy.max(every, axis=0)[me]).all()
    out = numpy.empty((n, 5), "int64")
    world.all_to_all(every[me], out)
    assert (out == numpy.stack([part[me] for part in every])).all()
    buffer = bytearray([me])
    world.all_reduce(buffer, "max", dtype="uint8")
    assert buffer == bytearray([n - 1])


def test_collectives_on_ordinary_arrays():
    ranks.run(3, collectives_on_ordinary_arrays)


def rooted_collectives_on_ordinary_arrays(world):
    n, me = world.size, world.rank
    every = parts(world, (n, 5))
    is_root = me == 1
    out = numpy.zeros((n, 5), "int64") if is_root else None
    world.reduce(every[me], out, "max", 1)
    assert not is_root or (out == numpy.max(every, axis=0)).all()
    out = numpy.zeros((n, n, 5), "int64") if is_root else None
    world.gather(every[me], out, root=1)
    assert not is_root or (out == numpy.stack(every)).all()
    out = numpy.zeros(5, "int64")
    world.scatter(every[me] if is_root else None, out, 1)
    assert (out == every[1][me]).all()
    unused = numpy.zeros(3, "float32")  # of another type and length, on ranks that do not use it
    world.reduce(every[me], numpy.zeros((n, 5), "int64") if is_root else unused, root=1)
    world.gather(every[me], numpy.zeros((n, n, 5), "int64") if is_root else unused, root=1)
    assert (unused == 0).all()


def test_rooted_collectives_on_ordinary_arrays():
    ranks.run(3, rooted_collectives_on_ordinary_arrays)


def scans_of_ordinary_arrays(world):
    me = world.rank
    every = parts(world, 1000)
    data = every[me].copy()
    world.scan(data)
    assert (data == sum(every[: me + 1])).all()
    data = every[me].copy()
    world.exclusive_scan(data, "max")
    assert (data == (numpy.max(every[:me], axis=0) if me else every[0])).all()
    with pytest.raises(symmem.Usage, match="scan"):
        world.scan(numpy.zeros(1, "float32"), "avg")


def test_scans_of_ordinary_arrays():
    ranks.run(3, scans_of_ordinary_arrays)


def arrays_of_different_lengths(world):
    n, me = world.size, world.rank
    received, lengths = world.all_gather_v(numpy.full(2 * me, me, "int16"))
    assert (received.dtype, received.shape) == ("int16", (n * (n - 1),))
    assert lengths == [2 * rank for rank in range(n)]
    assert list(received.numpy()) == [rank for rank in range(n) for _ in range(2 * rank)]
    counts = [me + to for to in range(n)]
    data = numpy.concatenate([numpy.full(me + to, 10 * me + to, "float32") for to in range(n)])
    received, lengths = world.all_to_all_v(data, counts)
    assert lengths == [source + me for source in range(n)]
    assert list(received.numpy()) == [10 * source + me for source in range(n) for _ in range(source + me)]
    received, lengths = world.all_gather_v(bytes([me]), dtype="uint8")
    assert (bytes(received.numpy()), lengths) == (bytes(range(n)), [1] * n)
    received, lengths = world.all_gather_v(numpy.zeros(0, "bool"))
    assert (len(received), received.dtype, lengths) == (0, "bool", [0] * n)
    with pytest.raises(symmem.Usage, match="dtype"):
        world.all_gather_v(b"a buffer alone")
    world.barrier()


def test_arrays_of_different_lengths():
    ranks.run(3, arrays_of_different_lengths)


def rows_by_rank_and_by_expert(world):
    n, me = world.size, world.rank
    rows = symmem.rendezvous(symmem.empty((16, 3), "float32", world), world)
    splits = symmem.rendezvous(symmem.empty(n, "int64", world), world)
    rows.local[:] = numpy.arange(16)[:, None] + 100 * me
    splits.local[:] = [me + 1 + to for to in range(n)]
    out = numpy.zeros((16, 3), "float32")
    received = rows.all_to_all_v(splits, out)
    counts = [source + 1 + me for source in range(n)]
    assert list(received[:n]) == counts
    assert list(received[n:]) == list(numpy.cumsum([0, *counts[:-1]]))
    for source, (count, first) in enumerate(zip(received[:n], received[n:])):
        begin = sum(source + 1 + to for to in range(me))
        assert (out[first : first + count, 0] == numpy.arange(begin, begin + count) + 100 * source).all()

    experts = symmem.rendezvous(symmem.empty(2 * n, "int64", world), world)
    experts.local[:] = 1
    there = symmem.rendezvous(symmem.empty((16, 3), "float32", world), world)
    received = symmem.rendezvous(symmem.empty(4 * n, "int64", world), world)
    rows.all_to_all_v(experts, there.local, received.local, major_align=4)
    assert list(received.local[: 2 * n]) == [1] * (2 * n)
    back = numpy.zeros((16, 3), "float32")
    there.all_to_all_v(received, back, offsets=True)
    assert (back[: 2 * n] == rows.local[: 2 * n]).all()


def test_rows_by_rank_and_by_expert():
    ranks.run(2, rows_by_rank_and_by_expert)


def signals_belong_to_their_memory(world):
    x, y = (symmem.rendezvous(symmem.empty(4, "int64", world), world) for _ in range(2))
    if world.rank == 0:
        x.put_signal(1, channel=3)
        world.barrier()
        words = numpy.asarray(x.handle.pad_view(1).view("uint32"))
        assert words[2 * 3 + 0] == 1 and words.sum() == 1
        world.barrier()
    else:
        world.barrier()
        for other in (y, world):
            with pytest.raises(symmem.Timeout):
                other.wait_signal(0, channel=3, timeout=0.2)
        world.barrier()
        x.wait_signal(0, channel=3)
    x.barrier(1)
    # Channel 0 of this memory has nothing to do with that of another, nor with that of the group.
    with pytest.raises(symmem.Timeout):
        (x if world.rank == 0 else y).barrier(timeout=0.2)
    world.barrier()
    x.barrier()
    y.barrier()
    assert not numpy.asarray(x.handle.pad_view(world.rank)).any()
    assert not numpy.asarray(y.handle.pad_view(world.rank)).any()


def test_signals_and_barriers_belong_to_their_memory():
    ranks.run(2, signals_belong_to_their_memory)


def one_sided_access(world):
    n, me = world.size, world.rank
    x = symmem.rendezvous(symmem.empty(10, "float64", world), world)
    x.barrier()
    x.put((me + 1) % n, numpy.full(3, me + 0.5), at=2)
    x.put_signal((me + 1) % n, channel=3)
    x.wait_signal((me - 1) % n, channel=3)
    assert (x.local[2:5] == (me - 1) % n + 0.5).all() and x.local[5] == 0
    x.barrier()
    got = x.get((me + 1) % n, numpy.empty(3), at=2)
    assert (got == me + 0.5).all()
    x.barrier()
    x.handle.fill32(me, 4, 7, 2)
    x.handle.write32(me, 0, 2**32 - 1)
    words = x.local.view("uint32")
    assert list(words[:6]) == [2**32 - 1, 0, 0, 0, 7, 7]
    with pytest.raises(symmem.Usage, match="exceeded the numel"):
        x.handle.fill32(me, 19, 0, 2)
    with pytest.raises(symmem.Usage, match=r"\(uint32_t\)"):
        x.handle.write32(me, 0, -1)


def test_one_sided_access():
    ranks.run(3, one_sided_access)


def one_sided_access_stays_within_the_array(world):
    whole = symmem.empty((4, 8), "int32", world)
    rows = whole.numpy()
    rows[:] = 7
    x = symmem.rendezvous(rows[1:3], world)
    me, four = world.rank, numpy.zeros(4, "int32")
    for at, data in ((-1, four), (-8, four), (13, four), (16, four), (0, numpy.zeros(17, "int32")), (13, bytes(16))):
        with pytest.raises(symmem.Usage, match="put: rank .: expected elements within the 16 of int32, got"):
            x.put(me, data, at)
    for at in (-1, 13):
        with pytest.raises(symmem.Usage, match="get: rank .: expected elements within the 16 of int32, got"):
            x.get(me, four, at)
    for other in ("float32", "int64", "uint8"):
        with pytest.raises(symmem.Usage, match=f"put: rank .: expected an array of int32, got one of {other}"):
            x.put(me, numpy.zeros(4, other))
        with pytest.raises(symmem.Usage, match=f"get: rank .: expected an array of int32, got one of {other}"):
            x.get(me, numpy.zeros(4, other))
    assert (rows == 7).all()
    x.put(me, numpy.arange(4, dtype="int32"), at=12)
    x.put(me, numpy.arange(2, dtype="int32").tobytes())
    assert list(rows[2, 4:]) == [0, 1, 2, 3] and list(rows[1, :3]) == [0, 1, 7]
    assert (rows[[0, 3]] == 7).all()
    buffer = bytearray(8)
    x.get(me, buffer, at=13)
    assert list(memoryview(buffer).cast("i")) == [1, 2]
    x.put(me, numpy.zeros(0, "int32"), at=16)


def test_one_sided_access_stays_within_the_array_and_its_type():
    ranks.run(2, one_sided_access_stays_within_the_array)


def parts_of_an_array(world):
    whole = symmem.empty((4, 8), "int32", world)
    rows = whole.numpy()
    rows[:] = 1
    x = symmem.rendezvous(rows[1:3], world)
    assert x.shape == (2, 8)
    x.all_reduce()
    assert (rows[1:3] == world.size).all() and (rows[[0, 3]] == 1).all()
    with pytest.raises(BufferError, match="contiguous"):
        symmem.rendezvous(rows[:, :2], world)
    with pytest.raises(symmem.Usage, match="symmetric memory"):
        symmem.rendezvous(numpy.zeros(3), world)


def test_parts_of_an_array():
    ranks.run(2, parts_of_an_array)


def wrong_arguments(world):
    x = symmem.rendezvous(symmem.empty((world.size, 4), "float32", world), world)
    for wrong in (
        lambda: x.all_reduce(out=numpy.empty(3, "float32")),
        lambda: x.all_reduce(out=numpy.empty((world.size, 4), "float64")),
        lambda: x.all_reduce(out=x.local),
        lambda: x.all_gather(out=b"0123"),
        lambda: x.all_reduce("no such operator"),
        lambda: x.all_reduce(algorithm="no such way"),
        lambda: x.broadcast(world.size),
        lambda: x.reduce_scatter(axis=1, out=numpy.empty(4, "float32")),
        lambda: world.all_reduce(bytearray(4)),
        lambda: world.all_reduce(object()),
        lambda: x.put(world.size, numpy.zeros(1, "float32")),
        lambda: x.put(0, numpy.zeros(5, "float32"), at=4 * world.size - 4),
    ):
        with pytest.raises(symmem.Usage, match="expected .*, got"):
            wrong()
    with pytest.raises(symmem.Mismatch) as raised:
        x.all_reduce(["sum", "max"][world.rank % 2], algorithm="two_shot")
    assert raised.value.op == "all_reduce" and raised.value.rank is not None
    x.all_reduce()
    with pytest.raises(
        symmem.Mismatch, match="here (broadcast|all_reduce) of 12 f32.*, on rank . (broadcast|all_reduce) of 12 f32"
    ):
        [x.all_reduce, lambda: x.broadcast(0)][world.rank % 2]()
    x.all_reduce()
    # No type of elements stands for anything else.
    data = numpy.ones(61 * world.size, ["uint16", "float32"][world.rank % 2])
    with pytest.raises(symmem.Mismatch, match="element type: here (u16|f32), on rank . (u16|f32)"):
        world.reduce_scatter(data, numpy.empty(61, data.dtype))
    # A rank that refuses a call is not waited for.
    if world.rank == 0:
        world.refuse()
    else:
        with pytest.raises(symmem.PeerFailed, match="rank 0 .*refused"):
            x.all_reduce()
    x.all_reduce()


def test_wrong_arguments_are_refused_and_the_next_call_works():
    ranks.run(3, wrong_arguments)

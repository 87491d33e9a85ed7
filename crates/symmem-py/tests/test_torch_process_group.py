"""The backend `symmem` of torch.distributed: every operation, in the thread of the caller and in the background."""

import pytest
from torch_ranks import ranks

torch = pytest.importorskip("torch")
dist = torch.distributed

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
OPS = dist.ReduceOp


def _filled(dtype, rank, count=6):
    """Small numbers, different on every rank."""
    return (torch.arange(count) % 3 + rank + 1).to(dtype)


def _wait(work):
    """The end of a call that may be asynchronous."""
    if work is not None:
        assert work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None


def _both(call):
    """A call, in the thread of the caller and in the background."""
    for async_op in (False, True):
        _wait(call(async_op))


@ranks((1, 2, 4), backend="symmem")
def test_every_type_is_moved_and_reduced(rank):
    size = dist.get_world_size()
    assert dist.get_backend() == "symmem"
    for dtype in DTYPES:
        every = torch.stack([_filled(dtype, r) for r in range(size)])
        total = every.any(0) if dtype is torch.bool else every.sum(0).to(dtype)
        mine, tensor = _filled(dtype, rank), torch.empty(6, dtype=dtype)

        def reduced(async_op, tensor=tensor, mine=mine):
            tensor.copy_(mine)
            return dist.all_reduce(tensor, async_op=async_op)

        _both(reduced)
        assert torch.equal(tensor, total), dtype
        gathered = [torch.empty_like(mine) for _ in range(size)]
        _both(lambda async_op, out=gathered, mine=mine: dist.all_gather(out, mine, async_op=async_op))
        assert torch.equal(torch.stack(gathered), every), dtype
        tensor.copy_(mine)
        _both(lambda async_op, tensor=tensor: dist.broadcast(tensor, size - 1, async_op=async_op))
        assert torch.equal(tensor, every[-1]), dtype


@ranks((2, 3), backend="symmem")
def test_every_operator_reduces(rank):
    size = dist.get_world_size()
    every = torch.stack([_filled(torch.int64, r) for r in range(size)])
    expected = {
        OPS.SUM: every.sum(0),
        OPS.PRODUCT: every.prod(0),
        OPS.MIN: every.min(0)[0],
        OPS.MAX: every.max(0)[0],
        OPS.BAND: every[0].clone(),
        OPS.BOR: every[0].clone(),
        OPS.BXOR: every[0].clone(),
    }
    for row in every[1:]:
        expected[OPS.BAND] &= row
        expected[OPS.BOR] |= row
        expected[OPS.BXOR] ^= row
    for op, result in expected.items():
        tensor = _filled(torch.int64, rank)
        dist.all_reduce(tensor, op)
        assert torch.equal(tensor, result), op
    tensor = _filled(torch.float32, rank)
    dist.all_reduce(tensor, OPS.AVG)
    assert torch.equal(tensor, every.float().mean(0))
    tensor = _filled(torch.float32, rank)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    assert torch.equal(tensor, every.float().sum(0) / 2)
    # The input of a call that has an output is not scaled in place.
    given, out = _filled(torch.float32, rank, 6 * size), torch.empty(6)
    dist.reduce_scatter_tensor(out, given, dist._make_nccl_premul_sum(2.0))
    assert torch.equal(given, _filled(torch.float32, rank, 6 * size))
    assert torch.equal(out, 2 * sum(_filled(torch.float32, r, 6 * size) for r in range(size)).chunk(size)[rank])


@ranks((1, 2, 4), backend="symmem")
def test_rooted_collectives(rank):
    size = dist.get_world_size()
    for root in range(size):
        tensor = torch.full((5,), float(rank + 1))
        _wait(dist.reduce(tensor, root, async_op=True))
        assert torch.equal(tensor, torch.full((5,), size * (size + 1) / 2 if rank == root else rank + 1.0))
        out = [torch.empty(3, dtype=torch.int64) for _ in range(size)] if rank == root else None
        _both(lambda async_op, root=root, out=out: dist.gather(torch.full((3,), rank), out, root, async_op=async_op))
        assert rank != root or [int(t[2]) for t in out] == list(range(size))
        if hasattr(dist, "gather_single"):
            whole = torch.empty(3 * size, dtype=torch.int64) if rank == root else None
            dist.gather_single(torch.full((3,), rank), whole, root)
            assert rank != root or whole.tolist() == [r for r in range(size) for _ in range(3)]
        given = [torch.full((2,), 10 * r) for r in range(size)] if rank == root else None
        part = torch.empty(2, dtype=torch.int64)
        _both(lambda async_op, root=root, given=given, part=part: dist.scatter(part, given, root, async_op=async_op))
        assert part.tolist() == [10 * rank] * 2
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]
    objects = ["root", 1] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, 0)
    assert objects == ["root", 1]


@ranks((1, 2, 4), backend="symmem")
def test_scatters_and_gathers_of_one_tensor(rank):
    size = dist.get_world_size()
    given = torch.arange(4.0 * size).reshape(2 * size, 2) + rank
    out, total = torch.empty(2, 2), size * torch.arange(4.0 * size).reshape(2 * size, 2) + sum(range(size))
    _both(lambda async_op: dist.reduce_scatter_tensor(out, given, async_op=async_op))
    assert torch.equal(out, total.chunk(size)[rank])
    _both(lambda async_op: dist.reduce_scatter(out, list(given.chunk(size)), async_op=async_op))
    assert torch.equal(out, total.chunk(size)[rank])
    every = torch.empty(2 * size, 2)
    _both(lambda async_op: dist.all_gather_into_tensor(every, out, async_op=async_op))
    assert torch.equal(every, total)
    # The input may be this rank's part of the output, and the other way round.
    mine = every.chunk(size)[rank]
    mine.fill_(rank)
    dist.all_gather_into_tensor(every, mine)
    assert every[:, 0].tolist() == [r for r in range(size) for _ in range(2)]
    dist.reduce_scatter_tensor(mine, every)
    assert torch.equal(mine, torch.full((2, 2), float(size * rank)))


@ranks((2, 3), backend="symmem")
def test_parts_may_differ_in_length(rank):
    size = dist.get_world_size()
    given = [torch.full((r + 1, 2), 10 * rank + r) for r in range(size)]
    out = [torch.empty(rank + 1, 2, dtype=torch.int64) for _ in range(size)]
    _both(lambda async_op: dist.all_to_all(out, given, async_op=async_op))
    assert [int(t[0, 0]) for t in out] == [10 * r + rank for r in range(size)]
    flat = torch.empty(size * (rank + 1), 2, dtype=torch.int64)
    lengths = list(range(1, size + 1))
    _both(
        lambda async_op: dist.all_to_all_single(flat, torch.cat(given), [rank + 1] * size, lengths, async_op=async_op)
    )
    assert torch.equal(flat, torch.cat(out))
    # Ranks whose own parts are equal need not say so.
    sent = torch.full((size,), rank) if rank == 0 else torch.full((size + rank,), rank)
    counts = None if rank == 0 else [1] * (size - 1) + [1 + rank]
    got = [1] * (size - 1) + [1] if rank == 0 else [1] * size
    if rank == size - 1:
        got = [1 + r for r in range(size)]
    received = torch.empty(sum(got), dtype=torch.int64)
    dist.all_to_all_single(received, sent, None if rank == 0 else got, counts)
    assert received.tolist() == [r for r, n in enumerate(got) for _ in range(n)]
    uneven = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [t.tolist() for t in uneven] == [[float(r)] * (r + 1) for r in range(size)]
    part = torch.empty(rank + 1)
    dist.reduce_scatter(part, [torch.full((r + 1,), float(rank)) for r in range(size)])
    assert part.tolist() == [sum(range(size))] * (rank + 1)


@ranks(2, backend="symmem")
def test_tensors_need_not_be_contiguous(rank):
    for async_op in (False, True):
        base = torch.zeros(4, 6)
        view = base[:, ::2].t()
        view.fill_(rank + 1)
        _wait(dist.all_reduce(view, async_op=async_op))
        assert torch.equal(base[:, ::2], torch.full((4, 3), 3.0)) and not base[:, 1::2].any()
        out = [torch.zeros(3, 4).t() for _ in range(2)]
        _wait(dist.all_gather(out, torch.full((3, 4), float(rank)).t(), async_op=async_op))
        assert [float(t.sum()) for t in out] == [0.0, 12.0]
    work = dist.irecv(base[:, 0], 1) if rank == 0 else dist.isend(torch.arange(8.0)[::2], 0)
    work.wait()
    assert rank or base[:, 0].tolist() == [0, 2, 4, 6]
    # Nothing is an array too.
    empty = torch.empty(0)
    dist.all_reduce(empty)
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar == 1


@ranks(3, backend="symmem")
def test_calls_are_in_order_however_ranks_wait(rank):
    tensors = [torch.full((1000,), float(rank + i)) for i in range(50)]
    works = []
    for i, tensor in enumerate(tensors):
        works.append(dist.all_reduce(tensor, async_op=(i + rank) % 3 > 0))
    for work in reversed(works):
        _wait(work)
    assert [float(t[999]) for t in tensors] == [3.0 + 3 * i for i in range(50)]


@ranks(2, backend="symmem")
def test_an_asynchronous_call_waits_for_nobody(rank):
    tensor, note = torch.full((4,), 1.0), torch.zeros(1)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        dist.send(torch.ones(1), 1)  # rank 1 makes its call after this
        work.wait()
    else:
        dist.recv(note, 0)
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        assert torch.equal(future.wait()[0], torch.full((4,), 2.0))
        doubled = future.then(lambda done: 2 * done.value()[0])
        assert torch.equal(doubled.wait(), torch.full((4,), 4.0))
    assert torch.equal(tensor, torch.full((4,), 2.0))


@ranks(2, backend="symmem")
def test_a_work_has_its_tensors_however_late_ranks_are(rank):
    import time

    for step in range(40):
        if step % 2 == rank:
            time.sleep(0.003)  # the others have come: the call is made at once
        tensor, out = torch.full((4,), float(rank)), torch.empty(8)
        works = [dist.all_reduce(tensor, async_op=True), dist.all_gather_into_tensor(out, tensor, async_op=True)]
        assert torch.equal(works[0].get_future().wait()[0], torch.ones(4))
        assert works[1].get_future().wait()[0] is not None and torch.equal(works[1].result()[0], torch.ones(8))


@ranks(2, backend="symmem")
def test_a_work_is_done_without_a_wait(rank):
    import time

    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=True)
    end = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < end, "it never completed"
        time.sleep(0.001)
    assert work.result()[0] is tensor and tensor[0] == 2


@ranks(2, backend="symmem")
def test_coalesced_calls(rank):
    tensors = [torch.full((n,), float(rank)) for n in (1, 100, 3)]
    dist.all_reduce_coalesced(tensors)
    assert all((t == 1).all() for t in tensors)
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all((t == 2).all() for t in tensors)
    outs, parts = [torch.empty(4), torch.empty(6)], [torch.full((2,), float(rank)), torch.full((3,), float(rank))]
    with dist._coalescing_manager():
        for out, part in zip(outs, parts):
            dist.all_gather_into_tensor(out, part)
    assert [out.tolist() for out in outs] == [[0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    with dist._coalescing_manager():
        for out, part in zip(outs, parts):
            dist.reduce_scatter_tensor(part, out)
    assert [part.tolist() for part in parts] == [[2 * rank] * 2, [2 * rank] * 3]


@ranks(2, backend="symmem")
def test_functional_collectives(rank):
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    tensor = torch.full((4,), float(rank + 1))
    assert torch.equal(functional.all_reduce(tensor, "sum", group) + 0, torch.full((4,), 3.0))
    assert (functional.all_gather_tensor(tensor, 0, group) + 0).tolist() == [1.0] * 4 + [2.0] * 4
    assert (functional.reduce_scatter_tensor(tensor, "avg", 0, group) + 0).tolist() == [1.5, 1.5]
    parts = functional.all_to_all_single(tensor, [1, 1] if rank == 0 else [3, 3], [1, 3], group)
    assert (parts + 0).tolist() == ([1.0, 2.0] if rank == 0 else [1.0] * 3 + [2.0] * 3)
    assert (functional.broadcast(tensor, 1, group) + 0).tolist() == [2.0] * 4


@ranks(3, backend="symmem")
def test_functional_collectives_are_right_however_late_ranks_are(rank):
    import time

    ops, name, size = torch.ops._c10d_functional, dist.group.WORLD.group_name, 3
    for step in range(30):
        if (step + rank) % 3 == 0:
            time.sleep(0.002)
        count = [5, 3000, 30_000][step % 3]
        tensor = torch.arange(3.0 * count) % 50 + rank
        kept = tensor.clone()
        total, maximum = tensor * size - size * rank + 3, tensor - rank + 2
        out = ops.all_reduce(tensor, "sum", name)
        top = ops.all_reduce_(tensor.clone(), "max", name)
        every = ops.all_gather_into_tensor(tensor, size, name)
        part = ops.reduce_scatter_tensor(tensor, "sum", size, name)
        # Waited for in another order, and the input is as it was.
        assert torch.equal(ops.wait_tensor(part), total.chunk(size)[rank])
        assert torch.equal(ops.wait_tensor(every), torch.cat([tensor - rank + r for r in range(size)]))
        assert torch.equal(ops.wait_tensor(top), maximum)
        assert torch.equal(ops.wait_tensor(out), total) and torch.equal(tensor, kept)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0


@ranks(2, backend="symmem")
def test_a_functional_collective_waits_for_nobody(rank):
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    tensor = torch.full((4,), 1.0)
    if rank == 0:
        out = ops.all_reduce(tensor, "sum", name)
        dist.send(torch.ones(1), 1)  # rank 1 makes its call after this
    else:
        dist.recv(torch.zeros(1), 0)
        out = ops.all_reduce(tensor, "sum", name)
    assert torch.equal(ops.wait_tensor(out), torch.full((4,), 2.0))


@ranks(2, backend="symmem")
def test_functional_collectives_of_other_groups_and_unusual_ones_are_torchs(rank):
    import symmem

    ops, gloo = torch.ops._c10d_functional, dist.new_group(backend="gloo")
    for group in (gloo, dist.group.WORLD):
        name = group.group_name
        view = torch.full((4, 6), float(rank)).t()
        assert torch.equal(ops.wait_tensor(ops.all_reduce(view, "sum", name)) + 0, torch.ones(6, 4))
        assert torch.equal(ops.wait_tensor(ops.all_reduce(torch.ones(3), "sum", name)), torch.full((3,), 2.0))
        empty = ops.wait_tensor(ops.all_gather_into_tensor(torch.empty(0, 3), 2, name))
        assert empty.shape == (0, 3)
    name = dist.group.WORLD.group_name
    with pytest.raises(RuntimeError, match='expected a type that "and" applies to'):
        ops.wait_tensor(ops.all_reduce(torch.ones(3), "band", name))
    with pytest.raises((symmem.Mismatch, RuntimeError), match="length"):
        ops.wait_tensor(ops.all_reduce(torch.ones(3 + rank), "sum", name))
    # Gradients, and compiled code, take torch's own way to the kernels.
    given = torch.ones(4, requires_grad=True)
    import torch.distributed._functional_collectives as functional

    functional.all_reduce(given, "sum", dist.group.WORLD).sum().backward()
    assert given.grad is not None

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x):
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 5.0))


@ranks(2, backend="symmem")
def test_what_cannot_be_reduced_is_refused_on_all_ranks(rank):
    import symmem

    sparse = torch.eye(3).to_sparse()
    with pytest.raises(
        ValueError, match=r"rank \d: all_reduce in process group \S+: expected dense tensors, got .*sparse"
    ):
        dist.all_reduce(sparse)
    with pytest.raises(ValueError, match="expected tensors on the CPU, got one on meta"):
        dist.all_reduce(torch.empty(4, device="meta"))
    with pytest.raises(ValueError, match="expected one dense tensor on the CPU"):
        dist.send(torch.empty(4, device="meta"), 1 - rank)
    with pytest.raises(
        symmem.Usage, match=r'expected a type that "and" applies to, got float32 \(rank \d of process group'
    ):
        dist.all_reduce(torch.ones(2), OPS.BAND)
    # The forms of the group's methods that `torch.distributed` does not use.
    with pytest.raises(TypeError, match="all_reduce: expected a list of tensors and options"):
        dist.group.WORLD.allreduce(torch.ones(2), OPS.SUM)
    # A rank that refuses alone does not keep the others waiting.
    if rank == 0:
        with pytest.raises(symmem.Usage):
            dist.all_reduce(torch.ones(2), OPS.BAND)
    else:
        with pytest.raises(symmem.PeerFailed, match="rank 0"):
            dist.all_reduce(torch.ones(2))
    with pytest.raises(symmem.Mismatch, match="all_reduce"):
        dist.all_reduce(torch.ones(2 + rank))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor[0] == 2


@ranks(2, backend="symmem")
def test_tensors_need_not_be_aligned(rank):
    def floats(count):
        return torch.frombuffer(bytearray(1 + 4 * count), dtype=torch.float32, count=count, offset=1).fill_(rank + 1)

    for count in (4, 40_000):
        x, part, every = floats(count), floats(count // 2), floats(2 * count)
        assert x.data_ptr() % 4
        dist.all_gather_into_tensor(every, x)
        assert (every[:count] == 1).all() and (every[count:] == 2).all()
        dist.all_reduce(x)
        assert (x == 3).all()
        dist.reduce_scatter_tensor(part, x)
        assert (part == 6).all()
        dist.broadcast(x.fill_(rank), 1)
        assert (x == 1).all()
        if rank == 0:
            dist.send(x.fill_(7), 1)
        else:
            dist.recv(x, 0)
            assert (x == 7).all()

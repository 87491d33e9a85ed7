"""All-to-all of rows and tiles on CPU tensors. The numbers are those of docs/parity.md."""

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem.torch  # noqa: F401
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

ops = torch.ops.symm_mem
WIDTH = 5


def _splits(count, size):
    """Every rank's splits, the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 10, (size, count), generator=generator)


def _rows(source, count):
    return (1000.0 * source + torch.arange(count)).unsqueeze(1).expand(count, WIDTH)


def _symmetric(values, rows=None, dtype=None):
    shape = (rows or values.shape[0], *values.shape[1:])
    tensor = symm_mem.empty(shape, dtype=dtype or values.dtype, device="cpu")
    tensor.zero_()
    tensor[: values.shape[0]].copy_(values)
    return tensor


@ranks(3)
def test_t221_all_to_all_vdev(rank):
    size = dist.get_world_size()
    splits = _splits(size, size)
    rows = int(splits.sum(1).max())
    inputs = _symmetric(_rows(rank, int(splits[rank].sum())), rows)
    in_splits = _symmetric(splits[rank])
    out = symm_mem.empty(size * 10, WIDTH, device="cpu")
    received = symm_mem.empty(2, size, dtype=torch.int64, device="cpu")
    ops.all_to_all_vdev(inputs, out, in_splits, received, world())
    assert torch.equal(in_splits, splits[rank])
    counts = splits[:, rank]
    assert torch.equal(received[0], counts)
    assert torch.equal(received[1], counts.cumsum(0) - counts)
    starts = splits.cumsum(1) - splits
    expected = [_rows(s, int(splits[s].sum()))[starts[s, rank] :][: counts[s]] for s in range(size)]
    assert torch.equal(out[: int(counts.sum())], torch.cat(expected))


#: Types that no reduction has.
MOVED = [
    getattr(torch, name)
    for name in (
        *("bool", "complex32", "complex64", "complex128", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        *("float4_e2m1fn_x2",),
    )
    if hasattr(torch, name)
]


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@ranks(2)
def test_t221_t222_t224_rows_of_every_type_are_moved(rank, dtype):
    """Two rows for each rank, there and back; as bytes, for not every type can be compared."""
    width = 3 * dtype.itemsize
    bits = 2 if dtype == torch.bool else 256

    def rows(source):
        return (torch.arange(4 * width).view(4, width) * 7 + 100 * source).remainder(bits).to(torch.uint8)

    def new(count):
        return symm_mem.empty(count, 3, dtype=dtype, device="cpu")

    inputs, out = new(4), new(8)
    inputs.view(torch.uint8).copy_(rows(rank))
    in_splits = _symmetric(torch.tensor([2, 2]))
    received = symm_mem.empty(2, 2, dtype=torch.int64, device="cpu")
    expected = torch.cat([rows(source)[2 * rank : 2 * rank + 2] for source in range(2)])
    for call in (ops.all_to_all_vdev, ops.all_to_all_vdev_2d):
        out.view(torch.uint8).zero_()
        call(inputs, out, in_splits, received, world())
        assert received.tolist() == [[2, 2], [0, 2]]
        assert torch.equal(out[:4].view(torch.uint8), expected)
    back = new(4)
    ops.all_to_all_vdev_2d_offset(out, back, received, torch.empty_like(received), world())
    assert torch.equal(back.view(torch.uint8), rows(rank))


@pytest.mark.parametrize("align", [1, 8, 16])
@ranks(2)
def test_t222_t223_t224_dispatch_and_combine(rank, align):
    size, experts = dist.get_world_size(), 4
    splits = _splits(size * experts, size)
    splits[:, 0] = 0  # an expert without rows
    rows = int(splits.sum(1).max())
    inputs = _symmetric(_rows(rank, int(splits[rank].sum())), rows)
    in_splits = _symmetric(splits[rank])
    capacity = size * experts * (10 + align)
    out = symm_mem.empty(capacity, WIDTH, device="cpu")
    received = symm_mem.empty(2, size * experts, dtype=torch.int64, device="cpu")
    ops.all_to_all_vdev_2d(inputs, out, in_splits, received, world(), align)

    by_expert = splits.view(size, size, experts)[:, rank].t()
    assert torch.equal(received[0], by_expert.reshape(-1))
    lengths = torch.maximum(-(-by_expert.sum(1) // align) * align, torch.tensor(align))
    begins = lengths.cumsum(0) - lengths
    offsets = begins.unsqueeze(1) + by_expert.cumsum(1) - by_expert
    assert torch.equal(received[1], offsets.reshape(-1))
    starts = (splits.cumsum(1) - splits).view(size, size, experts)
    for expert in range(experts):
        for source in range(size):
            first, count = int(starts[source, rank, expert]), int(by_expert[expert, source])
            at = int(offsets[expert, source])
            assert torch.equal(out[at : at + count], _rows(source, first + count)[first:])

    back = symm_mem.empty(rows, WIDTH, device="cpu")
    returned = symm_mem.empty(2, size * experts, dtype=torch.int64, device="cpu")
    ops.all_to_all_vdev_2d_offset(out, back, received, returned, world())
    assert torch.equal(returned[0], splits[rank])
    assert torch.equal(returned[1], splits[rank].cumsum(0) - splits[rank])
    count = int(splits[rank].sum())
    assert torch.equal(back[:count], inputs[:count])


@ranks(2)
def test_t221_one_row_has_its_length_whatever_its_stride(rank):
    # Every fourth row of four: one row, contiguous, with a stride of four.
    inputs = symm_mem.empty(4, WIDTH, device="cpu").fill_(-1)[::4]
    inputs.copy_(_rows(rank, 1))
    assert inputs.is_contiguous() and inputs.stride(0) == 4 * WIDTH
    in_splits = _symmetric(torch.tensor([0, 1] if rank == 0 else [1, 0]))
    out, received = torch.zeros(1, WIDTH), torch.zeros(2, 2, dtype=torch.int64)
    ops.all_to_all_vdev(inputs, out, in_splits, received, world())
    assert received[0].tolist() == ([0, 1] if rank == 0 else [1, 0])
    assert torch.equal(out, _rows(1 - rank, 1))


@ranks(2)
def test_op31_rows_that_do_not_fit_are_an_error_everywhere(rank):
    inputs = symm_mem.empty(20, WIDTH, device="cpu")
    # Rank 0 gets 20 rows and has space for 10; rank 1 gets none.
    in_splits = _symmetric(torch.tensor([10, 0]))
    received = symm_mem.empty(2, 2, dtype=torch.int64, device="cpu")
    small, large = symm_mem.empty(10, WIDTH, device="cpu"), symm_mem.empty(20, WIDTH, device="cpu")
    with pytest.raises(RuntimeError):
        ops.all_to_all_vdev(inputs, small, in_splits, received, world())
    ops.all_to_all_vdev(inputs, large, in_splits, received, world())
    assert received[0].tolist() == ([10, 10] if rank == 0 else [0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@ranks(2)
def test_t226_tile_reduce(rank, dtype):
    matrix = symm_mem.empty(64, 64, dtype=dtype, device="cpu").fill_(rank + 1)
    out = symm_mem.empty(64, 64, dtype=dtype, device="cpu").fill_(0)
    tile = (slice(8, 24), slice(16, 32))
    ops.tile_reduce(matrix[tile], out[tile], 0, world())
    expected = torch.zeros(64, 64, dtype=dtype)
    if rank == 0:
        expected[tile] = 3
    assert torch.equal(out, expected)


@ranks(2)
def test_t227_multi_root_tile_reduce(rank):
    matrix = symm_mem.empty(64, 64, device="cpu").fill_(rank + 1)
    out = symm_mem.empty(64, 64, device="cpu").fill_(0)
    tiles = [matrix[:32, :32], matrix[32:, 32:]]
    mine = [(slice(0, 32), slice(0, 32)), (slice(32, 64), slice(32, 64))][rank]
    ops.multi_root_tile_reduce(tiles, out[mine], [0, 1], world())
    expected = torch.zeros(64, 64)
    expected[mine] = 3
    assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", ["nvshmem", "nccl"])
@ranks(2)
def test_t211_t428_put_and_get(rank, backend):
    buffer = symm_mem.empty(8, device="cpu").fill_(rank)
    handle = symm_mem.rendezvous(buffer, world())
    handle.barrier()
    if rank == 0:
        getattr(ops, f"{backend}_get")(buffer[:4], 1)
        assert buffer.tolist() == [1] * 4 + [0] * 4
        getattr(ops, f"{backend}_put")(buffer[4:], 1)
    handle.barrier()
    assert buffer[4:].tolist() == [0] * 4
    with pytest.raises(RuntimeError, match=r"must be in \[0"):
        getattr(ops, f"{backend}_put")(buffer, 2)


@ranks(3)
def test_t220_nvshmem_all_to_all(rank):
    size = dist.get_world_size()
    inputs = symm_mem.empty(10 * size, device="cpu")
    for peer, block in enumerate(inputs.chunk(size)):
        block.fill_(10 * rank + peer)
    out = symm_mem.empty(10 * size, device="cpu")
    ops.nvshmem_all_to_all(inputs, out, world())
    assert out.view(size, 10)[:, 0].tolist() == [10 * peer + rank for peer in range(size)]


@ranks(2)
def test_t203_t205_a_tensor_of_the_pool_is_broadcast(rank):
    with torch.cpu.use_mem_pool(symm_mem.get_mem_pool("cpu")):
        tensor = torch.arange(1024.0) if rank == 0 else torch.zeros(1024)
        product = torch.mm(torch.full((4, 4), float(rank + 1)), torch.eye(4))
    assert torch.equal(ops.nvshmem_broadcast(tensor, 0, world()), torch.arange(1024.0))
    assert (ops.nvshmem_broadcast(product, 1, world()) == 2).all()


@ranks(2)
def test_t204_a_tensor_of_the_pool_in_an_ordinary_collective(rank):
    with torch.cpu.use_mem_pool(symm_mem.get_mem_pool("cpu")):
        tensor = torch.ones(1024)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()

"""PyTorch's fused operators and the functions under them, on CPU tensors. The numbers are those of docs/parity.md."""

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem.torch  # noqa: F401
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

ops = torch.ops.symm_mem


def _random(*shape, seed=0):
    """The same on all ranks."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("gather_dim", [0, 1, 2])
@ranks(2)
def test_t041_fused_all_gather_matmul(rank, gather_dim):
    whole = _random(8, 64, 32)
    shard = whole.chunk(2, dim=gather_dim)[rank].contiguous()
    weights = [_random(32, 16, seed=i + 1) for i in range(3)]
    expected_a, expected = symm_mem._fused_all_gather_matmul_fallback(shard, weights, gather_dim, world())
    for return_a in (True, False):
        a, products = ops.fused_all_gather_matmul(shard, weights, gather_dim, world(), return_A=return_a)
        if return_a:
            torch.testing.assert_close(a, expected_a)
            assert a.stride() == expected_a.stride()
        else:
            assert a is None
        for product, wanted, weight in zip(products, expected, weights):
            torch.testing.assert_close(product, wanted)
            torch.testing.assert_close(product, whole @ weight)
            assert product.stride() == wanted.stride()


@pytest.mark.parametrize("scatter_dim", [0, 1, 2])
@ranks(2)
def test_t046_fused_matmul_reduce_scatter(rank, scatter_dim):
    a, b = _random(8, 64, 1024, seed=rank), _random(1024, 16, seed=9)
    expected = symm_mem._fused_matmul_reduce_scatter_fallback(a, b, "avg", scatter_dim, world())
    result = ops.fused_matmul_reduce_scatter(a, b, "avg", scatter_dim, world())
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()


@ranks(2)
def test_t047_fused_matmul_reduce_scatter_bfloat16(rank):
    a, b = _random(64, 1024, seed=rank).bfloat16(), _random(1024, 32, seed=9).bfloat16()
    expected = symm_mem._fused_matmul_reduce_scatter_fallback(a.float(), b.float(), "avg", 0, world())
    result = ops.fused_matmul_reduce_scatter(a, b, "avg", 0, world())
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_t049_optimal_layout(dim):
    tensor = _random(8, 64, 32, 16)
    for restride in (
        symm_mem.restride_A_shard_for_fused_all_gather_matmul,
        symm_mem.restride_A_for_fused_matmul_reduce_scatter,
    ):
        moved = restride(tensor, dim)
        assert moved.movedim(dim, 0).is_contiguous()
        assert torch.equal(moved, tensor)


@ranks(2)
def test_t041_wrong_arguments(rank):
    a, b = _random(4, 4), _random(4, 4)
    with pytest.raises(ValueError, match="A_shard must be a matrix"):
        ops.fused_all_gather_matmul(a[0], [b], 0, world())
    with pytest.raises(ValueError, match="B must be a matrix"):
        ops.fused_all_gather_matmul(a, [b[0]], 0, world())
    with pytest.raises(ValueError, match="Invalid gather_dim"):
        ops.fused_all_gather_matmul(a, [b], 2, world())
    with pytest.raises(ValueError, match="reduce_op must be sum or avg"):
        ops.fused_matmul_reduce_scatter(a, b, "max", 0, world())


@ranks(2)
def test_py11_test_mode_uses_the_fallbacks(rank):
    shard, weight = _random(4, 8, seed=rank), _random(8, 3, seed=5)
    with symm_mem._test_mode():
        _, (product,) = ops.fused_all_gather_matmul(shard, [weight], 0, world())
    _, (ours,) = ops.fused_all_gather_matmul(shard, [weight], 0, world())
    torch.testing.assert_close(product, ours)


@ranks(3)
def test_py30_gather_and_consume(rank):
    shards = [torch.full((2, 3), float(rank)), torch.full((4,), rank, dtype=torch.int64)]
    gathered = [torch.full((6, 3), -1.0), torch.full((12,), -1)]
    seen = {}

    def consume(pieces, source):
        seen[source] = [piece.clone() for piece in pieces]

    symm_mem._pipelined_multi_all_gather_and_consume(shards, consume, gathered, world())
    assert sorted(seen) == [0, 1, 2]
    for source, pieces in seen.items():
        assert (pieces[0] == source).all() and (pieces[1] == source).all()
    assert gathered[0][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert gathered[1].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    with pytest.raises(AssertionError, match="must be contiguous"):
        transposed = torch.ones(2, 2).t()[:1]
        symm_mem._pipelined_multi_all_gather_and_consume([transposed.t()], consume, [torch.ones(6, 1)[::2]], world())


@ranks(2)
def test_py31_gather_and_consume_last_dim(rank):
    shard, gathered, seen = torch.full((2, 3), float(rank)), torch.empty(4, 3), []
    symm_mem._pipelined_all_gather_and_consume_last_dim(
        shard, lambda piece, source: seen.append((source, piece[0, 0].item())), gathered, world()
    )
    assert sorted(seen) == [(0, 0.0), (1, 1.0)]
    assert gathered[:, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("dim", [0, 1])
@ranks(3)
def test_py32_produce_and_exchange(rank, dim):
    shape = (6, 2) if dim == 0 else (2, 6)
    for round in range(3):  # the workspace is used again
        output = torch.full(shape, -1.0)

        def produce(destination, piece, round=round):
            piece.fill_(100 * round + 10 * rank + destination)

        symm_mem._pipelined_produce_and_all2all(produce, output, world(), dim)
        for source, piece in enumerate(output.chunk(3, dim=dim)):
            assert (piece == 100 * round + 10 * source + rank).all()


@ranks(2)
def test_py12_the_workspace_grows(rank):
    first = symm_mem.get_symm_mem_workspace(world(), 100)
    assert first.buffer_size == 100
    assert symm_mem.get_symm_mem_workspace(world(), 50).buffer_size == 100
    grown = symm_mem.get_symm_mem_workspace(world(), 1000)
    assert grown.buffer_size == 1000
    grown.get_buffer(rank, (1000,), torch.uint8).fill_(rank)
    grown.barrier()
    assert (grown.get_buffer(1 - rank, (1000,), torch.uint8) == 1 - rank).all()
    grown.barrier()
    # W-16: another group has another workspace.
    other = symm_mem.get_symm_mem_workspace(dist.new_group([0, 1]).group_name, 10)
    assert other.buffer_size == 10


def _fp8(*shape, seed=0):
    return _random(*shape, seed=seed).to(torch.float8_e4m3fn)


def _scales_by_row():
    """Whether this torch's product on CPUs takes a scale for each row."""
    a, b = _fp8(16, 16), _fp8(16, 16).t()
    try:
        torch._scaled_mm(a, b, torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


BY_ROW = pytest.mark.skipif(not _scales_by_row(), reason="this torch's product on CPUs takes one scale for all rows")


@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize(
    "scales",
    ["tensor-wise", pytest.param("row-wise-sharded", marks=BY_ROW), pytest.param("row-wise-replicated", marks=BY_ROW)],
)
@ranks(2)
def test_t045_fused_all_gather_scaled_matmul(rank, gather_dim, scales):
    batch, rows, n, k = 8, 64, 16, 32
    shape = [batch, rows, k]
    shape[gather_dim] //= 2
    shard = _fp8(*shape, seed=rank)
    weights = [_fp8(n, k, seed=i + 5).t() for i in range(3)]
    if scales == "tensor-wise":
        a_scale, b_scales = torch.tensor(0.1), [torch.tensor(0.2) for _ in weights]
    else:
        whole = (batch, rows) if scales == "row-wise-replicated" else shape[:2]
        a_scale = 0.1 + _random(*whole, 1, seed=3 if scales == "row-wise-replicated" else 10 + rank)
        b_scales = [0.1 + _random(1, n, seed=i + 20) for i in range(3)]
    types = [torch.bfloat16, torch.bfloat16, torch.float32]
    a, products = ops.fused_all_gather_scaled_matmul(
        shard, weights, a_scale, b_scales, gather_dim, world(), [None] * 3, [None] * 3, types, [False] * 3
    )
    # gloo, and so PyTorch's fallback, does not gather fp8.
    whole = torch.cat([_fp8(*shape, seed=peer) for peer in range(2)], dim=gather_dim).float()
    assert torch.equal(a.float(), whole)
    if scales == "row-wise-sharded":
        a_scale = torch.cat([0.1 + _random(*shape[:2], 1, seed=10 + peer) for peer in range(2)], dim=gather_dim)
    for product, weight, b_scale, dtype in zip(products, weights, b_scales, types):
        assert product.dtype == dtype
        expected = (whole * a_scale) @ (weight.float() * b_scale)
        torch.testing.assert_close(product.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("scatter_dim", [0, 1])
@pytest.mark.parametrize("by_row", [pytest.param(True, marks=BY_ROW), False])
@ranks(2)
def test_t048_fused_scaled_matmul_reduce_scatter(rank, scatter_dim, by_row):
    batch, rows, n, k = 8, 64, 16, 32
    a, b = _fp8(batch, rows, k, seed=rank), _fp8(n, k, seed=9).t()
    a_scale = 0.1 + _random(batch, rows, 1, seed=rank + 1) if by_row else torch.tensor(0.1)
    b_scale = 0.1 + _random(1, n, seed=4) if by_row else torch.tensor(0.2)
    fixed = (a, b, a_scale, b_scale, "avg", scatter_dim, scatter_dim, world())
    result = ops.fused_scaled_matmul_reduce_scatter(*fixed, [batch, rows, n], out_dtype=torch.float32)
    expected = symm_mem._fused_scaled_matmul_reduce_scatter_fallback(*fixed, [batch, rows, n], out_dtype=torch.float32)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()

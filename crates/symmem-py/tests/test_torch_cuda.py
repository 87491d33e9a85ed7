"""`symmem.torch` on CUDA tensors, after `install("cuda")`. Ranks share devices where there are more ranks than devices."""

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem.torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
ops = torch.ops.symm_mem


def _device(rank):
    """This rank's device, with the library installed for it."""
    symmem.torch.install("cuda")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _leave():
    """Nobody's memory goes while a peer's kernels may use it."""
    torch.cuda.synchronize()
    dist.barrier()


def _peers_are_read(rank):
    device = _device(rank)
    x = symm_mem.empty(1024, device=device)
    assert x.device == device and symm_mem.is_symm_mem_tensor(x)
    assert symm_mem.get_backend(device) == symmem.torch.BACKEND
    assert not symm_mem.is_symm_mem_tensor(torch.empty(1024, device=device))
    handle = symm_mem.rendezvous(x, world())
    assert handle.buffer_ptrs[rank] == x.data_ptr() and handle.device == device
    x.fill_(rank)
    handle.barrier()
    for peer in range(handle.world_size):
        view = handle.get_buffer(peer, (1024,), torch.float32)
        assert view.device == device and (view == peer).all()
    handle.barrier()
    right, left = (rank + 1) % handle.world_size, (rank - 1) % handle.world_size
    handle.get_buffer(right, (4,), torch.float32).fill_(10 + rank)
    handle.put_signal(right, channel=1)
    handle.wait_signal(left, channel=1)
    assert (x[:4] == 10 + left).all() and (x[4:] == rank).all()
    pad = handle.get_signal_pad(rank)
    assert pad.data_ptr() == handle.signal_pad_ptrs[rank] and (pad.view(torch.int32) == 0).all()
    _leave()


def _reductions(rank):
    device, size = _device(rank), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        for count in (4 * size, 8192, 65536 * size):
            count -= count % (16 * size) if count > 16 * size else 0
            x = symm_mem.empty(count + 8, dtype=dtype, device=device).fill_(0)
            part = x[8:]
            part.copy_(torch.arange(count, device=device) % 7 + rank)
            expected = sum(torch.arange(count, device=device) % 7 + peer for peer in range(size)).to(dtype)
            assert torch.equal(ops.one_shot_all_reduce(part, "sum", world()), expected)
            out = torch.empty_like(part)
            assert torch.equal(ops.two_shot_all_reduce_out(part, "sum", world(), out), expected)
            mine = torch.empty(count // size, dtype=dtype, device=device)
            if count >= 16 * size:
                ops.reduce_scatter_out(part, world(), False, mine)
                assert torch.equal(mine, expected.chunk(size)[rank])
            assert torch.equal(ops.two_shot_all_reduce_(part, "sum", world()), expected)
            assert (x[:8] == 0).all()
            _leave()


def _copies_and_tiles(rank):
    device, size = _device(rank), dist.get_world_size()
    inputs = torch.full((4, 3), float(rank), device=device)
    out = symm_mem.empty(4 * size, 3, device=device)
    ops.multimem_all_gather_out(inputs, world(), out)
    assert out[::4, 0].tolist() == list(range(size))
    gathered = torch.ops._c10d_functional.wait_tensor(ops._low_contention_all_gather(inputs, world()))
    assert torch.equal(gathered, out)
    matrix = symm_mem.empty(64, 64, device=device).fill_(rank + 1)
    tile = torch.zeros(16, 16, device=device)
    ops.tile_reduce(matrix[8:24, 8:24], tile, 0, world())
    assert (tile == (sum(range(1, size + 1)) if rank == 0 else 0)).all()
    remote = ops.get_remote_tensors(matrix, world())
    assert [(t == peer + 1).all().item() for peer, t in enumerate(remote)] == [True] * size
    _leave()


def _rows(rank):
    device, size = _device(rank), dist.get_world_size()
    splits = [[(source + to) % 3 + 1 for to in range(size)] for source in range(size)]
    inputs = symm_mem.empty(3 * size, 2, device=device).fill_(0)
    at = 0
    for to, count in enumerate(splits[rank]):
        inputs[at : at + count] = 10 * rank + to
        at += count
    in_splits = symm_mem.empty(size, dtype=torch.int64, device=device).copy_(torch.tensor(splits[rank]))
    out = symm_mem.empty(3 * size, 2, device=device)
    received = symm_mem.empty(2, size, dtype=torch.int64, device=device)
    ops.all_to_all_vdev(inputs, out, in_splits, received, world())
    counts = [splits[source][rank] for source in range(size)]
    assert received[0].tolist() == counts
    expected = [10 * source + rank for source, count in enumerate(counts) for _ in range(count)]
    assert out[: sum(counts), 0].tolist() == expected
    _leave()


def _fused(rank):
    device, size = _device(rank), dist.get_world_size()
    whole = torch.rand(8 * size, 32, generator=torch.Generator().manual_seed(0)).to(device)
    weight = torch.rand(32, 16, generator=torch.Generator().manual_seed(1)).to(device)
    _, (product,) = ops.fused_all_gather_matmul(whole.chunk(size)[rank].contiguous(), [weight], 0, world())
    torch.testing.assert_close(product, whole @ weight)
    result = ops.fused_matmul_reduce_scatter(whole, weight, "sum", 0, world())
    torch.testing.assert_close(result, size * (whole @ weight).chunk(size)[rank])
    _leave()


@ranks(1)
def test_one_rank(rank):
    for body in (_peers_are_read, _reductions, _copies_and_tiles, _rows, _fused):
        body(rank)


@ranks(2)
def test_two_ranks_read_and_signal(rank):
    _peers_are_read(rank)


@ranks(4)
def test_four_ranks_read_and_signal(rank):
    _peers_are_read(rank)


@ranks(2)
def test_two_ranks_reduce(rank):
    _reductions(rank)


@ranks(4)
def test_four_ranks_reduce(rank):
    _reductions(rank)


@ranks(2)
def test_two_ranks_gather_and_reduce_tiles(rank):
    _copies_and_tiles(rank)


@ranks(2)
def test_two_ranks_exchange_rows(rank):
    _rows(rank)


@ranks(2)
def test_two_ranks_run_fused_products(rank):
    _fused(rank)

"""One-sided access and exchanges of blocks on CPU tensors. The numbers are those of docs/parity.md."""

import itertools

import pytest
from torch_ranks import needs, ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

ops = torch.ops.symm_mem


@ranks(2)
def test_t029_get(rank):
    tensor = symm_mem.empty(1024, device="cpu").copy_(torch.arange(1024.0) + 1000 * rank)
    handle = symm_mem.rendezvous(tensor, world())
    handle.barrier()
    whole = torch.empty(1024)
    symm_mem.get(whole, handle, 1)
    assert torch.equal(whole, torch.arange(1024.0) + 1000)
    part = torch.zeros(20)
    symm_mem.get(part[5:15], handle, 1, offset=100)
    assert torch.equal(part[5:15], torch.arange(100.0, 110.0) + 1000)
    assert (part[:5] == 0).all() and (part[15:] == 0).all()
    for arguments, text in (
        ((torch.empty(4, 4).t(), handle, 1), "contiguous"),
        ((whole, handle, 1, -1), "non-negative"),
        ((whole, handle, 1, 1), "exceeds"),
        ((whole, handle, 2), "invalid peer"),
    ):
        with pytest.raises(ValueError, match=text):
            symm_mem.get(*arguments)
    handle.barrier()


@ranks(2)
def test_py15_put_signal_and_wait_signal(rank):
    tensor = symm_mem.empty(8, device="cpu").fill_(0)
    handle = symm_mem.rendezvous(tensor, world())
    if rank == 1:
        symm_mem.put_signal(torch.full((8,), 5.0), handle, 0)
    else:
        symm_mem.wait_signal(handle, 1)
        assert (tensor == 5).all()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("per_rank", [1, 2])
@ranks(2)
def test_py16_reduce_scatter_offset(rank, dim, per_rank):
    blocks = 2 * per_rank
    sizes = [(16, 48)[i // 2] for i in range(blocks)]
    shape = [32, 32]
    shape[dim] = sum(sizes)
    tensor = symm_mem.empty(shape, device="cpu")
    offsets = list(itertools.accumulate(sizes))
    for i, (begin, end) in enumerate(itertools.pairwise([0, *offsets])):
        tensor.narrow(dim, begin, end - begin).fill_((rank + 1) * (i + 1))
    mine = [i for i in range(blocks) if i % 2 == rank]
    out = [torch.empty_like(tensor.narrow(dim, 0, sizes[i]), memory_format=torch.contiguous_format) for i in mine]
    before = tensor.clone()
    symm_mem.reduce_scatter_offset(tensor, out, world(), dim=dim, offsets=offsets)
    for i, result in zip(mine, out):
        assert (result == 3 * (i + 1)).all()
    assert torch.equal(tensor, before)


@ranks(2)
def test_py16_blocks_and_outputs_that_do_not_fit_are_refused_on_all_ranks(rank):
    x, odd = symm_mem.empty(8, 6, device="cpu").fill_(rank + 1), symm_mem.empty(7, 6, device="cpu")
    out = torch.zeros(4, 6)

    def refused(text, given, outputs, dim=0, **how):
        with pytest.raises(RuntimeError, match=text):
            symm_mem.reduce_scatter_offset(given, outputs, world(), dim=dim, **how)

    refused("divisible by the 2 ranks, got 7", odd, [torch.zeros(3, 6)])
    refused(r"of shape \(4, 6\) of torch.float32, got \(4, 5\)", x, [torch.zeros(4, 5)])
    refused(r"of shape \(4, 6\) of torch.float32, got \(1, 6\)", x, [torch.zeros(1, 6)])
    refused(r"of shape \(8, 3\) of torch.float32, got \(4, 6\)", x, [out], dim=1)
    refused("got .* of torch.float64", x, [out.double()])
    refused("owns 1 blocks, got 2", x, [out, out])
    refused("offsets in order, from 0 to 8", x, [out], offsets=[4, 9])
    refused("offsets in order, from 0 to 8", x, [out], offsets=[8, 4])
    refused("a rank for each of 2 blocks", x, [out], offsets=[4, 8], dst_ranks=[0])
    refused(r"rank must be in \[0, 2\)", x, [out], offsets=[4, 8], dst_ranks=[0, 2])
    assert (out == 0).all()
    symm_mem.reduce_scatter_offset(x, [out], world(), dim=0)
    assert (out == 3).all()


@ranks(2)
def test_t071_py16_exchanges_of_nothing_give_nothing(rank):
    out = symm_mem.empty(0, 3, device="cpu")
    assert ops.multimem_all_gather_out(torch.empty(0, 3), world(), out).shape == (0, 3)
    out = symm_mem.empty(4, 0, device="cpu")
    assert ops.multimem_all_gather_out(torch.empty(2, 0), world(), out).shape == (4, 0)
    for scatter_dim, shape in ((1, (0, 4)), (0, (4, 0)), (1, (2, 2, 0)), (0, (2, 2, 0))):
        nothing = symm_mem.empty(*shape, device="cpu")
        symm_mem.all_to_all_nd(nothing, torch.empty(shape), scatter_dim, 1 - scatter_dim, group=world())
    assert ops.nvshmem_all_to_all(symm_mem.empty(0, device="cpu"), torch.empty(0), world()).shape == (0,)


@pytest.mark.parametrize("flat", [True, False])
@ranks(2)
def test_py16_all_to_all_nd(rank, flat):
    rows, columns, size = 4, 6, 2
    everything = torch.arange(float(size * rows * size * columns)).view(size, rows, size, columns)
    tensor = symm_mem.empty(rows, size, columns, device="cpu").copy_(everything[rank])
    given = tensor.view(rows, -1) if flat else tensor
    out = torch.empty(size * rows, columns) if flat else torch.empty(size, rows, columns)
    symm_mem.all_to_all_nd(given, out, 1, 0, group=world())
    assert torch.equal(out.view(size, rows, columns), everything[:, :, rank])

    everything = torch.arange(float(size * size * rows * columns)).view(size, size, rows, columns)
    tensor = symm_mem.empty(size, rows, columns, device="cpu").copy_(everything[rank])
    given = tensor.view(-1, columns) if flat else tensor
    out = torch.empty(rows, size * columns) if flat else torch.empty(rows, size, columns)
    symm_mem.all_to_all_nd(given, out, 0, 1, group=world())
    assert torch.equal(out.view(rows, size, columns), everything[:, rank].transpose(0, 1))


@ranks(2)
def test_py17_get_remote_tensors(rank):
    buffer = symm_mem.empty(4, 8, device="cpu").fill_(rank)
    buffer[1] = 10 + rank
    mine = buffer[1, 2:]
    dist.barrier()
    tensors = ops.get_remote_tensors(mine, world())
    dist.barrier()
    assert [t.shape for t in tensors] == [mine.shape] * 2
    assert [(t == 10 + peer).all().item() for peer, t in enumerate(tensors)] == [True, True]
    with pytest.raises(ValueError, match="not allocated from Symmetric Memory"):
        ops.get_remote_tensors(torch.ones(2), world())
    dist.barrier()


def test_t087_stream_write_value32():
    tensor = torch.zeros(4, dtype=torch.uint32)
    for i in range(4):
        _SymmetricMemory.stream_write_value32(tensor, i, i + 1)
    assert tensor.tolist() == [1, 2, 3, 4]
    for offset, value in ((-1, 1), (0, 1 << 32), (0, -1), (4, 1)):
        with pytest.raises(RuntimeError):
            _SymmetricMemory.stream_write_value32(tensor, offset, value)


def test_t088_memset32():
    tensor = torch.zeros(64, dtype=torch.uint32)
    _SymmetricMemory.memset32(tensor, offset=32, val=1, count=16)
    assert tensor.tolist() == [0] * 32 + [1] * 16 + [0] * 16
    for arguments, text in (
        ((torch.zeros(64), 0, 1, 1), "input must be a flat, contiguous uint32 tensor"),
        ((tensor.view(8, 8), 0, 1, 1), "input must be a flat, contiguous uint32 tensor"),
        ((tensor, -1, 1, 1), "offset must be greater than or equal to 0"),
        ((tensor, 0, 1 << 32, 1), r"val must be in the range of.*\(uint32_t\)"),
        ((tensor, 0, 1, 0), "count must be a positive integer"),
        ((tensor, 64, 1, 1), r"offset \+ count \(65\) exceeded the numel of the input"),
    ):
        with pytest.raises(RuntimeError, match=text):
            _SymmetricMemory.memset32(*arguments)
    _SymmetricMemory.memset32(tensor, 0, (1 << 32) - 1, 64)
    _SymmetricMemory.memset32(tensor, 63, 7, 1)
    assert tensor.tolist() == [(1 << 32) - 1] * 63 + [7]


@needs("memcpy_to_multicast_")
@ranks(2)
def test_op16_memcpy_to_multicast(rank):
    out = symm_mem.empty(8, device="cpu").fill_(0)
    handle = symm_mem.rendezvous(out, world())
    handle.barrier()
    ops.memcpy_to_multicast_(out, torch.full((4,), float(rank + 1)), rank * 16, world())
    handle.barrier()
    assert out.tolist() == [1] * 4 + [2] * 4
    handle.barrier()
    # One element, whose stride says nothing of where the next would be.
    ops.memcpy_to_multicast_(out.view(torch.uint8), torch.full((3,), 7, dtype=torch.uint8)[::3], 5 + rank, world())
    handle.barrier()
    assert out.view(torch.uint8)[5:7].tolist() == [7, 7]
    with pytest.raises(RuntimeError, match="exceeds dst buffer size"):
        ops.memcpy_to_multicast_(out, torch.ones(4), 20, world())

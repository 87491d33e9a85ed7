"""One-sided copies and exchanges of blocks, which PyTorch has only for some device backends."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from symmem.torch._groups import Group
from symmem.torch._handle import SymmetricMemory, fetched, store
from symmem.torch._parts import Part, contiguous, part, run
from symmem.torch._reduce import total
from symmem.torch._refusals import told
from symmem.torch._registry import first, nothing, operator, second


def get(dst: torch.Tensor, hdl: SymmetricMemory, peer: int, offset: int = 0) -> None:
    """Copy `dst.numel()` elements of the peer's memory, from element `offset`, to `dst`."""
    if not dst.is_contiguous():
        raise ValueError("get: dst must be backed by contiguous memory")
    if offset < 0:
        raise ValueError("get: offset must be non-negative")
    if not 0 <= peer < hdl.world_size:
        raise ValueError("get: invalid peer")
    size = dst.element_size()
    if hdl.offset % size:
        raise RuntimeError("get: handle offset is not element-aligned")
    first = hdl.offset // size + offset
    if (first + dst.numel()) * size > hdl.buffer_size:
        raise ValueError("get: requested range exceeds symmetric allocation")
    dst.copy_(fetched(hdl, peer, dst.shape, dst.dtype, first))


def put_signal(src: torch.Tensor, hdl: SymmetricMemory, peer: int) -> None:
    """Copy `src` to the start of the handle in the peer's memory, then signal the peer on channel 0."""
    contiguous("put_signal", src, "src")
    store(hdl, peer, src)
    hdl.put_signal(peer)


def wait_signal(hdl: SymmetricMemory, peer: int) -> None:
    """Wait for the peer's `put_signal`. Its data has then arrived."""
    hdl.wait_signal(peer)


@operator("nvshmem_put", "nccl_put", fake=nothing)
def put(tensor: torch.Tensor, peer: int) -> None:
    """Copy a tensor to the same tensor of a rank of the world. PyTorch's operators for this have no group."""
    _whole("put", tensor, peer).write(peer, tensor)


@operator("nvshmem_get", "nccl_get", fake=nothing)
def copy_from(tensor: torch.Tensor, peer: int) -> None:
    """Copy the same tensor of a rank of the world to this one."""
    tensor.copy_(_whole("get", tensor, peer).read(peer, tensor))


def _whole(op: str, tensor: torch.Tensor, peer: int) -> Part:
    contiguous(op, tensor)
    place = part(op, tensor, dist.group.WORLD.group_name)
    place.group.check_rank(peer)
    return place


@operator("nvshmem_broadcast", fake=first)
@told
def broadcast(input: torch.Tensor, root: int, group_name: str) -> torch.Tensor:
    """Copy the root's tensor to all ranks."""
    contiguous("broadcast", input)
    place = part("broadcast", input, group_name)
    place.group.check_rank(root)
    run("broadcast", "broadcast", place, input, root=root)
    return input


@operator("nvshmem_all_to_all", fake=second)
@told
def all_to_all(input: torch.Tensor, out: torch.Tensor, group_name: str) -> torch.Tensor:
    """Send block i of the input to rank i. The output has the received blocks in rank order."""
    op = "all_to_all"
    contiguous(op, input)
    contiguous(op, out, "out")
    place = part(op, input, group_name)
    if input.numel() != out.numel() or input.dtype != out.dtype or input.numel() % place.group.size:
        raise RuntimeError(
            f"{op}: input ({input.numel()} of {input.dtype}) and out ({out.numel()} of {out.dtype}) must be alike, "
            f"and divisible by {place.group.size}"
        )
    return run(op, "all_to_all", place, input, out, "out")


@operator("nccl_reduce_scatter_offset", fake=nothing)
@told
def reduce_scatter_offset(
    input: torch.Tensor,
    out: list[torch.Tensor],
    group_name: str,
    dim: int,
    offsets: list[int] | None = None,
    dst_ranks: list[int] | None = None,
    red_op: str = "sum",
) -> None:
    """Reduce blocks of a matrix, each to one rank. `offsets` are the ends of the blocks."""
    op = "reduce_scatter_offset"
    if input.dim() != 2 or dim not in (0, 1):
        raise RuntimeError(f"{op}: expected a 2-D input and dim 0 or 1, got {input.dim()}-D and {dim}")
    if red_op != "sum":
        raise RuntimeError(f"{op}: only sum is supported for now, got {red_op}")
    place = part(op, input, group_name)
    size, rank = place.group.size, place.group.rank
    offsets = _equal_blocks(op, input.shape[dim], size) if offsets is None else offsets
    dst_ranks = [i % size for i in range(len(offsets))] if dst_ranks is None else dst_ranks
    _check_blocks(op, offsets, dst_ranks, input.shape[dim], place.group)
    blocks = [block for block, to in zip(itertools.pairwise([0, *offsets]), dst_ranks) if to == rank]
    _check_outputs(op, input, dim, blocks, out)
    place.barrier()
    try:
        for (begin, end), result in zip(blocks, out):
            peers = (place.read(peer, input).narrow(dim, begin, end - begin) for peer in range(size))
            result.copy_(total(peers, result.dtype))
    finally:
        place.barrier()


def _equal_blocks(op: str, length: int, size: int) -> list[int]:
    """The ends of equal blocks, one for each rank."""
    if length % size:
        raise RuntimeError(f"{op}: without offsets, expected a size divisible by the {size} ranks, got {length}")
    return [length // size * (i + 1) for i in range(size)]


def _check_blocks(op: str, offsets: list[int], dst_ranks: list[int], length: int, group: Group) -> None:
    """Check the arguments that are the same on all ranks, so that all ranks raise."""
    if len(dst_ranks) != len(offsets):
        raise RuntimeError(f"{op}: expected a rank for each of {len(offsets)} blocks, got {len(dst_ranks)}")
    if any(end < begin for begin, end in itertools.pairwise([0, *offsets, length])):
        raise RuntimeError(f"{op}: expected offsets in order, from 0 to {length}, got {list(offsets)}")
    for rank in dst_ranks:
        group.check_rank(rank)


def _check_outputs(op: str, input: torch.Tensor, dim: int, blocks: list, out: list[torch.Tensor]) -> None:
    if len(out) != len(blocks):
        raise RuntimeError(f"{op}: this rank owns {len(blocks)} blocks, got {len(out)} outputs")
    for (begin, end), result in zip(blocks, out):
        expected = input.narrow(dim, begin, end - begin).shape
        if result.shape != expected or result.dtype != input.dtype:
            raise RuntimeError(
                f"{op}: expected an output of shape {tuple(expected)} of {input.dtype}, "
                f"got {tuple(result.shape)} of {result.dtype}"
            )


@operator("nccl_all_to_all_nd", fake=nothing)
@told
def all_to_all_nd(input: torch.Tensor, out: torch.Tensor, scatter_dim: int, gather_dim: int, group_name: str) -> None:
    """Exchange blocks of rows for blocks of columns, or the other way round."""
    op = "all_to_all_nd"
    if (scatter_dim, gather_dim) not in ((1, 0), (0, 1)):
        raise RuntimeError(f"{op}: expected dims (1, 0) or (0, 1), got {(scatter_dim, gather_dim)}")
    contiguous(op, input)
    contiguous(op, out, "out")
    place = part(op, input, group_name)
    if input.numel() != out.numel() or input.numel() % place.group.size or input.dtype != out.dtype:
        raise RuntimeError(
            f"{op}: input and out must have the same dtype and number of elements, by {place.group.size}"
        )
    if input.numel():
        _exchange_blocks(place, input, out, scatter_dim)


def _exchange_blocks(place: Part, input: torch.Tensor, out: torch.Tensor, scatter_dim: int) -> None:
    size, rank = place.group.size, place.group.rank
    place.barrier()
    for peer in range(size):
        theirs = place.read(peer, input)
        if scatter_dim == 1:
            block = theirs.reshape(input.shape[0], size, -1)[:, rank]
            out.view(size, input.shape[0], -1)[peer].copy_(block)
        else:
            block = theirs.reshape(size, -1, input.shape[-1])[rank]
            out.view(block.shape[0], size, -1)[:, peer].copy_(block)
    place.barrier()

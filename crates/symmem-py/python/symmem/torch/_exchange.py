"""The operators of `torch.ops.symm_mem` that move data or reduce tiles."""

from __future__ import annotations

import torch
import torch.distributed._symmetric_memory as symm_mem

from symmem.torch import _groups, _memory
from symmem.torch._parts import Part, contiguous, part, reduction, run
from symmem.torch._reduce import total
from symmem.torch._refusals import told
from symmem.torch._registry import first, last, nothing, operator
from symmem.torch._workspace import workspace


@operator("multimem_all_gather_out", fake=last)
@told
def multimem_all_gather_out(input: torch.Tensor, group_name: str, out: torch.Tensor) -> torch.Tensor:
    op = "multimem_all_gather_out"
    contiguous(op, input)
    contiguous(op, out, "output")
    place = part(op, out, group_name, "output")
    expected = (input.shape[0] * place.group.size, *input.shape[1:])
    if tuple(out.shape) != expected or out.dtype != input.dtype:
        raise RuntimeError(
            f"{op}: expected out shape {expected} of {input.dtype}, got {tuple(out.shape)} of {out.dtype}"
        )
    _store_with_all(place, input, out)
    return out


def _store_with_all(place: Part, input: torch.Tensor, out: torch.Tensor) -> None:
    """Copy this rank's rows into every rank's `out`."""
    if input.numel() == 0:
        return
    flat = input.reshape(-1)
    place.barrier()
    for step in range(place.group.size):
        peer = (place.group.rank + step) % place.group.size
        place.write(peer, flat, place.group.rank * flat.numel())
    place.barrier()


@operator("memcpy_to_multicast_", fake=first)
def memcpy_to_multicast_(
    symm_mem_out: torch.Tensor, src: torch.Tensor, byte_offset: int, group_name: str
) -> torch.Tensor:
    op = "memcpy_to_multicast_"
    contiguous(op, src, "src")
    if byte_offset < 0:
        raise RuntimeError(f"{op}: byte_offset must be non-negative, got {byte_offset}")
    place = part(op, symm_mem_out, group_name, "dst")
    raw = src.reshape(-1).view(torch.uint8)
    if place.offset + byte_offset + raw.numel() > place.allocation.nbytes:
        raise RuntimeError(f"{op}: byte_offset + src size ({byte_offset + raw.numel()}) exceeds dst buffer size")
    for rank in range(place.group.size):
        place.write(rank, raw, byte_offset)
    return symm_mem_out


@operator("get_remote_tensors")
def get_remote_tensors(x: torch.Tensor, group_name: str) -> tuple[torch.Tensor, ...]:
    if _memory.find(x) is None:
        raise ValueError("Tensor is not allocated from Symmetric Memory")
    place = part("get_remote_tensors", x, group_name)
    return tuple(place.of(rank, x) for rank in range(place.group.size))


@operator("_low_contention_all_gather", cpu_only=True)
@told
def _low_contention_all_gather(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    place, tensor = _symmetric_or_copied("_low_contention_all_gather", tensor, group_name)
    output = tensor.new_empty(tensor.shape[0] * place.group.size, *tensor.shape[1:])
    return run("_low_contention_all_gather", "all_gather", place, tensor, output)


@operator("_low_contention_all_gather_ce_multicast", cpu_only=True)
@told
def _low_contention_all_gather_ce_multicast(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    op = "_low_contention_all_gather_ce_multicast"
    place, tensor = _symmetric_or_copied(op, tensor, group_name)
    output = symm_mem.empty(symm_mem._lc_ag_out_shape(tensor, place.group.size), dtype=tensor.dtype, device="cpu")
    return run(op, "all_gather", place, tensor, output)


@operator("_low_contention_all_gather_ce_multicast_out", cpu_only=True)
@told
def _low_contention_all_gather_ce_multicast_out(
    tensor: torch.Tensor, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    op = "_low_contention_all_gather_ce_multicast"
    symm_mem._check_lc_ag_out(tensor, out, _groups.of(group_name).size, op)
    if _memory.find(out) is None:
        raise RuntimeError("ce_multicast output must be allocated from symmetric memory")
    _store_with_all(part(op, out, group_name, "output"), tensor, out)
    return out


@operator("_low_contention_reduce_scatter", cpu_only=True)
@told
def _low_contention_reduce_scatter(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    op = "_low_contention_reduce_scatter"
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"reduce_op ({reduce_op}) is not supported")
    place, tensor = _symmetric_or_copied(op, tensor, group_name)
    size = place.group.size
    if tensor.shape[0] % size:
        raise AssertionError(f"{op}: {tensor.shape[0]} rows cannot be divided among {size} ranks")
    output = tensor.new_empty(tensor.shape[0] // size, *tensor.shape[1:])
    return run(op, "reduce_scatter", place, tensor, output, op=reduction(op, reduce_op))


def _symmetric_or_copied(op: str, tensor: torch.Tensor, group_name: str) -> tuple[Part, torch.Tensor]:
    """A contiguous symmetric tensor with these contents: the tensor itself, or a copy in the workspace."""
    if _memory.find(tensor) is not None and tensor.is_contiguous():
        return part(op, tensor, group_name), tensor
    handle = workspace(group_name, tensor.numel() * tensor.element_size())
    copied = handle.get_buffer(handle.rank, tensor.shape, tensor.dtype)
    copied.copy_(tensor)
    return part(op, copied, group_name), copied


@operator("tile_reduce", fake=nothing)
def tile_reduce(
    in_tile: torch.Tensor, out_tile: torch.Tensor, root: int, group_name: str, reduce_op: str = "sum"
) -> None:
    multi_root_tile_reduce([in_tile], out_tile, [root], group_name, reduce_op)


@operator("multi_root_tile_reduce", fake=nothing)
@told
def multi_root_tile_reduce(
    in_tiles: list[torch.Tensor], out_tile: torch.Tensor, roots: list[int], group_name: str, reduce_op: str = "sum"
) -> None:
    op = "tile_reduce"
    if reduce_op != "sum":
        raise RuntimeError(f"{op}: only sum is supported for now, got {reduce_op}")
    if not in_tiles or len(in_tiles) != len(roots):
        raise RuntimeError(f"{op}: expected one root for each tile, got {len(in_tiles)} tiles and {len(roots)} roots")
    places = [part(op, tile, group_name, "in_tile") for tile in in_tiles]
    group = places[0].group
    for tile, root in zip(in_tiles, roots):
        group.check_rank(root)
        if tile.dtype != out_tile.dtype or tile.shape != out_tile.shape:
            raise RuntimeError(f"{op}: in_tile and out_tile must have the same dtype and size")
    if roots.count(group.rank) > 1:
        raise RuntimeError(f"{op}: a rank can be the root of one tile at most")
    places[0].barrier()
    result = None
    for place, tile, root in zip(places, in_tiles, roots):
        if root == group.rank:
            result = total((place.read(rank, tile) for rank in range(group.size)), tile.dtype)
    # The output may be a tile that other ranks are still reading.
    places[0].barrier()
    if result is not None:
        out_tile.copy_(result)
    places[0].barrier()


@operator("memset32_", fake=first, cpu_only=True)
def memset32_(input: torch.Tensor, offset: int, val: int, count: int) -> torch.Tensor:
    op = "memset32_"
    _check_word(op, input, offset, val)
    if count <= 0:
        raise RuntimeError(f"{op}: count must be a positive integer (got {count})")
    if offset + count > input.numel():
        raise RuntimeError(f"{op}: offset + count ({offset + count}) exceeded the numel of the input ({input.numel()})")
    # Not every version of torch can fill uint32.
    signed = val - (1 << 32) if val >= 1 << 31 else val
    input.view(torch.int32)[offset : offset + count].fill_(signed)
    return input


@operator("stream_write_value32_", fake=first, cpu_only=True)
def stream_write_value32_(input: torch.Tensor, offset: int, val: int) -> torch.Tensor:
    op = "stream_write_value32_"
    _check_word(op, input, offset, val)
    if offset >= input.numel():
        raise RuntimeError(f"{op}: offset ({offset}) exceeded the numel of the input ({input.numel()})")
    return memset32_(input, offset, val, 1)


def _check_word(op: str, input: torch.Tensor, offset: int, val: int) -> None:
    if input.dim() != 1 or not input.is_contiguous() or input.dtype != torch.uint32:
        raise RuntimeError(f"{op}: input must be a flat, contiguous uint32 tensor.")
    if offset < 0:
        raise RuntimeError(f"{op}: offset must be greater than or equal to 0 (got {offset})")
    if not 0 <= val < 1 << 32:
        raise RuntimeError(f"{op}: val must be in the range of [0, 4294967295] (uint32_t).")

"""The reducing operators of `torch.ops.symm_mem`.

The library reduces in rank order, 16-bit floats in float32 with one rounding, so results are the same bits on all ranks.
One-shot, two-shot and multimem are algorithms for the same result: the library chooses the fastest. CPUs have no multicast, and
the result of the multimem operators does not need it, so they work there too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import empty_like

from symmem import _native
from symmem.torch._groups import world_of
from symmem.torch._parts import DTYPES, REDUCTIONS, contiguous, part, reduction, run
from symmem.torch._refusals import told
from symmem.torch._registry import first, last, like_first, like_second, operator

#: Makes an all-reduce of memory that was at a rendezvous, and returns whether it did. `_all_reduce` handles unusual calls.
_quick = _native.Quick(
    list(DTYPES.items()), list(REDUCTIONS.items()), getattr(torch._C, "_cuda_getCurrentRawStream", None)
).all_reduce


@told
def _all_reduce(
    op: str, input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    contiguous(op, input)
    if out is not None:
        _check_alike(op, input, out)
    how = reduction(op, reduce_op)
    if input.numel():
        name = "all_reduce" if out is None else "all_reduce_into"
        run(op, name, part(op, input, group_name), input, out, op=how)
    return input if out is None else out


def _check_alike(op: str, input: torch.Tensor, out: torch.Tensor) -> None:
    contiguous(op, out, "output")
    if out.shape != input.shape:
        raise RuntimeError(f"{op}: input/output size mismatch, {tuple(input.shape)} and {tuple(out.shape)}")
    if out.dtype != input.dtype:
        raise RuntimeError(f"{op}: input/output dtype mismatch, {input.dtype} and {out.dtype}")


def _in_place(op: str) -> Callable:
    def all_reduce(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
        if input.is_contiguous() and _quick(
            input.data_ptr(), input.numel(), input.dtype, reduce_op, world_of(group_name)
        ):
            return input
        return _all_reduce(op, input, reduce_op, group_name)

    return all_reduce


def _into(op: str) -> Callable:
    def all_reduce(input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor) -> torch.Tensor:
        dtype = input.dtype
        if (
            input.is_contiguous()
            and out.is_contiguous()
            and out.dtype is dtype
            and out.shape == input.shape
            and out.device == input.device
            and _quick(input.data_ptr(), input.numel(), dtype, reduce_op, world_of(group_name), out.data_ptr())
        ):
            return out
        return _all_reduce(op, input, reduce_op, group_name, out)

    return all_reduce


def _new(op: str) -> Callable:
    def all_reduce(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
        out = empty_like(input)
        if input.is_contiguous() and _quick(
            input.data_ptr(), input.numel(), input.dtype, reduce_op, world_of(group_name), out.data_ptr()
        ):
            return out
        return _all_reduce(op, input, reduce_op, group_name, out)

    return all_reduce


operator("one_shot_all_reduce", fake=like_first)(_new("one_shot_all_reduce"))
operator("one_shot_all_reduce_out", fake=last)(_into("one_shot_all_reduce"))
operator("two_shot_all_reduce_", fake=first)(_in_place("two_shot_all_reduce"))
operator("two_shot_all_reduce_out", fake=last)(_into("two_shot_all_reduce_out"))
operator("multimem_all_reduce_", fake=first)(_in_place("multimem_all_reduce_"))
operator("multimem_one_shot_all_reduce", fake=like_first)(_new("multimem_one_shot_all_reduce"))
operator("multimem_one_shot_all_reduce_out", fake=last)(_into("multimem_one_shot_all_reduce"))


@operator("one_shot_all_reduce_copy_out", fake=last)
@told
def _copy_out(
    symm_buffer: torch.Tensor, local_input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    op = "one_shot_all_reduce_copy"
    contiguous(op, symm_buffer, "symm_buffer")
    contiguous(op, local_input, "local_input")
    if local_input.numel() > symm_buffer.numel() or local_input.dtype != symm_buffer.dtype:
        raise RuntimeError(
            f"{op}: local_input ({local_input.numel()} of {local_input.dtype}) must fit symm_buffer "
            f"({symm_buffer.numel()} of {symm_buffer.dtype})"
        )
    used = symm_buffer.view(-1)[: local_input.numel()].view(local_input.shape)
    used.copy_(local_input)
    return _all_reduce(op, used, reduce_op, group_name, out)


@operator("one_shot_all_reduce_copy", fake=like_second)
def _copy(symm_buffer: torch.Tensor, local_input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return _copy_out(symm_buffer, local_input, reduce_op, group_name, empty_like(local_input))


@operator("multimem_one_shot_reduce_out", fake=last, rooted=True)
@told
def _reduce_out(input: torch.Tensor, reduce_op: str, root: int, group_name: str, out: torch.Tensor) -> torch.Tensor:
    op = "multimem_one_shot_reduce_out"
    contiguous(op, input)
    how = reduction(op, reduce_op)
    place = part(op, input, group_name)
    if not 0 <= root < place.group.size:
        raise RuntimeError(f"{op}: root must be in [0, {place.group.size}) (got {root})")
    # The outputs of other ranks are not written, and may be any tensors.
    is_root = place.group.rank == root
    if is_root:
        _check_alike(op, input, out)
    run(op, "reduce", place, input, out if is_root else None, op=how, root=root)
    return out


@operator("reduce_scatter_out", fake=last)
@told
def _reduce_scatter_out(
    input: torch.Tensor, group_name: str, split_last_dim: bool, output: torch.Tensor
) -> torch.Tensor:
    op = "reduce_scatter"
    contiguous(op, input)
    contiguous(op, output, "output")
    if input.numel() == 0:
        return output
    place = part(op, input, group_name)
    if split_last_dim:
        _check_columns(op, input, output, place.offset, place.group.size)
        return run(op, "reduce_scatter_last_dim", place, input, output, op="sum", columns=input.shape[-1])
    _check_runs(op, input, output, place.offset, place.group.size)
    return run(op, "reduce_scatter", place, input, output, op="sum")


def _vector(input: torch.Tensor, offset: int) -> int:
    """The elements that PyTorch's kernel moves at once: sizes must be multiples of it."""
    aligned = offset | input.numel() * input.element_size()
    return max(min(aligned & -aligned, 16) // input.element_size(), 1)


def _check_runs(op: str, input: torch.Tensor, output: torch.Tensor, offset: int, size: int) -> None:
    if input.dim() != 1 or output.dim() != 1:
        raise RuntimeError(f"{op}: expected 1D input/output, got {input.dim()}D and {output.dim()}D")
    if input.numel() % (size * _vector(input, offset)):
        raise RuntimeError(
            f"{op}: expected number of elements to be divisible by world_size * alignment, got {input.numel()}"
        )
    if output.numel() * size != input.numel() or output.dtype != input.dtype:
        raise RuntimeError(
            f"{op}: expected an output of {input.numel() // size} elements of {input.dtype}, "
            f"got {output.numel()} of {output.dtype}"
        )


def _check_columns(op: str, input: torch.Tensor, output: torch.Tensor, offset: int, size: int) -> None:
    if input.shape[-1] % (size * _vector(input, offset)):
        raise RuntimeError(
            f"{op}: expected last dimension to be divisible by world_size * alignment, got {input.shape[-1]}"
        )
    expected = (*input.shape[:-1], input.shape[-1] // size)
    if tuple(output.shape) != expected or output.dtype != input.dtype:
        raise RuntimeError(
            f"{op}: expected an output of shape {expected} of {input.dtype}, got {tuple(output.shape)} of {output.dtype}"
        )


def total(tensors, dtype: torch.dtype) -> torch.Tensor:
    """The sum in the given order; 16-bit floats are summed in float32."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    tensors = iter(tensors)
    result = next(tensors).to(wide, copy=True)
    for tensor in tensors:
        result += tensor
    return result

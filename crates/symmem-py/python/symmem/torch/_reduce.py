"""The reducing operators of `torch.ops.symm_mem`.

The library reduces in rank order, 16-bit floats in float32 with one rounding, so results are the same bits on all ranks.
One-shot, two-shot and multimem are ways to the same result, of which the library takes whichever is the quickest. There is
no multicast on a CPU, and the multimem operators need none for their result, so they give it too.
"""

from __future__ import annotations

import torch
from torch import empty_like

from symmem.torch._parts import contiguous, destination, element, part, reduction
from symmem.torch._quick import in_place, into, remember
from symmem.torch._refusals import told


@told
def _all_reduce_into(
    op: str, symmetric: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    _check_alike(op, symmetric, out)
    how = reduction(op, reduce_op)
    if symmetric.numel() == 0:
        return out
    place = part(op, symmetric, group_name)
    target = destination(op, out, place)
    place.native.all_reduce(element(op, symmetric), how, place.offset, symmetric.numel(), out=target, **place.how)
    remember(symmetric, place)
    return out


def _check_alike(op: str, input: torch.Tensor, out: torch.Tensor) -> None:
    contiguous(op, input)
    contiguous(op, out, "output")
    if out.shape != input.shape:
        raise RuntimeError(f"{op}: input/output size mismatch, {tuple(input.shape)} and {tuple(out.shape)}")
    if out.dtype != input.dtype:
        raise RuntimeError(f"{op}: input/output dtype mismatch, {input.dtype} and {out.dtype}")


def one_shot_all_reduce(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    out = empty_like(input)
    if into(input, reduce_op, group_name, out):
        return out
    return _all_reduce_into("one_shot_all_reduce", input, reduce_op, group_name, out)


def one_shot_all_reduce_out(input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor) -> torch.Tensor:
    if into(input, reduce_op, group_name, out):
        return out
    return _all_reduce_into("one_shot_all_reduce", input, reduce_op, group_name, out)


def one_shot_all_reduce_copy(
    symm_buffer: torch.Tensor, local_input: torch.Tensor, reduce_op: str, group_name: str
) -> torch.Tensor:
    out = torch.empty_like(local_input)
    return one_shot_all_reduce_copy_out(symm_buffer, local_input, reduce_op, group_name, out)


@told
def one_shot_all_reduce_copy_out(
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
    return _all_reduce_into(op, used, reduce_op, group_name, out)


def two_shot_all_reduce_(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    if in_place(input, reduce_op, group_name):
        return input
    return _all_reduce_in_place("two_shot_all_reduce", input, reduce_op, group_name)


def multimem_all_reduce_(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    return _all_reduce_in_place("multimem_all_reduce_", input, reduce_op, group_name)


@told
def _all_reduce_in_place(op: str, input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    contiguous(op, input)
    how = reduction(op, reduce_op)
    if input.numel():
        place = part(op, input, group_name)
        place.native.all_reduce(element(op, input), how, place.offset, input.numel(), **place.how)
        remember(input, place)
    return input


def two_shot_all_reduce_out(input: torch.Tensor, reduce_op: str, group_name: str, output: torch.Tensor) -> torch.Tensor:
    if into(input, reduce_op, group_name, output):
        return output
    return _all_reduce_into("two_shot_all_reduce_out", input, reduce_op, group_name, output)


def multimem_one_shot_all_reduce(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    out = torch.empty_like(input)
    return _all_reduce_into("multimem_one_shot_all_reduce", input, reduce_op, group_name, out)


def multimem_one_shot_all_reduce_out(
    input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    return _all_reduce_into("multimem_one_shot_all_reduce", input, reduce_op, group_name, out)


@told
def multimem_one_shot_reduce_out(
    input: torch.Tensor, reduce_op: str, root: int, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    op = "multimem_one_shot_reduce_out"
    contiguous(op, input)
    how = reduction(op, reduce_op)
    place = part(op, input, group_name)
    if not 0 <= root < place.group.size:
        raise RuntimeError(f"{op}: root must be in [0, {place.group.size}) (got {root})")
    target = None
    # Nothing is written to that of another rank, which may be any tensor.
    if place.group.rank == root:
        _check_alike(op, input, out)
        target = destination(op, out, place)
    if input.numel():
        place.native.reduce(element(op, input), how, place.offset, input.numel(), root, out=target, **place.how)
    return out


@told
def reduce_scatter_out(
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
    else:
        _check_runs(op, input, output, place.offset, place.group.size)
    columns = input.shape[-1] if split_last_dim else None
    target = destination(op, output, place)
    place.native.reduce_scatter(
        element(op, input), "sum", place.offset, input.numel(), target, columns=columns, **place.how
    )
    return output


def _vector(input: torch.Tensor, offset: int) -> int:
    """Elements that PyTorch's kernel moves at a time: its sizes must be multiples of that."""
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
    """The sum in the order given, of 16-bit floats in float32."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    tensors = iter(tensors)
    result = next(tensors).to(wide, copy=True)
    for tensor in tensors:
        result += tensor
    return result

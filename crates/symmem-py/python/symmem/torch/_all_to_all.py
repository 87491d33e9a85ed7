"""All-to-all of rows, whose numbers only their senders know: `all_to_all_vdev` and its variants.

The library reads all ranks' splits first, so that all ranks agree whether the rows fit on every rank.
"""

from __future__ import annotations

import torch

from symmem.torch._parts import contiguous, destination, part, row_length, run, same_device
from symmem.torch._refusals import told
from symmem.torch._registry import nothing, operator


@operator("all_to_all_vdev", fake=nothing)
def all_to_all_vdev(
    input: torch.Tensor, out: torch.Tensor, in_splits: torch.Tensor, out_splits_offsets: torch.Tensor, group_name: str
) -> None:
    """The input is ordered by receiver, the output by sender."""
    _exchange("all_to_all_vdev", input, out, in_splits, out_splits_offsets, group_name)


@operator("all_to_all_vdev_2d", fake=nothing)
@told
def all_to_all_vdev_2d(
    input: torch.Tensor,
    out: torch.Tensor,
    in_splits: torch.Tensor,
    out_splits_offsets: torch.Tensor,
    group_name: str,
    major_align: int | None = None,
) -> None:
    """The input is ordered by receiver and expert, the output by expert and sender, aligned to `major_align` rows."""
    align = 1 if major_align is None else major_align
    if align < 1:
        raise RuntimeError(f"all_to_all_vdev_2d: major_align must be positive, got {align}")
    _exchange("all_to_all_vdev_2d", input, out, in_splits, out_splits_offsets, group_name, align)


@operator("all_to_all_vdev_2d_offset", fake=nothing)
def all_to_all_vdev_2d_offset(
    input: torch.Tensor,
    out: torch.Tensor,
    in_splits_offsets: torch.Tensor,
    out_splits_offsets: torch.Tensor,
    group_name: str,
) -> None:
    """The reverse: the input is ordered by expert and receiver, with gaps, the output by sender and expert."""
    op = "all_to_all_vdev_2d_offset"
    _exchange(op, input, out, in_splits_offsets, out_splits_offsets, group_name, 0)


@told
def _exchange(
    op: str,
    input: torch.Tensor,
    out: torch.Tensor,
    splits: torch.Tensor,
    received: torch.Tensor,
    group_name: str,
    align: int | None = None,
) -> None:
    for tensor, what in ((input, "input"), (out, "out"), (splits, "in_splits"), (received, "out_splits_offsets")):
        contiguous(op, tensor, what)
    if input.dtype != out.dtype or input.shape[1:] != out.shape[1:]:
        raise RuntimeError(
            f"{op}: input and out must have the same dtype and rows of the same shape, got {input.dtype} "
            f"{tuple(input.shape[1:])} and {out.dtype} {tuple(out.shape[1:])}"
        )
    if splits.dtype != torch.int64 or received.dtype != torch.int64:
        raise RuntimeError(f"{op}: splits must be int64, got {splits.dtype} and {received.dtype}")
    place, table = part(op, input, group_name), part(op, splits, group_name, "in_splits")
    same_device(op, splits, place, "in_splits")
    numbers = destination(op, received, place, "out_splits_offsets")
    rows = (row_length(input), (table.native, table.offset, splits.numel()), numbers, align)
    run(op, "all_to_all_v", place, input, out, "out", rows=rows)

"""Dispatch of rows to experts, and combine. The backward of each is the other."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import ClassVar

import torch

from symmem.torch import _all_to_all, _groups, _memory

#: Symmetric buffers by group and purpose. They are freed with the group, whose name another group may have later.
_buffers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
#: Memory for outputs, by group.
_outputs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class _Buffer:
    """A symmetric tensor that calls of one kind use one after the other, in any stream."""

    __slots__ = ("read", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        #: Recorded after the last call, in its stream; None before the first call, and on a CPU.
        self.read: torch.cuda.Event | None = None

    def fill(self, rows: torch.Tensor) -> None:
        if self.read is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(rows.device).wait_event(self.read)
        self.tensor[: rows.shape[0]].copy_(rows)


class _Outputs(_memory.Segments):
    """Memory for a group's outputs. It is reused for outputs of the same size, so that steps after the first allocate nothing.

    As in torch's allocator, memory is reused in the stream that used it first. Memory that a capture used stays with the group,
    because its graph may be replayed at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._captured: list[_memory.Allocation] = []

    def new(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A symmetric tensor of zeros: rows that no rank sends have no gradient."""
        strides = torch.empty(shape, device="meta").stride()
        nbytes = math.prod(shape) * dtype.itemsize
        stream = _groups.stream(device.index) if device.type == "cuda" else None
        if stream is not None and torch.cuda.is_current_stream_capturing():
            self._captured.append(_memory.Allocation(nbytes, device))
            storage = self._captured[-1].storage()
        else:
            storage = self.storage((nbytes, device, stream), lambda: _memory.Allocation(nbytes, device))
        return _memory.tensor_over(storage, shape, strides, dtype).zero_()

    def take_back(self, key: object, segment: _memory.Allocation) -> None:
        # Peers may reuse theirs in another order.
        if not segment.was_shared:
            super().take_back(key, segment)


@contextmanager
def _read(*buffers: _Buffer):
    """A call that reads these buffers. The next call that fills them waits until its stream has completed this one.

    A capture cannot wait for streams outside of it, nor others for streams in it: there the caller orders them.
    """
    try:
        yield
    finally:
        device = buffers[0].tensor.device
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            read = torch.cuda.current_stream(device).record_event()
            for buffer in buffers:
                buffer.read = read


class _Rows(torch.autograd.Function):
    """Common parts: the most rows of a rank, and buffers of that length."""

    max_output_len: ClassVar[int | None] = None
    major_align: ClassVar[int] = 1

    @classmethod
    def init(cls, max_output_len: int, major_align: int = 1) -> None:
        """Set the most rows that a rank sends or receives, and the alignment of each expert's rows. The same on all ranks."""
        if max_output_len < 1 or major_align < 1:
            raise ValueError(f"{cls.__name__}.init: expected positive numbers, got {max_output_len} and {major_align}")
        cls.max_output_len, cls.major_align = max_output_len, major_align

    @classmethod
    def _length(cls) -> int:
        if cls.max_output_len is None:
            raise RuntimeError(f"{cls.__name__}: call init(max_output_len) first")
        return cls.max_output_len

    @classmethod
    def _symmetric(cls, what: str, tensor: torch.Tensor, rows: int, group_name: str) -> _Buffer:
        """Copies the tensor to a symmetric buffer, which is kept for the next call of this kind."""
        if tensor.shape[0] > rows:
            raise RuntimeError(f"{cls.__name__}: {what} has {tensor.shape[0]} rows, more than the {rows} of init")
        shape = (rows, *tensor.shape[1:])
        key = (what, shape, tensor.dtype, tensor.device)
        buffers = _buffers.setdefault(_groups.of(group_name), {})
        if key not in buffers:
            strides = torch.empty(shape, device="meta").stride()
            buffers[key] = _Buffer(_memory.allocate(shape, strides, tensor.dtype, tensor.device))
        buffers[key].fill(tensor)
        return buffers[key]

    @classmethod
    def _dispatch(cls, rows: torch.Tensor, splits: torch.Tensor, group_name: str, align: int):
        """Sends rows, ordered by receiver and expert, to experts. Returns rows by expert and sender, and their splits and offsets."""
        table, received = ("in_splits", splits, splits.shape[0]), splits.new_empty(2, splits.shape[0])
        return cls._exchange(_all_to_all.all_to_all_vdev_2d, rows, table, received, group_name, align)

    @classmethod
    def _combine(cls, rows: torch.Tensor, splits_offsets: torch.Tensor, group_name: str):
        """Sends rows, ordered by expert at `splits_offsets`, back. Returns rows by sender and expert, and their splits and offsets."""
        table, received = ("in_splits_offsets", splits_offsets, 2), torch.empty_like(splits_offsets)
        return cls._exchange(_all_to_all.all_to_all_vdev_2d_offset, rows, table, received, group_name)

    @classmethod
    def _exchange(
        cls, operator: Callable, rows: torch.Tensor, table: tuple, received: torch.Tensor, group_name: str, *align: int
    ):
        """Makes a call from buffers; the table's is told by its name, its contents and its most rows."""
        length = cls._length()
        splits = cls._symmetric(*table, group_name)
        out = _output((length, *rows.shape[1:]), rows, group_name)
        sent = cls._symmetric("input", rows, length, group_name)
        with _read(sent, splits):
            operator(sent.tensor, out, splits.tensor, received, group_name, *align)
        return out, received

    @staticmethod
    def _save(ctx, input: torch.Tensor, received: torch.Tensor, group_name: str) -> None:
        ctx.save_for_backward(received)
        ctx.group_name, ctx.rows = group_name, input.shape[0]
        ctx.mark_non_differentiable(received)


class AllToAllVDev2d(_Rows):
    """Sends rows to experts: `output, out_splits_offsets = AllToAllVDev2d.apply(input, in_splits, group_name, major_align)`.

    As `torch.ops.symm_mem.all_to_all_vdev_2d`, with gradients for `input`. Call `AllToAllVDev2d.init(max_output_len)` first. The
    output has that many rows; `out_splits_offsets` says which of them were written.
    """

    @staticmethod
    def forward(ctx, input, in_splits, group_name, major_align=None):
        align = AllToAllVDev2d.major_align if major_align is None else major_align
        output, received = AllToAllVDev2d._dispatch(input, in_splits, group_name, align)
        _Rows._save(ctx, input, received, group_name)
        return output, received

    @staticmethod
    def backward(ctx, grad_output, _):
        (received,) = ctx.saved_tensors
        grad_input, _ = AllToAllVDev2d._combine(grad_output.contiguous(), received, ctx.group_name)
        return grad_input[: ctx.rows], None, None, None


class AllToAllVDev2dOffset(_Rows):
    """Sends rows back from experts: `output, out_splits_offsets = AllToAllVDev2dOffset.apply(input, in_splits_offsets, group_name)`.

    As `torch.ops.symm_mem.all_to_all_vdev_2d_offset`, with gradients for `input`. Call
    `AllToAllVDev2dOffset.init(max_output_len, major_align)` first, with the alignment of the dispatch.
    """

    @staticmethod
    def forward(ctx, input, in_splits_offsets, group_name):
        output, received = AllToAllVDev2dOffset._combine(input, in_splits_offsets, group_name)
        _Rows._save(ctx, input, received, group_name)
        return output, received

    @staticmethod
    def backward(ctx, grad_output, _):
        (received,) = ctx.saved_tensors
        align = AllToAllVDev2dOffset.major_align
        dispatch = AllToAllVDev2dOffset._dispatch
        grad_input, _ = dispatch(grad_output.contiguous(), received[0].contiguous(), ctx.group_name, align)
        return grad_input[: ctx.rows], None, None


def _output(shape: tuple[int, ...], like: torch.Tensor, group_name: str) -> torch.Tensor:
    return _outputs.setdefault(_groups.of(group_name), _Outputs()).new(shape, like.dtype, like.device)

"""A tensor as a part of symmetric memory, and the library's collectives on it."""

from __future__ import annotations

import math

import torch

from symmem import _native
from symmem.torch import _groups, _memory, _refusals

#: The library's names of torch's element types.
DTYPES = {getattr(torch, name): name for name in _native.DTYPES if hasattr(torch, name)}

#: torch's names of reductions, by the library's.
REDUCTIONS = {
    "sum": "sum",
    "avg": "avg",
    "min": "min",
    "max": "max",
    "prod": "prod",
    "product": "prod",
    "band": "and",
    "bor": "or",
    "bxor": "xor",
}


#: The options of a call on host memory.
_AT_ONCE: dict = {}


class Part:
    """The memory of a tensor on every rank of a group."""

    __slots__ = ("allocation", "group", "native", "offset")

    def __init__(self, group: _groups.Group, allocation: _memory.Allocation, offset: int) -> None:
        self.group = group
        self.allocation = allocation
        self.native = allocation.handle_in(group)
        #: The byte offset of the tensor in the allocation.
        self.offset = offset

    @property
    def how(self) -> dict:
        """The options of a call: on a device, the current stream."""
        if self.allocation.on_host:
            return _AT_ONCE
        return {"stream": _groups.stream(self.allocation.number)}

    def of(self, rank: int, like: torch.Tensor) -> torch.Tensor:
        """Rank `rank`'s tensor, with the shape and strides of `like`."""
        return self._view(rank, like.shape, like.stride(), like.dtype, 0)

    def read(self, rank: int, like: torch.Tensor) -> torch.Tensor:
        """As `of`, to read from: of a rank on another host it is a copy."""
        if self.native.is_reachable(rank) or not like.numel():
            return self.of(rank, like)
        copy = like.new_empty(_span(like.shape, like.stride()))
        self.native.get(rank, self.offset, _memory.moved(copy), **self.how)
        return copy.as_strided(like.shape, like.stride())

    def write(self, rank: int, data: torch.Tensor, first: int = 0) -> None:
        """Copy a contiguous tensor to rank `rank`'s, from element `first` of that on."""
        if self.native.is_reachable(rank) or not data.numel():
            self._view(rank, data.shape, data.stride(), data.dtype, first).copy_(data)
        else:
            self.native.put(rank, self.offset + first * data.dtype.itemsize, _memory.moved(data), **self.how)

    def _view(self, rank: int, shape, stride, dtype: torch.dtype, first: int) -> torch.Tensor:
        if 0 in shape:
            return torch.empty(shape, dtype=dtype, device=self.allocation.device)
        array = self.native.view(rank, _span(shape, stride) * dtype.itemsize, self.offset + first * dtype.itemsize)
        storage, _ = _memory.storage_over(array, self)
        return _memory.tensor_over(storage, shape, stride, dtype)

    def barrier(self) -> None:
        _refusals.has_begun()
        if self.allocation.on_host:
            self.group.native.barrier()
        else:
            # In the group's pads: the allocation's pad may hold the user's signals.
            self.native.group_barrier(_groups.stream(self.allocation.number))


def _span(shape, stride) -> int:
    """The elements from the first to the last of a tensor that has some."""
    return sum((size - 1) * step for size, step in zip(shape, stride)) + 1


def part(op: str, tensor: torch.Tensor, group_name: str, what: str = "input") -> Part:
    """The part of symmetric memory of a tensor. The first call for an allocation is collective."""
    group = _groups.of(group_name)
    allocation = _memory.find(tensor)
    if allocation is None:
        raise RuntimeError(f"{op}: {what} must be allocated with empty_strided_p2p().")
    return Part(group, allocation, tensor.data_ptr() - allocation.address if tensor.numel() else 0)


def element(op: str, tensor: torch.Tensor) -> str:
    """The library's name of the tensor's element type."""
    name = DTYPES.get(tensor.dtype)
    if name is None:
        raise RuntimeError(f"{op}: not implemented for {tensor.dtype}, expected one of {', '.join(DTYPES.values())}")
    return name


#: Types of the same size, for elements that are only moved and whose type the library does not have.
_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}


def moved(op: str, tensor: torch.Tensor) -> str:
    """The library's name of a type as long as the tensor's, for elements that are only moved."""
    name = DTYPES.get(tensor.dtype) or _WORDS.get(tensor.element_size())
    if name is None:
        raise RuntimeError(f"{op}: not implemented for {tensor.dtype}")
    return name


def reduction(op: str, reduce_op: str) -> str:
    """The library's name of a reduction."""
    name = REDUCTIONS.get(reduce_op)
    if name is None:
        known = ", ".join(REDUCTIONS)
        raise RuntimeError(f"{op}: expected one of {known} as reduce_op, got {reduce_op}")
    return name


def contiguous(op: str, tensor: torch.Tensor, what: str = "input") -> None:
    if not tensor.is_contiguous():
        raise RuntimeError(f"{op}: {what} must be contiguous.")


def row_length(tensor: torch.Tensor) -> int:
    """Elements of a row of a contiguous tensor. Its stride does not say so if there is only one row."""
    return math.prod(tensor.shape[1:])


def same_device(op: str, tensor: torch.Tensor, place: Part, what: str) -> None:
    if tensor.device != place.allocation.device:
        raise RuntimeError(f"{op}: expected {what} on {place.allocation.device}, got {tensor.device}")


def destination(op: str, tensor: torch.Tensor, place: Part, what: str = "output") -> tuple[int, int, torch.Tensor]:
    """A contiguous tensor on the device of the memory, as an output of the library: address, bytes, owner."""
    same_device(op, tensor, place, what)
    return (tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)


def run(
    op: str,
    name: str,
    place: Part,
    tensor: torch.Tensor,
    out: torch.Tensor | None = None,
    what: str = "output",
    /,
    **arguments: object,
) -> torch.Tensor | None:
    """Make the library's collective `name` on a contiguous tensor, which is a part of symmetric memory. Returns `out`."""
    dtype = (element if "op" in arguments else moved)(op, tensor)
    target = None if out is None else destination(op, out, place, what)
    if tensor.numel():
        place.native.collective(name, dtype, place.offset, tensor.numel(), target, **arguments, **place.how)
    return out

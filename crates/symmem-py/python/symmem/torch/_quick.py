"""Reductions that were made before go straight to the library: what a tensor's address means in a group is remembered natively.

What is remembered goes with the memory and with the group, and keeps neither alive.
"""

from __future__ import annotations

import weakref

import torch

from symmem import _native
from symmem.torch._groups import of
from symmem.torch._parts import DTYPES, REDUCTIONS, Part

QUICK = _native.Quick(
    list(DTYPES.items()), list(REDUCTIONS.items()), getattr(torch._C, "_cuda_getCurrentRawStream", None)
)
_reduce = QUICK.all_reduce

#: Whose end is looked out for already.
_watched: weakref.WeakSet = weakref.WeakSet()


def in_place(input: torch.Tensor, reduce_op: str, group_name: str) -> bool:
    """Whether the reduction was one that was made before, and is done."""
    return input.is_contiguous() and _reduce(input.data_ptr(), input.numel(), input.dtype, reduce_op, of(group_name))


def into(input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor) -> bool:
    """The same, of a reduction into another tensor."""
    dtype, device = input.dtype, input.device
    return (
        input.is_contiguous()
        and out.is_contiguous()
        and out.dtype is dtype
        and out.shape == input.shape
        and out.device == device
        and _reduce(input.data_ptr(), input.numel(), dtype, reduce_op, of(group_name), out.data_ptr())
    )


def remember(tensor: torch.Tensor, place: Part) -> None:
    """Have the next reduction of the tensor's memory in the group take the short way."""
    allocation, group = place.allocation, place.group
    _watch(allocation, QUICK.forget_memory, allocation.address, allocation.memory.nbytes)
    _watch(group, QUICK.forget_group, id(group))
    QUICK.remember(tensor.data_ptr(), group, place.native, place.offset)


def _watch(thing: object, forget: object, *what: int) -> None:
    if thing not in _watched:
        _watched.add(thing)
        weakref.finalize(thing, forget, *what).atexit = False

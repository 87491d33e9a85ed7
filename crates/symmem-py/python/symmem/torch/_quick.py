"""Reductions that were made before go straight to the library: what a tensor's address means in a group is remembered natively.

What is remembered goes with the memory and with the group, and keeps neither alive.
"""

from __future__ import annotations

import weakref

import torch
from torch._C._distributed_c10d import _resolve_process_group

from symmem import _native
from symmem.torch import _groups
from symmem.torch._parts import DTYPES, REDUCTIONS, Part

QUICK = _native.Quick(
    list(DTYPES.items()),
    list(REDUCTIONS.items()),
    _resolve_process_group,
    getattr(torch._C, "_cuda_getCurrentRawStream", None),
)

#: `all_reduce(input, reduce_op, group_name, out=None)`: whether it has been done.
all_reduce = QUICK.all_reduce

#: Whose end is looked out for already.
_watched: weakref.WeakSet = weakref.WeakSet()


def remember(tensor: torch.Tensor, group_name: str, place: Part) -> None:
    """Have the next reduction of the tensor's memory in the group take the short way."""
    if not _groups.is_process_group(group_name):
        return  # a name that was only registered cannot be told from another of the same name
    process_group = _resolve_process_group(group_name)
    allocation = place.allocation
    _watch(allocation, QUICK.forget_memory, allocation.address, allocation.memory.nbytes)
    _watch(place.group, QUICK.forget_group, id(process_group))
    QUICK.remember(tensor.data_ptr(), group_name, process_group, place.native, place.offset)


def _watch(thing: object, forget: object, *what: int) -> None:
    if thing not in _watched:
        _watched.add(thing)
        weakref.finalize(thing, forget, *what).atexit = False

"""One buffer per group, for operators whose arguments are in ordinary memory."""

from __future__ import annotations

import weakref

import torch

from symmem.torch import _groups, _memory
from symmem.torch._handle import SymmetricMemory

_workspaces: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def workspace(group_name: str, min_size: int) -> SymmetricMemory:
    """The group's workspace of at least `min_size` bytes. Collective when it is allocated or grows.

    It belongs to the group, not to its name, which another group may have later. It may be written at once: all operators that use
    it end with a barrier.
    """
    group = _groups.of(group_name)
    tensor = _workspaces.get(group)
    size = 0 if tensor is None else tensor.numel()
    if tensor is None or size < min_size:
        tensor = _memory.allocate((max(size, min_size),), (1,), torch.uint8, group_name=group_name)
        _workspaces[group] = tensor
    return SymmetricMemory(_memory.find(tensor), group, 0)

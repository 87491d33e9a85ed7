"""Symmetric memory as CPU tensors: how it is allocated, found again and freed.

A tensor's storage keeps its allocation alive, and so does every handle. All memory comes from a world of one, because
`empty` has no group and may be called before there is any; ranks of a group map it at the rendezvous.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
import weakref
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import _SymmetricMemory

from symmem import _native
from symmem.torch import _groups

CPU = torch.device("cpu")


@functools.cache
def _home() -> _native.World:
    return _native.World.connect(0, 1, backend="host")


_allocating = threading.Lock()


def _allocate(nbytes: int) -> tuple[_native.Memory, int]:
    """Memory, and the bytes of its signal pad: as many as PyTorch's setting says."""
    pad_bytes = _SymmetricMemory.signal_pad_size
    with _allocating:
        _native.set_signal_pad_size(pad_bytes)
        return _home().alloc(nbytes), pad_bytes


class Allocation:
    """Memory of this rank, and its counterparts in every group that it met."""

    __slots__ = ("address", "group_name", "memory", "nbytes", "pad_bytes", "storage", "_lock", "_met", "__weakref__")

    def __init__(self, nbytes: int, group_name: str | None = None) -> None:
        self.nbytes = nbytes
        self.group_name = group_name
        self.memory, self.pad_bytes = _allocate(nbytes)
        self.address = self.memory.address
        self.storage: weakref.ref | None = None
        self._lock = threading.Lock()
        self._met: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        _by_address[self.address] = self

    def meet(self, group: _groups.Group) -> _native.Handle:
        """All ranks' memory of this allocation; collective over the group the first time."""
        handle = self._met.get(group)
        if handle is not None:
            return handle
        with self._lock:
            handle = self._met.get(group)
            if handle is None:
                handle = self._met[group] = self.memory.rendezvous(group.native)
            return handle

    def tensor(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, owner: object = None) -> torch.Tensor:
        """A tensor over this allocation, whose storage keeps the allocation and `owner` alive."""
        made, storage = tensor_at(self.address, self.nbytes, (self, owner), size, stride, dtype)
        self.storage = weakref.ref(storage)
        return made


_by_address: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_persistent: dict[int, Allocation] = {}
_persistent_lock = threading.Lock()


def tensor_at(
    address: int, nbytes: int, owner: object, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> tuple[torch.Tensor, object]:
    """A tensor over foreign memory that keeps `owner` alive, and the object that lives as long as its storage."""
    # torch makes no storage of nothing; one byte more is always there.
    memory = (ctypes.c_ubyte * max(nbytes, 1)).from_address(address)
    memory.owner = owner
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype, device=CPU).set_(storage, 0, tuple(size), tuple(stride)), memory


def allocate(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    group_name: str | None = None,
    alloc_id: int | None = None,
) -> torch.Tensor:
    """A symmetric tensor; not collective. With an id, the same memory each time."""
    nbytes = math.prod(size) * dtype.itemsize
    if alloc_id is None:
        return Allocation(nbytes, group_name).tensor(size, stride, dtype)
    with _persistent_lock:
        kept = _persistent.get(alloc_id)
        if kept is None:
            kept = _persistent[alloc_id] = Allocation(nbytes, group_name)
        _check_free(kept, nbytes, alloc_id)
        return kept.tensor(size, stride, dtype)


def _check_free(kept: Allocation, nbytes: int, alloc_id: int) -> None:
    if kept.nbytes != nbytes:
        raise RuntimeError(
            f"SymmetricMemory::empty_strided_p2p_persistent: requested allocation size ({nbytes}) is different from the "
            f"size of a previous allocation with the same alloc_id {kept.nbytes}"
        )
    if kept.storage is not None and kept.storage() is not None:
        raise RuntimeError(
            "SymmetricMemory::empty_strided_p2p_persistent: can not allocate with "
            f"alloc_id == {alloc_id} because a previous allocation with the same alloc_id is still active"
        )


def find(tensor: torch.Tensor) -> Allocation | None:
    """The allocation that a tensor's storage lies in; no communication."""
    found = _by_address.get(tensor.data_ptr())
    if found is not None:
        return found
    address = tensor.untyped_storage().data_ptr()
    found = _by_address.get(address)
    if found is None:
        memory = _native.find(address)
        found = _by_address.get(memory.address) if memory is not None else None
    return found

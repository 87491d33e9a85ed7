"""Symmetric memory as tensors: allocation, lookup by address, and lifetime.

A tensor's storage keeps its allocation alive, and so does every handle. All memory is allocated in a world of one, because `empty`
has no group and may be called before there is any. The ranks of a group map it at the rendezvous.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch._C._distributed_c10d import _SymmetricMemory

from symmem import _native
from symmem.torch import _backends, _groups

CPU = torch.device("cpu")


#: The world of one in which all memory is allocated, once there is any.
_home: _native.World | None = None
_home_lock = threading.Lock()


def home() -> _native.World:
    """The world of one in which all memory is allocated."""
    global _home
    with _home_lock:
        if _home is None:
            _home = _native.World.connect(0, 1, backend="host")
        return _home


class _Owner:
    """Has the lifetime of a storage, and keeps alive what the storage needs."""

    __slots__ = ("__weakref__", "kept")

    def __init__(self, *kept: object) -> None:
        self.kept = kept


def storage_over(array: _native.Array, *kept: object) -> tuple[torch.UntypedStorage, _Owner]:
    """The bytes of an array as a storage that keeps `kept` alive."""
    # The caller orders streams: a tensor of a peer's memory is not a result of a call.
    stream = None if array.device == "cpu" else -1
    storage = torch.from_dlpack(array.__dlpack__(stream=stream)).untyped_storage()
    # torch keeps a storage's attributes as long as a tensor of it.
    storage.symmem_owner = owner = _Owner(*kept)
    return storage, owner


def tensor_over(
    storage: torch.UntypedStorage, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, tuple(size), tuple(stride))


#: Types of the same size, for elements that are only moved.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def moved(tensor: torch.Tensor) -> torch.Tensor | tuple[int, int, torch.Tensor]:
    """A contiguous tensor of any type, as the library's `put` and `get` take it."""
    if not tensor.is_cpu:
        return (tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)
    parts = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return parts.view(_WORDS[parts.element_size()])


class Allocation:
    """Memory of this rank, and its handle in every group that has mapped it."""

    __slots__ = ("__weakref__", "_handles", "_lock", "_user", "address", "device", "group_name")
    __slots__ += ("memory", "nbytes", "number", "on_host")

    def __init__(
        self,
        nbytes: int,
        device: torch.device = CPU,
        group_name: str | None = None,
        memory: _native.Memory | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.device = device
        self.on_host = device.type == "cpu"
        #: The number of the device. Cached, like the above: torch is slow to return them.
        self.number = device.index
        self.group_name = group_name
        if memory is None:
            if not self.on_host:
                # The library checks whether a stream that it knows is being captured.
                _groups.stream(self.number)
            # torch has no storage of 0 bytes at an address.
            pad_bytes = _SymmetricMemory.signal_pad_size
            backend = None if self.on_host else _backends.backend()
            memory = home().alloc(max(nbytes, 1), device=str(device), backend=backend, pad_bytes=pad_bytes)
        self.memory = memory
        self.address = memory.address
        self._lock = threading.Lock()
        self._handles: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._user: weakref.ref | None = None
        memory.attach(self)

    def known_handle(self, group: _groups.Group) -> _native.Handle | None:
        """The handle of this allocation in the group, if there was a rendezvous."""
        return self._handles.get(group)

    def handle_in(self, group: _groups.Group) -> _native.Handle:
        """The handle of this allocation in the group. The first call is collective over the group."""
        handle = self._handles.get(group)
        if handle is not None:
            return handle
        with self._lock:
            handle = self._handles.get(group)
            if handle is None:
                if not self.on_host:
                    _groups.stream(self.number)
                    _backends.use_external(self.memory, group, self.device)
                handle = self._handles[group] = self.memory.rendezvous(group.native)
                if not self.on_host:
                    group.note_handle(self.number, self)
            return handle

    def storage(self, *kept: object) -> torch.UntypedStorage:
        """A storage over this allocation, which keeps the allocation and `kept` alive."""
        storage, owner = storage_over(self.memory.view("uint8"), self, *kept)
        self._user = weakref.ref(owner)
        return storage

    @property
    def was_shared(self) -> bool:
        """Whether a living group has mapped it."""
        return bool(self._handles)

    @property
    def in_use(self) -> bool:
        """Whether there is a storage over this allocation."""
        return self._user is not None and self._user() is not None


class _Lease:
    """Has the lifetime of a storage that uses a segment."""

    __slots__ = ("__weakref__",)


class Segments:
    """Allocations that are used again, each for storages of one kind."""

    def __init__(self) -> None:
        self._free: defaultdict[object, list[Allocation]] = defaultdict(list)
        self._lock = threading.RLock()

    def storage(self, key: object, allocate: Callable[[], Allocation]) -> torch.UntypedStorage:
        """A storage over a free segment of this kind, or a new one. The segment is free again when the storage is gone."""
        with self._lock:
            free = self._free[key]
            segment = free.pop() if free else None
        segment = segment or allocate()
        lease = _Lease()
        weakref.finalize(lease, _take_back, weakref.ref(self), key, segment).atexit = False
        return segment.storage(lease)

    def take_back(self, key: object, segment: Allocation) -> None:
        with self._lock:
            self._free[key].append(segment)


def _take_back(segments: weakref.ref, key: object, segment: Allocation) -> None:
    held = segments()
    if held is not None:
        held.take_back(key, segment)


_persistent: dict[int, Allocation] = {}
_persistent_lock = threading.Lock()


def allocate(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device = CPU,
    group_name: str | None = None,
    alloc_id: int | None = None,
) -> torch.Tensor:
    """Allocate a symmetric tensor. Not collective. With an id, return the same memory each time."""
    nbytes = math.prod(size) * dtype.itemsize
    if alloc_id is None:
        return tensor_over(Allocation(nbytes, device, group_name).storage(), size, stride, dtype)
    with _persistent_lock:
        kept = _persistent.get(alloc_id)
        if kept is None:
            kept = _persistent[alloc_id] = Allocation(nbytes, device, group_name)
        _check_free(kept, nbytes, device, alloc_id)
        return tensor_over(kept.storage(), size, stride, dtype)


def _check_free(kept: Allocation, nbytes: int, device: torch.device, alloc_id: int) -> None:
    if kept.nbytes != nbytes:
        raise RuntimeError(
            f"SymmetricMemory::empty_strided_p2p_persistent: requested allocation size ({nbytes}) is different from the "
            f"size of a previous allocation with the same alloc_id {kept.nbytes}"
        )
    if kept.device != device:
        raise RuntimeError(
            "SymmetricMemory::empty_strided_p2p_persistent: "
            f"alloc_id == {alloc_id} is memory of {kept.device}, got {device}"
        )
    if kept.in_use:
        raise RuntimeError(
            "SymmetricMemory::empty_strided_p2p_persistent: can not allocate with "
            f"alloc_id == {alloc_id} because a previous allocation with the same alloc_id is still active"
        )


def find(tensor: torch.Tensor) -> Allocation | None:
    """The allocation that a tensor's storage lies in; no communication."""
    address = tensor.data_ptr() or tensor.untyped_storage().data_ptr()
    found = None if _home is None else _home.attached(address)
    if found is None and not tensor.is_cpu:
        memory = _native.find(address)
        found = None if memory is None else _of_a_pool(memory, tensor)
    return found


def _of_a_pool(memory: _native.Memory, tensor: torch.Tensor) -> Allocation:
    """A segment that torch allocated for one of its pools. The tensor's storage keeps what is known of it."""
    tensor.untyped_storage().symmem_owner = found = Allocation(memory.nbytes, tensor.device, memory=memory)
    return found

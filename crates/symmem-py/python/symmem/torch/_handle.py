"""The handle that a rendezvous returns: PyTorch's `_SymmetricMemory`, member by member."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import _SymmetricMemory
from torch._prims_common import make_contiguous_strides_for

from symmem.torch import _backends, _groups, _memory


class SymmetricMemory:
    """One allocation, as mapped by all ranks of one group. It keeps the memory alive."""

    __slots__ = ("_allocation", "_group", "native", "offset")

    def __init__(self, allocation: _memory.Allocation, group: _groups.Group, offset: int) -> None:
        self._allocation = allocation
        self._group = group
        self.native = allocation.handle_in(group)
        #: The byte offset in the allocation of the storage that was at the rendezvous.
        self.offset = offset

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.world_size} in group {self.group_name}"
        return f"<SymmetricMemory of {self.buffer_size} bytes on {self.device}, {place}>"

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return self._group.size

    @property
    def group_name(self) -> str:
        """The name of the group."""
        return self._group.name

    @property
    def device(self) -> torch.device:
        """The device of this rank's memory."""
        return self._allocation.device

    @property
    def buffer_ptrs(self) -> list[int]:
        """The address of every rank's allocation as mapped here, without `offset`; 0 for a rank on another host."""
        return list(self.native.buffer_ptrs)

    @property
    def buffer_ptrs_dev(self) -> int:
        """The address of an array of the same addresses, on the device of the memory."""
        return self.native.buffer_ptrs_dev

    @property
    def signal_pad_ptrs(self) -> list[int]:
        """The address of every rank's signal pad of this allocation as mapped here; 0 for a rank on another host."""
        return list(self.native.signal_pad_ptrs)

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """The address of an array of the same addresses, on the device of the memory."""
        return self.native.signal_pad_ptrs_dev

    @property
    def buffer_size(self) -> int:
        """Bytes of each rank's memory, as requested."""
        return self._allocation.nbytes

    @property
    def signal_pad_size(self) -> int:
        """Bytes of this allocation's signal pad."""
        return self.native.signal_pad_size

    @property
    def multicast_ptr(self) -> int:
        """The multicast address of all ranks' memory; 0 without multicast, which CPUs do not have."""
        address = self.native.multicast_ptr
        return address + self.offset if address else 0

    def world_within_direct_access(self) -> bool:
        """Whether this rank has an address of every rank's memory. False if some ranks are on other hosts."""
        return self.native.is_within_direct_access

    @staticmethod
    def has_multicast_support(device_type: DeviceType, device_idx: int) -> bool:
        """Whether the device has multicast. CPUs do not."""
        return _SymmetricMemory.has_multicast_support(device_type, device_idx)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """A rank's memory as a tensor, from element `storage_offset`. The tensor keeps the memory alive.

        Raises `symmem.Unavailable` for a rank on another host.
        """
        return self._buffer_at("get_buffer", rank, sizes, dtype, storage_offset * dtype.itemsize)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `get_buffer`, from the start of the storage that was at the rendezvous."""
        return self._buffer_at("get_remote_tensor", peer, sizes, dtype, self.offset)

    def _buffer_at(self, op: str, rank: int, sizes: Sequence[int], dtype: torch.dtype, offset: int) -> torch.Tensor:
        self._group.check_rank(rank)
        nbytes = _span(op, sizes, dtype, offset, self.buffer_size)
        return self._tensor(self.native.view(rank, nbytes, offset) if nbytes else None, sizes, dtype)

    def get_signal_pad(
        self,
        rank: int,
        sizes: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        storage_offset: int = 0,
    ) -> torch.Tensor:
        """A rank's signal pad of this allocation: the words of its barriers and signals. Operators do not use it."""
        self._group.check_rank(rank)
        dtype = torch.uint32 if dtype is None else dtype
        sizes = sizes or (self.signal_pad_size // dtype.itemsize,)
        offset = storage_offset * dtype.itemsize
        nbytes = _span("get_signal_pad", sizes, dtype, offset, self.signal_pad_size)
        return self._tensor(self.native.pad_view(rank, nbytes, offset) if nbytes else None, sizes, dtype)

    def _tensor(self, array: object, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if array is None:
            return torch.empty(tuple(sizes), dtype=dtype, device=self.device)
        storage, _ = _memory.storage_over(array, self)
        return _memory.tensor_over(storage, sizes, make_contiguous_strides_for(tuple(sizes)), dtype)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for all ranks. A timeout of 0 is the group's: SYMMEM_TIMEOUT, or 5 minutes."""
        group, allocation = self._group, self._allocation
        # Checked inline here and below: a function call would take a large part of the time.
        if not 0 <= channel < group.channels:
            group.check_channel(channel)
        stream = 0 if allocation.on_host else _groups.stream(allocation.number)
        self.native.barrier(channel, timeout_ms, stream)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signal a rank. Wait while it has not received the previous signal on the channel."""
        group, allocation = self._group, self._allocation
        if not (0 <= dst_rank < group.size and 0 <= channel < group.channels):
            group.check_rank(dst_rank)
            group.check_channel(channel)
        stream = 0 if allocation.on_host else _groups.stream(allocation.number)
        self.native.put_signal(dst_rank, channel, timeout_ms, stream)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for a rank's signal, and clear it. Everything the rank wrote before is then visible."""
        group, allocation = self._group, self._allocation
        if not (0 <= src_rank < group.size and 0 <= channel < group.channels):
            group.check_rank(src_rank)
            group.check_channel(channel)
        stream = 0 if allocation.on_host else _groups.stream(allocation.number)
        self.native.wait_signal(src_rank, channel, timeout_ms, stream)

    def boxed(self) -> object:
        """Refused: operators take a C++ class, which this is not."""
        raise NotImplementedError(
            "boxed: operators take a C++ class, which this is not; pass a tensor and the group's name"
        )

    def get_peer_cft_handle(self, peer: int) -> tuple[int, int]:
        """The endpoint and offset with which NCCL's kernels reach a rank's memory. Only NCCL memory has them."""
        return _backends.cft_handle("get_peer_cft_handle", self._allocation.memory, self.native, peer)

    def get_multimem_cft_handle(self) -> tuple[int, int]:
        """The endpoint and offset of all ranks' memory at once. Only NCCL memory has them."""
        return _backends.cft_handle("get_multimem_cft_handle", self._allocation.memory, self.native)


def fetched(
    handle: SymmetricMemory, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
) -> torch.Tensor:
    """As `get_buffer`, to read from: of a rank on another host it is a copy."""
    if handle.native.is_reachable(rank):
        return handle.get_buffer(rank, sizes, dtype, storage_offset)
    copy = torch.empty(tuple(sizes), dtype=dtype, device=handle.device)
    handle.native.get(rank, storage_offset * dtype.itemsize, _memory.moved(copy), stream=_stream(handle))
    return copy


def store(handle: SymmetricMemory, rank: int, tensor: torch.Tensor) -> None:
    """Copy a contiguous tensor to a rank's memory, to the start of the storage that was at the rendezvous."""
    if handle.native.is_reachable(rank):
        handle.get_remote_tensor(rank, tensor.shape, tensor.dtype).copy_(tensor)
    else:
        handle.native.put(rank, handle.offset, _memory.moved(tensor), stream=_stream(handle))


def _stream(handle: SymmetricMemory) -> int:
    return 0 if handle.device.type == "cpu" else _groups.stream(handle.device.index)


def _span(op: str, sizes: Sequence[int], dtype: torch.dtype, offset: int, limit: int) -> int:
    """The size of a view in bytes, which must end within `limit`."""
    nbytes = math.prod(sizes) * dtype.itemsize
    if offset < 0:
        raise RuntimeError(f"{op}: storage_offset must be non-negative")
    if offset + nbytes > limit:
        raise RuntimeError(
            f"{op}: the requested size ({offset + nbytes} bytes) exceeds the allocated size ({limit} bytes)"
        )
    return nbytes


def rendezvous(tensor: torch.Tensor, group_name: str | None = None) -> SymmetricMemory | None:
    """Map all ranks' memory of the tensor. The first call is collective. None for ordinary memory."""
    allocation = _memory.find(tensor)
    if allocation is None:
        warnings.warn(
            "Pointer not within any SymmetricMemory allocation, is the tensor allocated from SymmetricMemory?"
        )
        return None
    name = group_name or allocation.group_name
    if not name:
        raise RuntimeError("rendezvous: `group_name` is neither specified during allocation nor passed to rendezvous()")
    offset = tensor.untyped_storage().data_ptr() - allocation.address
    return SymmetricMemory(allocation, _groups.of(name), offset)

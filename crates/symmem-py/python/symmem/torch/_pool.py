"""Memory pools: tensors created while a pool is in use are in symmetric memory.

On a device the pool is torch's own, with this library's allocator. torch has no pluggable allocator for CPU memory: there the pool
intercepts operators, and moves the storages of their results into symmetric memory. That costs one copy for each such tensor;
`symm_mem.empty` costs none.
"""

from __future__ import annotations

import functools

import torch
from torch._C._distributed_c10d import _SymmetricMemory
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from symmem import _native
from symmem.torch import _backends, _memory


def device_allocator() -> object:
    """The allocator for a `torch.cuda.MemPool`. Its segments are symmetric, with signal pads of the current size."""
    return _device_allocator(*_serve())


def follow_backend() -> None:
    """Make existing pools allocate their next segments from the current backend."""
    if _device_allocator.cache_info().currsize:
        _serve()


def _serve() -> tuple[str, str]:
    return _native.serve_pools(_memory.home(), _SymmetricMemory.signal_pad_size, _backends.backend())


@functools.cache
def _device_allocator(alloc: str, free: str) -> object:
    return torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, alloc, free).allocator()


class Allocator:
    """The result of `get_mempool_allocator` for CPU memory, from which a pool allocates segments."""

    def allocate(self, nbytes: int) -> _memory.Allocation:
        return _memory.Allocation(nbytes)


ALLOCATOR = Allocator()


class MemPool:
    """Symmetric segments of one tensor each. A free segment is reused for the next tensor of the same size."""

    def __init__(self, allocator: Allocator = ALLOCATOR, use_on_oom: bool = False, no_split: bool = True) -> None:
        if use_on_oom or not no_split:
            raise RuntimeError("MemPool: symmetric memory needs use_on_oom=False and no_split=True")
        self.allocator = allocator
        self._segments = _memory.Segments()

    def move(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """A symmetric storage with the contents of the tensor's."""
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        moved = self._segments.storage(nbytes, lambda: self.allocator.allocate(nbytes))
        moved.copy_(storage)
        return moved


class use_mem_pool(TorchDispatchMode):
    """A context in which CPU tensors are created in the pool's memory: `torch.cuda.use_mem_pool` for CPUs."""

    def __init__(self, pool: MemPool, device: object = None) -> None:
        super().__init__()
        self.pool = pool

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if _is_plain(t)}
        moved: dict[int, torch.UntypedStorage] = {}

        def move(leaf: object) -> object:
            if not _is_plain(leaf) or leaf.untyped_storage().data_ptr() in given or _memory.find(leaf) is not None:
                return leaf
            key = leaf.untyped_storage().data_ptr()
            if key not in moved:
                moved[key] = self.pool.move(leaf)
            new = torch.empty(0, dtype=leaf.dtype, device=_memory.CPU)
            return new.set_(moved[key], leaf.storage_offset(), leaf.size(), leaf.stride())

        return pytree.tree_map(move, func(*args, **kwargs))


def _is_plain(leaf: object) -> bool:
    return (
        type(leaf) is torch.Tensor and leaf.device.type == "cpu" and leaf.layout == torch.strided and leaf.numel() > 0
    )

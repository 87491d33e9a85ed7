"""Gradient buckets of DistributedDataParallel in memory that peers read in place.

torch's reducer allocates its buckets in C++, which cannot ask a backend in Python for memory. So the reducer of a group of ours is made,
and makes its buckets anew, while its allocations are intercepted in its thread.
"""

from __future__ import annotations

import functools
import math
import os

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

#: Smaller buckets are staged in one piece anyway.
LEAST = 32 << 10


class _Intercepted(TorchDispatchMode):
    """Has the group allocate the large tensors of one dimension that this thread makes: the buckets."""

    def __init__(self, backend: object) -> None:
        super().__init__()
        self._backend = backend

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and len(args[0]) == 1:
            device, dtype = kwargs.get("device"), kwargs.get("dtype") or torch.get_default_dtype()
            on_cpu = device is None or torch.device(device).type == "cpu"
            if on_cpu and kwargs.get("layout") in (None, torch.strided) and args[0][0] * dtype.itemsize >= LEAST:
                return self._backend.allocate_tensor(args[0][0], dtype=dtype, device=torch.device("cpu"))
        return func(*args, **kwargs)


def is_wanted() -> bool:
    """Whether buckets may be a backend's memory: torch's own variable says so if it is set."""
    return os.environ.get("DDP_DISABLE_COMM_MEM", "0") != "1"


@functools.cache
def install(group_class: type) -> None:
    """Make later reducers of groups of this class allocate their buckets from the group."""
    former = dist.Reducer

    class Reducer(former):
        """torch's, with buckets in memory of the group's backend for the CPU."""

        def __init__(self, *given: object, **named: object) -> None:
            groups = (each for each in (*given, *named.values()) if isinstance(each, group_class))
            group = next(groups, None)
            self._backend_of_buckets = group.cpu if group is not None and is_wanted() else None
            if self._backend_of_buckets is None:
                super().__init__(*given, **named)
                return
            with _Intercepted(self._backend_of_buckets):
                super().__init__(*given, **named)

        def _rebuild_buckets(self) -> bool:
            if self._backend_of_buckets is None:
                return super()._rebuild_buckets()
            with _Intercepted(self._backend_of_buckets):
                rebuilt = super()._rebuild_buckets()
            if rebuilt:
                self._backend_of_buckets = None  # they are as they will stay
            return rebuilt

    dist.Reducer = Reducer


def allocated(backend: object, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of so many elements in memory of the backend's group; an ordinary one if there is no more of that."""
    from symmem import _native
    from symmem.torch import _memory

    try:
        array = backend.calls.allocate(max(math.prod((size, dtype.itemsize)), 1))
    except _native.Unavailable:
        array = None
    if array is None:
        return torch.empty(size, dtype=dtype, device="cpu")
    storage, _ = _memory.storage_over(array)
    return _memory.tensor_over(storage, (size,), (1,), dtype)

"""Backends of symmetric memory on CUDA devices, and NCCL communicators that others have made for it."""

from __future__ import annotations

import os
import weakref

import torch

from symmem import _external, _native
from symmem.torch import _groups

#: PyTorch's names of backends, and this library's.
BACKENDS = {"CUDA": "cuda", "NCCL": "nccl", "NVSHMEM": "nvshmem"}
VARIABLE = "SYMMEM_CUDA_BACKEND"

#: PyTorch's name of the backend that `set_backend` chose last.
_chosen: str | None = None


def choose(name: str) -> None:
    """Choose the backend of device memory that is allocated from now on, by PyTorch's name. Raise if it is unavailable."""
    global _chosen
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise _native.Usage(f"set_backend: expected a backend among {known}, got {name!r}")
    _check(BACKENDS[name])
    _chosen = name


def chosen() -> str | None:
    """PyTorch's name of the chosen backend, or None."""
    return _chosen


def backend() -> str:
    """The backend of new device memory: as chosen, or as the environment says."""
    if _chosen is not None:
        return BACKENDS[_chosen]
    named = os.environ.get(VARIABLE) or "cuda"
    _check(named)
    return named


def _check(backend: str) -> None:
    if backend == "nvshmem":
        raise _native.Unavailable(
            "NVSHMEM is not available through torch's functions: all ranks of a world allocate its memory together, and torch "
            'allocates before there is a group; use symmem.empty(..., device=..., backend="nvshmem") with a symmem.World, and '
            "torch.from_dlpack to make tensors of that memory"
        )
    if backend == "nccl":
        _native.nccl_version()


#: The communicator that each group uses, by device.
_used: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def use_external(memory: _native.Memory, group: _groups.Group, device: torch.device) -> None:
    """Register NCCL memory on the communicator registered for the group, if there is one. Called before the rendezvous."""
    if memory.backend != "nccl":
        return
    registration = _external.registration_of(group.name, device.index)
    used = _used.setdefault(group, {})
    if registration is not None and used.get(device.index) is not registration:
        registration.use_for(group.native)
        used[device.index] = registration


def register(former, group_name: str, comm_ptr: int, device: object, *, ours: bool) -> None:
    """PyTorch's `_register_external_nccl_comm`."""
    if ours:
        _external.register_external_nccl_comm(group_name, comm_ptr, torch.device(device))
    else:
        former(group_name, comm_ptr, device)


def unregister(former, group_name: str, device: object, *, ours: bool) -> None:
    """PyTorch's `_unregister_external_nccl_comm`. Does nothing for a communicator that is not registered."""
    found = _external.registration_of(group_name, _external.number_of(torch.device(device))) if ours else None
    if found is not None:
        found.unregister()
    elif not ours:
        former(group_name, device)


def cft_handle(op: str, memory: _native.Memory, handle: _native.Handle, peer: int | None = None) -> tuple[int, int]:
    """The NCCL endpoint and offset of `peer`'s memory, or of all ranks' memory. Only NCCL memory has one."""
    if memory.backend != "nccl":
        raise RuntimeError(f"{op}: only available on the NCCL backend")
    return _native.nccl_cft_handle(handle, peer)

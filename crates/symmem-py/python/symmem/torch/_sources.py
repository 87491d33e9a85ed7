"""Where symmetric memory of CUDA devices comes from, and communicators of NCCL that others have made for it."""

from __future__ import annotations

import os
import weakref

import torch

from symmem import _external, _native
from symmem.torch import _groups

#: PyTorch's names of backends, and ours of the sources of memory that do the same.
SOURCES = {"CUDA": "cuda", "NCCL": "nccl", "NVSHMEM": "nvshmem"}
VARIABLE = "SYMMEM_CUDA_BACKEND"

#: What `set_backend` was told last.
_backend: str | None = None


def choose(backend: str) -> None:
    """Have memory of devices come from the source with PyTorch's name. What it lacks is said at once."""
    global _backend
    if backend not in SOURCES:
        known = ", ".join(SOURCES)
        raise _native.Usage(f"set_backend: expected a backend among {known}, got {backend!r}")
    _check(SOURCES[backend])
    _backend = backend


def backend() -> str | None:
    """PyTorch's name of what was chosen; None if nothing was."""
    return _backend


def source() -> str:
    """Where new memory of devices comes from: as chosen, or as the environment says."""
    if _backend is not None:
        return SOURCES[_backend]
    named = os.environ.get(VARIABLE) or "cuda"
    _check(named)
    return named


def _check(source: str) -> None:
    if source == "nvshmem":
        raise _native.Unavailable(
            "NVSHMEM behind torch's entry points is not available: its memory is allocated by all ranks of one world together, "
            "and torch allocates before there is a group; a symmem.World has it by "
            'symmem.empty(..., device=..., source="nvshmem"), and torch.from_dlpack makes tensors of that'
        )
    if source == "nccl":
        _native.nccl_version()


#: The communicator that each group was told of, by device.
_used: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def use_external(memory: _native.Memory, group: _groups.Group, device: torch.device) -> None:
    """Before the first rendezvous of memory of NCCL with a group: have it registered on the communicator that is known for the
    group, if one is."""
    if memory.source != "nccl":
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
    """PyTorch's `_unregister_external_nccl_comm`; what is not registered is none of ours."""
    found = _external.registration_of(group_name, _external.number_of(torch.device(device))) if ours else None
    if found is not None:
        found.unregister()
    elif not ours:
        former(group_name, device)


def cft_handle(op: str, memory: _native.Memory, handle: _native.Handle, peer: int | None = None) -> tuple[int, int]:
    """An endpoint of NCCL and the offset there, which only memory of NCCL has."""
    if memory.source != "nccl":
        raise RuntimeError(f"{op}: only available on the NCCL backend")
    return _native.nccl_cft_handle(handle, peer)

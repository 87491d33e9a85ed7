"""Installs this library in PyTorch's functions. Tensors of other devices use the former functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch._C import _distributed_c10d as bindings
from torch._C._distributed_c10d import _SymmetricMemory
from torch.utils import _pytree as pytree

from symmem import _native, _torch_watch
from symmem.torch import (
    _backends,
    _compiler,
    _groups,
    _handle,
    _memory,
    _one_sided,
    _operators,
    _pipeline,
    _pool,
    _sharing,
    _work,
)
from symmem.torch._workspace import workspace

#: The name of this library's backend, as `get_backend` returns it.
BACKEND = "SYMMEM"

#: The kinds of devices that this library is installed for.
_installed: set[str] = set()


def install(device: str = "cpu") -> None:
    """Make `torch.distributed._symmetric_memory` use this library for tensors of a kind of device.

    Importing `symmem.torch` does this for "cpu". Call it for "cuda" before the first symmetric tensor on a device. Symmetric
    CUDA tensors are then this library's, and operators run its kernels on the current stream.
    """
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise _native.Unavailable(f"symmem.torch works on cpu and cuda, not on {kind}")
    if kind == "cuda" and torch.version.hip is not None:
        raise _native.Unavailable("symmem.torch on cuda: expected a torch for CUDA, got one for ROCm")
    if kind == "cuda" and not torch.cuda.is_available():
        raise _native.Unavailable("symmem.torch on cuda: torch has no CUDA device here")
    if kind not in _installed:
        _entry_points()
        _installed.add(kind)
        _operators.register(kind)
        if kind == "cuda":
            _torch_watch.install(torch)


@functools.cache
def _entry_points() -> None:
    replaced = {}
    for name, replacement in STATIC_METHODS.items():
        _replace(_SymmetricMemory, name, replacement, staticmethod)
    for name, replacement in FUNCTIONS.items():
        replaced.update(_replace(symm_mem, name, replacement))
    for owner, functions in ((symm_mem, PRIVATE_FUNCTIONS), (bindings, BINDINGS)):
        for name, replacement in functions.items():
            if hasattr(owner, name):
                replaced.update(_replace(owner, name, replacement))
    _replace_imported(replaced)
    symm_mem.Work = _work.Work
    _compiler.install()
    _sharing.install()
    if not hasattr(bindings, "_is_process_group_registered"):
        bindings._is_process_group_registered = _groups.is_process_group
    for name in ("MemPool", "use_mem_pool"):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, getattr(_pool, name))


def _replace(owner: object, name: str, replacement: Callable, kind: Callable = lambda function: function) -> dict:
    """Replace a function by ours, which gets the former one as its first argument. Returns the two as an entry.

    Older torches do not have them all.
    """
    former = getattr(owner, name, None)
    ours = _wrapped(former or functools.partial(_absent, name), replacement)
    setattr(owner, name, kind(ours))
    return {former: ours} if former is not None else {}


def _wrapped(former: Callable, replacement: Callable) -> Callable:
    @functools.wraps(former)
    def function(*arguments: object, **named: object) -> object:
        return replacement(former, *arguments, **named)

    return function


def _replace_imported(replaced: dict) -> None:
    """Replace functions in modules that took them by `from … import …` before, under whatever name."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            # Not `isinstance`, which asks objects for their class: some import modules when they are asked for anything.
            ours = replaced.get(value) if type(value) in (FunctionType, BuiltinFunctionType) else None
            if ours is not None:
                setattr(module, name, ours)


def _absent(name: str, *_: object, **__: object) -> None:
    raise NotImplementedError(f"torch {torch.__version__} has no {name}, and symmem.torch has it for CPU tensors only")


def _is_cpu(device: object) -> bool:
    return torch.device(device).type == "cpu"


def _is_ours(device: object) -> bool:
    return torch.device(device).type in _installed


def _empty_strided_p2p(former, size, stride, dtype, device, group_name=None, alloc_id=None):
    device = torch.device(device)
    if not _is_ours(device):
        return former(size, stride, dtype, device, group_name, alloc_id)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _memory.allocate(size, stride, dtype, _memory.CPU if _is_cpu(device) else device, group_name, alloc_id)


def _rendezvous(former, tensor, group_name=None):
    # A device may have tensors of torch's own backends, from its memory pools.
    if not _is_ours(tensor.device) or not (tensor.is_cpu or _memory.find(tensor)):
        return former(tensor, group_name)
    return _handle.rendezvous(tensor, group_name)


def _is_symm_mem_tensor(former, tensor):
    if _is_ours(tensor.device) and _memory.find(tensor) is not None:
        return True
    # Older versions of torch cannot say this about their own memory.
    asks_torch = not tensor.is_cpu and getattr(former, "func", None) is not _absent
    return asks_torch and former(tensor)


def _module_is_symm_mem_tensor(former, tensor):
    return _SymmetricMemory.is_symm_mem_tensor(tensor)


def _get_backend(former, device):
    if not _is_ours(device):
        return former(device)
    return BACKEND if _is_cpu(device) else _backends.chosen() or BACKEND


def _set_backend(former, name):
    """`install` chooses this library, so its name changes nothing. Other names choose the backend of its device memory."""
    if name == BACKEND:
        return
    if "cuda" in _installed:
        _backends.choose(name)
        _pool.follow_backend()
    else:
        former(name)


def _register_external_nccl_comm(former, group_name, comm_ptr, device):
    _backends.register(former, group_name, comm_ptr, device, ours=_is_ours(device))


def _unregister_external_nccl_comm(former, group_name, device):
    _backends.unregister(former, group_name, device, ours=_is_ours(device))


def _get_mempool_allocator(former, device):
    if not _is_ours(device):
        return former(device)
    return _pool.ALLOCATOR if _is_cpu(device) else _pool.device_allocator()


@functools.cache
def _pool_of_the_cpu():
    return _pool.MemPool()


def _get_mem_pool(former, device):
    return _pool_of_the_cpu() if _is_cpu(device) else former(device)


def _has_multicast_support(former, device_type, device_idx=None):
    # PyTorch passes the index of a CPU tensor's device, which is None.
    return former(device_type, device_idx) if device_idx is not None else False


def _set_group_info(former, name, rank, world_size, store):
    former(name, rank, world_size, store)
    _groups.register(name, rank, world_size, store)


def _stream_write_value32(former, input, offset, val):
    return torch.ops.symm_mem.stream_write_value32_(input, offset, val) if input.is_cpu else former(input, offset, val)


def _memset32(former, input, offset, val, count=1):
    return (
        torch.ops.symm_mem.memset32_(input, offset, val, count) if input.is_cpu else former(input, offset, val, count)
    )


def _get_symm_mem_workspace(former, group_name, min_size):
    """PyTorch's function has no device argument: it means the accelerator if there is one, and else the CPU."""
    return former(group_name, min_size) if torch.accelerator.is_available() else workspace(group_name, min_size)


def _is_symm_mem_enabled_for_group(former, group_name):
    if symm_mem._is_test_mode or torch.accelerator.is_available():
        return former(group_name)
    return _groups.is_registered(group_name)


def _get_backend_stream(former, priority=0):
    return former(priority) if torch.accelerator.is_available() else _work.side_stream(priority)


def _by_handle(ours, former, *args, **kwargs):
    """Call ours if an argument is one of our handles."""
    given = (*args, *kwargs.values())
    return (ours if any(isinstance(a, _handle.SymmetricMemory) for a in given) else former)(*args, **kwargs)


def _reduce_scatter_offset(former, input, out, group, *, dim, offsets=None, dst_ranks=None, red_op="sum"):
    if not _is_ours(input.device):
        return former(input, out, group, dim=dim, offsets=offsets, dst_ranks=dst_ranks, red_op=red_op)
    return _one_sided.reduce_scatter_offset(input, out, group, dim, offsets, dst_ranks, red_op)


def _all_to_all_nd(former, input, out, scatter_dim, gather_dim, *, group):
    if not _is_ours(input.device):
        return former(input, out, scatter_dim, gather_dim, group=group)
    return _one_sided.all_to_all_nd(input, out, scatter_dim, gather_dim, group)


def _on_cpu(ours, former, *args, **kwargs):
    """Call ours if all tensors are on the CPU."""
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return (ours if all(tensor.is_cpu for tensor in given) else former)(*args, **kwargs)


STATIC_METHODS = {
    "empty_strided_p2p": _empty_strided_p2p,
    "rendezvous": _rendezvous,
    "is_symm_mem_tensor": _is_symm_mem_tensor,
    "get_backend": _get_backend,
    "set_backend": _set_backend,
    "get_mempool_allocator": _get_mempool_allocator,
    "has_multicast_support": _has_multicast_support,
    "set_group_info": _set_group_info,
    "stream_write_value32": _stream_write_value32,
    "memset32": _memset32,
}

#: Functions of the bindings, replaced if this torch has them.
BINDINGS = {
    "_register_external_nccl_comm": _register_external_nccl_comm,
    "_unregister_external_nccl_comm": _unregister_external_nccl_comm,
}

FUNCTIONS = {
    "is_symm_mem_tensor": _module_is_symm_mem_tensor,
    "get_mem_pool": _get_mem_pool,
    "get_symm_mem_workspace": _get_symm_mem_workspace,
    "is_symm_mem_enabled_for_group": _is_symm_mem_enabled_for_group,
    "get": functools.partial(_by_handle, _one_sided.get),
    "put_signal": functools.partial(_by_handle, _one_sided.put_signal),
    "wait_signal": functools.partial(_by_handle, _one_sided.wait_signal),
    "reduce_scatter_offset": _reduce_scatter_offset,
    "all_to_all_nd": _all_to_all_nd,
}

#: Functions that PyTorch's fused operators use, replaced if this torch has them.
PRIVATE_FUNCTIONS = {
    "_get_backend_stream": _get_backend_stream,
    "_pipelined_multi_all_gather_and_consume": functools.partial(_on_cpu, _pipeline.multi_all_gather_and_consume),
    "_pipelined_all_gather_and_consume_last_dim": functools.partial(_on_cpu, _pipeline.all_gather_and_consume_last_dim),
    "_pipelined_produce_and_all2all": functools.partial(_on_cpu, _pipeline.produce_and_all2all),
}

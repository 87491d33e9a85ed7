"""The operators of `torch.ops.symm_mem`, registered for kinds of devices and for tensors without data."""

from __future__ import annotations

import inspect
import warnings

import torch
import torch.distributed._symmetric_memory as symm_mem

from symmem.torch import _all_to_all, _exchange, _one_sided, _pipeline, _reduce
from symmem.torch._fakes import FAKES


def _fused_all_gather_matmul(A, Bs, gather_dim, group_name, *, return_A=True):
    last = A.dim() >= 2 and gather_dim in (-1, A.dim() - 1) and all(B.dim() == 2 for B in Bs)
    if last and not symm_mem._is_test_mode:
        return _pipeline.fused_all_gather_matmul_last_dim(A, Bs, group_name, return_A)
    return symm_mem._fused_all_gather_matmul(A, Bs, gather_dim, group_name, return_A=return_A)


def _named(module: object, *names: str) -> dict:
    return {name: getattr(module, name) for name in names}


#: What this library's calls and ordinary copies do, on memory of any kind.
KERNELS = {
    **_named(_reduce, "one_shot_all_reduce", "one_shot_all_reduce_out"),
    **_named(_reduce, "one_shot_all_reduce_copy", "one_shot_all_reduce_copy_out"),
    **_named(_reduce, "two_shot_all_reduce_", "two_shot_all_reduce_out", "reduce_scatter_out"),
    **_named(_reduce, "multimem_all_reduce_", "multimem_one_shot_all_reduce", "multimem_one_shot_all_reduce_out"),
    **_named(_reduce, "multimem_one_shot_reduce_out"),
    **_named(_exchange, "multimem_all_gather_out", "memcpy_to_multicast_", "get_remote_tensors"),
    **_named(_exchange, "tile_reduce", "multi_root_tile_reduce"),
    **_named(_all_to_all, "all_to_all_vdev", "all_to_all_vdev_2d", "all_to_all_vdev_2d_offset"),
    "nvshmem_put": _one_sided.put,
    "nvshmem_get": _one_sided.copy_from,
    "nvshmem_broadcast": _one_sided.broadcast,
    "nvshmem_all_to_all": _one_sided.all_to_all,
    "nccl_put": _one_sided.put,
    "nccl_get": _one_sided.copy_from,
    "nccl_reduce_scatter_offset": _one_sided.reduce_scatter_offset,
    "nccl_all_to_all_nd": _one_sided.all_to_all_nd,
}

#: What torch has for devices over any handle, and not for CPUs.
CPU_KERNELS = {
    **_named(_exchange, "stream_write_value32_", "memset32_"),
    **_named(_exchange, "_low_contention_all_gather", "_low_contention_reduce_scatter"),
    **_named(_exchange, "_low_contention_all_gather_ce_multicast", "_low_contention_all_gather_ce_multicast_out"),
    "fused_all_gather_matmul": _fused_all_gather_matmul,
    "fused_all_gather_scaled_matmul": symm_mem._fused_all_gather_scaled_matmul,
    "fused_matmul_reduce_scatter": symm_mem._fused_matmul_reduce_scatter,
    "fused_scaled_matmul_reduce_scatter": symm_mem._fused_scaled_matmul_reduce_scatter,
}

#: Kernels that torch registered from Python are replaced only by whoever says so, where torch has a word for it.
_OVERRIDE = (
    {"allow_override": True} if "allow_override" in inspect.signature(torch.library.Library.impl).parameters else {}
)

#: Registrations last as long as this.
_library = torch.library.Library("symm_mem", "IMPL")


def register(device: str) -> None:
    """Register whatever this torch knows of for a kind of device, and fakes where torch has none."""
    if device == "cpu":
        _register("CPU", {**KERNELS, **CPU_KERNELS})
        _register("Meta", FAKES)
    else:
        _register("CUDA", KERNELS, override=True)


def _register(key: str, functions: dict, override: bool = False) -> None:
    with warnings.catch_warnings():
        # Older torches warn of kernels that are replaced, as they are to be.
        warnings.simplefilter("ignore")
        _impl(key, functions, override)


def _impl(key: str, functions: dict, override: bool) -> None:
    for name, function in functions.items():
        # An operator that came with a later torch is left out.
        if not hasattr(torch.ops.symm_mem, name):
            continue
        if override or not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", key):
            _library.impl(name, function, key, **(_OVERRIDE if override else {}))

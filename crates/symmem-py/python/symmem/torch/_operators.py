"""Registers the operators of `torch.ops.symm_mem` for CPU and CUDA tensors, and for tensors without data."""

from __future__ import annotations

import functools
import inspect
import warnings
from pathlib import Path

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed import distributed_c10d as c10d

from symmem import _native
from symmem.torch import _all_to_all, _exchange, _one_sided, _pipeline, _reduce  # noqa: F401  (they define operators)
from symmem.torch._parts import DTYPES, REDUCTIONS
from symmem.torch._registry import OPERATORS, fakes, operator


def _fused_all_gather_matmul(A, Bs, gather_dim, group_name, *, return_A=True):
    last = A.dim() >= 2 and gather_dim in (-1, A.dim() - 1) and all(B.dim() == 2 for B in Bs)
    if last and not symm_mem._is_test_mode:
        return _pipeline.fused_all_gather_matmul_last_dim(A, Bs, group_name, return_A)
    return symm_mem._fused_all_gather_matmul(A, Bs, gather_dim, group_name, return_A=return_A)


#: PyTorch's own functions, over these handles.
operator("fused_all_gather_matmul", cpu_only=True)(_fused_all_gather_matmul)
operator("fused_all_gather_scaled_matmul", cpu_only=True)(symm_mem._fused_all_gather_scaled_matmul)
operator("fused_matmul_reduce_scatter", cpu_only=True)(symm_mem._fused_matmul_reduce_scatter)
operator("fused_scaled_matmul_reduce_scatter", cpu_only=True)(symm_mem._fused_scaled_matmul_reduce_scatter)

#: Operators for which torch has functions for tensors without data that check nothing.
REPLACED = ("all_to_all_vdev_2d", "all_to_all_vdev_2d_offset")

#: Newer versions of torch replace kernels registered from Python only with this option.
_OVERRIDE = (
    {"allow_override": True} if "allow_override" in inspect.signature(torch.library.Library.impl).parameters else {}
)

#: Registrations have the lifetime of these.
_library = torch.library.Library("symm_mem", "IMPL")
_long_library = torch.library.Library("symmem", "DEF")


def register(device: str) -> None:
    """Register all operators that this torch has for a kind of device, and fakes where torch has none."""
    if device == "cpu":
        _register("CPU", {name: known.kernel for name, known in OPERATORS.items()})
        without_data = fakes()
        _register("Meta", without_data)
        _register("Meta", {name: without_data[name] for name in REPLACED}, override=True)
    else:
        kernels = {name: known.kernel for name, known in OPERATORS.items() if not known.cpu_only}
        _register("CUDA", kernels, override=True)
        register_native("CUDA")


#: The namespace with the Python kernels of the operators that have native kernels: those forward unusual calls to it.
_LONG = "symmem"


@functools.cache
def register_native(key: str) -> tuple[str, ...]:
    """Register the native kernels. Returns the names of their operators: none with an older torch."""
    folder = str(Path(torch.__file__).parent / "lib")
    dtypes = [(str(dtype).removeprefix("torch."), name) for dtype, name in DTYPES.items()]
    for name in ("two_shot_all_reduce_", "one_shot_all_reduce", "one_shot_all_reduce_out"):
        _define_long(name, key)
    try:
        names = _native.register_kernels(folder, key, dtypes, list(REDUCTIONS.items()))
    except _native.Usage:
        return ()
    _follow_names()
    return tuple(names)


def _define_long(name: str, key: str) -> None:
    if not hasattr(getattr(torch.ops, _LONG), name):
        schema = str(getattr(torch.ops.symm_mem, name).default._schema)
        _long_library.define(schema.split("::", 1)[1])
    _long_library.impl(name, _set_aside(OPERATORS[name].kernel), key)


def _set_aside(function):
    """The same for a native caller, which raises the exception: it cannot pass through the frames between the two."""

    def kernel(*arguments):
        try:
            return function(*arguments)
        except BaseException as raised:
            _native.set_aside(raised)
            return arguments[-1] if isinstance(arguments[-1], torch.Tensor) else arguments[0]

    return kernel


def _follow_names() -> None:
    """Native kernels know groups by their names: forget those that may come to mean another group."""
    for name in ("_unregister_process_group", "_unregister_all_process_groups"):
        original = getattr(c10d, name, None)
        if original is not None and not hasattr(original, "symmem"):

            def forgetting(*names, original=original):
                _native.forget_group(*names)
                return original(*names)

            forgetting.symmem = True
            setattr(c10d, name, forgetting)


def _register(key: str, functions: dict, override: bool = False) -> None:
    with warnings.catch_warnings():
        # Older versions of torch warn about replaced kernels.
        warnings.simplefilter("ignore")
        _impl(key, functions, override)


def _impl(key: str, functions: dict, override: bool) -> None:
    for name, function in functions.items():
        # Skip operators of later versions of torch.
        if not hasattr(torch.ops.symm_mem, name):
            continue
        if override or not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", key):
            _library.impl(name, function, key, **(_OVERRIDE if override else {}))

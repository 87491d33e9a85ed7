"""Makes Inductor plan symmetric buffers on CPUs, and not only on devices with an index."""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

#: The module that generates code for an allocation.
MODULE = "torch._inductor.codegen.wrapper"


def install() -> None:
    """Patch the compiler now, or when it is imported: importing it here would take seconds."""
    module = sys.modules.get(MODULE)
    if module is not None:
        _change(module)
    else:
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_load, spec.loader.exec_module)
        return spec


def _load(former, module: ModuleType) -> None:
    former(module)
    _change(module)


def _change(module: ModuleType) -> None:
    line = getattr(module, "AllocateLine", None)
    if hasattr(line, "_codegen_comm_buffer"):
        former = line._codegen_comm_buffer
        line._codegen_comm_buffer = lambda self, code: _write(former, self, code)


def _write(former, line, code) -> None:
    """The compiler needs a device index, which CPU tensors do not have; `cpu:0` is the same device."""
    node = line.node
    if node.get_device() != torch.device("cpu") or not plans():
        former(line, code)
        return
    node.get_device = lambda: torch.device("cpu", 0)
    try:
        former(line, code)
    finally:
        del node.get_device


@functools.cache
def plans() -> bool:
    """Whether this torch separates symmetric buffers from those that kernels write in place; older ones do not."""
    from torch._inductor.scheduler import BaseSchedulerNode

    return "CommBufferLayout" in BaseSchedulerNode.decide_inplace_update.__code__.co_names

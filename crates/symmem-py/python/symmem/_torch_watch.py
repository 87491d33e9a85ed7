"""Makes torch's synchronisation and graph replays on CUDA devices raise failures of symmem's groups.

Replaying a graph and `torch.cuda.synchronize` do not call the library. Without this, a program whose peer has died would go on with
the results of the last good replay.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from symmem import _native

#: The replaced attributes: owner, name, and former value or `_INHERITED`.
_replaced: list[tuple[Any, str, Any]] = []
_INHERITED = object()


def install(torch: ModuleType | None = None) -> None:
    """Make torch's functions check for failures, if torch is loaded. A second call does nothing."""
    torch = torch or sys.modules.get("torch")
    if torch is None or _replaced or not hasattr(torch, "cuda"):
        return
    for owner, name in _places(torch):
        former = vars(owner).get(name, _INHERITED)
        _replaced.append((owner, name, former))
        setattr(owner, name, _watched(getattr(owner, name)))


def uninstall() -> None:
    """Restore the replaced attributes."""
    while _replaced:
        owner, name, former = _replaced.pop()
        if former is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, former)


def _places(torch: ModuleType) -> list[tuple[Any, str]]:
    """The functions that synchronise with a device or replay a graph."""
    cuda, accelerator = torch.cuda, getattr(torch, "accelerator", None)
    places = [
        (getattr(cuda, "CUDAGraph", None), "replay"),
        (cuda, "synchronize"),
        (getattr(cuda, "Stream", None), "synchronize"),
        (getattr(cuda, "Event", None), "synchronize"),
        (accelerator, "synchronize"),
    ]
    return [(owner, name) for owner, name in places if hasattr(owner, name)]


def _watched(former: Callable) -> Callable:
    """The same function, which checks for failures before and after."""

    @functools.wraps(former)
    def call(*arguments: Any, **named: Any) -> Any:
        _native.check_failures()
        result = former(*arguments, **named)
        _native.check_failures()
        return result

    return call

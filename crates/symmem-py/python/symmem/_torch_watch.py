"""Has torch's waits and replays on CUDA devices raise what failed there.

A call of the library says itself what went wrong. A graph that is replayed makes no call, and `torch.cuda.synchronize` knows of
none: without this, a program whose peer is gone goes on with what the last good replay has left.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from symmem import _native

#: What was replaced: whose attribute, its name, and what it was, or `_INHERITED`.
_replaced: list[tuple[Any, str, Any]] = []
_INHERITED = object()


def install(torch: ModuleType | None = None) -> None:
    """Have torch's functions look for failures, if torch is loaded; again, it does nothing."""
    torch = torch or sys.modules.get("torch")
    if torch is None or _replaced or not hasattr(torch, "cuda"):
        return
    for owner, name in _places(torch):
        former = vars(owner).get(name, _INHERITED)
        _replaced.append((owner, name, former))
        setattr(owner, name, _watched(getattr(owner, name)))


def uninstall() -> None:
    """Put back what was there."""
    while _replaced:
        owner, name, former = _replaced.pop()
        if former is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, former)


def _places(torch: ModuleType) -> list[tuple[Any, str]]:
    """Where results leave a device, or work begins there that was noted before."""
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
    """The same, which raises a failure from before, and one that is there when it returns."""

    @functools.wraps(former)
    def call(*arguments: Any, **named: Any) -> Any:
        _native.check_failures()
        result = former(*arguments, **named)
        _native.check_failures()
        return result

    return call

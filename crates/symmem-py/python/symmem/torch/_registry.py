"""The operators of `torch.ops.symm_mem`: a kernel for each, and what it returns for tensors without data.

torch calls the latter as soon as one tensor has no data. If others have data, the call cannot be made, and is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from symmem.torch._refusals import told


class Operator(NamedTuple):
    """How an operator runs."""

    kernel: Callable
    #: What it returns for tensors without data; None where torch has that.
    fake: Callable | None
    #: Whether torch has a kernel of its own for devices, which works over any handle.
    cpu_only: bool
    #: Whether the output is that of one rank: others may pass anything.
    rooted: bool


OPERATORS: dict[str, Operator] = {}


def operator(
    *names: str, fake: Callable | None = None, cpu_only: bool = False, rooted: bool = False
) -> Callable[[Callable], Callable]:
    """Define operators of these names by their kernel."""

    def define(kernel: Callable) -> Callable:
        OPERATORS.update({name: Operator(kernel, fake, cpu_only, rooted) for name in names})
        return kernel

    return define


def like_first(first: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(first)


def like_second(_: torch.Tensor, second: torch.Tensor, *__: object) -> torch.Tensor:
    return torch.empty_like(second)


def first(first: torch.Tensor, *_: object) -> torch.Tensor:
    return first


def second(_: torch.Tensor, second: torch.Tensor, *__: object) -> torch.Tensor:
    return second


def last(*arguments: object) -> object:
    return arguments[-1]


def nothing(*_: object, **__: object) -> None:
    return None


def fakes() -> dict[str, Callable]:
    """What operators return for tensors without data, by name. With data in other tensors, the call is refused on all ranks."""
    return {name: _checked(name, known) for name, known in OPERATORS.items() if known.fake is not None}


def _checked(name: str, known: Operator) -> Callable:
    def refuse(*arguments: object, **named: object) -> object:
        with_data = next(leaf for leaf in _tensors(arguments, named) if not leaf.is_meta)
        raise RuntimeError(f"{name}: expected all tensors on one device, got one on {with_data.device} and one on meta")

    # The parameters are the kernel's.
    collective = "group_name" in inspect.signature(known.kernel).parameters
    refuse = told(functools.wraps(known.kernel)(refuse)) if collective else refuse
    mixed = known.kernel if known.rooted else refuse

    @functools.wraps(known.fake)
    def function(*arguments: object, **named: object) -> object:
        bare = all(leaf.is_meta for leaf in _tensors(arguments, named))
        return (known.fake if bare else mixed)(*arguments, **named)

    return function


def _tensors(arguments: tuple, named: dict) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)]

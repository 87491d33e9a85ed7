"""What operators return for tensors without data, where torch does not say: for FakeTensor and `torch.compile`.

torch comes here as soon as one tensor has no data. If others have, there is something to be done, and it cannot be.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

from symmem.torch._refusals import told


def _like_input(input: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(input)


def _first(first: torch.Tensor, *_: object) -> torch.Tensor:
    return first


def _last(*arguments: object) -> object:
    return arguments[-1]


def _nothing(*_: object, **__: object) -> None:
    return None


def _like_local_input(symm_buffer: torch.Tensor, local_input: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(local_input)


def checked(name: str, kernel: Callable) -> Callable:
    """The fake of an operator; with data there, it is refused, or left to the kernel that knows what it looks at."""
    fake = FAKES[name]

    def refuse(*arguments: object, **named: object) -> object:
        with_data = next(leaf for leaf in _tensors(arguments, named) if not leaf.is_meta)
        raise RuntimeError(f"{name}: expected all tensors on one device, got one on {with_data.device} and one on meta")

    # The parameters are the kernel's.
    collective = "group_name" in inspect.signature(kernel).parameters
    refuse = told(functools.wraps(kernel)(refuse)) if collective else refuse
    mixed = kernel if name in ROOTED else refuse

    @functools.wraps(fake)
    def function(*arguments: object, **named: object) -> object:
        bare = all(leaf.is_meta for leaf in _tensors(arguments, named))
        return (fake if bare else mixed)(*arguments, **named)

    return function


def _tensors(arguments: tuple, named: dict) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)]


#: Operators whose output is that of one rank; others may give anything.
ROOTED = ("multimem_one_shot_reduce_out",)

#: Those that torch has too, which looks at nothing.
REPLACED = ("all_to_all_vdev_2d", "all_to_all_vdev_2d_offset")

#: By operator; each is registered where torch has no such function of its own, or one that is `REPLACED`.
FAKES = {
    "one_shot_all_reduce": _like_input,
    "one_shot_all_reduce_out": _last,
    "one_shot_all_reduce_copy": _like_local_input,
    "one_shot_all_reduce_copy_out": _last,
    "two_shot_all_reduce_": _first,
    "two_shot_all_reduce_out": _last,
    "reduce_scatter_out": _last,
    "multimem_all_reduce_": _first,
    "multimem_one_shot_all_reduce": _like_input,
    "multimem_one_shot_all_reduce_out": _last,
    "multimem_one_shot_reduce_out": _last,
    "multimem_all_gather_out": _last,
    "memcpy_to_multicast_": _first,
    "stream_write_value32_": _first,
    "memset32_": _first,
    "all_to_all_vdev": _nothing,
    "all_to_all_vdev_2d": _nothing,
    "all_to_all_vdev_2d_offset": _nothing,
    "tile_reduce": _nothing,
    "multi_root_tile_reduce": _nothing,
    "nvshmem_put": _nothing,
    "nvshmem_get": _nothing,
    "nvshmem_broadcast": _first,
    "nvshmem_all_to_all": lambda input, out, group_name: out,
    "nccl_put": _nothing,
    "nccl_get": _nothing,
    "nccl_reduce_scatter_offset": _nothing,
    "nccl_all_to_all_nd": _nothing,
}

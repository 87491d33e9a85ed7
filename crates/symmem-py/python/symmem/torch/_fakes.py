"""What operators return for tensors without data, where torch does not say: for FakeTensor and `torch.compile`."""

from __future__ import annotations

import torch


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


#: By operator; each is registered where torch has no such function of its own.
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

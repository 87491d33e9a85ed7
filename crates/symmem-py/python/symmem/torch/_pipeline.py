"""PyTorch's pipelining functions for CPU tensors, which its fused operators use.

On a device they overlap copies and products on two streams. A CPU has no streams: a rank goes from peer to peer, starting with
itself, so that no two ranks read the same memory at the same time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from symmem.torch import _groups
from symmem.torch._handle import fetched
from symmem.torch._workspace import workspace

ALIGN = 128


def multi_all_gather_and_consume(
    shard: list[torch.Tensor],
    shard_consumer: Callable[[list[torch.Tensor], int], None],
    ag_out: list[torch.Tensor],
    group_name: str,
    ag_out_needed: bool = True,
) -> None:
    """Gather every tensor of `shard` along dim 0, and pass each rank's pieces to the consumer as they arrive."""
    for mine, whole in zip(shard, ag_out):
        if not (mine.is_contiguous() and whole.is_contiguous()):
            raise AssertionError(
                "_pipelined_all_gather_and_consume: all tensors in `shard` and `ag_out` must be contiguous"
            )
    starts, end = [], 0
    for tensor in shard:
        starts.append(end)
        end += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
    handle = workspace(group_name, end)
    rank, size = handle.rank, handle.world_size

    def pieces(peer: int) -> list[torch.Tensor]:
        placed = zip(shard, starts)
        return [fetched(handle, peer, x.shape, x.dtype, start // x.element_size()) for x, start in placed]

    handle.barrier(channel=0)
    for to, tensor in zip(pieces(rank), shard):
        to.copy_(tensor)
    handle.barrier(channel=1)
    chunks = [whole.chunk(size) for whole in ag_out]
    shard_consumer(shard, rank)
    for step in range(1, size):
        peer = (rank + step) % size
        arrived = [chunk[peer] for chunk in chunks]
        for to, piece in zip(arrived, pieces(peer)):
            to.copy_(piece)
        shard_consumer(arrived, peer)
    if ag_out_needed:
        for chunk, tensor in zip(chunks, shard):
            chunk[rank].copy_(tensor)
    handle.barrier(channel=0)


def all_gather_and_consume_last_dim(
    shard: torch.Tensor,
    shard_consumer: Callable[[torch.Tensor, int], None],
    ag_out: torch.Tensor,
    group_name: str,
    ag_out_needed: bool = True,
) -> None:
    """As the former, for one tensor, which need not be contiguous."""

    def consume(pieces: list[torch.Tensor], rank: int) -> None:
        shard_consumer(pieces[0], rank)

    multi_all_gather_and_consume([shard.contiguous()], consume, [ag_out], group_name, ag_out_needed)


def produce_and_all2all(
    chunk_producer: Callable[[int, torch.Tensor], None],
    output: torch.Tensor,
    group_name: str,
    out_chunk_dim: int = 0,
) -> None:
    """Produce the piece for each rank, and exchange the pieces once all ranks have produced theirs."""
    handle = workspace(group_name, output.numel() * output.element_size())
    rank, size = handle.rank, handle.world_size
    chunks = output.chunk(size, dim=out_chunk_dim)
    shape, count = chunks[0].shape, chunks[0].numel()

    handle.barrier(channel=0)
    # The pieces do not overlap, so one barrier is enough for all of them.
    for step in range(1, size):
        peer = (rank + step) % size
        chunk_producer(peer, handle.get_buffer(rank, shape, output.dtype, peer * count))
    chunk_producer(rank, chunks[rank])
    handle.barrier(channel=1)
    for step in range(1, size):
        peer = (rank + step) % size
        chunks[peer].copy_(fetched(handle, peer, shape, output.dtype, rank * count))
    handle.barrier(channel=0)


def fused_all_gather_matmul_last_dim(
    A_shard: torch.Tensor, Bs: list[torch.Tensor], group_name: str, return_A: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The product with A gathered along its last dimension: a sum over ranks, accumulated as their parts arrive."""
    leading = A_shard.shape[:-1]
    flat = A_shard.flatten(0, -2).contiguous()
    size = _groups.of(group_name).size
    gathered = flat.new_empty(flat.shape[0] * size, flat.shape[1])
    parts = [B.chunk(size) for B in Bs]
    outputs = [flat.new_zeros(flat.shape[0], B.shape[1], dtype=B.dtype) for B in Bs]

    def consume(piece: torch.Tensor, rank: int) -> None:
        for output, part in zip(outputs, parts):
            output.addmm_(piece, part[rank])

    all_gather_and_consume_last_dim(flat, consume, gathered, group_name, return_A)
    whole = torch.cat(gathered.chunk(size), dim=-1).view(*leading, -1) if return_A else None
    return whole, [output.view(*leading, -1) for output in outputs]

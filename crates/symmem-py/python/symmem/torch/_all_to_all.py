"""All-to-all of rows, with numbers of rows that only their senders know: `all_to_all_vdev` and the like for CPU tensors.

All ranks first read all ranks' splits, and so come to the same verdict whether everything fits. Only then does each fetch
its rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from symmem.torch._parts import Part, contiguous, part


class _Piece(NamedTuple):
    """Rows that lie together at their source and at their destination."""

    source: int
    first: int
    rows: int
    to: int


class _Exchange:
    """One call: the places of its arguments, and all ranks' splits."""

    def __init__(self, op: str, input: torch.Tensor, out: torch.Tensor, splits: torch.Tensor, group_name: str) -> None:
        self.op, self.input, self.out = op, input, out
        for tensor, what in ((input, "input"), (out, "out"), (splits, "splits")):
            contiguous(op, tensor, what)
        if input.dtype != out.dtype or input.shape[1:] != out.shape[1:]:
            raise RuntimeError(f"{op}: input and out must have the same dtype and the same rows")
        if splits.dtype != torch.int64:
            raise RuntimeError(f"{op}: splits must be int64, got {splits.dtype}")
        self.place = part(op, input, group_name)
        self.size, self.rank = self.place.group.size, self.place.group.rank
        if splits.numel() % self.size:
            raise RuntimeError(f"{op}: expected splits for {self.size} ranks, got {splits.numel()} entries")
        self.words = splits.numel()
        self.table = self._gather(part(op, splits, group_name, "splits"), splits)

    def _gather(self, place: Part, splits: torch.Tensor) -> list[list[int]]:
        place.barrier()
        return [place.of(rank, splits).reshape(-1).tolist() for rank in range(self.size)]

    def fetch(self, pieces_of, received: torch.Tensor) -> None:
        """Fetch what `pieces_of` gives for this rank, if what it gives for each rank fits; leave with a barrier."""
        try:
            for rank in range(self.size):
                ends = (piece.to + piece.rows for piece in pieces_of(rank))
                self._check(rank, max(ends, default=0))
            for at, piece in enumerate(pieces_of(self.rank)):
                self._copy(piece)
                received.view(2, -1)[0, at] = piece.rows
                received.view(2, -1)[1, at] = piece.to
        finally:
            self.place.barrier()

    def _check(self, rank: int, rows: int) -> None:
        if rows > self.out.shape[0]:
            raise RuntimeError(f"{self.op}: rank {rank} gets rows up to {rows}, and out has {self.out.shape[0]}")

    def _copy(self, piece: _Piece) -> None:
        rows = self.place.rows(piece.source, self.input, piece.first, piece.rows)
        self.out[piece.to : piece.to + piece.rows].copy_(rows)


def _starts(lengths: list[int]) -> list[int]:
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += length
    return starts


def all_to_all_vdev(
    input: torch.Tensor, out: torch.Tensor, in_splits: torch.Tensor, out_splits_offsets: torch.Tensor, group_name: str
) -> None:
    _dispatch("all_to_all_vdev", input, out, in_splits, out_splits_offsets, group_name, 1, keep_empty=False)


def all_to_all_vdev_2d(
    input: torch.Tensor,
    out: torch.Tensor,
    in_splits: torch.Tensor,
    out_splits_offsets: torch.Tensor,
    group_name: str,
    major_align: int | None = None,
) -> None:
    align = 1 if major_align is None else major_align
    if align < 1:
        raise RuntimeError(f"all_to_all_vdev_2d: major_align must be positive, got {align}")
    _dispatch("all_to_all_vdev_2d", input, out, in_splits, out_splits_offsets, group_name, align, keep_empty=True)


def _dispatch(op, input, out, in_splits, received, group_name, align, keep_empty) -> None:
    """Splits by destination and expert; rows arrive by expert and source."""
    call = _Exchange(op, input, out, in_splits, group_name)
    experts = call.words // call.size
    starts = [_starts(splits) for splits in call.table]

    def pieces(rank: int) -> list[_Piece]:
        found, begin = [], 0
        for expert in range(experts):
            at, entry = begin, rank * experts + expert
            for source in range(call.size):
                rows = call.table[source][entry]
                found.append(_Piece(source, starts[source][entry], rows, at))
                at += rows
            # Matrix products over groups of rows have no empty ones: an expert without rows has room all the same.
            end = max(at, begin + 1) if keep_empty else at
            begin = -(-end // align) * align
        return found

    call.fetch(pieces, received)


def all_to_all_vdev_2d_offset(
    input: torch.Tensor,
    out: torch.Tensor,
    in_splits_offsets: torch.Tensor,
    out_splits_offsets: torch.Tensor,
    group_name: str,
) -> None:
    """The way back: splits and first rows by expert and destination; rows arrive by source and expert."""
    call = _Exchange("all_to_all_vdev_2d_offset", input, out, in_splits_offsets, group_name)
    entries = call.words // 2
    experts = entries // call.size

    def pieces(rank: int) -> list[_Piece]:
        found, at = [], 0
        for source in range(call.size):
            for expert in range(experts):
                entry = expert * call.size + rank
                rows, first = call.table[source][entry], call.table[source][entries + entry]
                found.append(_Piece(source, first, rows, at))
                at += rows
        return found

    call.fetch(pieces, out_splits_offsets)

"""Symmetric memory with a shape and a type: what most programs use."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from symmem import _torch_watch
from symmem._native import Array, Group, Handle, Usage, find, span

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy


def empty(
    shape: int | Sequence[int],
    dtype: Any,
    group: Group,
    *,
    device: str | int | None = None,
    backend: str | None = None,
    persistent_id: int | None = None,
) -> Array:
    """Memory of this rank for a later `rendezvous`. Not collective.

    `dtype` is a name ("float32", "bfloat16", …), numpy's or torch's. With `persistent_id`, the memory outlives its users,
    and the next call with the same id gets it again, with what it held. `backend` is where memory of a device comes from, as
    for `Group.alloc`: "cuda", "nccl", or "nvshmem", which all ranks of the group allocate together.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(size < 0 for size in sizes):
        raise Usage(f"empty: rank {group.rank}: expected sizes of at least 0, got {sizes}")
    itemsize = Array.itemsize_of(dtype)
    nbytes = math.prod(sizes) * itemsize
    memory = group.alloc(nbytes, device=device, backend=backend, persistent_id=persistent_id)
    if memory.device != "cpu":
        _torch_watch.install()
    return memory.view(dtype, sizes)


def rendezvous(array: Any, group: Group) -> Symmetric:
    """Maps all ranks' counterparts of `array`. Collective over `group`, the first time for this memory and group.

    `array` is one of `empty`'s, or any array or tensor that lies in such memory: the same part of it on all ranks.
    """
    address, _, dtype = span(array)
    memory = find(address)
    if memory is None:
        raise Usage("rendezvous: expected an array in symmetric memory, got one elsewhere")
    return Symmetric(memory.rendezvous(group), dtype, array.shape, address - memory.address)


def _milliseconds(timeout: float | None) -> int:
    """A limit as handles take it: of None, that of the group."""
    if timeout is None:
        return 0
    if not timeout > 0:
        raise Usage(f"timeout: expected a number of seconds above 0, got {timeout}")
    return max(1, round(min(timeout, 1e12) * 1000))


class Symmetric:
    """The same array on every rank of a group, as mapped into this process.

    A collective is a call of all ranks with arguments that fit together; ranks that disagree all get a `Mismatch`, and
    nothing is done. The array belongs to the call while it lasts: no rank touches it otherwise. Reductions give the same
    bits on every rank, whatever the algorithm.

    On a device, calls go into `stream` (the address of a `CUstream`, such as `torch.cuda.current_stream().cuda_stream`; the
    default stream without), and `array` and `out` belong to them until that is done; `handle.synchronize` says how it went.

    A collective that timed out or was interrupted leaves the group out of step: all ranks call `group.resync()`, and then it and
    this memory work again. After the loss of a rank, the others go on with ``x = symmem.rendezvous(x.array, group.shrink())``.
    """

    def __init__(self, handle: Handle, dtype: str, shape: Sequence[int], offset: int = 0) -> None:
        self._handle = handle
        self._dtype = dtype
        self._shape = tuple(shape)
        self._offset = offset
        self._count = math.prod(self._shape)
        self._span = (self._offset, self._count)
        self._nbytes = self._count * Array.itemsize_of(dtype)

    @property
    def handle(self) -> Handle:
        """All ranks' memory, of which this array is a part: addresses, signals, sizes."""
        return self._handle

    @property
    def group(self) -> Group:
        """The group that mapped it."""
        return self._handle.group

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._handle.rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self._handle.size

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each rank's array."""
        return self._shape

    @property
    def dtype(self) -> str:
        """The name of the elements' type."""
        return self._dtype

    @property
    def array(self) -> Array:
        """This rank's part, for numpy, torch and others to take by DLPack."""
        return self.peer_array(self.rank)

    @property
    def local(self) -> numpy.ndarray:
        """This rank's part as a numpy array, without a copy."""
        return self.array.numpy()

    def peer_array(self, rank: int) -> Array:
        """Rank `rank`'s part, for numpy, torch and others to take by DLPack."""
        view = self._handle.view(rank, self._nbytes, self._offset)
        return view.view(self._dtype, self._shape)

    def peer(self, rank: int) -> numpy.ndarray:
        """Rank `rank`'s part as a numpy array, without a copy.

        Who reads it waits until its owner has written it, and the other way round: by `barrier` or by signals.
        """
        return self.peer_array(rank).numpy()

    def barrier(self, channel: int = 0, timeout: float | None = None, *, stream: int | None = None) -> None:
        """Waits for all ranks in this memory's pad; what any of them wrote before, all see after."""
        self._handle.barrier(channel, _milliseconds(timeout), stream or 0)

    def put_signal(self, to: int, channel: int = 0, timeout: float | None = None, *, stream: int | None = None) -> None:
        """Signals to rank `to` in this memory's pad; its `wait_signal` then sees what this rank wrote before."""
        self._handle.put_signal(to, channel, _milliseconds(timeout), stream or 0)

    def wait_signal(
        self, source: int, channel: int = 0, timeout: float | None = None, *, stream: int | None = None
    ) -> None:
        """Waits for a signal of rank `source` in this memory's pad and takes it."""
        self._handle.wait_signal(source, channel, _milliseconds(timeout), stream or 0)

    def all_reduce(
        self, op: str = "sum", *, out: Any = None, algorithm: str = "auto", stream: int | None = None
    ) -> Any:
        """Reduces all ranks' arrays: in place, or into `out`. Gives back the result."""
        self._handle.all_reduce(self._dtype, op, *self._span, out=out, algorithm=algorithm, stream=stream)
        return self.array if out is None else out

    def reduce(self, op: str = "sum", root: int = 0, *, out: Any = None, stream: int | None = None) -> Any:
        """Reduces all ranks' arrays into `out` of rank `root`, a new array by default; others get None."""
        out = self._at(root, out, self._shape)
        self._handle.reduce(self._dtype, op, *self._span, root, out, stream=stream)
        return out

    def reduce_scatter(self, op: str = "sum", *, axis: int = 0, out: Any = None, stream: int | None = None) -> Any:
        """Reduces all ranks' arrays, of which rank r gets the r-th equal part along the first axis (0) or the last (-1)."""
        shape = self._cut(axis)
        out = self._new(shape) if out is None else out
        last = axis % len(self._shape) == len(self._shape) - 1
        columns = self._shape[-1] if last and len(self._shape) > 1 else None
        self._handle.reduce_scatter(self._dtype, op, *self._span, out, columns=columns or None, stream=stream)
        return out

    def all_gather(self, *, out: Any = None, stream: int | None = None) -> Any:
        """All ranks' arrays, by rank, in a new first axis."""
        out = self._new((self.size, *self._shape)) if out is None else out
        self._handle.all_gather(self._dtype, *self._span, out, stream=stream)
        return out

    def gather(self, root: int = 0, *, out: Any = None, stream: int | None = None) -> Any:
        """As `all_gather`, on rank `root`; others get None."""
        out = self._at(root, out, (self.size, *self._shape))
        self._handle.gather(self._dtype, *self._span, root, out, stream=stream)
        return out

    def scatter(self, root: int = 0, *, out: Any = None, stream: int | None = None) -> Any:
        """The r-th equal part along the first axis of rank `root`'s array, on rank r."""
        out = self._new(self._cut(0)) if out is None else out
        self._handle.scatter(self._dtype, *self._span, root, out, stream=stream)
        return out

    def broadcast(self, root: int = 0, *, stream: int | None = None) -> Any:
        """The array becomes that of rank `root`. Gives it back."""
        self._handle.broadcast(self._dtype, *self._span, root, stream=stream)
        return self.array

    def all_to_all(self, *, out: Any = None, stream: int | None = None) -> Any:
        """The first axis is one equal part for each rank; gives back the parts that all ranks have for this one."""
        self._cut(0)
        out = self._new(self._shape) if out is None else out
        self._handle.all_to_all(self._dtype, *self._span, out, stream=stream)
        return out

    def all_to_all_v(
        self,
        splits: Symmetric,
        out: Any,
        received: Any = None,
        *,
        major_align: int | None = None,
        offsets: bool = False,
        stream: int | None = None,
    ) -> Any:
        """Sends rows (entries of the first axis) to ranks, of which each knows only how many it sends.

        `splits` has one int64 number of rows for each rank. `out` becomes the rows for this rank, by source; what is given
        back, or put into `received`, are the numbers of rows that came, and then the first row of each.

        With `major_align`, `splits` has a number for each expert of each rank, and `out` is ordered by expert, of which each
        begins at a multiple of `major_align` rows. With `offsets`, the way back: `splits` is what that gave as `received`.
        """
        if received is None:
            received = splits._new((splits._count if offsets else 2 * splits._count,))
        self._handle.all_to_all_v(
            self._dtype,
            *self._span,
            math.prod(self._shape[1:]),
            (splits._handle, *splits._span),
            out,
            received,
            major_align=major_align,
            offsets=offsets,
            stream=stream,
        )
        return received

    def put(self, rank: int, data: Any, at: int = 0, *, stream: int = 0) -> None:
        """Copies `data` to rank `rank`'s array, from element `at` on; a later signal or barrier shows it to others.

        It is of the array's type, or of none, such as bytes.
        """
        self._handle.put(rank, self._byte("put", data, at), data, stream=stream)

    def get(self, rank: int, out: Any, at: int = 0, *, stream: int = 0) -> Any:
        """Copies elements of rank `rank`'s array, from element `at` on, to `out`: as many as it has room for."""
        self._handle.get(rank, self._byte("get", out, at), out, stream=stream)
        return out

    def __repr__(self) -> str:
        shape, dtype = self._shape, self._dtype
        return f"symmem.Symmetric(shape={shape}, dtype={dtype!r}, rank {self.rank} of {self.size})"

    def _byte(self, op: str, data: Any, at: int) -> int:
        """Where element `at` lies in the memory, if what there is of `data` fits this array from there on."""
        _, nbytes, dtype = span(data)
        # Whatever has a type has it by DLPack; buffers are bytes of any type.
        if hasattr(data, "__dlpack__") and dtype != self._dtype:
            raise Usage(f"{op}: rank {self.rank}: expected an array of {self._dtype}, got one of {dtype}")
        first = at * Array.itemsize_of(self._dtype)
        if at < 0 or first + nbytes > self._nbytes:
            expected = f"elements within the {self._count} of {self._dtype}"
            raise Usage(f"{op}: rank {self.rank}: expected {expected}, got {nbytes} bytes at element {at}")
        return self._offset + first

    def _cut(self, axis: int) -> tuple[int, ...]:
        """The shape of one of as many equal parts along an axis as there are ranks."""
        dims = len(self._shape)
        if not dims or axis % dims not in (0, dims - 1) or self._shape[axis] % self.size:
            expected = f"a first or last axis divisible by the {self.size} ranks"
            raise Usage(f"rank {self.rank}: expected {expected}, got axis {axis} of {self._shape}")
        shape = list(self._shape)
        shape[axis] //= self.size
        return tuple(shape)

    def _at(self, root: int, out: Any, shape: tuple[int, ...]) -> Any:
        return self._new(shape) if out is None and self.rank == root else out

    def _new(self, shape: tuple[int, ...]) -> numpy.ndarray:
        """A new array of the same type, where numpy has it."""
        import numpy

        try:
            if self._handle.device == "cpu":
                return numpy.empty(shape, self._dtype)
        except TypeError:
            pass
        where = self._handle.device
        raise Usage(f"expected an `out`, for numpy has no {self._dtype} on {where}, got None")

"""Symmetric memory with a shape and a type."""

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
    """Allocates memory of this rank for a later `rendezvous`. Not collective.

    `dtype` is a name ("float32", "bfloat16", …) or a type of numpy or torch. With `persistent_id`, the memory is kept when it is
    no longer used, and the next call with the same id returns it with its contents. `backend` is that of device memory, as for
    `Group.alloc`: "cuda", "nccl", or "nvshmem", which all ranks of the group allocate together.
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
    """Maps all ranks' memory of `array`. The first call for a memory and a group is collective; later calls are local.

    `array` comes from `empty`, or is any array or tensor in such memory. It must be the same part of the memory on all ranks.
    """
    address, _, dtype = span(array)
    memory = find(address)
    if memory is None:
        raise Usage(f"rendezvous: rank {group.rank}: expected an array in symmetric memory, got one at {address:#x}")
    return Symmetric(memory.rendezvous(group), dtype, array.shape, address - memory.address)


def _milliseconds(timeout: float | None) -> int:
    """A timeout in milliseconds, as handles take it; 0 is the group's."""
    if timeout is None:
        return 0
    if not timeout > 0:
        raise Usage(f"timeout: expected a number of seconds above 0, got {timeout}")
    return max(1, round(min(timeout, 1e12) * 1000))


class Symmetric:
    """The same array on every rank of a group, as mapped into this process.

    All ranks call a collective, with matching arguments. If the arguments do not match, all ranks get a `Mismatch`, and nothing is
    done. No thread of any rank may access the array during a collective. Reductions give the same bits on every rank, with every
    algorithm.

    On a device, calls are put into `stream`: the address of a `CUstream`, such as `torch.cuda.current_stream().cuda_stream`, or the
    default stream. The array and `out` must not be accessed until the stream has completed the call. `handle.synchronize` waits for
    that, and raises the failure of a call.

    If a collective times out or is interrupted, all ranks must call `group.resync()`. Then the group and this memory work again. If a
    rank is lost, the others continue with ``x = symmem.rendezvous(x.array, group.shrink())``.
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
        """The handle of the memory that this array is part of: addresses, signals, sizes."""
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
        """The number of ranks in the group."""
        return self._handle.size

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each rank's array."""
        return self._shape

    @property
    def dtype(self) -> str:
        """The name of the element type."""
        return self._dtype

    @property
    def array(self) -> Array:
        """This rank's array, for numpy, torch and others, through DLPack."""
        return self.peer_array(self.rank)

    @property
    def local(self) -> numpy.ndarray:
        """This rank's array as a numpy array, without a copy."""
        return self.array.numpy()

    def peer_array(self, rank: int) -> Array:
        """Rank `rank`'s array, for numpy, torch and others, through DLPack. Unavailable for a rank on another host: use `get`."""
        view = self._handle.view(rank, self._nbytes, self._offset)
        return view.view(self._dtype, self._shape)

    def peer(self, rank: int) -> numpy.ndarray:
        """Rank `rank`'s array as a numpy array, without a copy.

        Use `barrier` or signals so that no rank reads elements while another writes them. Unavailable for a rank on another host: use
        `get` and `put`.
        """
        return self.peer_array(rank).numpy()

    def barrier(self, channel: int = 0, timeout: float | None = None, *, stream: int | None = None) -> None:
        """Waits for all ranks, in this memory's signal pad. What any rank wrote before the barrier, all see after it."""
        self._handle.barrier(channel, _milliseconds(timeout), stream or 0)

    def put_signal(self, to: int, channel: int = 0, timeout: float | None = None, *, stream: int | None = None) -> None:
        """Signals rank `to` in this memory's signal pad. Its `wait_signal` returns, and sees what this rank wrote before."""
        self._handle.put_signal(to, channel, _milliseconds(timeout), stream or 0)

    def wait_signal(
        self, source: int, channel: int = 0, timeout: float | None = None, *, stream: int | None = None
    ) -> None:
        """Waits for a signal from rank `source` in this memory's signal pad, and clears it."""
        self._handle.wait_signal(source, channel, _milliseconds(timeout), stream or 0)

    def all_reduce(
        self, op: str = "sum", *, out: Any = None, algorithm: str = "auto", stream: int | None = None
    ) -> Any:
        """Reduces all ranks' arrays in place, or into `out`. Returns the result."""
        name = "all_reduce" if out is None else "all_reduce_into"
        self._run(name, out, op=op, algorithm=algorithm, stream=stream)
        return self.array if out is None else out

    def reduce(self, op: str = "sum", root: int = 0, *, out: Any = None, stream: int | None = None) -> Any:
        """Reduces all ranks' arrays into `out` of rank `root`, by default a new array. Returns None on other ranks."""
        return self._run("reduce", self._at(root, out, self._shape), op=op, root=root, stream=stream)

    def reduce_scatter(self, op: str = "sum", *, axis: int = 0, out: Any = None, stream: int | None = None) -> Any:
        """Reduces all ranks' arrays and gives rank r the r-th equal part along the first axis (0) or the last (-1)."""
        shape = self._cut("reduce_scatter", axis)
        out = self._new(shape) if out is None else out
        dims, columns = len(self._shape), self._shape[-1]
        if dims > 1 and axis % dims == dims - 1 and columns:
            return self._run("reduce_scatter_last_dim", out, op=op, columns=columns, stream=stream)
        return self._run("reduce_scatter", out, op=op, stream=stream)

    def all_gather(self, *, out: Any = None, stream: int | None = None) -> Any:
        """Returns all ranks' arrays along a new first axis, in rank order."""
        out = self._new((self.size, *self._shape)) if out is None else out
        return self._run("all_gather", out, stream=stream)

    def gather(self, root: int = 0, *, out: Any = None, stream: int | None = None) -> Any:
        """As `all_gather`, on rank `root`. Returns None on other ranks."""
        return self._run("gather", self._at(root, out, (self.size, *self._shape)), root=root, stream=stream)

    def scatter(self, root: int = 0, *, out: Any = None, stream: int | None = None) -> Any:
        """Returns on rank r the r-th equal part of rank `root`'s array along the first axis."""
        out = self._new(self._cut("scatter", 0)) if out is None else out
        return self._run("scatter", out, root=root, stream=stream)

    def broadcast(self, root: int = 0, *, stream: int | None = None) -> Any:
        """Copies rank `root`'s array to all ranks. Returns this rank's array."""
        self._run("broadcast", root=root, stream=stream)
        return self.array

    def all_to_all(self, *, out: Any = None, stream: int | None = None) -> Any:
        """Sends the r-th equal part along the first axis to rank r. Returns the parts received, in rank order."""
        self._cut("all_to_all", 0)
        return self._run("all_to_all", self._new(self._shape) if out is None else out, stream=stream)

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
        """Sends rows (entries of the first axis) to ranks that do not know how many they will receive.

        `splits` has one int64 number of rows for each rank. `out` receives the rows for this rank, in the order of their senders.
        Returns, or puts into `received`, the number of rows from each sender, and then the first row of each.

        With `major_align`, `splits` has a number for each expert of each rank, and `out` is ordered by expert. The rows of each
        expert begin at a multiple of `major_align`. With `offsets`, rows go back from experts: `splits` is the `received` of that
        call.
        """
        if major_align is not None and major_align < 1:
            raise Usage(f"all_to_all_v: rank {self.rank}: expected a major_align of at least 1, got {major_align}")
        if received is None:
            received = splits._new((splits._count if offsets else 2 * splits._count,))
        align = 0 if offsets else major_align
        rows = (math.prod(self._shape[1:]), (splits._handle, *splits._span), received, align)
        self._run("all_to_all_v", out, rows=rows, stream=stream)
        return received

    def _run(self, name: str, out: Any = None, **arguments: Any) -> Any:
        self._handle.collective(name, self._dtype, *self._span, out, **arguments)
        return out

    def put(self, rank: int, data: Any, at: int = 0, *, stream: int = 0) -> None:
        """Copies `data` to rank `rank`'s array at element `at`. A later signal or barrier makes it visible to others.

        `data` has the array's type, or is a buffer without a type, such as bytes.
        """
        self._handle.put(rank, self._byte("put", data, at), data, stream=stream)

    def get(self, rank: int, out: Any, at: int = 0, *, stream: int = 0) -> Any:
        """Fills `out` with elements of rank `rank`'s array, from element `at`. Returns `out`."""
        self._handle.get(rank, self._byte("get", out, at), out, stream=stream)
        return out

    def __repr__(self) -> str:
        shape, dtype = self._shape, self._dtype
        return f"symmem.Symmetric(shape={shape}, dtype={dtype!r}, rank {self.rank} of {self.size})"

    def _byte(self, op: str, data: Any, at: int) -> int:
        """The byte offset of element `at` in the memory. Refuses `data` that does not fit there."""
        _, nbytes, dtype = span(data)
        # Arrays tell their type by DLPack; buffers are bytes of any type.
        if hasattr(data, "__dlpack__") and dtype != self._dtype:
            raise Usage(f"{op}: rank {self.rank}: expected an array of {self._dtype}, got one of {dtype}")
        first = at * Array.itemsize_of(self._dtype)
        if at < 0 or first + nbytes > self._nbytes:
            expected = f"elements within the {self._count} of {self._dtype}"
            raise Usage(f"{op}: rank {self.rank}: expected {expected}, got {nbytes} bytes at element {at}")
        return self._offset + first

    def _cut(self, op: str, axis: int) -> tuple[int, ...]:
        """The shape of one rank's part, where an axis is divided among all ranks."""
        dims = len(self._shape)
        if not dims or axis % dims not in (0, dims - 1) or self._shape[axis] % self.size:
            expected = f"a first or last axis divisible by the {self.size} ranks"
            raise Usage(f"{op}: rank {self.rank}: expected {expected}, got axis {axis} of {self._shape}")
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
        raise Usage(f"rank {self.rank}: expected an `out`, as numpy has no {self._dtype} on {where}, got None")

"""The native half of the package: classes over those of the Rust library. See there for what each call orders."""

from collections.abc import Sequence
from typing import Any, ClassVar, final

import numpy

__version__: str

class Error(RuntimeError):
    """What went wrong."""

class Unavailable(Error):
    """Something this call needs does not exist on this machine."""

    what: str | None
    why: str | None

class System(Error, OSError):
    """A call into the operating system failed."""

    call: str | None
    errno: int | None

class Driver(Error):
    """A call into a device's driver failed."""

    call: str | None
    why: str | None

class Mismatch(Error):
    """The ranks' arguments do not fit together. Every rank gets this, and nothing was done."""

    op: str | None
    what: str | None
    rank: int | None
    ours: str | None
    theirs: str | None

class PeerLost(Error):
    """A peer died or left while it was needed. Its group can go on without it: see `Group.shrink`."""

    rank: int | None
    during: str | None
    how: str | None

class PeerFailed(Error):
    """A peer lives, but could not do its part; it has its own error."""

    op: str | None
    rank: int | None
    reason: str | None

class Timeout(Error, TimeoutError):
    """A wait ended at its deadline."""

    op: str | None
    channel: int | None
    waiting_for: list[int] | None
    after: float | None

class Protocol(Error):
    """The other end of a connection did not keep to the protocol, or ended it."""

    peer: str | None
    expected: str | None
    got: str | None

class Usage(Error, ValueError):
    """The call itself is wrong, and nothing was done."""

    op: str | None
    rank: int | None
    expected: str | None
    got: str | None

@final
class Array:
    """A typed view of memory with n dimensions, in C order, which it keeps alive."""

    __array_interface__: ClassVar[Any]
    __cuda_array_interface__: ClassVar[Any]
    @staticmethod
    def itemsize_of(dtype: Any) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def ndim(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def device(self) -> str: ...
    def view(self, dtype: Any = None, shape: Sequence[int] | None = None, offset: int = 0) -> Array: ...
    def numpy(self) -> numpy.ndarray: ...
    def __array__(self, *arguments: Any, **options: Any) -> None: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...

@final
class Memory:
    """An allocation of this rank's symmetric memory. Arrays and handles of it keep the memory too."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> str: ...
    def view(self, dtype: Any = None, shape: Sequence[int] | None = None, offset: int = 0) -> Array: ...
    def rendezvous(self, group: Group) -> Handle: ...
    def close(self) -> None: ...

@final
class Pool:
    """Cuts small allocations from large ones."""

    def alloc(self, nbytes: int) -> Memory: ...
    @property
    def usage(self) -> tuple[int, int]: ...

@final
class Handle:
    """All ranks' memory of one rendezvous, as mapped into this process."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def group(self) -> Group: ...
    @property
    def group_name(self) -> str: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def buffer_ptrs(self) -> list[int]: ...
    @property
    def buffer_ptrs_dev(self) -> int: ...
    @property
    def signal_pad_ptrs(self) -> list[int]: ...
    @property
    def signal_pad_ptrs_dev(self) -> int: ...
    @property
    def signal_pad_size(self) -> int: ...
    @property
    def multicast_ptr(self) -> int: ...
    @property
    def device(self) -> str: ...
    def put_signal(self, dst: int, channel: int = 0, timeout_ms: int = 0, stream: int = 0) -> None: ...
    def wait_signal(self, src: int, channel: int = 0, timeout_ms: int = 0, stream: int = 0) -> None: ...
    def barrier(self, channel: int = 0, timeout_ms: int = 0, stream: int = 0) -> None: ...
    def synchronize(self, stream: int = 0) -> None: ...
    def view(self, rank: int, nbytes: int | None = None, offset: int = 0) -> Array: ...
    def pad_view(self, rank: int, nbytes: int | None = None, offset: int = 0) -> Array: ...
    def all_reduce(
        self,
        dtype: Any,
        op: str,
        offset: int,
        count: int,
        *,
        out: Any = None,
        algorithm: str = "auto",
        stream: int | None = None,
    ) -> None: ...
    def reduce_scatter(
        self,
        dtype: Any,
        op: str,
        offset: int,
        count: int,
        out: Any,
        *,
        rows: int | None = None,
        stream: int | None = None,
    ) -> None: ...
    def reduce(
        self, dtype: Any, op: str, offset: int, count: int, root: int, out: Any = None, *, stream: int | None = None
    ) -> None: ...
    def all_gather(self, dtype: Any, offset: int, count: int, out: Any, *, stream: int | None = None) -> None: ...
    def all_to_all(self, dtype: Any, offset: int, count: int, out: Any, *, stream: int | None = None) -> None: ...
    def broadcast(self, dtype: Any, offset: int, count: int, root: int, *, stream: int | None = None) -> None: ...
    def gather(
        self, dtype: Any, offset: int, count: int, root: int, out: Any = None, *, stream: int | None = None
    ) -> None: ...
    def scatter(
        self, dtype: Any, offset: int, count: int, root: int, out: Any, *, stream: int | None = None
    ) -> None: ...
    def all_to_all_v(
        self,
        dtype: Any,
        offset: int,
        count: int,
        row_len: int,
        splits: tuple[Handle, int, int],
        out: Any,
        received: Any,
        *,
        major_align: int | None = None,
        offsets: bool = False,
        stream: int | None = None,
    ) -> None: ...
    def put(self, rank: int, offset: int, data: Any, *, stream: int = 0) -> None: ...
    def get(self, rank: int, offset: int, out: Any, *, stream: int = 0) -> None: ...
    def fill32(self, rank: int, offset: int, value: int, count: int = 1, *, stream: int = 0) -> None: ...
    def write32(self, rank: int, offset: int, value: int, *, stream: int = 0) -> None: ...

class Group:
    """A set of ranks that work together."""

    timeout: float | None
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def name(self) -> str: ...
    @property
    def channels(self) -> int: ...
    @property
    def signal_pad_size(self) -> int: ...
    def subgroup(self, ranks: Sequence[int], name: str | None = None, timeout: float | None = None) -> Group | None: ...
    def barrier(self, timeout: float | None = None, channel: int = 0) -> None: ...
    def put_signal(self, to: int, channel: int = 0, timeout: float | None = None) -> None: ...
    def wait_signal(self, source: int, channel: int = 0, timeout: float | None = None) -> None: ...
    def check(self) -> None: ...
    def shrink(self, timeout: float | None = None) -> Group: ...
    def alloc(
        self,
        nbytes: int,
        *,
        device: str | int | None = None,
        pad_bytes: int | None = None,
        persistent_id: int | None = None,
    ) -> Memory: ...
    def pool(self, segment_bytes: int, *, device: str | int | None = None) -> Pool: ...
    def all_reduce(self, data: Any, op: str = "sum", *, dtype: Any = None) -> None: ...
    def all_gather(self, data: Any, out: Any, *, dtype: Any = None) -> None: ...
    def reduce_scatter(self, data: Any, out: Any, op: str = "sum", *, dtype: Any = None) -> None: ...
    def broadcast(self, data: Any, root: int = 0, *, dtype: Any = None) -> None: ...
    def all_to_all(self, data: Any, out: Any, *, dtype: Any = None) -> None: ...

@final
class World(Group):
    """All ranks of a job."""

    @staticmethod
    def from_env(
        timeout: float | None = None, *, signal_pad_size: int | None = None, backend: str | None = None
    ) -> World: ...
    @staticmethod
    def connect(
        rank: int,
        size: int,
        *,
        store: Any = None,
        timeout: float | None = None,
        signal_pad_size: int | None = None,
        backend: str | None = None,
    ) -> World: ...
    @property
    def local_rank(self) -> int: ...
    def close(self) -> None: ...
    def __enter__(self) -> World: ...
    def __exit__(self, *exception: object) -> None: ...

def keep_stream(device: int, stream: int) -> None: ...
def serve_pools(group: Group, pad_bytes: int) -> tuple[str, str]: ...
def find(address: int) -> Memory | None: ...
def span(array: Any) -> tuple[int, int, str]: ...
def close_all() -> None: ...
def signal_pad_size() -> int: ...
def set_signal_pad_size(bytes: int) -> None: ...

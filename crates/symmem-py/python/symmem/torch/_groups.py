"""The symmem group of each process group of torch.

Each process group gets a symmem world of its own at its first rendezvous. The ranks connect through the process group's store, or
through an all-gather of the group if it has `use_pg_for_symm_mem_rendezvous` set. Only the members of a group take part: ranks that
do not use symmetric memory are not waited for. A name that is used again for other ranks means another world.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group, _SymmetricMemory
from torch.distributed import distributed_c10d as c10d

from symmem import _native

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
WORD = 4


class Group:
    """The ranks of one process group, joined."""

    __slots__ = ("__weakref__", "_on_devices", "channels", "name", "native", "rank", "size")

    def __init__(self, name: str, rank: int, size: int, native: _native.World, pad_bytes: int) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.native = native
        _native.name_group(name, native)
        #: The number of channels of barrier(), put_signal() and wait_signal().
        self.channels = pad_bytes // (WORD * size)
        #: The last allocation on each device that was at a rendezvous.
        self._on_devices: dict[int, weakref.ref] = {}

    def note_handle(self, number: int, allocation: object) -> None:
        self._on_devices[number] = weakref.ref(allocation)

    def handle_on(self, number: int) -> _native.Handle | None:
        """A handle of device memory that the group has mapped, if there is any."""
        known = self._on_devices.get(number)
        allocation = known() if known is not None else None
        return None if allocation is None else allocation.known_handle(self)

    def check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise RuntimeError(f"rank must be in [0, {self.size}) (got {rank})")

    def check_channel(self, channel: int) -> None:
        if 0 <= channel < self.channels:
            return
        if channel < 0:
            raise RuntimeError(f"channel must be non-negative (got {channel})")
        if channel >= self.channels:
            raise RuntimeError(
                "The maximum supported channel for barrier(), put_signal() and wait_signal() is "
                f"{self.channels - 1} (got {channel})"
            )


#: torch without CUDA has no such function.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

#: Addresses of streams that are never destroyed, as the library knows, by the device's number.
_kept_streams: defaultdict[int, set[int]] = defaultdict(set)


def stream(number: int) -> int:
    """The address of the current stream of a CUDA device."""
    address = _current_stream(number)
    if address not in _kept_streams[number]:
        _keep_stream(number, address)
    return address


def _keep_stream(number: int, address: int) -> None:
    # torch never destroys its own streams; the id of an external stream is its address.
    if torch.cuda.current_stream(number).stream_id != address or address == 0:
        _native.keep_stream(number, address)
        _kept_streams[number].add(address)


class _Membership:
    """The state of one process group: how often this rank tried to join, and the result."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.attempts = 0
        self.group: Group | None = None


_members: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
#: A cache: the process group that a name meant last, its group and its world. An entry goes with its process group.
_last: dict[str, tuple[weakref.ref, Group, _native.World]] = {}
_registered: dict[str, tuple[_Membership, int, int, c10d.Store]] = {}


def register(name: str, rank: int, size: int, store: c10d.Store) -> None:
    """Register a group that is not a process group, as `set_group_info` does."""
    _registered[name] = (_Membership(), rank, size, store)


def is_registered(name: str) -> bool:
    """Whether a process group or a registered group has that name."""
    return is_process_group(name) or name in _registered


def process_group(name: str) -> dist.ProcessGroup | None:
    """The process group of that name, if there is one."""
    try:
        return _resolve_process_group(name)
    except RuntimeError:
        return None


def is_process_group(name: str) -> bool:
    """Whether a process group has that name."""
    return process_group(name) is not None


def has_joined(group: dist.ProcessGroup) -> bool:
    """Whether a process group has a world already."""
    membership = _members.get(group)
    return membership is not None and membership.group is not None


def of(name: str) -> Group:
    """The group of that name. The first call is collective over its ranks."""
    try:
        process_group = _resolve_process_group(name)
    except RuntimeError:
        if name not in _registered:
            raise
        membership, *where = _registered[name]
        return _joined(membership, lambda attempt: _join_by_store(name, *where, attempt))
    last = _last.get(name)
    if last is not None and last[0]() is process_group:
        return last[1]
    group = _of_process_group(name, process_group)

    def forget(gone: weakref.ref) -> None:
        if name in _last and _last[name][0] is gone:
            del _last[name]

    _last[name] = (weakref.ref(process_group, forget), group, group.native)
    return group


def world_of(name: str) -> _native.World:
    """The world of the group of that name. As `of`, and faster for a name that was used before."""
    last = _last.get(name)
    if last is not None:
        try:
            if last[0]() is _resolve_process_group(name):
                return last[2]
        except RuntimeError:
            pass  # `of` says what the name means now
    return of(name).native


def _of_process_group(name: str, process_group: dist.ProcessGroup) -> Group:
    membership = _members.setdefault(process_group, _Membership())
    if getattr(process_group, "use_pg_for_symm_mem_rendezvous", False):
        return _joined(membership, lambda attempt: _join_by_group(name, process_group, attempt))
    store = c10d._get_process_group_store(process_group)
    where = (process_group.rank(), process_group.size(), store)
    return _joined(membership, lambda attempt: _join_by_store(name, *where, attempt))


def _joined(membership: _Membership, join: Callable[[int], Group]) -> Group:
    with membership.lock:
        if membership.group is None:
            membership.attempts += 1
            membership.group = join(membership.attempts)
        return membership.group


def _join_by_store(name: str, rank: int, size: int, store: c10d.Store, attempt: int) -> Group:
    store = c10d.PrefixStore(f"symmem/{attempt}", store)
    proposal = _proposal()
    _check(name, _exchange(store, rank, size, proposal))
    group = _join(name, rank, size, store, proposal)
    # All ranks have read the proposals. A later group of the same name must not find them.
    store.delete_key(f"proposal/{rank}")
    return group


def _join_by_group(name: str, process_group: dist.ProcessGroup, attempt: int) -> Group:
    """Join through one all-gather of the group, in which rank 0 sends the address of its store.

    Ranks of other hosts cannot reach that. If there are any, all ranks join through the process group's store.
    """
    rank, size = process_group.rank(), process_group.size()
    with tempfile.TemporaryDirectory(prefix="symmem-") as folder:
        proposal = {**_proposal(), "store": f"unix:{folder}/store"}
        proposals = _gather(process_group, proposal)
        _check(name, proposals)
        if len({each["host"] for each in proposals}) > 1:
            store = c10d.PrefixStore(f"symmem/{attempt}", c10d._get_process_group_store(process_group))
            return _join(name, rank, size, store, proposal)
        # The folder is needed until all ranks have connected, which this waits for.
        return _join(name, rank, size, proposals[0]["store"], proposal)


#: The size of a rank's proposal: a socket's path has at most 108 bytes, and the rest is short.
PROPOSAL_BYTES = 512


def _gather(process_group: dist.ProcessGroup, proposal: dict) -> list[dict]:
    """Every rank's proposal, by one all-gather of bytes; an all-gather of objects would need two."""
    text = json.dumps(proposal).encode()
    if len(text) > PROPOSAL_BYTES:
        raise RuntimeError(
            f"group: rank {process_group.rank()}: expected a proposal of at most {PROPOSAL_BYTES} bytes, got {len(text)}"
        )
    device = c10d._get_object_coll_device(process_group)
    mine = torch.frombuffer(bytearray(text.ljust(PROPOSAL_BYTES)), dtype=torch.uint8).to(device)
    every = torch.empty(process_group.size() * PROPOSAL_BYTES, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(every, mine, group=process_group)
    return [json.loads(bytes(one.tolist())) for one in every.cpu().split(PROPOSAL_BYTES)]


def _join(name: str, rank: int, size: int, store: c10d.Store | str, proposal: dict) -> Group:
    pad_bytes = proposal["pad"]
    world = _native.World.connect(rank, size, store=store, backend="host", signal_pad_size=pad_bytes)
    return Group(name, rank, size, world, pad_bytes)


def _proposal() -> dict:
    return {"pad": _SymmetricMemory.signal_pad_size, "host": _host()}


def _exchange(store: c10d.Store, rank: int, size: int, proposal: dict) -> list[dict]:
    store.set(f"proposal/{rank}", json.dumps(proposal))
    return [json.loads(store.get(f"proposal/{peer}")) for peer in range(size)]


def _check(name: str, proposals: list[dict]) -> None:
    """Refuse proposals that differ. All ranks have the same proposals, so that all ranks raise."""
    pads = [proposal["pad"] for proposal in proposals]
    if len(set(pads)) > 1:
        raise RuntimeError(f"group {name}: ranks disagree on the signal pad size: {pads} bytes by rank")


def _host() -> str:
    """The identity of this host, as the library tells hosts apart."""
    named = os.environ.get("SYMMEM_HOST")
    if named:
        return named
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""

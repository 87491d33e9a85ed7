"""From a process group of torch to a symmem group of the same ranks.

Each process group gets a symmem world of its own, joined at the first rendezvous: through the process group's store, or, where
it has `use_pg_for_symm_mem_rendezvous` set, through a collective of its own. So only the members of a group take part in it:
ranks that never touch symmetric memory are never waited for, and a name that is used again for other ranks means another
world.
"""

from __future__ import annotations

import json
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
        #: How many channels barrier(), put_signal() and wait_signal() have.
        self.channels = pad_bytes // (WORD * size)
        #: The allocation of each device that was at a rendezvous last.
        self._on_devices: dict[int, weakref.ref] = {}

    def note_handle(self, number: int, allocation: object) -> None:
        self._on_devices[number] = weakref.ref(allocation)

    def handle_on(self, number: int) -> _native.Handle | None:
        """Memory of a device that the group has mapped, if there is any."""
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

#: Addresses of streams that the library knows to live for ever, by the device's number.
_kept_streams: defaultdict[int, set[int]] = defaultdict(set)


def stream(number: int) -> int:
    """The current stream of the CUDA device of that number, as the driver knows it."""
    address = _current_stream(number)
    if address not in _kept_streams[number]:
        _keep_stream(number, address)
    return address


def _keep_stream(number: int, address: int) -> None:
    # torch never destroys its own streams; the id of one that it was given is its address.
    if torch.cuda.current_stream(number).stream_id != address or address == 0:
        _native.keep_stream(number, address)
        _kept_streams[number].add(address)


class _Membership:
    """What this process knows of one process group: how often it tried to join, and the result."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.attempts = 0
        self.group: Group | None = None


_members: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
#: The process group that a name meant last, and its group: quicker to ask than the former, and keeps neither.
_last: dict[str, tuple[weakref.ref, weakref.ref]] = {}
_registered: dict[str, tuple[_Membership, int, int, c10d.Store]] = {}


def register(name: str, rank: int, size: int, store: c10d.Store) -> None:
    """Name a group that is no process group: what `set_group_info` does."""
    _registered[name] = (_Membership(), rank, size, store)


def is_registered(name: str) -> bool:
    """Whether there is a process group of that name, or one was registered."""
    return is_process_group(name) or name in _registered


def is_process_group(name: str) -> bool:
    """Whether there is a process group of that name."""
    try:
        _resolve_process_group(name)
    except RuntimeError:
        return False
    return True


def of(name: str) -> Group:
    """The group of that name; collective over its ranks the first time."""
    try:
        process_group = _resolve_process_group(name)
    except RuntimeError:
        if name not in _registered:
            raise
        membership, *where = _registered[name]
        return _joined(membership, lambda attempt: _join_by_store(name, *where, attempt))
    last = _last.get(name)
    if last is not None and last[0]() is process_group:
        return last[1]()
    group = _of_process_group(name, process_group)
    _last[name] = (weakref.ref(process_group), weakref.ref(group))
    return group


def _of_process_group(name: str, process_group: dist.ProcessGroup) -> Group:
    membership = _members.setdefault(process_group, _Membership())
    if getattr(process_group, "use_pg_for_symm_mem_rendezvous", False):
        return _joined(membership, lambda attempt: _join_by_group(name, process_group))
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
    # Every rank has read all proposals before it connected. A later group of the same name must not find them.
    store.delete_key(f"proposal/{rank}")
    return group


def _join_by_group(name: str, process_group: dist.ProcessGroup) -> Group:
    """All that ranks tell each other goes through one all-gather of the group: rank 0 tells where its own store is."""
    rank, size = process_group.rank(), process_group.size()
    with tempfile.TemporaryDirectory(prefix="symmem-") as folder:
        proposal = {**_proposal(), "store": f"unix:{folder}/store"}
        proposals = _gather(process_group, proposal)
        _check(name, proposals)
        # Nobody is done with this before all have found the store.
        return _join(name, rank, size, proposals[0]["store"], proposal)


#: Bytes of what a rank tells all others: a socket's path is 108 at most, and the rest is short.
PROPOSAL_BYTES = 512


def _gather(process_group: dist.ProcessGroup, proposal: dict) -> list[dict]:
    """Every rank's proposal, by one all-gather of as many bytes of each: that of objects would make two."""
    text = json.dumps(proposal).encode()
    if len(text) > PROPOSAL_BYTES:
        raise RuntimeError(
            f"group: what this rank has to tell others is {len(text)} bytes, of at most {PROPOSAL_BYTES}"
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
    return {"pad": _SymmetricMemory.signal_pad_size, "machine": _machine()}


def _exchange(store: c10d.Store, rank: int, size: int, proposal: dict) -> list[dict]:
    store.set(f"proposal/{rank}", json.dumps(proposal))
    return [json.loads(store.get(f"proposal/{peer}")) for peer in range(size)]


def _check(name: str, proposals: list[dict]) -> None:
    """All ranks see the same proposals, so all come to the same verdict."""
    pads = [proposal["pad"] for proposal in proposals]
    if len(set(pads)) > 1:
        raise RuntimeError(f"group {name}: ranks disagree on the signal pad size: {pads} bytes by rank")
    machines = [proposal["machine"] for proposal in proposals]
    if len(set(machines)) > 1:
        raise RuntimeError(
            f"group {name}: symmetric memory on CPU needs all ranks on one machine, and theirs are {machines}"
        )


def _machine() -> str:
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""

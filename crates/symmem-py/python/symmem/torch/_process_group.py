"""The backend `symmem` of `torch.distributed`: process groups whose calls on CPU tensors are this library's.

torch calls a group from Python and from C++. A backend of a group alone would be called by both through torch's dispatcher, and its works
would come back as works of C++ that know neither whether they are done nor who sent a message. So the group itself is a subclass, which
Python calls directly. It also has the backend, for the calls that C++ makes to that.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.distributed import distributed_c10d as c10d

from symmem import _native
from symmem.torch import _buckets, _versions
from symmem.torch._operations import Operations

NAME = "symmem"

#: The operations of a process group that `Operations` has, and older names of some.
OPERATIONS = [
    "allreduce",
    "allreduce_coalesced",
    "allreduce_sparse",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "broadcast",
    "allgather",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "gather",
    "gather_single",
    "scatter",
    "alltoall",
    "all_to_all_single",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
]
ALIASES = {
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "gather_into_tensor": "gather_single",
    "alltoall_base": "all_to_all_single",
}


class Backend(Operations, _c10d.Backend if _versions.has_backends() else object):
    """The calls on CPU tensors, as torch's backend of a device. An older torch has none in Python, and its group makes all calls."""

    # All that torch asks: without an answer here, its own property asks C++, which asks the property.
    supports_splitting = True
    supports_coalescing = supports_shrinking = supports_reconfigure = supports_window = False
    _supports_time_estimate = False

    def __init__(self, native: _native.Group, name: str, timeout: timedelta, label: str = NAME) -> None:
        if _versions.has_backends():
            _c10d.Backend.__init__(self, native.rank, native.size)
        Operations.__init__(self, native, name, label)
        self._options = _c10d.Backend.Options(NAME, timeout)

    @property
    def options(self) -> _c10d.Backend.Options:
        return self._options

    def getBackendName(self) -> str:
        return NAME

    def get_error(self) -> _c10d.ErrorType:
        try:
            self.native.check()
        except _native.Error:
            return _c10d.ErrorType.REMOTE_ERROR
        return _c10d.ErrorType.SUCCESS

    def supports_tensor_alloc(self, device: torch.device | int) -> bool:
        """Whether `allocate_tensor` serves a device. Not if C++ asks, by a number: it could not say what it wants."""
        return isinstance(device, torch.device) and device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of one dimension that peers read in place in collectives. Not a collective call."""
        if device.type != "cpu":
            raise self._usage_of_one("allocate_tensor", "the CPU as device", device)
        return _buckets.allocated(self, size, dtype)

    def shutdown(self) -> None:
        """Wait for all calls but receives, which end with an error. The default group also leaves the job."""
        self.calls.drain()
        self.calls.abort()
        self.calls.release()
        if isinstance(self.native, _native.World):
            self.native.close()


class ProcessGroup(dist.ProcessGroup):
    """A process group whose calls on CPU tensors are this library's. Those on other devices go to their backends."""

    def __init__(self, store: dist.Store, backend: Backend, others: dict[str, tuple]) -> None:
        where = (store,) if _versions.has_backends() else ()
        super().__init__(*where, backend.native.rank, backend.native.size)
        self.cpu = backend
        self._store = store
        # Also in place of gloo: for torch's C++, a backend of gloo's type or name is gloo's class.
        own = dist.ProcessGroup.BackendType.CUSTOM
        if _versions.has_backends():
            self._register_backend(torch.device("cpu"), own, backend)
        for device, (kind, other) in others.items():
            self._register_backend(torch.device(device), kind, other)
        kinds = [kind for kind, _ in others.values()]
        self._set_default_backend(kinds[0] if kinds else own)
        self._backends = [backend, *(other for _, other in others.values())]
        if not others:
            # Found before the methods of the class: a call has no way to go but this.
            for name in (*OPERATIONS, *ALIASES):
                setattr(self, name, getattr(backend, ALIASES.get(name, name)))

    def getBackendName(self) -> str:
        return NAME

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. The error names all that are missing, on every rank."""
        self.cpu.monitored_barrier(timeout, wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of all later calls."""
        for backend in self._backends:
            backend.set_timeout(timeout)

    def abort(self) -> None:
        """End all calls with an error, and refuse later ones."""
        for backend in self._backends:
            backend.abort()

    def shutdown(self) -> None:
        """Wait for all calls, and end the group."""
        for backend in self._backends:
            backend.shutdown()

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """A group of some of this group's ranks. Those ranks call it."""
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self.group_name}:{','.join(map(str, new_ranks))}"
        limit = timeout or self.cpu.options._timeout
        store = dist.PrefixStore(f"{name}/", self._store)
        native = _part(self.cpu.native, new_ranks, limit, store)
        group = ProcessGroup(store, Backend(native, name, limit, self.cpu.label), {})
        group._set_group_name(name)
        group._set_group_desc(group_desc or "undefined")
        return group


def _named(what: str) -> Callable:
    """A method of C++ that an older torch forwards to a group's backends, of which ours has none there."""

    def method(self: ProcessGroup, *given: str) -> str | None:
        if not given:
            return self.__dict__.get(what, "")
        self.__dict__[what] = given[0]
        return None

    return method


if not _versions.has_backends():
    for _what in ("GroupName", "GroupDesc"):
        for _verb in ("get", "set"):
            setattr(ProcessGroup, _verb + _what, _named(_what))


def _by_device(name: str) -> Callable:
    """An operation of a group that has backends of other devices too."""

    def call(self: ProcessGroup, *arguments: object, **named: object) -> object:
        if _is_on_cpu(arguments):
            return getattr(self.cpu, ALIASES.get(name, name))(*arguments, **named)
        return getattr(super(ProcessGroup, self), name)(*arguments, **named)

    # By this name torch knows that the class's own method asks for that of its base.
    call.__code__ = call.__code__.replace(co_name=name)
    call.__name__ = name
    return call


for _name in (*OPERATIONS, *ALIASES):
    if hasattr(dist.ProcessGroup, _name):
        setattr(ProcessGroup, _name, _by_device(_name))


def _is_on_cpu(arguments: tuple) -> bool:
    """Whether the first tensor of a call is, or the device of a barrier."""
    for argument in arguments:
        while isinstance(argument, list | tuple) and argument:
            argument = argument[0]
        if isinstance(argument, torch.Tensor):
            return argument.is_cpu
        if isinstance(argument, dist.BarrierOptions):
            return argument.device is None or argument.device.type == "cpu"
    return True


# Creation.


def register() -> None:
    """Make torch know the backend. torch calls it when a program first names the backend, as the package's metadata says.

    For an older torch, `_torch_start` does this.
    """
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


def create(options: c10d._DistributedBackendOptions, _: object = None) -> ProcessGroup:
    """The process group that torch asks for."""
    return _group(options, _joined(options), _others(options))


def _group(
    options: c10d._DistributedBackendOptions, native: _native.Group, others: dict[str, tuple], label: str = NAME
) -> ProcessGroup:
    _buckets.install(ProcessGroup)
    backend = Backend(native, options.group_id, options.timeout, label)
    return ProcessGroup(_store(options), backend, others)


def _store(options: c10d._DistributedBackendOptions) -> dist.Store:
    """The group's store. An older torch has only that of the device to give."""
    group = getattr(options, "process_group", None)
    return options.store if group is None else group.get_group_store()


def replace_gloo() -> None:
    """Make later process groups that are asked for as `gloo` groups of this library, if their ranks are on one host.

    `torch.distributed.get_backend` still says `gloo`. Groups with ranks on several hosts, and calls on CUDA tensors, are gloo's. The variable
    `SYMMEM_REPLACE_GLOO=1` does this when a program imports torch.
    """
    if not _versions.has_backends():
        raise RuntimeError(
            f"replace_gloo: expected torch 2.14 or later, got {torch.__version__}; ask for symmem by its name"
        )
    former = _plugin("gloo")
    if former.creator_fn.__module__ == __name__:
        return

    def create_or_gloo(options: c10d._DistributedBackendOptions, theirs: object = None) -> object:
        native = _joined(options)
        if len(native.hosts()) > 1:
            if isinstance(native, _native.World):
                native.close()
            return former.creator_fn(options, theirs)
        others = {}
        if torch.cuda.is_available():
            others["cuda"] = (dist.ProcessGroup.BackendType.GLOO, former.creator_fn(options, theirs))
        logging.getLogger("symmem").info("process group %s: symmem in place of gloo", options.group_id)
        return _group(options, native, others, "gloo")

    dist.Backend._plugins["GLOO"] = former._replace(creator_fn=create_or_gloo)


def _joined(options: c10d._DistributedBackendOptions) -> _native.Group:
    """The library's group of the same ranks: a part of the default group's if that is one of ours."""
    members = list(options.global_ranks_in_group)
    parent = dist.group.WORLD if members else None
    if isinstance(parent, ProcessGroup) and members == sorted(members):
        return _part(parent.cpu.native, members, options.timeout, options.store)
    return _world(options.group_rank, options.group_size, options.timeout, options.store)


def _part(parent: _native.Group, ranks: list[int], limit: timedelta, store: dist.Store) -> _native.Group:
    if ranks != sorted(ranks):  # the library numbers ranks in their order
        return _world(ranks.index(parent.rank), len(ranks), limit, store)
    # Without a name: torch uses a name again, and groups of the same ranks are made in the same order on all of them.
    return parent.subgroup(ranks, timeout=_seconds(limit))


def _world(rank: int, size: int, limit: timedelta, store: dist.Store) -> _native.World:
    return _native.World.connect(rank, size, store=store, timeout=_seconds(limit), backend="host")


def _seconds(limit: timedelta) -> float:
    return min(limit.total_seconds(), 1e9)


def _others(options: c10d._DistributedBackendOptions) -> dict[str, tuple]:
    """The backends of the group's other devices.

    torch takes a process group as the whole group, and makes no backend after it; nor does it tell its creator of the other devices.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = frame.f_locals.get("backend_config") if frame is not None else None
    wanted = config.get_device_backend_map() if isinstance(config, c10d.BackendConfig) else {}
    others = {device: name for device, name in wanted.items() if device != "cpu"}
    if others and not _versions.has_backends():
        text = f"process group {options.group_id}: expected the backend symmem for all devices, got {config}; "
        raise RuntimeError(text + "backends for each device need torch 2.14")
    return {device: _other(options, device, name) for device, name in others.items()}


def _plugin(name: str) -> c10d.Backend._BackendPlugin:
    """What torch makes a backend with. Its own are found by name too."""
    dist.Backend._ensure_backend_registered(name)
    return dist.Backend._plugins[name.upper()]


def _other(options: c10d._DistributedBackendOptions, device: str, name: str) -> tuple:
    kind = dist.Backend.backend_type_map.get(name, dist.ProcessGroup.BackendType.CUSTOM)
    try:
        return kind, options.process_group._get_backend(torch.device(device))
    except RuntimeError:
        pass  # torch has not made it yet
    plugin = _plugin(name)
    store = dist.PrefixStore(f"{device}/", _store(options))
    if not plugin.extended_api:
        return kind, plugin.creator_fn(store, options.group_rank, options.group_size, options.timeout)
    theirs = c10d._DistributedBackendOptions()
    for field in [
        "group_rank",
        "group_size",
        "timeout",
        "group_id",
        "global_ranks_in_group",
        "process_group",
        "split_from",
    ]:
        setattr(theirs, field, getattr(options, field))
    theirs.store = store
    return kind, plugin.creator_fn(theirs, None)

"""The backend `symmem` of `ray.util.collective`, for numpy arrays and torch's CPU tensors.

Import it in the driver and in every actor, or give `register` to Ray as the hook that sets up workers::

    ray.init(runtime_env={"worker_process_setup_hook": symmem.ray.register})
    ray.util.collective.create_collective_group(actors, 2, [0, 1], backend="symmem")
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import ray
from ray.experimental import internal_kv
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)

from symmem import _native
from symmem._ray_store import Server, Store

__all__ = ["Group", "register"]

NAME = "SYMMEM"

OPERATORS = {ReduceOp.SUM: "sum", ReduceOp.PRODUCT: "prod", ReduceOp.MIN: "min", ReduceOp.MAX: "max"}


def _collective(call: Callable[..., None]) -> Callable[..., None]:
    """A collective: if this rank refuses it, the others do not wait for it."""

    @functools.wraps(call)
    def made(self: Group, *arguments: Any, **named: Any) -> None:
        try:
            call(self, *arguments, **named)
        except (BufferError, TypeError, _native.Usage):
            with contextlib.suppress(_native.Error):
                self.world.refuse()
            raise

    return made


class Group(BaseGroup):
    """A collective group of Ray whose ranks are a `symmem.World`. Ray makes it."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        #: What other ranks find rank 0's store by. That of another job may have been left behind.
        self._key = f"symmem:{ray.get_runtime_context().get_job_id()}:{group_name}".encode()
        self._server: Server | None = None
        self._store: Store | None = None
        self._world: _native.World | None = None
        try:
            self._store = self._meet()
            if "SYMMEM_IFACE" not in os.environ:
                # Where ranks on other nodes reach this one: from a store that is an object, the library cannot tell.
                os.environ.setdefault("SYMMEM_ADDR", ray.util.get_node_ip_address())
            self._world = _native.World.connect(rank, world_size, store=self._store, backend="host")
            # Each rank has found the store by now.
            self._withdraw()
        except BaseException:
            self.destroy_group()
            raise

    @classmethod
    def backend(cls) -> str:
        """The name of the backend."""
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Whether groups can be made: always, once this package is installed."""
        return True

    @property
    def world(self) -> _native.World:
        """The ranks, for what Ray's interface has not, as `shrink` and `all_to_all`."""
        if self._world is None:
            raise _native.Usage(f"rank {self._rank} of collective group {self._group_name}: the group was destroyed")
        return self._world

    def destroy_group(self) -> None:
        """Leave the group. Later calls of the other ranks raise `symmem.PeerLost`."""
        world, self._world = self._world, None
        if world is not None:
            world.close()
        self._withdraw()
        if self._store is not None:
            self._store.close()
        if self._server is not None:
            self._server.close()

    # How ranks find each other.

    def _meet(self) -> Store:
        """The store of the group, which rank 0 serves and announces in Ray's own."""
        if self._rank == 0:
            self._server = Server(ray.util.get_node_ip_address(), secrets.token_hex(16))
            internal_kv._internal_kv_put(self._key, json.dumps(self._server.address).encode(), overwrite=True)
            return Store(*self._server.address)
        limit = _limit()
        deadline = time.monotonic() + limit
        found: Exception | None = None
        while time.monotonic() < deadline:
            announced = internal_kv._internal_kv_get(self._key)
            if announced is not None:
                try:
                    return Store(*json.loads(announced))
                except OSError as error:
                    found = error  # of a group of this name whose rank 0 is gone: the next one will replace it
            time.sleep(0.02)
        got = "it announced no store" if found is None else f"its store does not answer: {found}"
        raise _native.Timeout(
            f"rank {self._rank} of collective group {self._group_name}: rank 0 did not come within {limit:g} s: {got}"
        )

    def _withdraw(self) -> None:
        """Take the announcement away, unless it is that of a later group."""
        if self._server is None:
            return
        announced = internal_kv._internal_kv_get(self._key)
        if announced is not None and json.loads(announced) == self._server.address:
            internal_kv._internal_kv_del(self._key)

    # The operations, as Ray calls them: each tensor is in a list of its own.

    @_collective
    def allreduce(self, tensor: list, allreduce_options: AllReduceOptions = AllReduceOptions()) -> None:
        """Reduce a tensor of all ranks, in place."""
        target = self._target("allreduce", tensor)
        data = _dense(target)
        with self._within(allreduce_options):
            self.world.all_reduce(data, self._operator("allreduce", allreduce_options))
        _give_back(data, target)

    @_collective
    def barrier(self, barrier_options: BarrierOptions = BarrierOptions()) -> None:
        """Wait for all ranks."""
        with self._within(barrier_options):
            self.world.barrier()

    @_collective
    def reduce(self, tensor: list, reduce_options: ReduceOptions = ReduceOptions()) -> None:
        """Reduce a tensor to the root, in place. Other ranks' tensors stay as they are."""
        root = reduce_options.root_rank
        one = self._target if self._rank == root else self._one
        given = one("reduce", tensor)
        out = _empty(given) if self._rank == root else None
        with self._within(reduce_options):
            self.world.reduce(_dense(given), out, self._operator("reduce", reduce_options), root)
        if out is not None:
            given[...] = out

    @_collective
    def allgather(
        self, tensor_list: list, tensor: list, allgather_options: AllGatherOptions = AllGatherOptions()
    ) -> None:
        """Copy all ranks' tensors to the list, by rank."""
        given = self._one("allgather", tensor)
        targets = self._every("allgather", tensor_list, given)
        for target in targets:
            self._check_writable("allgather", target)
        out = _empty(given, self._world_size)
        with self._within(allgather_options):
            self.world.all_gather(_dense(given), out)
        _copy(out, targets)

    @_collective
    def broadcast(self, tensor: list, broadcast_options: BroadcastOptions = BroadcastOptions()) -> None:
        """Copy the root's tensor to all ranks."""
        root = broadcast_options.root_rank
        if self._rank == root:
            given = self._one("broadcast", tensor)
            # The library takes no array that may not be written, such as those that come from Ray's object store.
            data = _dense(given) if _is_writable(given) else given.copy()
        else:
            given = self._target("broadcast", tensor)
            data = _dense(given)
        with self._within(broadcast_options):
            self.world.broadcast(data, root)
        if self._rank != root:
            _give_back(data, given)

    @_collective
    def reducescatter(
        self, tensor: list, tensor_list: list, reducescatter_options: ReduceScatterOptions = ReduceScatterOptions()
    ) -> None:
        """Reduce lists of tensors; each rank gets the one of its rank. The lists stay as they are."""
        target = self._target("reducescatter", tensor)
        given = self._every("reducescatter", tensor_list, target)
        data, out = _empty(target, self._world_size), _empty(target)
        _copy(given, data)
        with self._within(reducescatter_options):
            self.world.reduce_scatter(data, out, self._operator("reducescatter", reducescatter_options))
        target[...] = out

    def send(self, tensor: list, send_options: SendOptions) -> None:
        """Send a tensor to a rank."""
        data = _dense(self._one("send", tensor))
        self._check_whole("send", send_options)
        with self._within(send_options):
            self.world.send(data, send_options.dst_rank)

    def recv(self, tensor: list, recv_options: RecvOptions) -> None:
        """Receive a tensor of the same type and length from a rank."""
        target = self._target("recv", tensor)
        self._check_whole("recv", recv_options)
        data = _dense(target)
        with self._within(recv_options):
            self.world.recv(data, recv_options.src_rank)
        _give_back(data, target)

    # What is checked.

    def _wrong(self, op: str, expected: str, got: object) -> Exception:
        where = f"rank {self._rank} of collective group {self._group_name}"
        return _native.Usage(f"{op}: expected {expected}, got {got} ({where})")

    def _one(self, op: str, tensors: Sequence) -> Any:
        """The one tensor of a list, which is read."""
        if not isinstance(tensors, list) or len(tensors) != 1:
            got = f"one of {len(tensors)}" if isinstance(tensors, list) else type(tensors).__name__
            raise self._wrong(op, "a list of one tensor", got)
        return self._on_host(op, tensors[0])

    def _target(self, op: str, tensors: Sequence) -> Any:
        """The one tensor of a list, which is written."""
        tensor = self._one(op, tensors)
        self._check_writable(op, tensor)
        return tensor

    def _check_writable(self, op: str, tensor: Any) -> None:
        if not _is_writable(tensor):
            raise self._wrong(op, "an array that may be written", "a read-only one; copy() it first")

    def _every(self, op: str, lists: Sequence, like: Any) -> list:
        """The tensors of the one list of a list: as many as there are ranks, each like the rank's own."""
        tensors = lists[0] if isinstance(lists, list) and len(lists) == 1 else None
        if not isinstance(tensors, list) or len(tensors) != self._world_size:
            got = f"one of {len(tensors)}" if isinstance(tensors, list) else f"{len(lists)} lists"
            raise self._wrong(op, f"a list of {self._world_size} tensors", got)
        tensors = [self._on_host(op, tensor) for tensor in tensors]
        for tensor in tensors:
            if _kind(tensor) != _kind(like):
                raise self._wrong(op, f"tensors as the rank's own, {_kind(like)}", _kind(tensor))
        return tensors

    def _on_host(self, op: str, tensor: Any) -> Any:
        if isinstance(tensor, numpy.ndarray):
            return tensor
        if not getattr(tensor, "is_cpu", False) or str(tensor.layout) != "torch.strided":
            got = f"{type(tensor).__name__} on {getattr(tensor, 'device', 'no device')}"
            raise self._wrong(op, "a numpy array or a dense torch tensor on the CPU", got)
        return tensor.detach()

    def _operator(self, op: str, options: Any) -> str:
        name = OPERATORS.get(options.reduceOp)
        if name is None:
            raise self._wrong(op, f"one of {[str(known) for known in OPERATORS]}", options.reduceOp)
        return name

    def _check_whole(self, op: str, options: Any) -> None:
        if options.n_elements:
            raise self._wrong(op, "a whole tensor", f"n_elements={options.n_elements}")

    @contextlib.contextmanager
    def _within(self, options: Any) -> Iterator[None]:
        """The time limit of one call, if its options have one."""
        limit = getattr(options, "timeout_ms", None)
        seconds = -1 if limit is None else limit.total_seconds()
        world = self.world
        if seconds <= 0:
            yield
            return
        usual, world.timeout = world.timeout, seconds
        try:
            yield
        finally:
            world.timeout = usual


def _limit() -> float:
    """Seconds to wait for rank 0: those of all waits."""
    seconds = float(os.environ.get("SYMMEM_TIMEOUT") or 300)
    return seconds if seconds > 0 else float("inf")


def _kind(tensor: Any) -> str:
    """What two tensors of one call must have in common, in words."""
    library = "numpy" if isinstance(tensor, numpy.ndarray) else "torch"
    return f"{library} {str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _dense(tensor: Any) -> Any:
    """The tensor, or a contiguous copy of it."""
    return numpy.asarray(tensor, order="C") if isinstance(tensor, numpy.ndarray) else tensor.contiguous()


def _give_back(data: Any, target: Any) -> None:
    """Copy a result from the contiguous copy of a tensor."""
    if data is not target:
        target[...] = data


def _copy(sources: Any, targets: Any) -> None:
    for source, target in zip(sources, targets):
        target[...] = source


def _is_writable(tensor: Any) -> bool:
    return not isinstance(tensor, numpy.ndarray) or tensor.flags.writeable


def _empty(like: Any, *rows: int) -> Any:
    """A contiguous tensor of the same kind, with more axes in front."""
    shape = (*rows, *like.shape)
    return numpy.empty(shape, like.dtype) if isinstance(like, numpy.ndarray) else like.new_empty(shape)


def register() -> None:
    """Make Ray know the backend in this process. The import of the module does this; it may be called again."""
    try:
        from ray.util.collective.backend_registry import _global_registry, register_collective_backend
    except ImportError as error:
        text = f"symmem.ray: expected a Ray that has register_collective_backend, got Ray {ray.__version__}"
        raise ImportError(text) from error
    if not _global_registry.is_registered(NAME):
        register_collective_backend(NAME, Group)


register()

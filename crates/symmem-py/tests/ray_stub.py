"""As much of Ray as `symmem.ray` uses, for ranks that are plain processes; Ray's key-value store is a folder."""

import dataclasses
import enum
import os
import pathlib
import sys
import types
from datetime import timedelta

UNSET = timedelta(milliseconds=-1)
OPTIONS = ("AllReduce", "Barrier", "Reduce", "AllGather", "Broadcast", "ReduceScatter", "Send", "Recv")


class ReduceOp(enum.Enum):
    SUM, PRODUCT, MIN, MAX = range(4)


@dataclasses.dataclass
class Options:
    """All of Ray's options. Like Ray's, its fields are the class's."""

    reduceOp = ReduceOp.SUM
    root_rank = dst_rank = src_rank = n_elements = 0
    timeout_ms = UNSET


class BaseGroup:
    def __init__(self, world_size, rank, group_name):
        self._world_size, self._rank, self._group_name = world_size, rank, group_name

    rank = property(lambda self: self._rank)
    world_size = property(lambda self: self._world_size)


class Registry:
    def __init__(self):
        self.groups = {}

    def is_registered(self, name):
        return name in self.groups


def install(folder):
    """Makes `import ray` find this."""

    def module(name, **contents):
        made = types.ModuleType(name)
        vars(made).update(contents)
        sys.modules[name] = made
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, made)
        return made

    def entry(key):
        return pathlib.Path(folder, key.hex())

    def put(key, value, overwrite=True):
        part = entry(key).with_suffix(f".{os.getpid()}")
        part.write_bytes(value)
        part.rename(entry(key))

    def get(key):
        try:
            return entry(key).read_bytes()
        except FileNotFoundError:
            return None

    context = types.SimpleNamespace(get_job_id=lambda: "job")
    module("ray", __version__="0", get_runtime_context=lambda: context)
    module("ray.util", get_node_ip_address=lambda: "127.0.0.1")
    module("ray.experimental")
    module(
        "ray.experimental.internal_kv",
        _internal_kv_put=put,
        _internal_kv_get=get,
        _internal_kv_del=lambda key: entry(key).unlink(missing_ok=True),
    )
    registry = Registry()
    module("ray.util.collective")
    module(
        "ray.util.collective.backend_registry",
        _global_registry=registry,
        register_collective_backend=registry.groups.__setitem__,
    )
    module("ray.util.collective.types", ReduceOp=ReduceOp, **{f"{name}Options": Options for name in OPTIONS})
    module("ray.util.collective.collective_group")
    module("ray.util.collective.collective_group.base_collective_group", BaseGroup=BaseGroup)


class Collective:
    """The functions of `ray.util.collective` over one group."""

    def __init__(self, group):
        self.group = group

    @staticmethod
    def _options(**fields):
        options = Options()
        vars(options).update(fields)
        return options

    def get_group_handle(self, name):
        return self.group

    def destroy_collective_group(self, name):
        self.group.destroy_group()

    def allreduce(self, tensor, name, op=ReduceOp.SUM):
        self.group.allreduce([tensor], self._options(reduceOp=op))

    def barrier(self, name):
        self.group.barrier()

    def reduce(self, tensor, dst_rank, name, op=ReduceOp.SUM):
        self.group.reduce([tensor], self._options(reduceOp=op, root_rank=dst_rank))

    def broadcast(self, tensor, src_rank, name):
        self.group.broadcast([tensor], self._options(root_rank=src_rank))

    def allgather(self, tensor_list, tensor, name):
        self.group.allgather([tensor_list], [tensor], self._options())

    def reducescatter(self, tensor, tensor_list, name, op=ReduceOp.SUM):
        self.group.reducescatter([tensor], [tensor_list], self._options(reduceOp=op))

    def send(self, tensor, dst_rank, name):
        self.group.send([tensor], self._options(dst_rank=dst_rank))

    def recv(self, tensor, src_rank, name):
        self.group.recv([tensor], self._options(src_rank=src_rank))

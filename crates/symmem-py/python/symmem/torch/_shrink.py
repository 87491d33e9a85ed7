"""Going on after a rank was lost: the process group of those that are left."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from symmem import _native
from symmem.torch._process_group import NAME, Backend, ProcessGroup

#: How often each group was shrunk; all survivors have shrunk it as often.
_times: dict[str, int] = {}


def shrink(group: dist.ProcessGroup | None = None, timeout: float | None = None) -> dist.ProcessGroup:
    """Make a process group of the ranks that are left of one that has lost some. Every survivor calls it.

    `group` is one of the backend `symmem`, by default that of all ranks; calls on it go on to fail. The survivors keep their global ranks, by
    which `torch.distributed` knows them, and are numbered in the same order in the new group. `timeout` is in seconds, by default the
    group's; after a timeout this may be called again.
    """
    former = group or dist.group.WORLD
    if not isinstance(former, ProcessGroup):
        got = type(former).__name__
        raise RuntimeError(f"shrink: expected a process group of the backend symmem, got {got}")
    limit = former.cpu.options._timeout
    try:
        native = former.cpu.native.shrink(timeout)
    except _native.Error as error:
        raise former.cpu._named(error) from None
    count = _times[former.group_name] = _times.get(former.group_name, 0) + 1
    name = f"{former.group_name}/left/{count}"
    store = dist.PrefixStore(f"{name}/", c10d._get_process_group_store(former))
    made = ProcessGroup(store, Backend(native, name, limit, former.cpu.label), {})
    made._set_group_name(name)
    made._set_group_desc("undefined")
    _register(made, name, store, _survivors(made, dist.get_global_rank(former, former.rank())))
    return made


def _survivors(group: ProcessGroup, rank: int) -> list[int]:
    """The global ranks of a group that torch does not know yet."""
    every = torch.empty(group.size(), dtype=torch.int64)
    group.all_gather_single(every, torch.tensor([rank])).wait()
    return every.tolist()


def _register(group: ProcessGroup, name: str, store: dist.Store, ranks: list[int]) -> None:
    """Make torch's functions know a group, as those do that make one."""
    world = c10d._world
    world.pg_map[group] = (NAME, store)
    world.pg_names[group] = name
    c10d._register_process_group(name, group)
    world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend(NAME)))
    tag = f"ptd:{name}"
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}

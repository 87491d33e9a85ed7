"""How process groups become groups of the library. The numbers are those of docs/parity.md."""

import datetime

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from symmem.torch import _groups

through_group = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "use_pg_for_symm_mem_rendezvous"),
    reason="process groups of this torch have no use_pg_for_symm_mem_rendezvous",
)


def _peers_are_seen(rank, group):
    tensor = symm_mem.empty(64, device="cpu").fill_(rank)
    handle = symm_mem.rendezvous(tensor, group)
    handle.barrier()
    for peer in range(handle.world_size):
        assert (handle.get_buffer(peer, (64,), torch.float32) == peer).all()
    handle.barrier()


class Counting(dist.ProcessGroup):
    """A backend of somebody's own, which has gloo's all-gathers, and counts them."""

    def __init__(self, store, rank, size, _timeout):
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=60))
        self.gathers = 0
        # torch asks the group's backend for the group's settings.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.inner)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def allgather(self, *arguments):
        self.gathers += 1
        return self.inner.allgather(*arguments)

    def _allgather_base(self, *arguments):
        self.gathers += 1
        return self.inner._allgather_base(*arguments)

    def all_gather_single(self, *arguments):
        self.gathers += 1
        return self.inner.all_gather_single(*arguments)

    def getBackendName(self):
        return "counting"


def _counting():
    dist.Backend.register_backend("counting", Counting, devices=["cpu"])
    return dist.new_group(backend="counting")


@through_group
@ranks(2)
def test_l56_t019_a_rendezvous_through_the_process_group(rank):
    group = dist.new_group([0, 1])
    group.use_pg_for_symm_mem_rendezvous = True
    store = dist.distributed_c10d._get_process_group_store(group)
    _peers_are_seen(rank, group)
    assert not store.check([f"symmem/1/proposal/{rank}"])
    _peers_are_seen(rank, group)
    _peers_are_seen(rank, world())


@through_group
@ranks(2)
def test_l56_t020_a_rendezvous_through_a_backend_of_somebodys_own(rank):
    group = _counting()
    group.use_pg_for_symm_mem_rendezvous = True
    _peers_are_seen(rank, group)
    assert group.gathers == 1
    # Once, however many rendezvous there are.
    _peers_are_seen(rank, group)
    assert group.gathers == 1


@ranks(2)
def test_what_ranks_tell_each_other_takes_one_all_gather(rank):
    group = _counting()
    proposals = _groups._gather(group, {"rank": rank, "store": "unix:" + "x" * (50 + 50 * rank)})
    assert [(proposal["rank"], len(proposal["store"])) for proposal in proposals] == [(0, 55), (1, 105)]
    assert group.gathers == 1


@through_group
@ranks(2)
def test_l56_a_disagreement_is_told_to_all_and_the_next_rendezvous_works(rank):
    former = symm_mem.get_signal_pad_size()
    group = dist.new_group([0, 1])
    group.use_pg_for_symm_mem_rendezvous = True
    symm_mem.set_signal_pad_size(former + 4096 * rank)
    with pytest.raises(RuntimeError, match="disagree on the signal pad size"):
        _peers_are_seen(rank, group)
    symm_mem.set_signal_pad_size(former)
    _peers_are_seen(rank, group)

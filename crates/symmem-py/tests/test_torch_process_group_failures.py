"""Failures of the backend `symmem` of torch.distributed: an error that names rank, operation and group, and no wait without end."""

import os
import time
from datetime import timedelta

import pytest
from torch_ranks import ranks

torch = pytest.importorskip("torch")
dist = torch.distributed

SOON = 10.0


def _die():
    os._exit(1)


@ranks(3, lost=[2], backend="symmem")
def test_a_lost_rank_ends_every_work_and_future(rank):
    import symmem

    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    if rank == 2:
        time.sleep(0.3)
        _die()
    begun = time.monotonic()
    works = [dist.all_reduce(torch.ones(1 << i), async_op=True) for i in (2, 12, 22)]
    receiving = dist.irecv(torch.empty(3), 2)
    futures = [work.get_future() for work in works]
    for work in [*works, receiving]:
        with pytest.raises(dist.DistBackendError, match=rf"rank 2 .*\(rank {rank} of process group 0\)"):
            work.wait()
        assert work.is_completed() and not work.is_success()
        assert isinstance(work.exception(), symmem.PeerLost) and work.exception().rank == 2
    with pytest.raises(RuntimeError, match="all_reduce: rank 2"):
        futures[0].wait()
    with pytest.raises(symmem.PeerLost, match="all_reduce: rank 2"):
        dist.all_reduce(torch.ones(4))
    with pytest.raises(symmem.PeerLost, match="rank 2"):
        dist.group.WORLD.monitored_barrier()
    assert time.monotonic() - begun < SOON
    # A group of the others works.
    dist.destroy_process_group()


@ranks(3, lost=[2], backend="symmem")
def test_a_step_of_ddp_ends_when_a_rank_is_lost(rank):
    model = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    model = torch.nn.parallel.DistributedDataParallel(model)
    model(torch.ones(2, 8)).sum().backward()
    if rank == 2:
        _die()
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 2"):
        for _ in range(100):
            model(torch.ones(2, 8)).sum().backward()
    assert time.monotonic() - begun < SOON
    dist.destroy_process_group()


@ranks(4, backend="symmem")
def test_a_monitored_barrier_names_all_missing_ranks(rank):
    import symmem

    dist.group.WORLD.monitored_barrier(timeout=timedelta(seconds=30))
    begun = time.monotonic()
    if rank in (0, 2):
        with pytest.raises(
            symmem.Timeout, match=rf"\[Rank {rank}\]: Ranks 1, 3 failed to pass monitoredBarrier in"
        ) as told:
            dist.group.WORLD.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
        assert sorted(told.value.waiting_for) == [1, 3]
        assert time.monotonic() - begun < SOON
        dist.send(torch.zeros(1), rank + 1)
    else:
        dist.recv(torch.zeros(1), rank - 1)  # once that rank has given up
        dist.group.WORLD.monitored_barrier(timeout=timedelta(seconds=30))  # all have come
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # and the group goes on
    assert tensor == 4


@ranks(2, backend="symmem")
def test_each_group_has_its_own_time_limit(rank):
    import symmem.torch

    hasty = dist.new_group(timeout=timedelta(seconds=3))
    patient = dist.new_group(timeout=timedelta(seconds=60))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=hasty)
    if rank == 0:
        begun = time.monotonic()
        with pytest.raises(symmem.Timeout, match="all_reduce: no answer from rank 1"):
            dist.all_reduce(tensor, group=hasty)
        assert 2 < time.monotonic() - begun < SOON
        with pytest.raises(symmem.OutOfStepError, match="rank 0"):
            dist.all_reduce(tensor, group=hasty)
        with pytest.raises(symmem.Timeout, match="recv: no"):
            dist.recv(tensor, 1, group=hasty)
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    dist.all_reduce(tensor, group=patient)
    with pytest.raises((symmem.Timeout, symmem.OutOfStepError)):
        dist.all_reduce(tensor, group=hasty)
    symmem.torch.resync(hasty, timeout=30)
    tensor.fill_(1)
    dist.all_reduce(tensor, group=hasty)
    assert tensor == 2


@ranks(2, backend="symmem")
def test_a_wait_with_a_time_limit_leaves_the_call(rank):
    import symmem

    tensor = torch.ones(1)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(symmem.Timeout, match="wait"):
            work.wait(timedelta(seconds=0.2))
        dist.send(tensor, 1)
        work.wait()
    else:
        dist.recv(torch.empty(1), 0)
        dist.all_reduce(tensor)
    assert tensor == 2


@ranks(2, backend="symmem")
def test_abort_ends_all_calls_of_this_rank(rank):
    import symmem

    group = dist.new_group()
    dist.barrier(group)
    if rank == 0:
        works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(3)]
        works.append(dist.irecv(torch.empty(1), 1, group=group))
        begun = time.monotonic()
        group.abort()
        for work in works:
            with pytest.raises(symmem.Aborted, match="aborted.*rank 0 of process group"):
                work.wait()
        assert time.monotonic() - begun < SOON
        with pytest.raises(symmem.Usage, match="a process group that was not aborted"):
            dist.all_reduce(torch.ones(1), group=group)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # other groups go on
    assert tensor == 2


@ranks(2, backend="symmem")
def test_a_group_that_was_destroyed_and_made_again(rank):
    for _ in range(3):
        group = dist.new_group([0, 1])
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        dist.destroy_process_group(group)
        assert work.is_completed()
    dist.all_reduce(torch.ones(1))


@ranks(4, lost=[1], backend="symmem")
def test_the_ranks_that_are_left_make_a_group(rank):
    import symmem
    import symmem.torch

    tensor = torch.ones(50_000)
    dist.all_reduce(tensor)
    if rank == 1:
        _die()
    with pytest.raises(symmem.PeerLost, match="rank 1"):
        while True:
            dist.all_reduce(tensor)
    group = symmem.torch.shrink()
    assert dist.get_process_group_ranks(group) == [0, 2, 3]
    assert (dist.get_rank(group), dist.get_world_size(group)) == ([0, 2, 3].index(rank), 3)
    tensor.fill_(1)
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == 3
    dist.broadcast(tensor.fill_(rank), 2, group=group)
    assert tensor[0] == 2
    functional = torch.ops._c10d_functional
    assert functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", group.group_name))[0] == 3
    with pytest.raises(symmem.PeerLost, match="rank 1"):
        dist.all_reduce(tensor)
    with pytest.raises(RuntimeError, match="expected a process group of the backend symmem"):
        symmem.torch.shrink(dist.ProcessGroup(0, 1))
    dist.destroy_process_group()

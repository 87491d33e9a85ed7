"""A call that one rank gives up leaves the group out of step, on all ranks, until all have called `resync`."""

import os
import signal
import threading

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem.torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from symmem.torch import _groups

pytestmark = pytest.mark.skipif(not hasattr(symmem.Group, "resync"), reason="groups cannot be put back in step")
ops = torch.ops.symm_mem
#: Elements of float32: 8 bytes to 1 MiB, and more than a group stages at once.
COUNTS = (2, 256, 512, 513, 4096, 65_536, 262_144, 3_000_001)


def _tensor(rank, count):
    return symm_mem.empty(count, device="cpu").fill_(rank + 1)


def _operators(rank, x):
    """Calls of every kind on a tensor of rank + 1, with what they give for two ranks."""
    count = x.numel()
    out, even = torch.empty(count), count - count % 8
    yield lambda: ops.one_shot_all_reduce(x, "sum", world()), 3
    yield lambda: ops.one_shot_all_reduce_out(x, "sum", world(), out), 3
    yield lambda: ops.nvshmem_all_to_all(x[: even or 2], out[: even or 2], world())[: even // 2 or 1], 1
    yield lambda: ops.two_shot_all_reduce_(x, "sum", world()), 3
    yield lambda: ops.nvshmem_broadcast(x.fill_(rank + 1), 1, world()), 2


def _all_work(rank, tensors):
    for x in tensors:
        for call, expected in _operators(rank, x.fill_(rank + 1)):
            assert (call() == expected).all(), x.numel()


def _give_up(rank, x):
    """Rank 0 makes a call that rank 1 does not make in time."""
    group = _groups.of(world()).native
    group.timeout, former = 0.3, group.timeout
    if rank == 0:
        with pytest.raises(symmem.Timeout) as caught:
            ops.two_shot_all_reduce_(x, "sum", world())
        assert caught.value.waiting_for == [1]
    group.timeout = former
    dist.barrier()


def _nothing_works(rank, tensors):
    for x in tensors:
        for operator, *arguments in (
            (ops.one_shot_all_reduce, x, "sum"),
            (ops.two_shot_all_reduce_, x, "sum"),
            (ops.nvshmem_broadcast, x, 0),
            (ops.nvshmem_all_to_all, x[:2], torch.empty(2)),
        ):
            with pytest.raises(symmem.OutOfStepError) as caught:
                operator(*arguments, world())
            assert isinstance(caught.value, symmem.Error) and caught.value.rank == 0
            assert "all_reduce" in caught.value.what and "resync" in str(caught.value)


@pytest.mark.parametrize("count", COUNTS)
@ranks(2)
def test_p03_after_a_timeout_nothing_works_until_all_are_back_in_step(rank, count):
    old = [_tensor(rank, count), _tensor(rank, 2)]
    _all_work(rank, old)
    for _ in range(2):
        _give_up(rank, old[0])
        _nothing_works(rank, old)
        dist.barrier()
        symmem.torch.resync()
        _all_work(rank, old)
        _all_work(rank, [_tensor(rank, other) for other in COUNTS])


@ranks(3)
def test_p03_those_who_were_in_the_call_are_told_too(rank):
    x = _tensor(rank, 65_536)
    ops.one_shot_all_reduce(x, "sum", world())
    group = _groups.of(world()).native
    if rank == 0:
        group.timeout = 0.3
        with pytest.raises(symmem.Timeout):
            ops.one_shot_all_reduce(x, "sum", world())
        group.timeout = 60
    elif rank == 1:
        # It is in the same call, with a longer limit.
        with pytest.raises((symmem.OutOfStepError, symmem.PeerFailed), match="rank 0"):
            ops.one_shot_all_reduce(x, "sum", world())
    else:
        dist.distributed_c10d._get_default_store().wait(["others are done"])
    if rank != 2:
        store = dist.distributed_c10d._get_default_store()
        if store.add("done", 1) == 2:
            store.set("others are done", "yes")
    symmem.torch.resync(timeout=30)
    assert (ops.one_shot_all_reduce(x, "sum", world()) == 6).all()


@ranks(2)
def test_p03_ctrl_c_in_an_operator_is_keyboard_interrupt_and_all_come_back(rank):
    x = _tensor(rank, 262_144)
    _all_work(rank, [x])
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            ops.two_shot_all_reduce_(x, "sum", world())
    dist.barrier()
    with pytest.raises(symmem.OutOfStepError):
        ops.one_shot_all_reduce(x, "sum", world())
    symmem.torch.resync(dist.group.WORLD, timeout=30)
    _all_work(rank, [x])


@ranks(3)
def test_p03_other_groups_go_on(rank):
    pair = dist.new_group([0, 1])
    x = _tensor(rank, 512)
    ops.one_shot_all_reduce(x, "sum", world())
    if rank < 2:
        ops.one_shot_all_reduce(x, "sum", pair.group_name)
        group = _groups.of(pair.group_name).native
        if rank == 0:
            group.timeout = 0.3
            with pytest.raises(symmem.Timeout):
                ops.one_shot_all_reduce(x, "sum", pair.group_name)
            group.timeout = 60
    dist.barrier()
    assert (ops.one_shot_all_reduce(x, "sum", world()) == 6).all()
    if rank < 2:
        with pytest.raises(symmem.OutOfStepError):
            ops.one_shot_all_reduce(x, "sum", pair.group_name)
        symmem.torch.resync(pair)
        assert (ops.one_shot_all_reduce(x, "sum", pair.group_name) == 3).all()


@ranks(2)
def test_p03_what_is_in_step_stays_so(rank):
    x = _tensor(rank, 512)
    for _ in range(3):
        symmem.torch.resync(world())
        assert (ops.one_shot_all_reduce(x, "sum", world()) == 3).all()
    # Signals stay as they are.
    handle = symm_mem.rendezvous(x, world())
    if rank == 0:
        handle.put_signal(1)
    symmem.torch.resync()
    if rank == 1:
        handle.wait_signal(0, timeout_ms=20_000)
    handle.barrier()

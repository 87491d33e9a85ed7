"""Barriers, signals and groups of CPU handles. The numbers are those of docs/parity.md."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem.torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem


def _handle(group=None, count=64):
    return symm_mem.rendezvous(symm_mem.empty(count, device="cpu"), group or world())


@ranks(2)
def test_t013_signal_pad_size_disagreement_raises_everywhere(rank):
    former = symm_mem.get_signal_pad_size()
    group = dist.new_group([0, 1])
    symm_mem.set_signal_pad_size(former + 4096 * rank)
    with pytest.raises(RuntimeError, match="disagree on the signal pad size"):
        _handle(group)
    symm_mem.set_signal_pad_size(former)
    _handle(group).barrier()


@ranks(2)
def test_t014_what_a_group_holds_goes_with_it(rank):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    counts = []
    for _ in range(10):
        group = dist.new_group([0, 1])
        handle = _handle(group)
        handle.barrier()
        del handle
        dist.destroy_process_group(group)
        del group
        dist.barrier()
        counts.append(descriptors())
    assert counts[9] <= counts[3] + 8, counts


@ranks(2)
def test_t021_buffers_outlive_an_aborted_process_group(rank):
    group = dist.new_group([0, 1])
    tensor = symm_mem.empty(64, device="cpu").fill_(rank)
    handle = symm_mem.rendezvous(tensor, group)
    handle.barrier()
    dist.destroy_process_group(group)
    assert (handle.get_buffer(1 - rank, (64,), torch.float32) == 1 - rank).all()
    handle.barrier()


@ranks(4)
def test_t026_subgroup(rank):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[rank // 2]
    tensor = symm_mem.empty(64, device="cpu").fill_(rank)
    everyone, few = symm_mem.rendezvous(tensor, world()), symm_mem.rendezvous(tensor, half)
    assert (everyone.rank, everyone.world_size, few.rank, few.world_size) == (rank, 4, rank % 2, 2)
    everyone.barrier()
    peer = (rank + 1) % 4
    assert (everyone.get_buffer(peer, (64,), torch.float32) == peer).all()
    few.barrier()
    assert (few.get_buffer(1 - rank % 2, (64,), torch.float32) == rank ^ 1).all()
    everyone.barrier()


@ranks(3)
def test_t027_rendezvous_after_strict_subgroup(rank):
    group = dist.new_group([0, 1])
    tensor = symm_mem.empty(64, device="cpu").fill_(rank)
    if rank < 2:
        symm_mem.rendezvous(tensor, group).barrier()
    handle = symm_mem.rendezvous(tensor, world())
    handle.barrier()
    assert [handle.get_buffer(r, (1,), torch.float32).item() for r in range(3)] == [0, 1, 2]
    handle.barrier()


@ranks(3)
def test_t027_ranks_outside_the_group_take_no_part(rank):
    group = dist.new_group([0, 1])
    if rank < 2:
        handle = _handle(group)
        handle.barrier()
        assert handle.world_size == 2


@ranks(3)
def test_t028_rendezvous_on_overlapping_subgroups(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    tensor = symm_mem.empty(64, device="cpu").fill_(rank)
    for number, group in enumerate(groups):
        if rank in (number, number + 1):
            handle = symm_mem.rendezvous(tensor, group)
            handle.barrier()
            values = [handle.get_buffer(r, (1,), torch.float32).item() for r in range(2)]
            assert values == [number, number + 1]
            handle.barrier()


@ranks(3)
def test_t052_rendezvous_after_group_name_recycled(rank):
    group = dist.new_group([0, 1])
    name = group.group_name if rank < 2 else None
    if rank < 2:
        _handle(group).barrier()
    dist.barrier()
    dist.destroy_process_group()
    folder = os.environ["SYMMEM_TEST_FOLDER"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=3)
    group = dist.new_group([1, 2])
    if rank == 1:
        assert group.group_name == name
    if rank > 0:
        handle = _handle(group)
        handle.barrier()
        assert (handle.rank, handle.world_size) == (rank - 1, 2)


@ranks(2)
def test_t053_barrier_timeout(rank):
    handle = _handle()
    if rank == 0:
        with pytest.raises(RuntimeError):
            handle.barrier(timeout_ms=300)
    dist.barrier()
    # W-02: the barrier that timed out can be resumed.
    handle.barrier()


@ranks(2)
def test_t054_signals_of_a_prefix_subgroup_stay_apart(rank):
    tensor = symm_mem.empty(64, device="cpu")
    group = dist.new_group([0, 1])
    everyone, few = symm_mem.rendezvous(tensor, world()), symm_mem.rendezvous(tensor, group)
    if rank == 0:
        everyone.put_signal(1, 0, 10_000)
        few.put_signal(1, 0, 10_000)
    else:
        few.wait_signal(0, 0, 10_000)
        everyone.wait_signal(0, 0, 10_000)


@ranks(3)
def test_t055_signals_of_different_groups_stay_apart(rank):
    tensor = symm_mem.empty(64, device="cpu")
    group = dist.new_group([0, 2])
    everyone = symm_mem.rendezvous(tensor, world())
    few = symm_mem.rendezvous(tensor, group) if rank != 1 else None
    if rank == 0:
        few.put_signal(1, 0, 10_000)
        everyone.put_signal(2, 0, 10_000)
    elif rank == 2:
        everyone.wait_signal(0, 0, 10_000)
        few.wait_signal(0, 0, 10_000)


@ranks(2)
def test_t057_internal_signal_pad_shared_across_allocations(rank):
    """Two threads, with a channel each, take the place of PyTorch's two streams."""
    handles = [_handle(), _handle()]
    pads = [handle.get_signal_pad(rank).view(torch.int32).fill_(1) for handle in handles]
    with ThreadPoolExecutor(2) as threads:

        def barriers(number):
            for _ in range(100):
                handles[number].barrier(channel=number)

        list(threads.map(barriers, range(2)))
    assert all((pad == 1).all() for pad in pads)


@ranks(2)
def test_t058_put_signal_timeout(rank):
    handle = _handle()
    if rank == 0:
        handle.put_signal(1)
        with pytest.raises(RuntimeError):
            handle.put_signal(1, timeout_ms=300)
    dist.barrier()
    if rank == 1:
        handle.wait_signal(0)


@ranks(2)
def test_t059_wait_signal_timeout(rank):
    handle = _handle()
    if rank == 0:
        with pytest.raises(RuntimeError):
            handle.wait_signal(1, timeout_ms=300)
    dist.barrier()
    if rank == 1:
        handle.put_signal(0)
    else:
        handle.wait_signal(1)


@ranks(2)
def test_t061_barrier_channel_out_of_bounds(rank):
    handle = _handle()
    channels = handle.signal_pad_size // 4 // handle.world_size
    with pytest.raises(RuntimeError, match="maximum supported channel"):
        handle.barrier(channel=channels)
    with pytest.raises(RuntimeError, match="must be non-negative"):
        handle.barrier(channel=-1)
    handle.barrier(channel=channels - 1)


@ranks(2)
def test_t062_put_wait_signal_channel_out_of_bounds(rank):
    handle = _handle()
    channels = handle.signal_pad_size // 4 // handle.world_size
    for call in (handle.put_signal, handle.wait_signal):
        with pytest.raises(RuntimeError, match="maximum supported channel"):
            call(1 - rank, channel=channels)
    handle.put_signal(1 - rank, channel=channels - 1)
    handle.wait_signal(1 - rank, channel=channels - 1)


@ranks(2)
def test_t063_put_wait_signal_rank_out_of_bounds(rank):
    handle = _handle()
    for call in (handle.put_signal, handle.wait_signal, handle.get_signal_pad):
        for wrong in (-1, 2):
            with pytest.raises(RuntimeError, match=r"must be in \[0"):
                call(wrong)


@ranks(2)
def test_h64_a_rank_may_signal_itself(rank):
    handle = _handle()
    handle.put_signal(rank, channel=5)
    handle.wait_signal(rank, channel=5)


@ranks(2)
def test_h01_a_group_may_be_registered_by_name(rank):
    store = dist.PrefixStore("registered", dist.distributed_c10d._get_default_store())
    torch._C._distributed_c10d._SymmetricMemory.set_group_info("mine", rank, 2, store)
    tensor = symm_mem.empty(4, device="cpu").fill_(rank)
    handle = symm_mem.rendezvous(tensor, "mine")
    handle.barrier()
    assert handle.get_buffer(1 - rank, (1,), torch.float32).item() == 1 - rank
    handle.barrier()


@ranks(2)
def test_py09_enable_symm_mem_for_group(rank):
    for _ in range(2):
        with pytest.warns(FutureWarning):
            symm_mem.enable_symm_mem_for_group(world())
    _handle().barrier()


@ranks(2, lost={1})
def test_w01_a_peer_that_dies_ends_every_wait(rank):
    handle = _handle()
    handle.barrier()
    if rank == 1:
        os._exit(1)
    for wait in (handle.barrier, lambda: handle.wait_signal(1)):
        with pytest.raises(RuntimeError, match="rank 1 is gone") as caught:
            wait()
        assert isinstance(caught.value, symmem.PeerLost)
    # Memory that was mapped stays.
    assert handle.get_buffer(1, (64,), torch.float32).shape == (64,)
    dist.destroy_process_group()

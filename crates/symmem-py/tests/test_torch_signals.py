"""Barriers, signals and groups of CPU handles. The numbers are those of docs/parity.md."""

import os
import time

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
    few.barrier(channel=2)  # its words, 4 and 5 of the tensor's one pad, are apart from 0 to 3, which `everyone` uses
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
    tensors = [symm_mem.empty(64, device="cpu") for _ in range(2)]
    pads = [symm_mem.rendezvous(x, world()).get_signal_pad(rank).view(torch.int32).fill_(1) for x in tensors]
    for step in range(100):
        for tensor in tensors:
            tensor.fill_(step + rank)
            assert (torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", world()) == 2 * step + 1).all()
    assert all((pad == 1).all() for pad in pads)


def _word(handle, owner, channel, source):
    """The word of a rank's pad in which `source` signals to it, as a tensor."""
    return handle.get_signal_pad(owner).view(torch.int32)[handle.world_size * channel + source]


@ranks(2)
def test_a_signal_of_one_memory_is_not_taken_for_that_of_another(rank):
    a, b = _handle(), _handle()
    dist.barrier()
    if rank == 0:
        a.put_signal(1)
        dist.barrier()
        dist.barrier()
        b.get_buffer(1, (64,), torch.float32).fill_(7)
        b.put_signal(1)
    else:
        dist.barrier()
        with pytest.raises(symmem.Timeout):
            b.wait_signal(0, timeout_ms=300)
        dist.barrier()
        b.wait_signal(0)
        assert (b.get_buffer(1, (64,), torch.float32) == 7).all()
        a.wait_signal(0)
    dist.barrier()


@ranks(2)
def test_a_barrier_of_one_memory_is_not_passed_by_that_of_another(rank):
    a, b = _handle(), _handle()
    dist.barrier()
    with pytest.raises(symmem.Timeout):
        (a if rank == 0 else b).barrier(channel=2, timeout_ms=300)
    dist.barrier()
    # Each goes on with its own.
    for handle in (a, b):
        handle.barrier(channel=2)
    assert _word(a, rank, 2, 1 - rank) == 0 and _word(b, rank, 2, 1 - rank) == 0


@ranks(2)
def test_t012_a_signal_is_a_word_of_the_memorys_pad(rank):
    handle = _handle()
    if rank == 0:
        handle.put_signal(1, channel=3)
        assert _word(handle, 1, 3, 0) == 1
        dist.barrier()
        dist.barrier()
        assert _word(handle, 1, 3, 0) == 0
    else:
        dist.barrier()
        assert _word(handle, 1, 3, 0) == 1
        handle.wait_signal(0, channel=3)
        assert (handle.get_signal_pad(1).view(torch.int32) == 0).all()
        dist.barrier()
    dist.barrier()


@ranks(2)
def test_a_word_that_is_set_by_hand_satisfies_a_wait(rank):
    handle = _handle()
    if rank == 0:
        time.sleep(0.3)  # rank 1 is asleep by then, and nobody rings for it
        _word(handle, 1, 5, 0).fill_(1)
    else:
        handle.wait_signal(0, channel=5, timeout_ms=20_000)
        assert _word(handle, 1, 5, 0) == 0
    dist.barrier()


@ranks(3)
def test_a_barrier_sets_and_clears_the_words_of_its_channel(rank):
    handle = _handle()
    for channel in (0, 4, handle.signal_pad_size // 12 - 1):
        others = [peer for peer in range(3) if peer != rank]
        if rank == 2:
            dist.barrier()
            # The others have signalled, and wait for this rank.
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and not all(_word(handle, 2, channel, peer) == 1 for peer in others):
                time.sleep(0.01)
            assert [_word(handle, 2, channel, peer).item() for peer in others] == [1, 1]
            handle.barrier(channel)
        else:
            dist.barrier()
            handle.barrier(channel)
        dist.barrier()
        assert (handle.get_signal_pad(rank).view(torch.int32) == 0).all()
        dist.barrier()


@ranks(2)
def test_w02_a_barrier_that_timed_out_goes_on_where_it_was(rank):
    handle = _handle()
    for _ in range(3):
        if rank == 0:
            for _ in range(2):
                with pytest.raises(symmem.Timeout) as caught:
                    handle.barrier(channel=1, timeout_ms=100)
                assert caught.value.waiting_for == [1]
        dist.barrier()
        handle.barrier(channel=1)
        dist.barrier()
        assert (handle.get_signal_pad(rank).view(torch.int32) == 0).all()
        dist.barrier()


@ranks(2)
def test_every_handle_of_a_memory_has_its_signals(rank):
    tensor = symm_mem.empty(64, device="cpu")
    first, second = symm_mem.rendezvous(tensor, world()), symm_mem.rendezvous(tensor, world())
    if rank == 0:
        first.put_signal(1)
    else:
        second.wait_signal(0)
    (first if rank == 0 else second).barrier()


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

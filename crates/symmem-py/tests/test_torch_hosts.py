"""PyTorch's symmetric-memory functions on CPU tensors of ranks on two hosts, which connect over TCP."""

import pytest
import test_torch_all_to_all as all_to_all
import test_torch_collectives as collectives
import test_torch_fused as fused
import test_torch_one_sided as one_sided
from torch_ranks import on_hosts, ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

ops = torch.ops.symm_mem
HOSTS = ["a", "a", "b", "b"]


def _refused(rank, call):
    with pytest.raises(symmem.Unavailable, match=rf"rank {rank}.*on another host \({HOSTS[rank]}\); get and put reach it"):
        call()


@ranks(4, hosts=HOSTS)
def test_only_tensors_of_another_hosts_memory_are_refused(rank):
    tensor = symm_mem.empty(64, device="cpu").fill_(rank)
    handle = symm_mem.rendezvous(tensor, world())
    assert not handle.world_within_direct_access()
    handle.barrier()
    for peer in range(4):
        if peer // 2 == rank // 2:
            assert handle.buffer_ptrs[peer] and handle.signal_pad_ptrs[peer]
            assert (handle.get_buffer(peer, (64,), torch.float32) == peer).all()
            assert handle.get_signal_pad(peer).numel()
            continue
        assert handle.buffer_ptrs[peer] == handle.signal_pad_ptrs[peer] == 0
        _refused(peer, lambda: handle.get_buffer(peer, (64,), torch.float32))
        _refused(peer, lambda: handle.get_remote_tensor(peer, (64,), torch.float32))
        _refused(peer, lambda: handle.get_signal_pad(peer))
        with pytest.raises(RuntimeError, match="exceeds the allocated size"):
            handle.get_buffer(peer, (65,), torch.float32)
    with pytest.raises(symmem.Unavailable, match="on another host"):
        ops.get_remote_tensors(tensor, world())
    handle.barrier()


@ranks(4, hosts=HOSTS)
def test_within_a_host_everything_has_an_address(rank):
    near = dist.new_group([0, 1]), dist.new_group([2, 3])
    handle = symm_mem.rendezvous(symm_mem.empty(8, device="cpu").fill_(rank), near[rank // 2].group_name)
    assert handle.world_within_direct_access() and 0 not in handle.buffer_ptrs
    handle.barrier()
    assert (handle.get_buffer(1 - rank % 2, (8,), torch.float32) == (rank ^ 1)).all()
    handle.barrier()


@ranks(4, hosts=HOSTS)
def test_signals_barriers_and_copies_reach_another_host(rank):
    """PyTorch has neither barriers nor signals for ranks that only a network connects."""
    tensor = symm_mem.empty(1000, device="cpu").fill_(rank)
    handle = symm_mem.rendezvous(tensor, world())
    far, origin = (rank + 2) % 4, torch.empty(1000)
    for channel in range(3):
        handle.barrier(channel)
        handle.put_signal(far, channel)
        handle.wait_signal(far, channel)
    symm_mem.get(origin, handle, far)
    assert (origin == far).all()
    symm_mem.get(origin[:10], handle, far, offset=990)
    handle.barrier()
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64):
        symm_mem.put_signal(torch.full((7,), rank, dtype=dtype), handle, far)
        symm_mem.wait_signal(handle, far)
        assert (handle.get_buffer(rank, (7,), dtype) == torch.full((7,), far, dtype=dtype)).all()
        handle.barrier()
    with pytest.raises(symmem.Timeout):
        handle.wait_signal(far, channel=9, timeout_ms=50)
    handle.barrier()
    tensor.fill_(rank)
    handle.barrier()
    if rank == 3:
        ops.nvshmem_put(tensor, 0)
    handle.barrier()
    assert (tensor == (3 if rank == 0 else rank)).all()
    handle.barrier()
    if rank == 1:
        ops.nvshmem_get(tensor, 2)
        assert (tensor == 2).all()
    handle.barrier()


@ranks(4, hosts=HOSTS)
def test_a_rendezvous_through_the_process_group_reaches_another_host(rank):
    group = dist.new_group([0, 1, 2, 3])
    group.use_pg_for_symm_mem_rendezvous = True
    tensor = symm_mem.empty(64, device="cpu").fill_(rank)
    assert not symm_mem.rendezvous(tensor, group).world_within_direct_access()
    assert (ops.one_shot_all_reduce(tensor, "sum", group.group_name) == 6).all()


@ranks(4, hosts=HOSTS)
def test_operators_that_write_to_every_rank(rank):
    out = symm_mem.empty(8, 3, device="cpu").fill_(-1)
    mine = torch.full((2, 3), float(rank))
    ops.multimem_all_gather_out(mine, world(), out)
    assert torch.equal(out, torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 3))
    handle = symm_mem.rendezvous(out, world())
    handle.barrier()
    if rank == 2 and hasattr(ops, "memcpy_to_multicast_"):
        ops.memcpy_to_multicast_(out, torch.full((3,), 9.0), 12, world())
    handle.barrier()
    assert not hasattr(ops, "memcpy_to_multicast_") or (out[1] == 9).all()
    assert (out[0] == 0).all() and (out[2] == 1).all()


#: Tests of operators and of functions around them, each with its arguments.
WHEREVER = [
    (HOSTS, collectives.test_t067_one_shot_all_reduce),
    (HOSTS, collectives.test_t068_two_shot_all_reduce),
    (HOSTS, collectives.test_t066_multimem_one_shot_reduce_out),
    (HOSTS, collectives.test_t069_reduce_scatter),
    (HOSTS, collectives.test_t071_multimem_all_gather),
    ("ab", collectives.test_t022_low_contention_all_gather, {"symmetric": False}),
    ("ab", collectives.test_t025_low_contention_reduce_scatter, {"reduce_op": "avg", "symmetric": True}),
    ("ab", collectives.test_what_one_rank_refuses_ends_the_call_of_all),
    ("ab", one_sided.test_t029_get),
    ("ab", one_sided.test_py15_put_signal_and_wait_signal),
    ("ab", one_sided.test_py16_reduce_scatter_offset, {"dim": 1, "per_rank": 2}),
    ("ab", one_sided.test_py16_all_to_all_nd, {"flat": True}),
    ("ab", one_sided.test_op16_memcpy_to_multicast),
    ("aab", all_to_all.test_t221_all_to_all_vdev),
    ("ab", all_to_all.test_t222_t223_t224_dispatch_and_combine, {"align": 8}),
    ("ab", all_to_all.test_t227_multi_root_tile_reduce),
    ("ab", all_to_all.test_t211_t428_put_and_get, {"backend": "nccl"}),
    ("aab", all_to_all.test_t220_nvshmem_all_to_all),
    ("ab", fused.test_t041_fused_all_gather_matmul, {"gather_dim": 0}),
    ("ab", fused.test_t046_fused_matmul_reduce_scatter, {"scatter_dim": 1}),
    ("aab", fused.test_py30_gather_and_consume),
    ("aab", fused.test_py32_produce_and_exchange, {"dim": 1}),
]


@pytest.mark.parametrize("given", WHEREVER, ids=lambda given: given[1].__name__)
def test_what_works_on_one_host_works_on_two(given):
    hosts, test, *arguments = given
    skipped = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "skipif" and mark.args[0]]
    if skipped:
        pytest.skip(skipped[0].kwargs["reason"])
    on_hosts(hosts, test, **(arguments[0] if arguments else {}))

"""Symmetric tensors whose memory is NCCL's, after `install("cuda")` and `set_backend("NCCL")`. The numbers are those of
docs/parity.md. NCCL takes ranks on one device only for ranks of two machines, so that is what they say they are."""

import os

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem.torch
import torch.distributed._symmetric_memory as symm_mem
from cuda_ranks import device_of, leave
from symmem import nccl
from torch._C import _distributed_c10d as bindings


def _lacks():
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        return "" if nccl.version() >= (2, 27) else "memory of NCCL needs 2.27"
    except symmem.Unavailable as missing:
        return str(missing)


pytestmark = pytest.mark.skipif(bool(_lacks()), reason=_lacks() or "nothing lacks")
ops = torch.ops.symm_mem
SIZES = (1, 2)


def _device(rank):
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
    device = device_of(rank)
    symm_mem.set_backend("NCCL")
    assert symm_mem.get_backend(device) == "NCCL"
    return device


@ranks(SIZES)
def test_t411_t413_t418_t439_t440_nccl_and_one_shot_reduce_alike(rank):
    device = _device(rank)
    x = symm_mem.empty(1000, device=device).fill_(rank + 1)
    handle = symm_mem.rendezvous(x, world())
    assert handle.native.memory.backend == "nccl" and nccl.window_of(handle.native)
    comm = nccl.communicator_of(handle.native)
    assert (comm.rank, comm.size) == (rank, handle.world_size)
    theirs = torch.empty(1000, device=device)
    nccl.all_reduce([x], [theirs], comms=[comm])
    ours = ops.one_shot_all_reduce(x, "sum", world())
    assert torch.equal(ours, theirs) and (ours == sum(range(1, comm.size + 1))).all()
    peer = (rank + 1) % comm.size
    handle.barrier()
    assert (handle.get_buffer(peer, (1000,), torch.float32) == peer + 1).all()
    handle.barrier()
    leave()


@ranks(SIZES)
def test_t419_t420_both_are_captured_and_replayed(rank):
    device = _device(rank)
    x = symm_mem.empty(1000, device=device).fill_(1)
    handle = symm_mem.rendezvous(x, world())
    comm = nccl.communicator_of(handle.native)
    theirs, ours = torch.empty(1000, device=device), torch.empty(1000, device=device)

    def both():
        nccl.all_reduce([x], [theirs], comms=[comm])
        ours.copy_(ops.one_shot_all_reduce(x, "sum", world()))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    leave()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        both()
    for value in range(4):
        x.fill_(value + rank)
        leave()
        graph.replay()
        torch.cuda.synchronize()
        expected = sum(value + other for other in range(comm.size))
        assert (theirs == expected).all() and (ours == expected).all(), value
        leave()


@ranks(SIZES)
def test_t434_t435_t436_tensors_of_a_pool_are_nccls_and_recycled(rank):
    device = _device(rank)
    pool = torch.cuda.MemPool(symm_mem.get_mempool_allocator(device))
    a = torch.arange(1024.0, device=device)
    addresses = []
    for value in range(2):
        with torch.cuda.use_mem_pool(pool):
            made = torch.full((1024,), float(value + rank), device=device)
            product = torch.mul(a, 2)
        addresses.append(made.data_ptr())
        assert symmem.find(made.data_ptr()).backend == symmem.find(product.data_ptr()).backend == "nccl"
        size = symm_mem.rendezvous(made, world()).world_size
        assert (ops.one_shot_all_reduce(made, "sum", world()) == sum(value + other for other in range(size))).all()
        assert torch.equal(ops.one_shot_all_reduce(product, "sum", world()), size * 2 * a)
        symm_mem.rendezvous(made, world()).barrier(timeout_ms=60_000)
        leave()
        del made, product
    assert addresses[0] == addresses[1]
    leave()


@ranks(1)
def test_t434_a_pool_follows_the_choice_of_a_backend(rank):
    device = device_of(rank)
    pool, kept = torch.cuda.MemPool(symm_mem.get_mempool_allocator(device)), []
    for name, backend in (("NCCL", "nccl"), ("CUDA", "cuda")):
        symm_mem.set_backend(name)
        with torch.cuda.use_mem_pool(pool):
            kept.append(torch.ones(1 << 24, device=device))
        assert symmem.find(kept[-1].data_ptr()).backend == backend
    leave()


@ranks(1)
def test_py23_t096_a_group_is_backed_by_a_foreign_communicator(rank):
    device = _device(rank)
    theirs = nccl.init_rank(1, nccl.unique_id(), 0, device=device.index)
    if hasattr(bindings, "_register_external_nccl_comm"):
        from torch.distributed._symmetric_memory import _nccl

        registration = _nccl.register_external_nccl_comm(world(), theirs.raw, device, theirs)
    else:
        registration = nccl.register_external_nccl_comm(world(), theirs.raw, device, theirs)
    x = symm_mem.empty(1000, device=device).fill_(3)
    handle = symm_mem.rendezvous(x, world())
    assert nccl.communicator_of(handle.native).raw == theirs.raw
    assert (handle.rank, handle.world_size) == (0, 1)
    assert (handle.get_buffer(0, (1000,), torch.float32) == 3).all()
    torch.cuda.synchronize()
    registration.unregister()
    # The window goes before its communicator.
    del x, handle
    leave()


@ranks(1)
def test_h47_t447_endpoints_need_a_newer_nccl_or_other_devices(rank):
    device = _device(rank)
    handle = symm_mem.rendezvous(symm_mem.empty(16, device=device), world())
    for call in (lambda: handle.get_peer_cft_handle(0), handle.get_multimem_cft_handle):
        try:
            endpoint, offset = call()
        except symmem.Error as error:
            assert nccl.version() >= (2, 31) or "needs NCCL 2.31.2" in str(error), error
        else:
            assert endpoint >= 0 and offset >= 0
    leave()

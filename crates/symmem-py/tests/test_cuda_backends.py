"""Memory of devices from each backend, between processes. Ranks share a device where there are more ranks than devices: NCCL
takes them only for ranks of two machines, so that is what they say they are."""

import os

import pytest
import ranks
import symmem
from symmem import nccl


def _lacks(backend):
    """What this machine lacks for a backend, if it lacks something."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if backend == "nvshmem":
        return None if os.environ.get("SYMMEM_NVSHMEM") else "SYMMEM_NVSHMEM is not set"
    return None


def _check_backend(world, backend):
    import torch

    os.environ.update(NCCL_HOSTID=f"host{world.rank}", NCCL_SOCKET_IFNAME="lo", NVSHMEM_REMOTE_TRANSPORT="none")
    number = world.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(number)
    stream = torch.cuda.current_stream().cuda_stream
    n, me = world.size, world.rank
    for _ in range(2):
        array = symmem.empty(1024, "float32", world, device=number, backend=backend)
        own = torch.from_dlpack(array)
        assert symmem.find(own.data_ptr()).backend == backend and (own == 0).all()
        own.fill_(me + 1)
        x = symmem.rendezvous(own, world)
        x.handle.barrier(stream=stream)
        for rank in range(n):
            assert (torch.from_dlpack(x.peer_array(rank)) == rank + 1).all()
        x.handle.barrier(stream=stream)
        if backend == "nccl":
            theirs = torch.empty_like(own)
            nccl.all_reduce([own], [theirs], comms=[nccl.communicator_of(x.handle)])
            torch.cuda.synchronize()
            assert (theirs == n * (n + 1) / 2).all()
        x.all_reduce("sum", stream=stream)
        x.handle.synchronize(stream)
        assert (own == n * (n + 1) / 2).all()
        assert x.handle.buffer_ptrs_dev
        torch.cuda.synchronize()
        world.barrier()
    pool = world.pool(1 << 20, device=number, backend=backend)
    handles = [pool.alloc(256).rendezvous(world) for _ in range(3)]
    assert {handle.memory.backend for handle in handles} == {backend}
    handles[2].barrier(stream=stream)
    handles[2].synchronize(stream)
    torch.cuda.synchronize()
    world.barrier()


def from_cuda(world):
    _check_backend(world, "cuda")


def from_nccl(world):
    _check_backend(world, "nccl")


def from_nvshmem(world):
    _check_backend(world, "nvshmem")


@pytest.mark.parametrize("n", (1, 2))
@pytest.mark.parametrize("body", (from_cuda, from_nccl, from_nvshmem), ids=lambda body: body.__name__)
def test_ranks_read_and_reduce_memory_of_every_backend(n, body):
    lacks = _lacks(body.__name__.removeprefix("from_"))
    if lacks:
        pytest.skip(lacks)
    ranks.run(n, body)

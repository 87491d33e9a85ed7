"""Memory pools on the CPU. The numbers are those of docs/parity.md."""

import ctypes

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem.torch
import torch.distributed._symmetric_memory as symm_mem
from symmem import _native


def _pool():
    return symm_mem.get_mem_pool("cpu")


def test_py06_py07_the_pool_of_the_cpu():
    assert _pool() is _pool()
    assert symm_mem.get_mempool_allocator("cpu") is _pool().allocator
    assert torch.get_device_module("cpu").MemPool is symmem.torch.MemPool
    with pytest.raises(RuntimeError, match="no_split=True"):
        torch.cpu.MemPool(symm_mem.get_mempool_allocator("cpu"), no_split=False)


def test_l114_whatever_is_made_in_the_pool_is_symmetric():
    ordinary = torch.arange(4.0)
    with torch.cpu.use_mem_pool(_pool()):
        made = [torch.arange(4.0), torch.zeros(2, 2), ordinary + 1, ordinary.clone(), torch.linspace(0, 1, 5)]
        view = ordinary[1:]
        parts = torch.rand(4, 4).chunk(2)
    for tensor in (*made, *parts):
        assert symm_mem.is_symm_mem_tensor(tensor)
    assert made[2].tolist() == [1, 2, 3, 4]
    # What was there before stays where it was.
    assert view.untyped_storage().data_ptr() == ordinary.untyped_storage().data_ptr()
    assert not symm_mem.is_symm_mem_tensor(view)
    assert not symm_mem.is_symm_mem_tensor(torch.zeros(4))


def test_l114_gradients_flow_through_tensors_of_the_pool():
    weight = torch.ones(3, requires_grad=True)
    with torch.cpu.use_mem_pool(_pool()):
        result = (weight * 2).sum()
    result.backward()
    assert weight.grad.tolist() == [2, 2, 2]


@ranks(2)
def test_t090_mempool_tensor_factory(rank):
    with torch.cpu.use_mem_pool(_pool()):
        tensor = torch.arange(1024, dtype=torch.float32)
    symm_mem.rendezvous(tensor, world())
    result = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", world())
    assert torch.equal(result, 2 * torch.arange(1024.0))


@ranks(2)
def test_t091_mempool_compute_ops(rank):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.rand(1, 1024, generator=generator), torch.rand(1024, 1024, generator=generator)
    with torch.cpu.use_mem_pool(_pool()):
        y = torch.mm(x, w)
    result = torch.ops.symm_mem.one_shot_all_reduce(y, "sum", world())
    torch.testing.assert_close(result, 2 * torch.mm(x, w))


@pytest.mark.parametrize("count", [1024, 4 * 1024 * 1024])
@ranks(2)
def test_t092_t093_a_recycled_segment_has_a_working_pad(rank, count):
    addresses = []
    for value in range(2):
        with torch.cpu.use_mem_pool(_pool()):
            tensor = torch.full((count,), float(10 * value + rank))
        addresses.append(tensor.data_ptr())
        handle = symm_mem.rendezvous(tensor, world())
        handle.barrier(timeout_ms=60_000)
        assert (handle.get_remote_tensor(1 - rank, (count,), torch.float32) == 10 * value + 1 - rank).all()
        handle.barrier(timeout_ms=60_000)
        del tensor, handle
    assert addresses[0] == addresses[1]


def test_t094_mempool_storage_reuse():
    def address(count):
        with torch.cpu.use_mem_pool(_pool()):
            return torch.zeros(count).data_ptr()

    first = address(1000)
    assert address(1000) == first
    assert address(2000) != first


def test_l111_the_functions_of_a_devices_pool_say_why_they_have_nothing(capfd):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    library = ctypes.CDLL(_native.__file__)
    alloc, free = library.symmem_pool_alloc, library.symmem_pool_free
    alloc.restype, alloc.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    assert _native.serve_pools(_native.World.connect(0, 1), 4096) == ("symmem_pool_alloc", "symmem_pool_free")
    assert alloc(1024, 0, None) is None
    assert "1024 bytes for a pool of cuda:0" in capfd.readouterr().err
    assert alloc(-1, 0, None) is None
    assert "negative" in capfd.readouterr().err
    free(None, 0, 0, None)


@pytest.mark.skipif(not hasattr(torch._C, "_cuda_customAllocator"), reason="this torch is without CUDA")
def test_l110_torch_takes_the_allocator_of_devices():
    from symmem.torch import _pool as pools

    assert isinstance(pools.device_allocator(), torch._C._cuda_CUDAAllocator)
    assert pools.device_allocator() is pools.device_allocator()


def test_l110_a_pool_of_another_kind_of_device_is_torchs():
    with pytest.raises(RuntimeError):
        symm_mem.get_mempool_allocator("meta")

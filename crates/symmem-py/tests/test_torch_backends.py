"""PyTorch's choice of a backend, and communicators of others, for memory of devices: with shared objects that stand in for a
driver, for NCCL and for NVSHMEM, and one rank. Tensors need a device: `test_torch_cuda_backends.py`."""

import ctypes
import os

import fake_nccl
import pytest
from fake_nccl import needs_it, run

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem
import symmem.torch
import torch.distributed._symmetric_memory as symm_mem
from symmem import nccl
from symmem.torch import _backends, _groups, _handle, _install, _memory
from torch._C import _distributed_c10d as bindings

DEVICE = torch.device("cuda", 0)
NOWHERE = "/nowhere/libnccl.so.2"


def _installed():
    """As after `install("cuda")`, but for the operators, which need a device."""
    _install._installed.add("cuda")
    _groups.stream = lambda number: 0


def _unavailable(text, call, *arguments):
    with pytest.raises(symmem.Unavailable) as raised:
        call(*arguments)
    assert text in str(raised.value), raised.value


def _choices():
    assert _backends.backend() == "cuda"
    _installed()
    assert symm_mem.get_backend("cuda") == symmem.torch.BACKEND
    symm_mem.set_backend(symmem.torch.BACKEND)
    assert symm_mem.get_backend("cuda") == symmem.torch.BACKEND
    _unavailable('backend="nvshmem"', symm_mem.set_backend, "NVSHMEM")
    with pytest.raises(RuntimeError, match="a backend among CUDA, NCCL, NVSHMEM, got 'tape'"):
        symm_mem.set_backend("tape")
    assert symm_mem.get_backend("cuda") == symmem.torch.BACKEND and _backends.backend() == "cuda"
    for name, backend in (("NCCL", "nccl"), ("CUDA", "cuda"), ("NCCL", "nccl")):
        symm_mem.set_backend(name)
        assert symm_mem.get_backend("cuda") == name and _backends.backend() == backend
        made = _memory.Allocation(64, DEVICE)
        assert made.memory.backend == backend and fake_nccl.live()[2] == (backend == "nccl")
        del made
    assert symm_mem.get_backend("cpu") == symmem.torch.BACKEND
    assert _memory.Allocation(64).memory.backend is None


@needs_it
def test_l04_a_backend_of_devices_is_chosen_by_pytorchs_names():
    run(_choices)


def _no_library():
    _installed()
    _unavailable(NOWHERE, symm_mem.set_backend, "NCCL")
    assert symm_mem.get_backend("cuda") == symmem.torch.BACKEND


@needs_it
def test_a_backend_without_its_library_is_unavailable():
    run(_no_library, SYMMEM_NCCL=NOWHERE)


def _environment():
    for backend in ("cuda", "nccl"):
        os.environ["SYMMEM_CUDA_BACKEND"] = backend
        assert _backends.backend() == backend
        assert _memory.Allocation(64, DEVICE).memory.backend == backend
    os.environ["SYMMEM_CUDA_BACKEND"] = "nvshmem"
    _unavailable('backend="nvshmem"', _memory.Allocation, 64, DEVICE)
    os.environ["SYMMEM_CUDA_BACKEND"] = "tape"
    with pytest.raises(symmem.Usage, match="a backend of devices among cuda, nccl, nvshmem"):
        _memory.Allocation(64, DEVICE)


def _environment_of_devices():
    _installed()
    _environment()


@needs_it
def test_the_environment_chooses_where_set_backend_was_not_called():
    run(_environment_of_devices)


def test_without_devices_of_ours_the_choice_is_torchs():
    if "cuda" in _install._installed:
        pytest.skip("devices are this library's")
    with pytest.raises(RuntimeError, match="tape"):
        symm_mem.set_backend("tape")
    assert _backends.chosen() is None


def _torchs_functions():
    """What torch calls for a segment and when it gives one back."""
    library = ctypes.CDLL(symmem._native.__file__)
    alloc, free = library.symmem_pool_alloc, library.symmem_pool_free
    alloc.argtypes, alloc.restype = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    return alloc, free


def _segments():
    _installed()
    symm_mem.set_backend("NCCL")
    names = symmem._native.serve_pools(_memory.home(), 4096, _backends.backend())
    assert names == ("symmem_pool_alloc", "symmem_pool_free")
    alloc, free = _torchs_functions()
    address = alloc(2048, 0, None)
    assert symmem.find(address).backend == "nccl" and fake_nccl.live()[2] == 1
    free(address, 2048, 0, None)
    assert symmem.find(address) is None and fake_nccl.live()[2] == 0


@needs_it
def test_t434_segments_of_torchs_pools_come_from_the_chosen_backend():
    run(_segments)


def _changed_backend():
    _installed()
    symm_mem.get_mempool_allocator("cuda")
    alloc, free = _torchs_functions()
    for name, backend in ((None, "cuda"), ("NCCL", "nccl"), ("CUDA", "cuda")):
        if name is not None:
            symm_mem.set_backend(name)
        address = alloc(2048, 0, None)
        assert symmem.find(address).backend == backend
        free(address, 2048, 0, None)


@needs_it
def test_t434_pools_that_there_are_follow_the_choice():
    if not hasattr(torch._C, "_cuda_customAllocator"):
        pytest.skip("this torch was built without CUDA")
    run(_changed_backend)


def _group(name):
    pad = 9216
    return _groups.Group(name, 0, 1, symmem.World.connect(0, 1, signal_pad_size=pad), pad)


def _register(name, comm):
    """By torch's entry point where this torch has it, or by ours."""
    if hasattr(bindings, "_register_external_nccl_comm"):
        from torch.distributed._symmetric_memory import _nccl

        return _nccl.register_external_nccl_comm(name, comm.raw, "cuda:0", comm)
    return nccl.register_external_nccl_comm(name, comm.raw, DEVICE, comm)


def _foreign():
    _installed()
    symm_mem.set_backend("NCCL")
    theirs = nccl.init_rank(1, nccl.unique_id(), 0, device=0)
    group = _group("external")
    registration = _register("external", theirs)
    assert nccl.external_nccl_comm("external", 0).raw == theirs.raw
    handles = [_handle.SymmetricMemory(_memory.Allocation(4096, DEVICE), group, 0) for _ in range(2)]
    for handle in handles:
        assert nccl.communicator_of(handle.native).raw == theirs.raw
    other = _handle.SymmetricMemory(_memory.Allocation(4096, DEVICE), _group("another"), 0)
    assert nccl.communicator_of(other.native).raw != theirs.raw
    registration.unregister()
    registration.unregister()
    assert nccl.external_nccl_comm("external", 0) is None
    after = _handle.SymmetricMemory(_memory.Allocation(4096, DEVICE), group, 0)
    assert nccl.communicator_of(after.native).raw != theirs.raw
    with _register("external", theirs):
        again = _handle.SymmetricMemory(_memory.Allocation(4096, DEVICE), group, 0)
        assert nccl.communicator_of(again.native).raw == theirs.raw
    if hasattr(bindings, "_register_external_nccl_comm"):
        with pytest.raises(RuntimeError, match="null"):
            bindings._register_external_nccl_comm("external", 0, DEVICE)
        bindings._unregister_external_nccl_comm("external", DEVICE)
    # Windows go before their communicator.
    del handles, handle, again


@needs_it
def test_py23_t096_l135_h12_a_group_is_backed_by_a_foreign_communicator():
    run(_foreign)


def _current_device():
    _installed()
    torch.cuda.current_device = lambda: 2
    theirs = nccl.init_rank(1, nccl.unique_id(), 0, device=2)
    with nccl.register_external_nccl_comm("current", theirs.raw, torch.device("cuda"), theirs) as registration:
        assert registration.device == 2 and nccl.external_nccl_comm("current", 2).raw == theirs.raw
    with nccl.register_external_nccl_comm("named", theirs.raw, "cuda:2", theirs) as registration:
        assert registration.device == 2
    _backends.register(None, "current", theirs.raw, "cuda", ours=True)
    assert nccl.external_nccl_comm("current", 2) is not None and nccl.external_nccl_comm("current", 0) is None
    _backends.unregister(None, "current", "cuda", ours=True)
    assert nccl.external_nccl_comm("current", 2) is None


@needs_it
def test_py23_a_device_without_a_number_is_the_current_one():
    run(_current_device)


def _endpoints():
    _installed()
    group = _group("endpoints")
    plain = _handle.SymmetricMemory(_memory.Allocation(4096, DEVICE), group, 0)
    for call in (plain.get_multimem_cft_handle, lambda: plain.get_peer_cft_handle(0)):
        with pytest.raises(RuntimeError, match="only available on the NCCL"):
            call()
    symm_mem.set_backend("NCCL")
    handle = _handle.SymmetricMemory(_memory.Allocation(4096, DEVICE), group, 0)
    endpoint, offset = handle.get_peer_cft_handle(0)
    assert handle.get_multimem_cft_handle()[1] == offset and handle.get_multimem_cft_handle()[0] != endpoint
    with pytest.raises(RuntimeError, match="a rank in"):
        handle.get_peer_cft_handle(1)


@needs_it
def test_h47_t447_endpoints_are_those_of_nccls_memory():
    run(_endpoints)

"""Allocation and rendezvous of CPU tensors. The numbers are those of docs/parity.md."""

import gc
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem.torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import _SymmetricMemory


def test_t001_has_multicast_support():
    assert not _SymmetricMemory.has_multicast_support(DeviceType.CPU, 0)
    assert not _SymmetricMemory.has_multicast_support(DeviceType.CPU, None)


def test_t002_is_symm_mem_tensor():
    assert not symm_mem.is_symm_mem_tensor(torch.empty(1024))
    tensor = symm_mem.empty(1024, device="cpu")
    assert symm_mem.is_symm_mem_tensor(tensor)
    # W-35: views and parts of it are symmetric too.
    assert symm_mem.is_symm_mem_tensor(tensor[10:20])


def test_t003_get_backend():
    assert symm_mem.get_backend(torch.device("cpu")) == symmem.torch.BACKEND
    assert symm_mem.get_backend("cpu") == symmem.torch.BACKEND
    symm_mem.set_backend(symmem.torch.BACKEND)
    with pytest.raises(RuntimeError, match="does not find"):
        symm_mem.set_backend("no such backend")


def test_t005_get_signal_pad_size():
    size = symm_mem.get_signal_pad_size()
    assert isinstance(size, int) and size > 0
    assert size == _SymmetricMemory.signal_pad_size


def test_t006_set_signal_pad_size():
    former = symm_mem.get_signal_pad_size()
    try:
        symm_mem.set_signal_pad_size(1024 * 1024)
        assert symm_mem.get_signal_pad_size() == _SymmetricMemory.signal_pad_size == 1024 * 1024
    finally:
        symm_mem.set_signal_pad_size(former)


@ranks(2)
def test_t007_set_signal_pad_size_with_allocation(rank):
    former = symm_mem.get_signal_pad_size()
    symm_mem.set_signal_pad_size(2 * former)
    tensor = symm_mem.empty(64, device="cpu")
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD)
    assert handle.signal_pad_size == 2 * former
    pad = handle.get_signal_pad(rank)
    assert pad.numel() == 2 * former // 4
    pad[0] = 42
    assert pad[0].item() == 42
    # W-19: an older allocation keeps the size it was made with.
    symm_mem.set_signal_pad_size(former)
    assert handle.signal_pad_size == 2 * former


@ranks(2)
def test_t008_handle_group_name(rank):
    tensor = symm_mem.empty(64, device="cpu")
    second = dist.new_group([0, 1])
    for group in (dist.group.WORLD, second):
        assert symm_mem.rendezvous(tensor, group).group_name == group.group_name


def test_t009_large_alloc():
    tensor = symm_mem.empty(2 * 1024**3, dtype=torch.uint8, device="cpu")
    assert tensor.numel() * tensor.element_size() == 2 * 1024**3


@pytest.mark.parametrize("size", [(), (0,), (3,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint32, torch.float8_e4m3fn, torch.bool])
def test_py01_empty_takes_what_torch_empty_takes(size, dtype):
    for tensor in (symm_mem.empty(size, dtype=dtype, device="cpu"), symm_mem.empty(*size, dtype=dtype, device="cpu")):
        like = torch.empty(size, dtype=dtype)
        assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) == (
            (like.shape, like.stride(), like.dtype, like.device)
        )
        assert symm_mem.is_symm_mem_tensor(tensor)


def test_py01_empty_uses_torchs_defaults():
    tensor = symm_mem.empty(4)
    assert tensor.dtype == torch.get_default_dtype() and tensor.device == torch.device("cpu")


def test_l10_strides_decorate_the_tensor():
    tensor = _SymmetricMemory.empty_strided_p2p((2, 3), (1, 2), torch.float32, torch.device("cpu"))
    assert tensor.stride() == (1, 2)
    assert tensor.untyped_storage().nbytes() == 24


@ranks(2)
def test_t011_get_signal_pad(rank):
    tensor = symm_mem.empty(1, device="cpu")
    handle = symm_mem.rendezvous(tensor, world())
    pad = handle.get_signal_pad(rank)
    assert pad.data_ptr() == handle.signal_pad_ptrs[rank]
    assert pad.dtype == torch.uint32 and pad.numel() == handle.signal_pad_size // 4
    assert handle.get_signal_pad(rank, (8, 8)).shape == (8, 8)
    wide = handle.get_signal_pad(rank, dtype=torch.uint64)
    assert wide.dtype == torch.uint64 and wide.numel() == handle.signal_pad_size // 8
    both = handle.get_signal_pad(rank, (8, 8), dtype=torch.uint64)
    assert both.dtype == torch.uint64 and both.shape == (8, 8)
    pad.view(torch.int32).fill_(42)
    tensor.fill_(0)
    assert (pad.view(torch.int32) == 42).all()
    with pytest.raises(RuntimeError, match="get_signal_pad: the requested size .* exceeds"):
        handle.get_signal_pad(rank, (handle.signal_pad_size,))


@ranks(3)
def test_t012_signal_pad_slot_layout(rank):
    handle = symm_mem.rendezvous(symm_mem.empty(64, device="cpu"), world())
    size = handle.world_size
    handle.get_signal_pad((rank + 1) % size)[size * 3 + rank] = 1
    handle.barrier()
    expected = torch.zeros(handle.signal_pad_size // 4, dtype=torch.int32)
    expected[size * 3 + (rank - 1) % size] = 1
    assert torch.equal(handle.get_signal_pad(rank).view(torch.int32), expected)


def _check_handle(handle, rank):
    """What T-050 and T-051 do with a handle whose tensor is gone."""
    size = handle.world_size
    assert (handle.rank, size) == (rank, dist.get_world_size())
    buffer = handle.get_buffer(0, (64, 64), torch.float32)
    if rank == 0:
        handle.wait_signal(src_rank=1)
        assert (buffer == 42).all()
    elif rank == 1:
        buffer.fill_(42)
        handle.put_signal(dst_rank=0)
    handle.barrier()
    if rank == 0:
        buffer.fill_(43)
    handle.barrier()
    assert (buffer == 43).all()
    handle.barrier()


@ranks(2)
def test_t050_empty_strided_p2p(rank):
    with pytest.warns(UserWarning, match="not within any SymmetricMemory allocation"):
        assert _SymmetricMemory.rendezvous(torch.rand(64, 64), group_name=world()) is None
    tensor = _SymmetricMemory.empty_strided_p2p((64, 64), (64, 1), torch.float32, torch.device("cpu"), world())
    handle = _SymmetricMemory.rendezvous(tensor)
    del tensor
    _check_handle(handle, rank)


@ranks(2)
def test_t051_empty_strided_p2p_persistent(rank):
    def allocate(size=(64, 64)):
        stride = torch.empty(size, device="meta").stride()
        return _SymmetricMemory.empty_strided_p2p(
            size, stride, torch.float32, torch.device("cpu"), world(), alloc_id=42
        )

    tensor = allocate()
    address = tensor.data_ptr()
    with pytest.raises(RuntimeError, match="previous allocation with the same alloc_id is still active"):
        allocate()
    view = tensor[1]
    del tensor
    with pytest.raises(RuntimeError, match="still active"):  # a view keeps the storage
        allocate()
    del view
    with pytest.raises(RuntimeError, match="requested allocation size .* is different"):
        allocate((65, 64))
    tensor = allocate()
    assert tensor.data_ptr() == address
    handle = _SymmetricMemory.rendezvous(tensor)
    del tensor
    _check_handle(handle, rank)


def test_t095_same_id_gives_the_same_address():
    def allocate():
        return _SymmetricMemory.empty_strided_p2p((64,), (1,), torch.float32, torch.device("cpu"), alloc_id=7)

    address = allocate().data_ptr()
    assert allocate().data_ptr() == address


def test_l34_no_group_at_all_is_an_error():
    with pytest.raises(RuntimeError, match="neither specified during allocation nor passed to rendezvous"):
        _SymmetricMemory.rendezvous(symm_mem.empty(4, device="cpu"))


@ranks(2)
def test_py02_rendezvous_takes_a_group_or_its_name(rank):
    tensor = symm_mem.empty(4, device="cpu")
    by_group, by_name = symm_mem.rendezvous(tensor, dist.group.WORLD), symm_mem.rendezvous(tensor, world())
    assert by_group.buffer_ptrs == by_name.buffer_ptrs
    with pytest.raises(TypeError, match="unsupported group type"):
        symm_mem.rendezvous(tensor, 0)
    with pytest.raises(RuntimeError):
        symm_mem.rendezvous(tensor, "no such group")


@ranks(2)
def test_h20_the_handle_tells_sizes_and_addresses(rank):
    import ctypes

    tensor = symm_mem.empty(10, device="cpu")
    handle = symm_mem.rendezvous(tensor, world())
    assert (handle.rank, handle.world_size, handle.offset) == (rank, 2, 0)
    assert (handle.buffer_size, handle.device) == (40, torch.device("cpu"))
    assert handle.buffer_ptrs[rank] == tensor.data_ptr() and len(set(handle.buffer_ptrs)) == 2
    assert (handle.multicast_ptr, handle.has_multicast_support(DeviceType.CPU, 0)) == (0, False)
    for table, address in (
        (handle.buffer_ptrs, handle.buffer_ptrs_dev),
        (handle.signal_pad_ptrs, handle.signal_pad_ptrs_dev),
    ):
        assert list((ctypes.c_uint64 * 2).from_address(address)) == table


@ranks(2)
def test_h40_get_buffer(rank):
    tensor = symm_mem.empty(8, device="cpu").copy_(torch.arange(8.0) + 10 * rank)
    handle = symm_mem.rendezvous(tensor, world())
    handle.barrier()
    peer = 1 - rank
    assert handle.get_buffer(rank, (8,), torch.float32).data_ptr() == tensor.data_ptr()
    assert torch.equal(handle.get_buffer(peer, (2, 3), torch.float32, 2), torch.arange(2.0, 8.0).view(2, 3) + 10 * peer)
    assert handle.get_buffer(peer, (32,), torch.uint8).numel() == 32
    with pytest.raises(RuntimeError, match=r"exceeds the allocated size \(32 bytes\)"):
        handle.get_buffer(peer, (8,), torch.float32, 1)
    with pytest.raises(RuntimeError, match="non-negative"):  # W-12
        handle.get_buffer(peer, (1,), torch.float32, -1)
    with pytest.raises(RuntimeError, match=r"rank must be in \[0, 2\) \(got 2\)"):
        handle.get_buffer(2, (1,), torch.float32)


@ranks(2)
def test_h41_handles_of_interior_memory_have_an_offset(rank):
    tensor = symm_mem.empty(8, device="cpu").copy_(torch.arange(8.0) + 10 * rank)
    whole = symm_mem.rendezvous(tensor, world())
    part = whole.get_buffer(rank, (4,), torch.float32, 4)
    handle = symm_mem.rendezvous(part, world())
    assert (handle.offset, handle.buffer_ptrs) == (16, whole.buffer_ptrs)
    handle.barrier()
    peer = 1 - rank
    assert torch.equal(handle.get_remote_tensor(peer, (4,), torch.float32), torch.arange(4.0, 8.0) + 10 * peer)
    handle.barrier()


@ranks(2)
def test_w11_a_peers_buffer_keeps_the_memory(rank):
    tensor = symm_mem.empty(8, device="cpu").fill_(rank)
    handle = symm_mem.rendezvous(tensor, world())
    view = handle.get_buffer(1 - rank, (8,), torch.float32)
    handle.barrier()
    del tensor, handle
    gc.collect()
    dist.barrier()
    assert (view == 1 - rank).all()
    dist.barrier()


def test_l11_memory_goes_with_its_last_user():
    from symmem.torch import _memory

    tensor = symm_mem.empty(8, device="cpu")
    allocation = weakref.ref(_memory.find(tensor))
    view = tensor[2:]
    del tensor
    assert allocation() is not None
    del view
    assert allocation() is None


def test_a_symmetric_tensor_stays_where_it_is_when_it_is_to_be_shared():
    tensor = symm_mem.empty(64, device="cpu").fill_(1)
    address = tensor.data_ptr()
    strategy = torch.multiprocessing.get_sharing_strategy()
    try:
        for name in torch.multiprocessing.get_all_sharing_strategies():
            torch.multiprocessing.set_sharing_strategy(name)
            for given in (tensor, tensor[8:16], tensor.view(torch.int32)):
                with pytest.raises(RuntimeError, match="expected an ordinary tensor, got a symmetric one"):
                    given.share_memory_()
            with pytest.raises(RuntimeError, match="expected an ordinary tensor, got a symmetric one"):
                ForkingPickler.dumps(tensor)
            # Others are shared as before, and a clone is another.
            assert torch.ones(4).share_memory_().is_shared() and tensor.clone().share_memory_().is_shared()
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    assert tensor.data_ptr() == address and symm_mem.is_symm_mem_tensor(tensor) and (tensor == 1).all()


@ranks(2)
def test_a_peers_tensor_stays_where_it_is_too(rank):
    handle = symm_mem.rendezvous(symm_mem.empty(64, device="cpu"), world())
    for tensor in (handle.get_buffer(1 - rank, (64,), torch.float32), handle.get_signal_pad(1 - rank)):
        with pytest.raises(RuntimeError, match="expected an ordinary tensor, got a symmetric one"):
            tensor.share_memory_()

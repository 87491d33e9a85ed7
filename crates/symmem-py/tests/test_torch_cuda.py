"""`symmem.torch` on CUDA tensors, after `install("cuda")`. The numbers are those of docs/parity.md."""

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem.torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from cuda_ranks import delay, device_of, leave
from symmem.torch import _exchange, _groups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
ops = torch.ops.symm_mem
SIZES = (1, 2, 4)


@ranks(SIZES)
def test_t002_t011_t015_peers_are_read_and_signalled(rank):
    device = device_of(rank)
    x = symm_mem.empty(1024, device=device)
    assert x.device == device and symm_mem.is_symm_mem_tensor(x)
    assert symm_mem.get_backend(device) == symmem.torch.BACKEND
    assert not symm_mem.is_symm_mem_tensor(torch.empty(1024, device=device))
    handle = symm_mem.rendezvous(x, world())
    assert handle.buffer_ptrs[rank] == x.data_ptr() and handle.device == device
    assert handle.buffer_size == 4096 and handle.signal_pad_size == symm_mem.get_signal_pad_size()
    x.fill_(rank)
    handle.barrier()
    for peer in range(handle.world_size):
        view = handle.get_buffer(peer, (1024,), torch.float32)
        assert view.device == device and (view == peer).all()
    handle.barrier()
    right, left = (rank + 1) % handle.world_size, (rank - 1) % handle.world_size
    handle.get_buffer(right, (4,), torch.float32).fill_(10 + rank)
    handle.put_signal(right, channel=1)
    handle.wait_signal(left, channel=1)
    assert (x[:4] == 10 + left).all() and (x[4:] == rank).all()
    pad = handle.get_signal_pad(rank)
    assert pad.data_ptr() == handle.signal_pad_ptrs[rank] and (pad.view(torch.int32) == 0).all()
    leave()


@ranks(1)
def test_t004_h12_links_between_devices_are_torchs_answer(rank):
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity

    device_of(rank)
    found = _detect_dma_connectivity(DeviceType.CUDA, "nvlink")
    count = torch.cuda.device_count()
    assert found.connection_type == "nvlink" and [len(row) for row in found.matrix] == [count] * count


@ranks(2)
def test_t007_the_pad_has_the_size_that_was_set(rank):
    device, size = device_of(rank), 2 * symm_mem.get_signal_pad_size()
    symm_mem.set_signal_pad_size(size)
    handle = symm_mem.rendezvous(symm_mem.empty(64, device=device), world())
    pad = handle.get_signal_pad(rank)
    assert handle.signal_pad_size == size and pad.numel() == size // 4
    pad.view(torch.int32)[0] = 42
    assert pad.view(torch.int32)[0].item() == 42
    leave()


@ranks(2)
def test_h23_h25_tables_of_addresses_lie_on_the_device(rank):
    device = device_of(rank)
    handle = symm_mem.rendezvous(symm_mem.empty(64, device=device), world())
    for address, expected in (
        (handle.buffer_ptrs_dev, handle.buffer_ptrs),
        (handle.signal_pad_ptrs_dev, handle.signal_pad_ptrs),
    ):
        assert _words_at(address, len(expected), device) == expected
    leave()


def _words_at(address, count, device):
    class Table:
        @property
        def __cuda_array_interface__(self):
            return {"shape": (count,), "typestr": "<i8", "data": (address, False), "version": 3}

    return torch.as_tensor(Table(), device=device).tolist()


@ranks(2)
def test_t050_t051_t095_memory_outlives_its_tensor_and_an_id_gives_it_again(rank):
    device = device_of(rank)
    assert symm_mem.rendezvous(torch.empty(64, 64, device=device), world()) is None
    new = torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p
    arguments = ((64, 64), (64, 1), torch.float32, device, world(), 42)
    x = new(*arguments).fill_(rank)
    address, handle = x.data_ptr(), symm_mem.rendezvous(x, world())
    with pytest.raises(RuntimeError, match="still active"):
        new(*arguments)
    del x
    handle.barrier()
    assert (handle.get_buffer(1 - rank, (64, 64), torch.float32) == 1 - rank).all()
    handle.barrier()
    x = new(*arguments)
    assert x.data_ptr() == address and (x == rank).all()
    leave()


@ranks(SIZES)
def test_t067_t068_t069_reductions(rank):
    device, size = device_of(rank), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        for count in (4 * size, 8192, 65536 * size):
            count -= count % (16 * size) if count > 16 * size else 0
            x = symm_mem.empty(count + 8, dtype=dtype, device=device).fill_(0)
            part = x[8:]
            part.copy_(torch.arange(count, device=device) % 7 + rank)
            expected = sum(torch.arange(count, device=device) % 7 + peer for peer in range(size)).to(dtype)
            assert torch.equal(ops.one_shot_all_reduce(part, "sum", world()), expected)
            out = torch.empty_like(part)
            assert torch.equal(ops.two_shot_all_reduce_out(part, "sum", world(), out), expected)
            copied = ops.one_shot_all_reduce_copy(x[: count + 8], part.clone(), "sum", world())
            assert torch.equal(copied, expected)
            x[:8].fill_(0)
            part.copy_(torch.arange(count, device=device) % 7 + rank)
            if count >= 16 * size:
                mine = torch.empty(count // size, dtype=dtype, device=device)
                ops.reduce_scatter_out(part, world(), False, mine)
                assert torch.equal(mine, expected.chunk(size)[rank])
            assert torch.equal(ops.two_shot_all_reduce_(part, "sum", world()), expected)
            assert (x[:8] == 0).all()
            leave()


@ranks(SIZES)
def test_t022_t025_t226_gathers_and_tiles(rank):
    device, size = device_of(rank), dist.get_world_size()
    inputs = torch.full((4, 3), float(rank), device=device)
    out = symm_mem.empty(4 * size, 3, device=device)
    ops.multimem_all_gather_out(inputs, world(), out)
    assert out[::4, 0].tolist() == list(range(size))
    wait = torch.ops._c10d_functional.wait_tensor
    assert torch.equal(wait(ops._low_contention_all_gather(inputs, world())), out)
    symmetric = symm_mem.empty(4, 3, device=device).copy_(inputs)
    assert torch.equal(wait(ops._low_contention_all_gather(symmetric, world())), out)
    rows = torch.arange(size, device=device).repeat_interleave(4).unsqueeze(1).expand(-1, 3).float().contiguous()
    scattered = wait(ops._low_contention_reduce_scatter(rows, "sum", world()))
    assert (scattered == rank * size).all() and scattered.shape == (4, 3)
    if hasattr(ops, "tile_reduce"):
        matrix = symm_mem.empty(64, 64, device=device).fill_(rank + 1)
        tile = torch.zeros(16, 16, device=device)
        ops.tile_reduce(matrix[8:24, 8:24], tile, 0, world())
        assert (tile == (sum(range(1, size + 1)) if rank == 0 else 0)).all()
        remote = ops.get_remote_tensors(matrix, world())
        assert [(t == peer + 1).all().item() for peer, t in enumerate(remote)] == [True] * size
    leave()


#: Operators that are copies between barriers.
COPIES = (
    *("tile_reduce", "multi_root_tile_reduce", "multimem_all_gather_out"),
    *("reduce_scatter_offset", "all_to_all_nd"),
)


def _copying(name, rank, x):
    """A call of one of them on two ranks' `x`, which is rank + 1: the call, what it writes, and what that is then."""
    tile, half, columns = torch.zeros_like(x), torch.zeros_like(x[:2]), x.new_zeros(8, 2)
    gathered = symm_mem.empty(8, 4, device=x.device)
    by_rank = torch.tensor([[1.0]] * 4 + [[2.0]] * 4, device=x.device)
    return {
        "tile_reduce": (lambda: _exchange.tile_reduce(x, tile, 0, world()), tile, 3 * (rank == 0)),
        "multi_root_tile_reduce": (
            lambda: _exchange.multi_root_tile_reduce([x[:2], x[2:]], half, [0, 1], world()),
            *(half, 3),
        ),
        "multimem_all_gather_out": (lambda: ops.multimem_all_gather_out(x, world(), gathered), gathered, by_rank),
        "reduce_scatter_offset": (lambda: symm_mem.reduce_scatter_offset(x, [half], world(), dim=0), half, 3),
        "all_to_all_nd": (lambda: symm_mem.all_to_all_nd(x, columns, 1, 0, group=world()), columns, by_rank),
    }[name]


@pytest.mark.parametrize("name", COPIES)
@ranks(2)
def test_w02_what_timed_out_works_when_all_ranks_are_back_in_step(rank, name):
    device = device_of(rank)
    x = symm_mem.empty(4, 4, device=device).fill_(rank + 1)
    handle, group = symm_mem.rendezvous(x, world()), _groups.of(world()).native
    call, written, expected = _copying(name, rank, x)
    call()
    assert (written == expected).all()
    leave()
    group.timeout, former = 1, group.timeout
    if rank == 0:
        with pytest.raises(symmem.Error):
            call()
            handle.native.synchronize(_groups.stream(device.index))
    dist.barrier()
    group.timeout = former
    if rank == 1:
        with pytest.raises(symmem.Error, match="rank 0"):
            call()
            handle.native.synchronize(_groups.stream(device.index))
    dist.barrier()
    symmem.torch.resync(timeout=30)
    for _ in range(3):
        written.zero_()
        call()
        assert (written == expected).all()
    leave()


@ranks(2)
def test_t056_tile_reduce_and_a_signal_that_nobody_has_taken_leave_each_other_alone(rank):
    device = device_of(rank)
    x, tile = symm_mem.empty(16, 16, device=device), torch.zeros(16, 16, device=device)
    handle = symm_mem.rendezvous(x, world())
    if rank == 0:
        handle.put_signal(1, channel=0)
    leave()
    for step in range(3):
        if rank == 0:
            delay()  # a rank that takes the signal for this rank's reads too early
        x.fill_(step + rank)
        _exchange.tile_reduce(x, tile, 1, world())
        assert (tile == (2 * step + 1 if rank == 1 else 0)).all()
    if rank == 1:
        handle.wait_signal(0, channel=0)
    leave()
    assert (handle.get_signal_pad(rank).view(torch.int32) == 0).all()
    leave()


@ranks(2)
def test_an_output_on_another_device_is_refused(rank):
    device = device_of(rank)
    x, host = symm_mem.empty(16, device=device).fill_(1), symm_mem.empty(16, device="cpu").fill_(1)
    others = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()) if i != device.index)]
    for _ in range(2):
        for given, where in ((host, device), *((x, other) for other in others)):
            with pytest.raises(RuntimeError, match=f"expected output on {given.device}, got {where}"):
                ops.one_shot_all_reduce_out(given, "sum", world(), torch.empty(16, device=where))
            with pytest.raises(RuntimeError, match=f"expected output on {given.device}, got {where}"):
                ops.reduce_scatter_out(given, world(), False, torch.empty(8, device=where))
        # The second time, these are reductions that were made before.
        assert (ops.one_shot_all_reduce(x, "sum", world()) == 2).all()
        assert (ops.one_shot_all_reduce(host, "sum", world()) == 2).all()
    leave()


@ranks(SIZES)
def test_t221_rows_go_where_the_splits_say(rank):
    device, size = device_of(rank), dist.get_world_size()
    splits = [[(source + to) % 3 + 1 for to in range(size)] for source in range(size)]
    inputs = symm_mem.empty(3 * size, 2, device=device).fill_(0)
    at = 0
    for to, count in enumerate(splits[rank]):
        inputs[at : at + count] = 10 * rank + to
        at += count
    in_splits = symm_mem.empty(size, dtype=torch.int64, device=device).copy_(torch.tensor(splits[rank]))
    out = symm_mem.empty(3 * size, 2, device=device)
    received = symm_mem.empty(2, size, dtype=torch.int64, device=device)
    ops.all_to_all_vdev(inputs, out, in_splits, received, world())
    counts = [splits[source][rank] for source in range(size)]
    assert received[0].tolist() == counts
    expected = [10 * source + rank for source, count in enumerate(counts) for _ in range(count)]
    assert out[: sum(counts), 0].tolist() == expected
    leave()


@ranks(2)
def test_t029_get(rank):
    device = device_of(rank)
    x = symm_mem.empty(1024, device=device).copy_(torch.arange(1024) + 1000 * rank)
    handle = symm_mem.rendezvous(x, world())
    handle.barrier()
    got = torch.empty(16, device=device)
    symm_mem.get(got, handle, 1 - rank, 8)
    handle.barrier()
    assert got.tolist() == [1000.0 * (1 - rank) + i for i in range(8, 24)]
    leave()


@ranks((1, 2))
def test_t041_t046_fused_products(rank):
    device, size = device_of(rank), dist.get_world_size()
    whole = torch.rand(8 * size, 32, generator=torch.Generator().manual_seed(0)).to(device)
    weight = torch.rand(32, 16, generator=torch.Generator().manual_seed(1)).to(device)
    _, (product,) = ops.fused_all_gather_matmul(whole.chunk(size)[rank].contiguous(), [weight], 0, world())
    torch.testing.assert_close(product, whole @ weight)
    result = ops.fused_matmul_reduce_scatter(whole, weight, "sum", 0, world())
    torch.testing.assert_close(result, size * (whole @ weight).chunk(size)[rank])
    leave()


@ranks(1)
def test_t087_t088_words_of_symmetric_memory(rank):
    device = device_of(rank)
    words = symm_mem.empty(64, dtype=torch.uint32, device=device)
    ops.memset32_(words, 32, 7, 16)
    for offset in range(4):
        ops.stream_write_value32_(words, offset, offset + 1)
    expected = [1, 2, 3, 4] + [0] * 28 + [7] * 16 + [0] * 16
    assert words.view(torch.int32).tolist() == expected
    leave()


@ranks(2)
def test_t085_memory_goes_after_what_is_in_a_side_stream(rank):
    device = device_of(rank)
    x = symm_mem.empty(1 << 20, device=device).fill_(rank + 1)
    symm_mem.rendezvous(x, world())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        delay()
        copied = x.clone()
    del x
    side.synchronize()
    assert (copied == rank + 1).all()
    leave()


def _pool(device):
    return symm_mem.get_mem_pool(device)


@ranks(2)
def test_t090_t091_l114_whatever_is_made_in_the_pool_is_symmetric(rank):
    device = device_of(rank)
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(1, 1024, generator=generator).to(device)
    b = torch.rand(1024, 1024, generator=generator).to(device)
    ordinary = torch.arange(1024, device=device)
    with torch.cuda.use_mem_pool(_pool(device)):
        made = torch.arange(1024, dtype=torch.float32, device=device)
        product = torch.mm(a, b)
    assert symm_mem.is_symm_mem_tensor(made) and symm_mem.is_symm_mem_tensor(product)
    assert not symm_mem.is_symm_mem_tensor(ordinary)
    assert symm_mem.rendezvous(made, world()).buffer_ptrs[rank] <= made.data_ptr()
    assert torch.equal(ops.one_shot_all_reduce(made, "sum", world()), 2 * torch.arange(1024.0, device=device))
    reduced = ops.one_shot_all_reduce(product, "sum", world())
    torch.testing.assert_close(reduced, 2 * torch.mm(a, b))
    leave()


@pytest.mark.parametrize("count", [1024, 4 * 1024 * 1024])
@ranks(2)
def test_t092_t093_t094_a_recycled_segment_has_its_address_and_a_working_pad(rank, count):
    device, addresses = device_of(rank), []
    for value in range(2):
        with torch.cuda.use_mem_pool(_pool(device)):
            tensor = torch.full((count,), float(10 * value + rank), device=device)
        addresses.append(tensor.data_ptr())
        handle = symm_mem.rendezvous(tensor, world())
        handle.barrier(timeout_ms=60_000)
        assert (handle.get_remote_tensor(1 - rank, (count,), torch.float32) == 10 * value + 1 - rank).all()
        handle.barrier(timeout_ms=60_000)
        del tensor, handle
    assert addresses[0] == addresses[1]
    leave()


@ranks(1)
def test_l111_a_pool_gives_its_segments_back(rank):
    device = device_of(rank)
    pool = torch.cuda.MemPool(symm_mem.get_mempool_allocator(device))
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.ones(1 << 24, device=device)
    assert symm_mem.is_symm_mem_tensor(tensor) and tensor.sum().item() == 1 << 24
    address = tensor.data_ptr()
    assert symmem.find(address) is not None
    del tensor, pool
    torch.cuda.empty_cache()
    assert symmem.find(address) is None

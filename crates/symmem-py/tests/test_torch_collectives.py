"""The operators of `torch.ops.symm_mem` on CPU tensors. The numbers are those of docs/parity.md."""

import gc
import itertools
import os
import time

import pytest
from torch_ranks import needs, ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem.torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

ops = torch.ops.symm_mem
DTYPES = (torch.float32, torch.bfloat16)
SIZES = (4, 8192, 8196)


def _random(count, dtype, seed=0):
    generator = torch.Generator().manual_seed(42 + 100 * dist.get_rank() + seed)
    return torch.rand(count, generator=generator).to(dtype)


def _all_gather(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def _check_sum(inputs, result):
    """The result is close to the sum of all ranks' inputs, and the same bits on all ranks."""
    expected = torch.stack(_all_gather(inputs)).float().sum(0)
    torch.testing.assert_close(result.float(), expected, rtol=1e-2, atol=1e-2)
    for other in _all_gather(result):
        assert torch.equal(other, result)


@ranks(4)
def test_t067_one_shot_all_reduce(rank):
    for dtype, size, copy, offset in itertools.product(DTYPES, SIZES, (False, True), (0, 16)):
        count = size // dtype.itemsize
        buffer = symm_mem.empty(16384, dtype=dtype, device="cpu").fill_(0)
        inputs, part = _random(count, dtype), buffer[offset : offset + count]
        if copy:
            result = ops.one_shot_all_reduce_copy(part, inputs, "sum", world())
        else:
            part.copy_(inputs)
            result = ops.one_shot_all_reduce(part, "sum", world())
        assert torch.equal(part, inputs)
        _check_sum(inputs, result)
        out = torch.empty_like(inputs)
        if copy:
            assert ops.one_shot_all_reduce_copy_out(part, inputs, "sum", world(), out).data_ptr() == out.data_ptr()
        else:
            assert ops.one_shot_all_reduce_out(part, "sum", world(), out).data_ptr() == out.data_ptr()
        assert torch.equal(out, result)


@ranks(4)
def test_t068_two_shot_all_reduce(rank):
    for dtype, size, in_place in itertools.product(DTYPES, SIZES, (False, True)):
        count, offset = size // dtype.itemsize, 8 // dtype.itemsize
        buffer = symm_mem.empty(16384, dtype=dtype, device="cpu").fill_(0)
        inputs, part = _random(count, dtype), buffer[offset : offset + count]
        part.copy_(inputs)
        if in_place:
            result = ops.two_shot_all_reduce_(part, "sum", world())
            assert result.data_ptr() == part.data_ptr()
        else:
            result = ops.two_shot_all_reduce_out(part, "sum", world(), torch.empty_like(inputs))
        assert (buffer[:offset] == 0).all() and (buffer[offset + count :] == 0).all()
        _check_sum(inputs, result)


@pytest.mark.parametrize("name", ["multimem_all_reduce_", "multimem_one_shot_all_reduce"])
@ranks(4)
def test_t064_t065_multimem_all_reduce(rank, name):
    for dtype, size, align in itertools.product(DTYPES, SIZES, (4, 8, 16)):
        count, offset = size // dtype.itemsize, align // dtype.itemsize
        buffer = symm_mem.empty(16384, dtype=dtype, device="cpu").fill_(0)
        inputs, part = _random(count, dtype), buffer[offset : offset + count]
        part.copy_(inputs)
        result = getattr(ops, name)(part, "sum", world())
        assert (buffer[:offset] == 0).all() and (buffer[offset + count :] == 0).all()
        _check_sum(inputs, result)


@ranks(4)
def test_t066_multimem_one_shot_reduce_out(rank):
    for dtype, size in itertools.product(DTYPES, SIZES):
        inputs = symm_mem.empty(size // dtype.itemsize, dtype=dtype, device="cpu")
        inputs.copy_(_random(inputs.numel(), dtype))
        out = torch.full_like(inputs, -1)
        ops.multimem_one_shot_reduce_out(inputs, "sum", 0, world(), out)
        expected = torch.stack(_all_gather(inputs)).float().sum(0)
        if rank == 0:
            torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)
        else:
            assert (out == -1).all()
    with pytest.raises(RuntimeError, match="root must be in"):
        ops.multimem_one_shot_reduce_out(inputs, "sum", 4, world(), out)


@ranks(4)
def test_t069_reduce_scatter(rank):
    size = dist.get_world_size()
    for dtype, nbytes, last in itertools.product(DTYPES, (128, 8192, 36 * 1024 * 16), (False, True)):
        count = nbytes // dtype.itemsize
        shape = (-1, 128 // dtype.itemsize) if last else (-1,)
        inputs = symm_mem.empty(count, dtype=dtype, device="cpu").copy_(_random(count, dtype)).view(shape)
        whole = torch.stack(_all_gather(inputs)).float().sum(0)
        expected = whole.chunk(size, dim=-1)[rank]
        out = torch.empty(expected.shape, dtype=dtype)
        ops.reduce_scatter_out(inputs, world(), last, out)
        torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)


@ranks(4)
def test_t070_reduce_scatter_corner_cases(rank):
    nothing, out = symm_mem.empty(0, dtype=torch.bfloat16, device="cpu"), torch.empty(0, dtype=torch.bfloat16)
    ops.reduce_scatter_out(nothing, world(), False, out)
    odd = symm_mem.empty(48, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(RuntimeError, match="divisible"):
        ops.reduce_scatter_out(odd, world(), False, torch.empty(12, dtype=torch.bfloat16))
    odd = symm_mem.empty(2 * 48, dtype=torch.bfloat16, device="cpu").view(2, 48)
    with pytest.raises(RuntimeError, match="divisible"):
        ops.reduce_scatter_out(odd, world(), True, torch.empty(2, 12, dtype=torch.bfloat16))


@ranks(4)
def test_t071_multimem_all_gather(rank):
    for align in (4, 8, 16):
        inputs = _random(32, torch.float32)
        out = symm_mem.empty(4096, device="cpu")[align // 4 : align // 4 + 4 * 32]
        ops.multimem_all_gather_out(inputs, world(), out)
        assert torch.equal(out, torch.cat(_all_gather(inputs)))


@pytest.mark.parametrize("symmetric", [True, False])
@ranks(2)
def test_t022_low_contention_all_gather(rank, symmetric):
    tensor = (symm_mem.empty(64, 64, device="cpu") if symmetric else torch.empty(64, 64)).fill_(rank)
    result = _waited(ops._low_contention_all_gather(tensor, world()))
    assert result.shape == (128, 64)
    for peer, chunk in enumerate(result.chunk(2)):
        assert (chunk == peer).all()


def _waited(tensor):
    return torch.ops._c10d_functional.wait_tensor(tensor)


@needs("_low_contention_all_gather_ce_multicast")
@pytest.mark.parametrize("shape", [(), (64, 64)])
@ranks(2)
def test_t023_t024_low_contention_all_gather_ce_multicast(rank, shape):
    tensor = torch.full(shape, float(rank))
    result = ops._low_contention_all_gather_ce_multicast(tensor, world())
    out = symm_mem.empty(result.shape, device="cpu")
    assert ops._low_contention_all_gather_ce_multicast_out(tensor, world(), out).data_ptr() == out.data_ptr()
    for got in (result, out):
        assert got.shape == ((2,) if shape == () else (128, 64))
        for peer, chunk in enumerate(got.chunk(2)):
            assert (chunk == peer).all()
    with pytest.raises(RuntimeError, match="expected out shape"):
        wrong = symm_mem.empty(3, device="cpu")
        ops._low_contention_all_gather_ce_multicast_out(tensor, world(), wrong)


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@pytest.mark.parametrize("symmetric", [True, False])
@ranks(2)
def test_t025_low_contention_reduce_scatter(rank, reduce_op, symmetric):
    tensor = symm_mem.empty(64, 64, device="cpu") if symmetric else torch.empty(64, 64)
    for peer, chunk in enumerate(tensor.chunk(2)):
        chunk.fill_(peer)
    result = _waited(ops._low_contention_reduce_scatter(tensor, reduce_op, world()))
    assert result.shape == (32, 64)
    assert (result == (rank * 2 if reduce_op == "sum" else rank)).all()
    with pytest.raises(ValueError, match="is not supported"):
        ops._low_contention_reduce_scatter(tensor, "xor", world())


@ranks(2)
def test_w14_low_contention_ops_honour_the_offset_of_a_view(rank):
    buffer = symm_mem.empty(8, device="cpu").copy_(torch.arange(8.0) + 10 * rank)
    result = ops._low_contention_all_gather(buffer[4:], world())
    assert result.tolist() == [4, 5, 6, 7, 14, 15, 16, 17]


@ranks(2)
def test_t056_builtin_ops_leave_signal_pad_alone(rank):
    tensor = symm_mem.empty(64, device="cpu").fill_(1)
    handle = symm_mem.rendezvous(tensor, world())
    pad = handle.get_signal_pad(rank).view(torch.int32)
    pad.fill_(1)
    dist.barrier()
    assert (ops.one_shot_all_reduce(tensor, "sum", world()) == 2).all()
    assert (ops.two_shot_all_reduce_(tensor, "sum", world()) == 2).all()
    gathered = symm_mem.empty(128, device="cpu")
    ops.multimem_all_gather_out(tensor, world(), gathered)
    assert (pad == 1).all() and (gathered == 2).all()


@ranks(2)
def test_t081_ordinary_input_is_refused_by_name(rank):
    with pytest.raises(RuntimeError, match=r"input must be allocated with empty_strided_p2p\(\)"):
        ops.one_shot_all_reduce(torch.ones(4), "sum", world())
    tensor = symm_mem.empty(4, 4, device="cpu").fill_(1)
    with pytest.raises(RuntimeError, match="input must be contiguous"):
        ops.one_shot_all_reduce(tensor.t(), "sum", world())
    with pytest.raises(RuntimeError, match="reduce_op"):
        ops.one_shot_all_reduce(tensor, "nonsense", world())
    with pytest.raises(RuntimeError, match="size mismatch"):
        ops.one_shot_all_reduce_out(tensor, "sum", world(), torch.empty(4))
    with pytest.raises(RuntimeError, match="output must be contiguous"):
        ops.one_shot_all_reduce_out(tensor, "sum", world(), torch.empty(4, 4).t())
    # The next correct call works.
    assert (ops.one_shot_all_reduce(tensor, "sum", world()) == 2).all()


@ranks(2)
def test_an_output_on_another_device_is_refused_before_anything_is_done(rank):
    # torch's dispatcher has the device of the output choose the kernel, so these are called by themselves.
    from symmem.torch._registry import OPERATORS

    x = symm_mem.empty(16, device="cpu").fill_(1)
    splits = symm_mem.empty(2, dtype=torch.int64, device="cpu").fill_(1)
    there, part = torch.empty(16, device="meta"), torch.empty(8, device="meta")
    received, elsewhere = torch.empty(2, 2, dtype=torch.int64), torch.empty(2, 2, dtype=torch.int64, device="meta")
    for _ in range(2):
        for name, *arguments in (
            ("one_shot_all_reduce_out", x, "sum", world(), there),
            ("one_shot_all_reduce_copy_out", x, torch.ones(16), "sum", world(), there),
            ("two_shot_all_reduce_out", x, "sum", world(), there),
            ("multimem_one_shot_all_reduce_out", x, "sum", world(), there),
            ("reduce_scatter_out", x, world(), False, part),
            ("nvshmem_all_to_all", x, there, world()),
            ("all_to_all_vdev", x, there, splits, received, world()),
            ("all_to_all_vdev", x, torch.empty(16), splits, elsewhere, world()),
            ("all_to_all_vdev_2d", x, there, splits, received, world()),
        ):
            with pytest.raises(RuntimeError, match=r"expected out.* on cpu, got meta"):
                OPERATORS[name].kernel(*arguments)
        # The second time, this is a reduction that was made before.
        assert (ops.one_shot_all_reduce(x, "sum", world()) == 2).all()


@ranks(2)
def test_t066_the_roots_output_is_looked_at_and_all_are_told(rank):
    x = symm_mem.empty(8, device="cpu").fill_(rank + 1)
    for wrong, text in (
        (torch.empty(4), "size mismatch"),
        (torch.empty(8, dtype=torch.int32), "dtype mismatch"),
        (torch.empty(8, dtype=torch.float64), "dtype mismatch"),
        (torch.empty(8, 2)[:, 0], "output must be contiguous"),
    ):
        with pytest.raises(RuntimeError, match=text if rank == 0 else "rank 0 could not do its part"):
            ops.multimem_one_shot_reduce_out(x, "sum", 0, world(), wrong)
    out = torch.zeros(8)
    ops.multimem_one_shot_reduce_out(x, "sum", 0, world(), out)
    assert (out == (3 if rank == 0 else 0)).all()


@ranks(2)
def test_w24_more_types_and_reductions_than_pytorch(rank):
    for dtype in (torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8):
        tensor = symm_mem.empty(5, dtype=dtype, device="cpu").fill_(rank + 1)
        assert (ops.one_shot_all_reduce(tensor, "sum", world()) == 3).all()
        assert (ops.one_shot_all_reduce(tensor, "max", world()) == 2).all()
        assert (ops.two_shot_all_reduce_(tensor, "prod", world()) == 2).all()


@ranks(2)
def test_l35_an_address_that_is_used_again_means_the_new_memory(rank):
    addresses = set()
    for step in range(20):
        tensor = symm_mem.empty(4096, device="cpu").fill_(step + rank)
        address = tensor.data_ptr()
        addresses.add(address)
        for _ in range(3):
            assert (ops.one_shot_all_reduce(tensor, "sum", world()) == 2 * step + 1).all()
        del tensor
        gc.collect()
        assert symmem.find(address) is None
    assert len(addresses) < 20


@ranks(2)
def test_l70_a_group_name_that_is_used_again_means_the_new_group(rank):
    tensor, name = symm_mem.empty(64, device="cpu").fill_(rank + 1), world()
    for attempt in range(2):
        for _ in range(3):
            assert (ops.one_shot_all_reduce(tensor, "sum", name) == 3).all()
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        assert name not in symmem._native.group_names()
        again = f"file://{os.environ['SYMMEM_TEST_FOLDER']}/again{attempt}"
        # The ranks change places, under the same name.
        dist.init_process_group("gloo", init_method=again, rank=(rank + attempt) % 2, world_size=2)
        assert world() == name
    assert (ops.one_shot_all_reduce(tensor, "sum", name) == 3).all()


@ranks(2)
def test_the_quick_path_leaves_unusual_calls_to_the_operators(rank):
    tensor = symm_mem.empty(4, 4, device="cpu").fill_(1)
    for _ in range(2):
        assert (ops.one_shot_all_reduce(tensor, "sum", world()) == 2).all()
    with pytest.raises(RuntimeError, match="input must be contiguous"):
        ops.one_shot_all_reduce(tensor.t(), "sum", world())
    with pytest.raises(RuntimeError, match="output must be contiguous"):
        ops.one_shot_all_reduce_out(tensor, "sum", world(), torch.empty(4, 4).t())
    with pytest.raises(RuntimeError, match="size mismatch"):
        ops.one_shot_all_reduce_out(tensor, "sum", world(), torch.empty(16))
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        ops.one_shot_all_reduce_out(tensor, "sum", world(), torch.empty(4, 4, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="reduce_op"):
        ops.one_shot_all_reduce(tensor, "nonsense", world())
    with pytest.raises(symmem.Usage, match="overlaps"):
        ops.one_shot_all_reduce_out(tensor, "sum", world(), tensor)
    # Another part of the memory, and another type of it, begin at the same address.
    assert (ops.one_shot_all_reduce(tensor[:2], "sum", world()) == 2).all()
    assert (ops.one_shot_all_reduce(tensor.view(torch.int32)[0], "max", world()) == tensor.view(torch.int32)[0]).all()
    assert (ops.one_shot_all_reduce(tensor[1:], "sum", world()) == 2).all()


@ranks(2)
def test_an_output_without_data_is_refused_where_the_input_has_data(rank):
    x, bare = symm_mem.empty(8, device="cpu").fill_(rank + 1), torch.empty(8, device="meta")
    splits = symm_mem.empty(2, dtype=torch.int64, device="cpu").fill_(2)
    numbers, rows = splits.new_empty(2, 2), x.view(8, 1)
    calls = (
        lambda: ops.one_shot_all_reduce_out(x, "sum", world(), bare),
        lambda: ops.one_shot_all_reduce_copy_out(x, x.clone(), "sum", world(), bare),
        lambda: ops.two_shot_all_reduce_out(x, "sum", world(), bare),
        lambda: ops.reduce_scatter_out(x, world(), False, bare[:4]),
        lambda: ops.multimem_one_shot_all_reduce_out(x, "sum", world(), bare),
        lambda: ops.multimem_one_shot_reduce_out(x, "sum", rank, world(), bare),
        lambda: ops.multimem_all_gather_out(x[:4], world(), bare),
        lambda: ops.all_to_all_vdev(rows, bare.view(8, 1), splits, numbers, world()),
        lambda: ops.all_to_all_vdev_2d(rows, bare.view(8, 1), splits, numbers, world()),
        lambda: ops.all_to_all_vdev_2d_offset(rows, bare.view(8, 1), numbers, numbers, world()),
        lambda: ops.nvshmem_all_to_all(x, bare, world()),
        *([lambda: ops.tile_reduce(rows, bare.view(8, 1), rank, world())] if hasattr(ops, "tile_reduce") else []),
    )
    for number, call in enumerate(calls):
        with pytest.raises(RuntimeError, match="one on cpu and one on meta|expected .* on cpu, got meta"):
            print(number, call())
    # Of tensors without data there are shapes only.
    assert ops.one_shot_all_reduce_out(bare, "sum", world(), bare).shape == (8,)
    assert (ops.one_shot_all_reduce(x, "sum", world()) == 3).all()


#: Whether barriers are calls like others, which are told apart from them.
IN_STEP = hasattr(symmem.Group, "resync")


#: What a rank alone may do wrong, by operator: a good call, and a bad one.
def _calls(rank):
    x, out = symm_mem.empty(8, device="cpu").fill_(rank + 1), torch.empty(8)
    splits = symm_mem.empty(2, dtype=torch.int64, device="cpu").fill_(2)
    numbers, rows = splits.new_empty(2, 2), x.view(8, 1)
    gathered = symm_mem.empty(8, device="cpu")
    bad, bare = torch.empty(9), torch.empty(8, device="meta")
    calls = {
        "one_shot_all_reduce": ((x, "sum"), (x.view(2, 4).t(), "sum")),
        "one_shot_all_reduce_out": ((x, "sum", world(), out), (x, "sum", world(), bad)),
        "one_shot_all_reduce_copy_out": ((x, out, "sum", world(), out), (x, torch.empty(16), "sum", world(), out)),
        "two_shot_all_reduce_": ((x, "sum"), (x, "nonsense")),
        "two_shot_all_reduce_out": ((x, "sum", world(), out), (x, "sum", world(), x)),
        "reduce_scatter_out": ((x, world(), False, out[:4]), (x, world(), False, bare[:4])),
        "multimem_one_shot_reduce_out": ((x, "sum", 1, world(), out), (x, "sum", 1, world(), bad)),
        "multimem_all_gather_out": ((x[:4], world(), gathered), (x[:5], world(), gathered)),
        "all_to_all_vdev": ((rows, out.view(8, 1), splits, numbers), (rows, bare.view(8, 1), splits, numbers)),
        "all_to_all_vdev_2d": (
            (rows, out.view(8, 1), splits, numbers, world(), 1),
            (rows, out.view(8, 1), splits, numbers, world(), 0),
        ),
        "nvshmem_broadcast": ((x, 0), (x, 7)),
        "nvshmem_all_to_all": ((x, out), (x, bad)),
    }
    if not IN_STEP:
        del calls["multimem_all_gather_out"]
    elif hasattr(ops, "tile_reduce"):
        calls["tile_reduce"] = ((rows, out.view(8, 1), 0, world()), (rows, out, 0, world()))
    return {name: [call if world() in call else (*call, world()) for call in both] for name, both in calls.items()}


@ranks(2)
def test_what_one_rank_refuses_ends_the_call_of_all(rank):
    calls = _calls(rank)
    for name, (good, _) in calls.items():
        getattr(ops, name)(*good)
    for name, (good, bad) in calls.items():
        operator, begin = getattr(ops, name), time.monotonic()
        # The second time, the refusal is of a call that was made before.
        for _ in range(2):
            if rank == 1:
                with pytest.raises((RuntimeError, ValueError)) as caught:
                    operator(*bad)
                assert not isinstance(caught.value, (symmem.Mismatch, symmem.PeerFailed, symmem.Timeout)), name
            else:
                with pytest.raises(symmem.PeerFailed, match="rank 1 could not do its part: it refused the call"):
                    operator(*good)
            operator(*good)
        assert time.monotonic() - begin < 20, name
    # A call that all ranks refuse fails on each with its own error.
    for name, (good, bad) in calls.items():
        if name != "multimem_one_shot_reduce_out" or rank == 1:
            with pytest.raises((RuntimeError, ValueError)) as caught:
                getattr(ops, name)(*bad)
            assert not isinstance(caught.value, symmem.PeerFailed), name
        else:
            with pytest.raises(symmem.PeerFailed):
                getattr(ops, name)(*bad)
        getattr(ops, name)(*good)


@pytest.mark.skipif(not IN_STEP, reason="a rendezvous is not yet a call like others")
@ranks(2)
def test_what_one_rank_refuses_ends_the_rendezvous_of_the_others(rank):
    for _ in range(3):
        x = symm_mem.empty(8, device="cpu").fill_(rank + 1)
        if rank == 1:
            with pytest.raises(RuntimeError, match="size mismatch"):
                ops.one_shot_all_reduce_out(x, "sum", world(), torch.empty(3))
        else:
            with pytest.raises(symmem.Error, match="rank 1"):
                ops.one_shot_all_reduce_out(x, "sum", world(), torch.empty(8))
        assert (ops.one_shot_all_reduce(x, "sum", world()) == 3).all()


@ranks(2)
def test_t066_only_the_roots_output_is_looked_at(rank):
    x = symm_mem.empty(8, device="cpu").fill_(rank + 1)
    others = (torch.empty(0), torch.empty(3, dtype=torch.int8), torch.empty(8, 8).t(), torch.empty(8, device="meta"), x)
    for dummy in others:
        out = torch.zeros(8) if rank == 1 else dummy
        assert ops.multimem_one_shot_reduce_out(x, "sum", 1, world(), out) is out
        assert rank == 0 or (out == 3).all()
    assert (x == rank + 1).all()

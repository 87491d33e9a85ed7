"""Every element type of the library, in torch's operators; and clear errors for what does not apply."""

import re

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem
import symmem.torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from symmem import _native
from symmem.torch import _parts

ops = torch.ops.symm_mem


def test_torchs_types_are_those_of_the_library():
    known = {name for name in _native.DTYPES if hasattr(torch, name)}
    assert set(_parts.DTYPES.values()) == known >= {"bool", "complex64", "complex128", "bfloat16", "float8_e4m3fn"}
    assert _native.DTYPES["complex64"] == ("sum", "avg", "prod") and _native.DTYPES["float8_e8m0fnu"] == ()


def _filled(dtype, rank, count=6):
    """Small numbers of a type, which differ between ranks."""
    numbers = (torch.arange(count) + rank) % 2
    numbers = numbers * (1 + 2j) if dtype.is_complex else numbers
    return symm_mem.empty(count, dtype=dtype, device="cpu").copy_(numbers.to(dtype))


@ranks(2)
def test_every_type_is_reduced_by_every_operator_that_applies(rank):
    combine = {
        "sum": lambda a, b: a | b if a.dtype == torch.bool else a + b,
        "prod": lambda a, b: a & b if a.dtype == torch.bool else a * b,
        "max": torch.maximum,
        "min": torch.minimum,
        "band": torch.bitwise_and,
        "bxor": torch.bitwise_xor,
    }
    for dtype, name in _parts.DTYPES.items():
        small = dtype.itemsize == 1 and dtype.is_floating_point
        for op, expected in combine.items():
            x = _filled(dtype, rank)
            if _parts.REDUCTIONS[op] not in _native.DTYPES[name]:
                with pytest.raises(RuntimeError, match=f"rank {rank}: all_reduce: expected a type .*, got {name}"):
                    ops.one_shot_all_reduce(x, op, world())
                continue
            both = [_filled(dtype, other).clone() for other in range(2)]
            wide = [one.float() for one in both] if small else both
            got = ops.one_shot_all_reduce(x, op, world())
            # Not all of torch's arithmetic has unsigned types.
            signed = getattr(torch, name.removeprefix("u")) if name.startswith("uint") and name != "uint8" else None
            wide = [one.view(signed) for one in wide] if signed else wide
            got = got.view(signed) if signed else got.float() if small else got
            assert torch.equal(got, expected(*wide)), (name, op)
            dist.barrier()


@ranks(2)
def test_every_type_is_moved(rank):
    for dtype in (*_parts.DTYPES, *filter(None, [getattr(torch, "float4_e2m1fn_x2", None)])):
        x = symm_mem.empty(4, dtype=dtype, device="cpu")
        raw = x.view(torch.uint8)
        raw.copy_(torch.arange(raw.numel()) % 2 + (0 if dtype == torch.bool else 2 * rank))
        mine = raw.clone()
        gathered = ops._low_contention_all_gather(x, world()).view(torch.uint8)
        assert torch.equal(gathered.view(2, -1)[rank], mine), dtype
        out = torch.empty_like(x)
        ops.nvshmem_all_to_all(x, out, world())
        assert torch.equal(out.view(torch.uint8).view(2, -1)[rank], mine.view(2, -1)[rank]), dtype
        ops.nvshmem_broadcast(x, 1, world())
        assert raw[0] == (0 if dtype == torch.bool else 2), dtype
        dist.barrier()


@ranks(2)
def test_errors_name_the_rank_the_operation_and_both_sides(rank):
    x = symm_mem.empty(4, 4, device="cpu").fill_(1)
    here = re.escape(f"(rank {rank} of group {world()})")
    fp4 = getattr(torch, "float4_e2m1fn_x2", None)
    for wrong, text in (
        (lambda: ops.one_shot_all_reduce(x.t(), "sum", world()), "one_shot_all_reduce: input must be contiguous"),
        (lambda: ops.one_shot_all_reduce_out(x, "sum", world(), torch.empty(3)), r"size mismatch, \(4, 4\) and \(3,\)"),
        (lambda: ops.reduce_scatter_out(x.view(-1), world(), False, torch.empty(3)), "output of 8 elements .* got 3"),
        (lambda: ops.two_shot_all_reduce_(x, "nonsense", world()), "expected one of sum, .* got nonsense"),
        (lambda: ops.multimem_all_reduce_(torch.ones(4), "sum", world()), "must be allocated with empty_strided_p2p"),
        *([(lambda: ops.two_shot_all_reduce_(x.view(torch.uint8).view(fp4), "sum", world()), "float4")] if fp4 else []),
    ):
        with pytest.raises(RuntimeError, match=f"{text}.*{here}"):
            wrong()
    # Ranks that disagree all see both sides.
    with pytest.raises(symmem.Mismatch, match="all_reduce.*sum.*max|all_reduce.*max.*sum"):
        ops.two_shot_all_reduce_(x, ("sum", "max")[rank], world())
    with pytest.raises(symmem.Mismatch, match="element type: here (f32|i32), on rank . (f32|i32)"):
        ops.two_shot_all_reduce_(x if rank else x.view(torch.int32), "sum", world())
    with pytest.raises(symmem.Mismatch):
        ops.two_shot_all_reduce_(x if rank else x[:2], "sum", world())
    assert (ops.one_shot_all_reduce(x.fill_(1), "sum", world()) == 2).all()
    dist.barrier()

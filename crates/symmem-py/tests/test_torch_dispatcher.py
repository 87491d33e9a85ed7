"""Native kernels of torch's operators. On a CPU they hand everything on to those in Python, and so can be tried there."""

import subprocess
import sys

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from symmem import _native
from symmem.torch import _operators

ops = torch.ops.symm_mem
NAMES = ("two_shot_all_reduce_", "one_shot_all_reduce", "one_shot_all_reduce_out")


def _registered():
    names = _operators.register_native("CPU")
    if not names:
        pytest.skip("this torch has no stable interface with strings")
    assert set(names) == set(NAMES)


@ranks(2)
def test_native_kernels_give_what_those_in_python_give(rank):
    _registered()
    x = symm_mem.empty(64, dtype=torch.float32, device="cpu")
    out = torch.zeros(64)
    for step in range(5):
        x.fill_(rank + 1 + step)
        dist.barrier()
        total = 3.0 + 2 * step
        assert (ops.one_shot_all_reduce(x, "sum", world()) == total).all()
        same = ops.one_shot_all_reduce_out(x, "max", world(), out)
        assert same.data_ptr() == out.data_ptr() and (out == 2 + step).all()
        dist.barrier()
        reduced = ops.two_shot_all_reduce_(x, "sum", world())
        assert reduced.data_ptr() == x.data_ptr() and (x == total).all()
        dist.barrier()


@ranks(2)
def test_what_python_raises_comes_through_native_kernels(rank):
    _registered()
    x = symm_mem.empty(64, dtype=torch.float32, device="cpu").fill_(1)
    out = torch.zeros(64)
    ordinary = torch.zeros(64)
    for operator, arguments in (
        (ops.two_shot_all_reduce_, (ordinary, "sum", world())),
        (ops.one_shot_all_reduce, (ordinary, "sum", world())),
        (ops.one_shot_all_reduce_out, (ordinary, "sum", world(), out)),
    ):
        with pytest.raises(RuntimeError, match="must be allocated with empty_strided_p2p"):
            operator(*arguments)
        with pytest.raises(RuntimeError, match="expected one of .* as reduce_op, got nonsense"):
            operator(x, "nonsense", *arguments[2:])
    assert (ops.one_shot_all_reduce(x, "sum", world()) == 2).all()
    dist.barrier()


@ranks(2)
def test_names_that_are_used_again_are_looked_up_again(rank):
    _registered()
    x = symm_mem.empty(64, dtype=torch.float32, device="cpu").fill_(1)
    half = dist.new_group([0, 1])
    ops.one_shot_all_reduce(x, "sum", half.group_name)
    name = half.group_name
    assert name in _native.group_names()
    dist.destroy_process_group(half)
    assert name not in _native.group_names()
    assert (ops.one_shot_all_reduce(x, "sum", world()) == 2).all()
    dist.barrier()


def test_nothing_is_said_when_they_are_registered():
    code = "from symmem.torch import _operators; _operators.register('cuda'); print(_operators.register_native('CUDA'))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stderr == ""
    assert all(name in said.stdout for name in NAMES) or said.stdout.strip() == "()"

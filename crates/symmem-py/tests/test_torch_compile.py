"""Operators without data and under `torch.compile`."""

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed._symmetric_memory as symm_mem
from symmem.torch import _registry
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.symm_mem


@pytest.mark.parametrize("name", sorted(_registry.OPERATORS))
def test_every_kernel_is_registered_and_has_a_fake(name):
    if not hasattr(ops, name):
        pytest.skip(f"this torch has no symm_mem::{name}")
    for key in ("CPU", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", key), key


def test_fakes_have_the_shapes_of_results():
    with FakeTensorMode():
        x, out = torch.empty(4, 6), torch.empty(4, 6)
        for name in ("one_shot_all_reduce", "multimem_one_shot_all_reduce"):
            assert getattr(ops, name)(x, "sum", "0").shape == (4, 6)
        assert ops.one_shot_all_reduce_copy(x, torch.empty(3), "sum", "0").shape == (3,)
        for name in ("one_shot_all_reduce_out", "two_shot_all_reduce_out", "multimem_one_shot_all_reduce_out"):
            assert getattr(ops, name)(x, "sum", "0", out) is out
        assert ops.two_shot_all_reduce_(x, "sum", "0") is x
        assert ops.reduce_scatter_out(x, "0", True, out) is out
        words = torch.empty(4, dtype=torch.uint32)
        assert ops.memset32_(words, 0, 1, 1) is words
    assert set(_registry.fakes()) >= {"memset32_", "stream_write_value32_", "all_to_all_vdev"}


@ranks(2)
def test_torch_compile_of_a_one_shot_all_reduce(rank):
    name = world()

    def layer(partial, bias):
        return torch.relu(ops.one_shot_all_reduce(partial, "sum", name)) + bias

    partial = symm_mem.empty(4, 8, device="cpu").fill_(rank + 1)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for bias in (1.0, 2.0):
        torch.testing.assert_close(compiled(partial, torch.full((8,), bias)), torch.full((4, 8), 3 + bias))


@ranks(2)
def test_torch_compile_of_a_copy_into_symmetric_memory(rank):
    """The form for values that the graph makes: they are copied into a symmetric buffer that it is given."""
    name = world()

    def layer(buffer, x, weight):
        return torch.relu(ops.one_shot_all_reduce_copy(buffer, x @ weight, "sum", name)) + 1

    buffer = symm_mem.empty(4, 8, device="cpu")
    x, weight = torch.full((4, 3), float(rank + 1)), torch.ones(3, 8)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(buffer, x, weight), torch.full((4, 8), 10.0))


@ranks(2)
def test_torch_compile_of_an_operator_that_writes(rank):
    name = world()

    def reduce(buffer, out):
        ops.one_shot_all_reduce_out(buffer, "sum", name, out)
        return out * 2

    buffer = symm_mem.empty(16, device="cpu").fill_(rank + 1)
    assert (torch.compile(reduce, backend="eager")(buffer, torch.empty(16)) == 6).all()

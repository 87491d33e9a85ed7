"""Gradients through dispatch and combine. The numbers are those of docs/parity.md."""

import gc

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from symmem.torch import AllToAllVDev2d, AllToAllVDev2dOffset, _memory

EXPERTS, WIDTH, ALIGN = 2, 3, 4


def _rows_of(rank, splits):
    count = int(splits.sum())
    return torch.arange(count * WIDTH, dtype=torch.float32).view(count, WIDTH) + 1000 * rank


def _splits(rank, size):
    return torch.tensor([(rank + i) % 3 for i in range(size * EXPERTS)])


def _init(size):
    capacity = 3 * size * EXPERTS + ALIGN * EXPERTS
    AllToAllVDev2d.init(capacity)
    AllToAllVDev2dOffset.init(capacity, ALIGN)


@ranks(2)
def test_py22_dispatch_has_the_gradients_of_its_rows(rank):
    _init(dist.get_world_size())
    splits = _splits(rank, dist.get_world_size())
    inputs = _rows_of(rank, splits).requires_grad_()
    for _ in range(2):
        output, received = AllToAllVDev2d.apply(inputs, splits, world(), ALIGN)
        assert symm_mem.is_symm_mem_tensor(output) and not received.requires_grad
        inputs.grad = None
        # What a rank does with its rows is what their senders get back.
        (output * (rank + 1)).sum().backward()
        to = torch.arange(dist.get_world_size()).repeat_interleave(EXPERTS).repeat_interleave(splits)
        assert torch.equal(inputs.grad, (to + 1.0).unsqueeze(1).expand(-1, WIDTH))


@ranks(2)
def test_py22_there_and_back_is_the_identity_and_so_is_its_gradient(rank):
    size = dist.get_world_size()
    _init(size)
    splits = _splits(rank, size)
    inputs = _rows_of(rank, splits).requires_grad_()
    there, received = AllToAllVDev2d.apply(inputs, splits, world(), ALIGN)
    back, returned = AllToAllVDev2dOffset.apply(there, received, world())
    assert torch.equal(returned[0], splits)
    assert torch.equal(back[: len(inputs)], inputs)
    weight = torch.rand_like(inputs)
    (back[: len(inputs)] * weight).sum().backward()
    assert torch.equal(inputs.grad, weight)


@ranks(1)
def test_py22_what_was_not_set_or_does_not_fit_is_told(rank):
    splits, rows = torch.tensor([2, 1]), torch.zeros(3, WIDTH)
    AllToAllVDev2d.max_output_len = None
    with pytest.raises(RuntimeError, match="call init"):
        AllToAllVDev2d.apply(rows, splits, world(), 1)
    with pytest.raises(ValueError, match="positive"):
        AllToAllVDev2d.init(0)
    AllToAllVDev2d.init(2)
    with pytest.raises(RuntimeError, match="3 rows, more than the 2"):
        AllToAllVDev2d.apply(rows, splits, world(), 1)


def _there_and_back(rank, group_name):
    splits = _splits(rank, dist.get_world_size())
    inputs = _rows_of(rank, splits).requires_grad_()
    there, received = AllToAllVDev2d.apply(inputs, splits, group_name, ALIGN)
    back, _ = AllToAllVDev2dOffset.apply(there, received, group_name)
    back.sum().backward()


def _allocations():
    return sum(isinstance(found, _memory.Allocation) for found in gc.get_objects())


@ranks(2)
def test_py22_buffers_go_with_their_group(rank):
    _init(dist.get_world_size())
    allocations = _allocations()
    for _ in range(2):
        group = dist.new_group([0, 1])
        _there_and_back(rank, group.group_name)
        assert _allocations() > allocations
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert _allocations() == allocations


@ranks(2)
def test_py22_steps_after_the_first_allocate_nothing(rank):
    _init(dist.get_world_size())
    made, former = [], _memory.Allocation.__init__

    def counting(self, *arguments, **named):
        made.append(arguments)
        former(self, *arguments, **named)

    _memory.Allocation.__init__ = counting
    counts = []
    for _ in range(4):
        _there_and_back(rank, world())
        gc.collect()
        counts.append(len(made))
    assert counts == counts[:1] * 4, made
    # An output that lives keeps its memory.
    splits = _splits(rank, dist.get_world_size())
    rows = _rows_of(rank, splits)
    kept = [AllToAllVDev2d.apply(rows, splits, world(), ALIGN)[0] for _ in range(3)]
    assert len({tensor.data_ptr() for tensor in kept}) == 3
    assert torch.equal(kept[0], kept[1]) and torch.equal(kept[1], kept[2])


@ranks(2)
def test_py22_memory_that_is_used_again_holds_no_rows_of_before(rank):
    _init(dist.get_world_size())
    many = torch.full((2 * EXPERTS,), 2)
    few = torch.zeros_like(many)
    output, _ = AllToAllVDev2d.apply(torch.ones(4 * EXPERTS, WIDTH), many, world(), ALIGN)
    address = output.data_ptr()
    assert output.any()
    del output
    gc.collect()
    output, _ = AllToAllVDev2d.apply(torch.ones(4 * EXPERTS, WIDTH), few, world(), ALIGN)
    assert output.data_ptr() == address and not output.any()

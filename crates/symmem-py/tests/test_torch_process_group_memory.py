"""Memory of the backend `symmem` that peers read in place: allocated by each rank on its own, and right whatever the others have."""

import gc
import os
import random

import pytest
from torch_ranks import ranks

torch = pytest.importorskip("torch")
dist = torch.distributed

has_backends = pytest.mark.skipif(torch.__version__ < "2.14", reason="this torch has no backends in Python")
pytestmark = has_backends

CPU = torch.device("cpu")
COUNT = 50_000


def _backend(group=None):
    return (group or dist.group.WORLD)._get_backend(CPU)


def _allocated(count, dtype=torch.float32, group=None):
    return _backend(group).allocate_tensor(count, dtype=dtype, device=CPU)


def _fill(tensor, rank, step):
    """Other numbers on every rank and in every step, which no sum rounds."""
    tensor.copy_((torch.arange(tensor.numel()) * 3 + 7 * rank + 5 * step) % 64)
    return tensor


def _total(count, step, size):
    return sum(_fill(torch.empty(count), rank, step) for rank in range(size))


def _mapped():
    return _backend().calls.memory[0]


@ranks((1, 2, 3), backend="symmem")
def test_every_collective_is_right_in_any_memory(rank):
    size = dist.get_world_size()
    assert _backend().supports_tensor_alloc(CPU) and not _backend().supports_tensor_alloc(-1)
    made = [lambda: _allocated(size * COUNT), lambda: torch.empty(size * COUNT)]
    for step in range(12):
        # All in memory of the group; all in ordinary memory; each rank another.
        which = [0, 1, (step >> rank) & 1][step % 3]
        whole, async_op = made[which](), step % 2 == 1

        def done(work):
            if work is not None:
                work.wait()

        _fill(whole, rank, step)
        done(dist.all_reduce(whole, async_op=async_op))
        assert torch.equal(whole, _total(size * COUNT, step, size))
        _fill(whole, rank, step)
        part = torch.empty(COUNT)
        done(dist.reduce_scatter_tensor(part, whole, async_op=async_op))
        own = slice(rank * COUNT, (rank + 1) * COUNT)
        assert torch.equal(part, _total(size * COUNT, step, size)[own])
        # In place: the output is a part of the input, and the other way round.
        done(dist.reduce_scatter_tensor(whole[own], whole, async_op=async_op))
        assert torch.equal(whole[own], part)
        whole[own] = rank + step
        done(dist.all_gather_into_tensor(whole, whole[own], async_op=async_op))
        assert torch.equal(whole, (torch.arange(size) + step).repeat_interleave(COUNT).float())
        every = torch.empty(size * COUNT)
        done(dist.all_gather_into_tensor(every, whole[own], async_op=async_op))
        assert torch.equal(every, whole)
        for root in range(size):
            _fill(whole, rank, step)
            done(dist.broadcast(whole, root, async_op=async_op))
            assert torch.equal(whole, _fill(torch.empty(size * COUNT), root, step))


@ranks(3, backend="symmem")
def test_ranks_allocate_and_free_in_an_order_of_their_own(rank):
    own, common = random.Random(rank), random.Random(77)
    held = []
    for step in range(60):
        for _ in range(own.randrange(4)):
            held.append(_allocated(own.choice([10_000, COUNT, 2 * COUNT])))
        own.shuffle(held)
        del held[6:]
        count, begin = common.choice([9000, 20_000, COUNT]), own.choice([0, 1, 17, 900])
        fitting = [tensor for tensor in held if tensor.numel() >= begin + count]
        tensor = fitting[0][begin : begin + count] if fitting and own.random() < 0.9 else torch.empty(count)
        _fill(tensor, rank, step)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, _total(count, step, 3)), step
    assert _mapped() > 0


@ranks(2, backend="symmem")
def test_an_allocation_waits_for_nobody_and_is_used_again(rank):
    if rank == 0:
        tensors = [_allocated(COUNT) for _ in range(5)]  # the other rank makes none of these
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.empty(1), 0)
        tensors = [_allocated(COUNT)]
    for step in range(3):
        _fill(tensors[0], rank, step)
        dist.all_reduce(tensors[0])
        assert torch.equal(tensors[0], _total(COUNT, step, 2))
    assert _mapped() == 1
    address = tensors[-1].data_ptr()
    tensors.clear()
    gc.collect()
    assert _backend().calls.memory[1] > 0
    again = _allocated(COUNT)
    assert rank == 0 or again.data_ptr() == address
    for _ in range(20):
        _fill(again, rank, 1)
        dist.all_reduce(again)
        assert torch.equal(again, _total(COUNT, 1, 2))
        again = None
        again = _allocated(COUNT)
    assert _mapped() <= 2


@ranks(2, backend="symmem")
def test_a_tensor_outlives_its_group(rank):
    group = dist.new_group()
    tensor = _allocated(COUNT, group=group)
    free = _allocated(COUNT, group=group)
    _fill(tensor, rank, 0)
    dist.all_reduce(tensor, group=group)
    del free
    calls = _backend(group).calls
    dist.destroy_process_group(group)
    gc.collect()
    assert calls.memory == (0, 0)
    assert torch.equal(tensor, _total(COUNT, 0, 2))
    # It is memory like any other now, or a tensor of another group of the same world.
    _fill(tensor, rank, 1)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, _total(COUNT, 1, 2))
    dist.barrier()
    dist.destroy_process_group()
    tensor += 1
    assert torch.equal(tensor, _total(COUNT, 1, 2) + 1)
    assert not torch.empty(3).data_ptr() == tensor.data_ptr()


@ranks(2, backend="symmem")
def test_other_devices_and_calls_that_differ_are_refused(rank):
    import symmem

    with pytest.raises(ValueError, match=r"rank \d: allocate_tensor in process group 0: expected the CPU as device, got meta"):
        _backend().allocate_tensor(4, dtype=torch.float32, device=torch.device("meta"))
    tensor = _allocated(COUNT)
    with pytest.raises(symmem.Mismatch, match=f"all_reduce.*length.*{COUNT - 1}"):
        dist.all_reduce(tensor[rank:])
    with pytest.raises(symmem.Mismatch, match="operator"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX if rank else dist.ReduceOp.MIN)
    _fill(tensor, rank, 0)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, _total(COUNT, 0, 2))


@ranks(3, lost=[2], backend="symmem")
def test_a_lost_rank_leaves_the_tensors_of_the_others_alone(rank):
    import symmem

    tensor = _allocated(4 * COUNT)
    _fill(tensor, rank, 0)
    dist.all_reduce(tensor)
    if rank == 2:
        os._exit(1)
    with pytest.raises(symmem.PeerLost, match="rank 2"):
        for step in range(1000):
            dist.all_reduce(_fill(tensor, rank, step))
    # Nobody writes there but this rank, whatever the others still do.
    _fill(tensor, rank, 5)
    for _ in range(50):
        assert torch.equal(tensor, _fill(torch.empty(4 * COUNT), rank, 5))
    dist.destroy_process_group()
    assert torch.equal(tensor, _fill(torch.empty(4 * COUNT), rank, 5))


@ranks(2, backend="symmem")
def test_buckets_of_ddp_lie_in_memory_of_the_group(rank):
    def trained(wanted):
        os.environ["DDP_DISABLE_COMM_MEM"] = "0" if wanted else "1"
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 64))
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before, losses = _mapped(), []
        for step in range(6):
            torch.manual_seed(100 * rank + step)
            given = torch.randn(8, 64)
            loss = (model(given) - given).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach())
            losses.append(loss.item())
        return losses, _mapped() - before

    ordinary, none = trained(False)
    ours, mapped = trained(True)
    assert ours == ordinary and none == 0 and mapped >= 1


@ranks(2, backend="symmem")
def test_buffers_of_fsdp_lie_in_memory_of_the_group(rank):
    from torch.distributed.fsdp import fully_shard

    def trained(wanted):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(64, 600), torch.nn.ReLU(), torch.nn.Linear(600, 64))
        for layer in (*model, model):
            if layer is model or isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
                if hasattr(layer, "set_allocate_memory_from_process_group_for_comm"):
                    if next(layer.parameters(recurse=layer is not model), None) is not None:
                        layer.set_allocate_memory_from_process_group_for_comm(wanted)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before, losses = _mapped(), []
        for step in range(5):
            torch.manual_seed(100 * rank + step)
            given = torch.randn(8, 64)
            loss = (model(given) - given).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, _mapped() - before

    ordinary, none = trained(False)
    ours, mapped = trained(True)
    assert ours == ordinary and none == 0 and mapped >= 1


@ranks(2, hosts=["host-a", "host-b"], backend="symmem")
def test_between_hosts_memory_of_the_group_is_like_any_other(rank):
    tensor = _allocated(2 * COUNT)
    _fill(tensor, rank, 0)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, _total(2 * COUNT, 0, 2)) and _mapped() == 0
    own = slice(rank * COUNT, (rank + 1) * COUNT)
    tensor[own] = rank
    dist.all_gather_into_tensor(tensor, tensor[own])
    assert torch.equal(tensor, torch.arange(2.0).repeat_interleave(COUNT))


@ranks(2, backend="symmem")
def test_a_group_that_was_destroyed_allocates_nothing(rank):
    import symmem

    group = dist.new_group()
    backend = _backend(group)
    dist.destroy_process_group(group)
    with pytest.raises(symmem.Usage, match="allocate_tensor: expected a process group that was not aborted"):
        backend.allocate_tensor(COUNT, dtype=torch.float32, device=CPU)

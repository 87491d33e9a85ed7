"""Messages and groups of the backend `symmem` of torch.distributed."""

import threading
import time

import pytest
from torch_ranks import ranks

torch = pytest.importorskip("torch")
dist = torch.distributed

#: What an older torch has not: backends for each device, and by their names; splitting of groups without devices.
has_backends = pytest.mark.skipif(torch.__version__ < "2.14", reason="this torch has no backends in Python")

LARGE = 4 << 20  # elements: more than is buffered on the way


@ranks(3, backend="symmem")
def test_messages_by_sender_and_tag(rank):
    if rank:
        for tag in (2, 1, 0):
            dist.send(torch.tensor([10 * rank + tag]), 0, tag=tag)
        return
    tensor = torch.zeros(1, dtype=torch.int64)
    for source, tag in [(2, 0), (1, 2), (2, 1), (1, 0)]:
        assert dist.recv(tensor, source, tag=tag) == source
        assert tensor == 10 * source + tag
    assert dist.recv(tensor, tag=2) == 2 and tensor == 22
    work = dist.irecv(tensor, tag=1)
    work.wait()
    assert work.source_rank() == 1 and tensor == 11


@ranks(2, backend="symmem")
def test_large_messages_both_ways_at_once(rank):
    other = 1 - rank
    for wait_for_send_first in (True, False):
        sent, got = torch.full((LARGE,), float(rank)), torch.empty(LARGE)
        works = [dist.isend(sent, other), dist.irecv(got, other)]
        for work in works if wait_for_send_first else reversed(works):
            work.wait()
        assert (got == other).all()
    sent, got = torch.full((LARGE,), float(rank)), torch.empty(LARGE)
    pairs = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    assert (got == other).all()


@ranks(2, backend="symmem")
def test_a_posted_receive_needs_no_wait_to_progress(rank):
    if rank == 0:
        got = torch.empty(LARGE)
        work = dist.irecv(got, 1)
        dist.barrier()  # rank 1 comes here once all of its message is gone
        work.wait()
        assert (got == 1).all()
    else:
        dist.send(torch.ones(LARGE), 0)
        dist.barrier()


@ranks(3, backend="symmem")
def test_receives_wait_for_their_own_sender_only(rank):
    if rank == 0:
        first, second = torch.zeros(1), torch.zeros(1)
        late, soon = dist.irecv(first, 1), dist.irecv(second, 2)
        soon.wait()
        assert second == 2 and not late.is_completed()
        dist.send(second, 1)  # only now does rank 1 send
        late.wait()
        assert first == 1
    elif rank == 1:
        dist.recv(torch.empty(1), 0)
        dist.send(torch.ones(1), 0)
    else:
        dist.send(torch.full((1,), 2.0), 0)


@ranks(2, backend="symmem")
def test_receives_with_one_tag_come_in_order(rank):
    tensors = [torch.zeros(1 << 14) for _ in range(64)]
    if rank == 0:
        works = [dist.irecv(tensor, 1) for tensor in tensors]
        for work in works:
            work.wait()
        assert [int(t[-1]) for t in tensors] == list(range(64))
    else:
        for work in [dist.isend(tensor.fill_(i), 0) for i, tensor in enumerate(tensors)]:
            work.wait()


@ranks(4, backend="symmem")
def test_groups_of_some_ranks(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    odd = dist.new_group([3, 1])
    mine = pairs[rank // 2]
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=mine)
    assert (tensor == (1 if rank < 2 else 5)).all()
    if rank % 2:
        tensor.fill_(rank)
        dist.broadcast(tensor, 3, group=odd)
        assert (tensor == 3).all()
    again = dist.new_group([1, 2])
    if rank in (1, 2):
        dist.barrier(again)
        dist.destroy_process_group(again)
    unsorted, _ = dist.new_subgroups_by_enumeration([[1, 0], [3, 2]])
    out = [torch.empty(1) for _ in range(2)]
    dist.all_gather(out, torch.full((1,), float(rank)), group=unsorted)
    assert sorted(float(t) for t in out) == [2.0 * (rank // 2), 2.0 * (rank // 2) + 1]


@has_backends
@ranks(4, backend="symmem")
def test_a_group_is_split(rank):
    split = dist.split_group(split_ranks=[[0, 2], [1, 3]])
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=split)
    assert (tensor == (2 if rank % 2 == 0 else 4)).all() and split.size() == 2


@ranks(2, backend="symmem")
def test_two_groups_from_two_threads(rank):
    groups = [dist.new_group(), dist.new_group()]
    wrong = []

    def work(group, start):
        time.sleep(0.01 * start * (1 - 2 * rank) ** 2)
        for i in range(300):
            tensor = torch.full((64,), float(rank + i + start))
            pending = dist.all_reduce(tensor, group=group, async_op=i % 3 == 0)
            if pending is not None:
                pending.wait()
            if tensor[0] != 1 + 2 * (i + start):
                wrong.append((i, float(tensor[0])))

    # Each rank begins with another group.
    order = [0, 1] if rank == 0 else [1, 0]
    threads = [threading.Thread(target=work, args=(groups[i], i)) for i in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


@has_backends
@ranks(2, backend="cpu:symmem,cuda:gloo")
def test_other_devices_keep_their_backend(rank):
    group = dist.group.WORLD
    assert {device.type for device in group._device_types} == {"cpu", "cuda"}
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed() and tensor[0] == 2
    assert group._get_backend(torch.device("cuda")).name() == "gloo"
    assert group._get_backend(torch.device("cpu")).name() == "symmem"
    # A call on tensors of another device goes to torch's dispatcher, which asks that device's backend.
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Seen():
        dist.all_reduce(tensor)
        assert not any("c10d" in name for name in seen), seen
        dist.all_reduce(torch.empty(2, device="meta"))
    assert "c10d.allreduce_.default" in seen, seen


@has_backends
@ranks(2, backend="cuda:gloo,cpu:symmem")
def test_devices_may_be_named_in_any_order(rank):
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor[0] == 2
    assert dist.group.WORLD._get_backend(torch.device("cuda")).name() == "gloo"

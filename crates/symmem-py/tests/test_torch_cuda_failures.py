"""What fails on a device is raised by torch's own waits and replays, until all ranks are back in step."""

import os
import signal
import time

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem.torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from cuda_ranks import device_of, leave
from symmem.torch import _groups

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(not hasattr(symmem.Group, "resync"), reason="groups cannot be put back in step"),
]
ops = torch.ops.symm_mem


def _captured(rank, count=1024):
    """A captured all-reduce of rank + 1, its result, and its input."""
    x = symm_mem.empty(count, device=device_of(rank)).fill_(rank + 1)
    out = torch.zeros_like(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            ops.one_shot_all_reduce_out(x, "sum", world(), out)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.one_shot_all_reduce_out(x, "sum", world(), out)
    return graph, out, x


def _replayed(graph, out, expected=3, times=3):
    for _ in range(times):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert (out == expected).all()


def _ways_to_wait(graph):
    event = torch.cuda.Event()
    event.record()
    return {
        "replay": graph.replay,
        "synchronize": torch.cuda.synchronize,
        "Stream.synchronize": torch.cuda.current_stream().synchronize,
        "Event.synchronize": event.synchronize,
    }


@pytest.mark.parametrize("count", [16, 1024, 4 << 20])
@ranks(2, lost={1})
def test_g01_a_peer_that_is_killed_between_replays_is_told_by_all_later_ones(rank, count):
    graph, out, x = _captured(rank, count)
    _replayed(graph, out)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(symmem.PeerLost) as caught:
        # A replay that the peer's death is noticed during ends, and the wait for it raises.
        for _ in range(1000):
            graph.replay()
            torch.cuda.synchronize()
            time.sleep(0.01)
    assert caught.value.rank == 1 and caught.value.during and "rank 1" in str(caught.value)
    took = time.monotonic() - begin
    print(f"rank 0 was told {took:.3f} s after the last barrier before the kill")  # seen with pytest -s
    assert took < 30
    for _ in range(3):
        for name, wait in _ways_to_wait(graph).items():
            with pytest.raises(symmem.PeerLost, match="rank 1"):
                wait()
                pytest.fail(f"{name} did not raise")
    # So is it by calls of the library.
    with pytest.raises(RuntimeError, match="rank 1"):
        ops.one_shot_all_reduce_out(x, "sum", world(), out)
    dist.destroy_process_group()


@pytest.mark.parametrize("count", [16, 1024, 4 << 20])
@ranks(2)
def test_g01_a_replay_that_timed_out_is_told_until_all_are_back_in_step(rank, count):
    graph, out, x = _captured(rank, count)
    _replayed(graph, out)
    leave()
    group = _groups.of(world()).native
    group.timeout, former = 1, group.timeout
    # The limit is one of what is captured.
    late = torch.cuda.CUDAGraph()
    with torch.cuda.graph(late):
        ops.one_shot_all_reduce_out(x, "sum", world(), out)
    group.timeout = former
    if rank == 0:
        late.replay()
        with pytest.raises(symmem.Timeout) as caught:
            torch.cuda.synchronize()
        assert caught.value.waiting_for == [1] and "all_reduce" in str(caught.value)
        for _ in range(2):
            for name, wait in _ways_to_wait(late).items():
                with pytest.raises(symmem.Error, match="rank 1"):
                    wait()
                    pytest.fail(f"{name} did not raise")
    dist.barrier()
    if rank == 1:
        # It is told of a call that its peer has given up, by whatever it does next.
        with pytest.raises(symmem.Error, match="rank 0"):
            for _ in range(100):
                graph.replay()
                torch.cuda.synchronize()
    dist.barrier()
    symmem.torch.resync(timeout=30)
    _replayed(graph, out)
    assert (ops.one_shot_all_reduce(x, "sum", world()) == 3).all()
    leave()


@ranks(2)
def test_g01_limits_in_milliseconds_count_on_devices(rank):
    x = symm_mem.empty(64, device=device_of(rank))
    handle = symm_mem.rendezvous(x, world())
    handle.barrier()
    leave()
    calls = {
        "wait_signal": lambda: handle.wait_signal(1 - rank, channel=3, timeout_ms=500),
        "put_signal": lambda: [handle.put_signal(1 - rank, channel=4, timeout_ms=500) for _ in range(2)],
        "barrier": lambda: handle.barrier(channel=5, timeout_ms=500),
    }
    for name, call in calls.items():
        if rank == 0:
            begin = time.monotonic()
            with pytest.raises(symmem.Timeout) as caught:
                call()
                torch.cuda.synchronize()
            assert caught.value.waiting_for == [1], name
            assert time.monotonic() - begin < 20, name  # the group's limit is a minute
        dist.barrier()
        symmem.torch.resync(timeout=30)
        handle.get_signal_pad(rank).view(torch.int32).zero_()
        leave()
        handle.barrier(timeout_ms=20_000)
        leave()


@ranks(2)
def test_g04_what_one_rank_refuses_on_a_device_ends_the_call_of_all(rank):
    device = device_of(rank)
    x, out = symm_mem.empty(64, device=device).fill_(rank + 1), torch.empty(64, device=device)
    ops.one_shot_all_reduce_out(x, "sum", world(), out)
    leave()
    rows, splits = x.view(64, 1), symm_mem.empty(2, dtype=torch.int64, device=device).fill_(8)
    numbers = torch.empty(2, 2, dtype=torch.int64, device=device)
    ops.all_to_all_vdev(rows, out.view(64, 1), splits, numbers, world())
    leave()
    calls = (
        (ops.one_shot_all_reduce_out, (x, "sum", world(), out), (x, "sum", world(), out[:7])),
        (ops.two_shot_all_reduce_, (x, "sum", world()), (x, "nonsense", world())),
        (ops.reduce_scatter_out, (x, world(), False, out[:32]), (x, world(), False, out[:31])),
        (ops.all_to_all_vdev, (rows, out.view(64, 1), splits, numbers, world()), (rows, out, splits, numbers, world())),
    )
    for operator, good, bad in calls:
        begin = time.monotonic()
        if rank == 1:
            with pytest.raises(RuntimeError) as caught:
                operator(*bad)
            assert not isinstance(caught.value, (symmem.Mismatch, symmem.Timeout))
        else:
            with pytest.raises(symmem.Error, match="rank 1"):
                operator(*good)
                torch.cuda.synchronize()
        assert time.monotonic() - begin < 20
        dist.barrier()
        symmem.torch.resync(timeout=30)
        operator(*good)
        leave()


@ranks(2)
def test_g04_only_the_roots_output_is_looked_at_on_a_device(rank):
    device = device_of(rank)
    x = symm_mem.empty(64, device=device).fill_(rank + 1)
    for dummy in (torch.empty(0, device=device), torch.empty(3, dtype=torch.int8, device=device), x):
        out = torch.zeros(64, device=device) if rank == 1 else dummy
        ops.multimem_one_shot_reduce_out(x, "sum", 1, world(), out)
        assert rank == 0 or (out == 3).all()
        leave()


@ranks(2)
def test_p12_signals_on_a_device_belong_to_their_memory(rank):
    device = device_of(rank)
    a, b = (symm_mem.rendezvous(symm_mem.empty(64, device=device), world()) for _ in range(2))
    leave()
    if rank == 0:
        a.put_signal(1)
        torch.cuda.synchronize()
        pads = [handle.get_signal_pad(1).view(torch.int32)[0].item() for handle in (a, b)]
        assert pads == [1, 0]
        dist.barrier()
        b.get_buffer(1, (64,), torch.float32).fill_(7)
        b.put_signal(1)
    else:
        dist.barrier()
        b.wait_signal(0)
        assert (b.get_buffer(1, (64,), torch.float32) == 7).all()
        a.wait_signal(0)
    leave()
    assert not any(handle.get_signal_pad(rank).view(torch.int32).any() for handle in (a, b))
    leave()
    if rank == 0:
        a.get_signal_pad(1).view(torch.int32)[2 * 5].fill_(1)  # by hand
    else:
        a.wait_signal(0, channel=5, timeout_ms=20_000)
    leave()


def _there_and_back(device, rank):
    from symmem.torch import AllToAllVDev2d, AllToAllVDev2dOffset

    AllToAllVDev2d.init(32)
    AllToAllVDev2dOffset.init(32, 4)
    splits = torch.tensor([1, 2, 0, 3], device=device)
    inputs = torch.arange(18.0, device=device).view(6, 3).add_(100 * rank).requires_grad_()
    there, received = AllToAllVDev2d.apply(inputs, splits, world(), 4)
    back, _ = AllToAllVDev2dOffset.apply(there, received, world())
    assert torch.equal(back[:6], inputs)
    back[:6].sum().backward()
    assert (inputs.grad == 1).all()


@ranks(2)
def test_g06_steps_to_experts_allocate_nothing_after_the_first(rank):
    from symmem.torch import _memory

    device, made, former = device_of(rank), [], _memory.Allocation.__init__

    def counting(self, *arguments, **named):
        made.append(arguments)
        former(self, *arguments, **named)

    _memory.Allocation.__init__ = counting
    counts = []
    for _ in range(4):
        _there_and_back(device, rank)
        counts.append(len(made))
    assert counts == counts[:1] * 4, made
    leave()


@pytest.mark.parametrize("name", ["bool", "complex64", "complex128", "float8_e8m0fnu", "float4_e2m1fn_x2"])
@ranks(2)
def test_g06_rows_of_every_type_are_moved_on_a_device(rank, name):
    if not hasattr(torch, name):
        return
    device, dtype = device_of(rank), getattr(torch, name)
    bits = 2 if dtype == torch.bool else 256

    def rows(source):
        count = 12 * dtype.itemsize
        values = (torch.arange(count) * 7 + 100 * source).remainder(bits).to(torch.uint8)
        return values.view(4, -1).to(device)

    inputs = symm_mem.empty(4, 3, dtype=dtype, device=device)
    inputs.view(torch.uint8).copy_(rows(rank))
    out = torch.empty(4, 3, dtype=dtype, device=device)
    splits = symm_mem.empty(2, dtype=torch.int64, device=device).fill_(2)
    numbers = torch.empty(2, 2, dtype=torch.int64, device=device)
    ops.all_to_all_vdev(inputs, out, splits, numbers, world())
    expected = torch.cat([rows(source)[2 * rank : 2 * rank + 2] for source in range(2)])
    assert torch.equal(out.view(torch.uint8), expected)
    leave()


@ranks(1)
def test_g06_a_consumers_stream_comes_after_the_librarys_calls(rank):
    device = device_of(rank)
    world_of_one = symmem.World.connect(0, 1)
    x = symmem.rendezvous(symmem.empty(1 << 20, "float32", world_of_one, device=str(device)), world_of_one)
    own, values = torch.from_dlpack(x.array), torch.ones(1 << 20, device=device)
    torch.cuda.synchronize()
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(200_000_000)
    x.put(0, values, stream=producer.cuda_stream)
    with torch.cuda.stream(consumer):
        assert (torch.from_dlpack(x.array) == 1).all()
    assert (own == 1).all()

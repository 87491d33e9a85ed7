"""Streams, graphs and the compiler, over `symmem.torch` on CUDA tensors. The numbers are those of docs/parity.md."""

import os
import sysconfig
from importlib.util import find_spec

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from cuda_ranks import delay, device_of, leave
from symmem.torch import AllToAllVDev2d

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
ops = torch.ops.symm_mem
#: The compiler's kernels are Triton's, which are built against Python's headers.
compiles = pytest.mark.skipif(
    not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")) or find_spec("triton") is None,
    reason="Triton or Python's headers are not there",
)


@ranks(2)
def test_t010_memory_is_made_and_met_in_a_side_stream(rank):
    device = device_of(rank)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = symm_mem.empty(1024, device=device).fill_(rank)
        handle = symm_mem.rendezvous(x, world())
        handle.barrier()
        got = handle.get_buffer(1 - rank, (1024,), torch.float32).clone()
        handle.barrier()
    side.synchronize()
    assert (got == 1 - rank).all()
    leave()


@ranks((2, 4))
def test_t037_reductions_in_two_streams_are_ordered(rank):
    device, size = device_of(rank), dist.get_world_size()
    x = symm_mem.empty(4096, device=device).fill_(1)
    symm_mem.rendezvous(x, world())
    leave()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    results = []
    for stream in (first, second):
        with torch.cuda.stream(stream):
            if rank == 0 and stream is first:
                delay()
            results.append(ops.one_shot_all_reduce(x, "sum", world()))
    torch.cuda.synchronize()
    assert all((result == size).all() for result in results)
    leave()


@ranks(2)
def test_py22_dispatches_in_two_streams_have_the_rows_that_each_was_given(rank):
    device = device_of(rank)
    AllToAllVDev2d.init(4)
    splits = torch.tensor([1, 1], device=device)
    inputs = [torch.full((2, 8), 10.0 * step + rank, device=device) for step in range(3)]
    AllToAllVDev2d.apply(inputs[0], splits, world(), 1)
    leave()
    results = []
    for rows in inputs:
        # Each stream is free, and would fill the buffers while the one before has not come to its own rows yet.
        with torch.cuda.stream(torch.cuda.Stream()):
            if not results:
                delay()
            results.append(AllToAllVDev2d.apply(rows, splits, world(), 1)[0])
    torch.cuda.synchronize()
    for step, result in enumerate(results):
        assert result[:2, 0].tolist() == [10 * step, 10 * step + 1]
    leave()


def _captured(work):
    """The graph of what `work` does, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


@ranks(2)
def test_t038_a_captured_barrier_replays(rank):
    device = device_of(rank)
    x = symm_mem.empty(1024, device=device).fill_(-1)
    handle = symm_mem.rendezvous(x, world())
    handle.barrier()
    leave()
    graph, _ = _captured(lambda: (x.fill_(rank), handle.barrier()))
    graph.replay()
    assert (handle.get_buffer(1 - rank, (1024,), torch.float32) == 1 - rank).all()
    handle.barrier()
    leave()


@ranks(2)
def test_t039_a_capture_that_is_never_replayed_disturbs_nobody(rank):
    device = device_of(rank)
    x = symm_mem.empty(1024, device=device).fill_(1)
    assert (ops.one_shot_all_reduce(x, "sum", world()) == 2).all()
    graph, _ = _captured(lambda: ops.one_shot_all_reduce(x, "sum", world()))
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            assert (ops.one_shot_all_reduce(x, "sum", world()) == 2).all()
    leave()
    del graph


@ranks(2)
def test_t040_streams_that_fork_within_a_capture_are_ordered(rank):
    device = device_of(rank)
    x = symm_mem.empty(1024, device=device).fill_(rank + 1)
    ops.one_shot_all_reduce(x, "sum", world())
    leave()
    side = torch.cuda.Stream()

    def work():
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            first = ops.one_shot_all_reduce(x, "sum", world())
        second = ops.one_shot_all_reduce(x, "sum", world())
        main.wait_stream(side)
        return first, second

    graph, results = _captured(work)
    for step in range(4):
        x.fill_(step)
        graph.replay()
        assert all((result == 2 * step).all() for result in results)
    leave()


@ranks(2)
def test_t073_memory_and_first_meetings_are_refused_in_a_capture(rank):
    device = device_of(rank)
    x = symm_mem.empty(1024, device=device).fill_(rank)
    y = torch.zeros(4, device=device)

    def work():
        with pytest.raises(RuntimeError, match="capturing a graph"):
            symm_mem.empty(1024, device=device)
        with pytest.raises(RuntimeError, match="capturing a graph"):
            symm_mem.rendezvous(x, world())
        y.add_(1)

    graph, _ = _captured(work)
    graph.replay()
    assert (y == 1).all()
    assert (ops.one_shot_all_reduce(x, "sum", world()) == 1).all()
    leave()


@ranks((2, 4))
def test_t074_a_captured_reduction_replays(rank):
    device, size = device_of(rank), dist.get_world_size()
    x = symm_mem.empty(1920, device=device).fill_(0)
    handle = symm_mem.rendezvous(x, world())
    ops.one_shot_all_reduce(x, "sum", world())
    leave()
    graph, result = _captured(lambda: ops.one_shot_all_reduce(x, "sum", world()))
    for step in range(1, 5):
        x.fill_(step)
        if rank == 0:
            delay()
        graph.replay()
        assert (result == step * size).all()
    assert (handle.get_signal_pad(rank).view(torch.int32) == 0).all()
    leave()


@ranks(2)
def test_t047_a_fused_product_is_captured(rank):
    device, size = device_of(rank), dist.get_world_size()
    a = torch.full((64, 128), 0.5, dtype=torch.bfloat16, device=device)
    b = torch.full((128, 32), 0.25, dtype=torch.bfloat16, device=device)
    eager = ops.fused_matmul_reduce_scatter(a, b, "avg", 0, world())
    leave()
    graph, captured = _captured(lambda: ops.fused_matmul_reduce_scatter(a, b, "avg", 0, world()))
    graph.replay()
    torch.testing.assert_close(captured, eager)
    assert eager.shape == (64 // size, 32) and (eager == 16).all()
    leave()


@compiles
@ranks(2)
def test_h72_a_triton_kernel_meets_its_peers_on_the_pad(rank):
    from triton_kernels import pad_barrier

    device, size = device_of(rank), dist.get_world_size()
    x = symm_mem.empty(1024, device=device)
    handle = symm_mem.rendezvous(x, world())
    for step in range(3):
        x.fill_(10 * step + rank)
        pad_barrier[(1,)](handle.signal_pad_ptrs_dev, rank, size)
        assert (handle.get_buffer(1 - rank, (1024,), torch.float32) == 10 * step + 1 - rank).all()
        pad_barrier[(1,)](handle.signal_pad_ptrs_dev, rank, size)
    assert (handle.get_signal_pad(rank).view(torch.int32) == 0).all()
    leave()


def _compiled(function, *inputs):
    """What the compiled function gives, twice, and the code that was made of it."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    if hasattr(symm_mem, "enable_symm_mem_for_group"):
        symm_mem.enable_symm_mem_for_group(world())
    with config.patch({"_collective.auto_select": True}):
        compiled = torch.compile(function, fullgraph=True)
        result, codes = run_and_get_code(compiled, *inputs)
        return result, compiled(*inputs), "\n".join(codes)


@compiles
@ranks(2)
def test_t075_the_compiler_lowers_an_all_reduce(rank):
    from torch.distributed import _functional_collectives as funcol

    device, name = device_of(rank), world()

    def layer(x):
        return funcol.all_reduce(x + 1, "sum", name) * 2

    x = torch.full((4, 4), float(rank), device=device)
    first, second, code = _compiled(layer, x)
    assert "one_shot_all_reduce" in code and "empty_strided_p2p" in code
    assert (first == 6).all() and (second == 6).all()
    leave()


@compiles
@ranks(2)
def test_t076_communication_buffers_are_used_again(rank):
    from torch.distributed import _functional_collectives as funcol

    device, name = device_of(rank), world()

    # Not one reduction's result into the next: torch 2.11 reads the wrong buffer then, on its own memory too (T-082).
    def layer(x):
        return funcol.all_reduce(x + 1, "sum", name) * 10 + funcol.all_reduce(x * 3, "sum", name)

    x = torch.full((4, 4), float(rank), device=device)
    first, second, code = _compiled(layer, x)
    assert code.count("= empty_strided_p2p(") in (1, 2)
    assert (first == 33).all() and (second == 33).all()
    leave()

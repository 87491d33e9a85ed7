"""The communicator for vLLM: over a stub of vLLM's classes, and over vLLM where it is installed."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import time

import pytest
import vllm_stub
from torch_ranks import ranks

import symmem

torch = pytest.importorskip("torch")
dist = torch.distributed

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def _communicator(name="tp:0", group=None, **named):
    vllm_stub.install()
    from symmem.vllm import Communicator

    group = group or dist.group.WORLD
    return Communicator(group, torch.device("cpu"), group, name, **named)


def _rows(rank, count, dtype=torch.float32):
    return (torch.arange(count * 3).reshape(count, 3) % 5 + rank + 1).to(dtype)


def _moves_and_reduces(c, rank, size):
    every = [_rows(r, 4) for r in range(size)]
    assert torch.equal(c.all_reduce(every[rank].clone()), sum(every))
    assert torch.equal(c.broadcast(every[rank].clone(), size - 1), every[-1])
    for dim in (0, 1, -1):
        assert torch.equal(c.all_gather(every[rank], dim), torch.cat(every, dim))
        gathered = c.gather(every[rank], size - 1, dim)
        assert torch.equal(gathered, torch.cat(every, dim)) if rank == size - 1 else gathered is None
    wide = [one.repeat(size, size) for one in every]
    for dim in (0, -1):
        assert torch.equal(c.reduce_scatter(wide[rank], dim), sum(wide).chunk(size, dim)[rank])
    if rank == 0:
        c.send(every[0], size - 1)
    elif rank == size - 1:
        assert torch.equal(c.recv(every[0].shape, torch.float32, 0), every[0])


def _gathers_and_scatters_any_number_of_rows(c, rank, size):
    for sizes in ([3] * size, [3 * r for r in range(size)], [5, *[0] * (size - 1)], [0] * size, None):
        counts = sizes or [4] * size
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            every = [_rows(r, counts[r], dtype) for r in range(size)]
            assert torch.equal(c.all_gatherv(every[rank], 0, sizes), torch.cat(every)), sizes
            several = c.all_gatherv([every[rank], every[rank][:, 0]], sizes=sizes)
            assert torch.equal(several[0], torch.cat(every)) and torch.equal(several[1], torch.cat(every)[:, 0])
            whole = [_rows(r, sum(counts), dtype) for r in range(size)]
            for dim in (0, -1):
                given = [one if dim == 0 else one.T for one in whole]
                expected = sum(given).split(counts, dim)[rank]
                assert torch.equal(c.reduce_scatterv(given[rank], dim, sizes), expected), sizes


def _sends_dictionaries(c, rank, size):
    sent = {
        "hidden": _rows(1, 5, torch.bfloat16),
        "part": _rows(1, 6)[::2],
        "nothing": torch.empty(0, 3),
        "flag": torch.tensor(True),
        "step": 7,
        "words": ["a", None],
    }
    if rank == 0:
        c.send_tensor_dict(sent, size - 1)
        c.send_tensor_dict({}, size - 1)
        for wrong in (object(), (1, 2), float("nan")):
            with pytest.raises(TypeError, match="JSON"):
                c.send_tensor_dict({"wrong": wrong}, size - 1)
        c.send_tensor_dict({"last": torch.ones(1)}, size - 1)
    elif rank == size - 1:
        received = c.recv_tensor_dict(0)
        assert list(received) == list(sent)
        for key, value in sent.items():
            same = torch.equal(received[key], value) if isinstance(value, torch.Tensor) else received[key] == value
            assert same and type(received[key]) is type(value), key
            assert not isinstance(value, torch.Tensor) or received[key].dtype == value.dtype
        assert c.recv_tensor_dict(0) == {}
        assert torch.equal(c.recv_tensor_dict(0)["last"], torch.ones(1))


def _dispatches_and_combines(c, rank, size):
    counts = [r + 1 for r in range(size)]
    c.all2all_manager.communicator, c.all2all_manager.sizes = c, counts
    tokens = [_rows(r, counts[r]) for r in range(size)]
    weights = [torch.full((counts[r], 2), 0.5) for r in range(size)]
    ids = [torch.full((counts[r], 2), r) for r in range(size)]
    mine = [tokens[rank], weights[rank], ids[rank]]
    expected = [torch.cat(every) for every in (tokens, weights, ids)]
    assert all(map(torch.equal, c.dispatch(*mine), expected))
    *same, extra = c.dispatch(*mine, extra_tensors=[tokens[rank][:, :1]])
    assert all(map(torch.equal, same, expected)) and torch.equal(extra[0], expected[0][:, :1])
    # Every rank's experts add their share of all tokens.
    combined = c.combine(expected[0] * (rank + 1))
    assert torch.equal(combined, tokens[rank] * sum(range(1, size + 1)))


def _refuses_without_a_wait(c, rank, size):
    wrong = [
        lambda: c.all_gatherv(torch.ones(2, 3), 0, [1] * size),
        lambda: c.all_gatherv(torch.ones(2, 3), 0, [2]),
        lambda: c.all_gatherv(torch.ones(2, 3), 1),
        lambda: c.reduce_scatterv(torch.ones(size + 1, 3), 0),
        lambda: c.reduce_scatterv(torch.ones(size, 3), 0, [2] * size),
        lambda: c.reduce_scatterv(torch.ones(size, 3), 2),
    ]
    for call in wrong:
        began = time.monotonic()
        with pytest.raises(ValueError if rank == 0 else symmem.PeerFailed):
            call() if rank == 0 else c.all_reduce(torch.ones(3))
        assert time.monotonic() - began < 15
    assert torch.equal(c.all_reduce(torch.ones(3)), torch.full((3,), float(size)))


def _everything(rank):
    size = dist.get_world_size()
    c = _communicator()
    assert type(c.device_group).__module__ == "symmem.torch._process_group"
    assert c.supports_tensor_dict and c.all2all_manager is None
    _moves_and_reduces(c, rank, size)
    _gathers_and_scatters_any_number_of_rows(c, rank, size)
    _sends_dictionaries(c, rank, size)
    _refuses_without_a_wait(c, rank, size)
    _dispatches_and_combines(_communicator("ep:0", use_all2all=True), rank, size)


@ranks((2, 3), backend="gloo")
def test_groups_of_gloo_get_a_group_of_their_own(rank):
    _everything(rank)
    assert dist.get_backend() == "gloo"


@ranks((2, 3), backend="symmem")
def test_groups_of_ours_are_used_as_they_are(rank):
    assert _communicator().device_group is dist.group.WORLD
    _everything(rank)


@ranks(3, backend="gloo")
def test_several_groups_of_some_ranks(rank):
    """As vLLM makes them: all ranks make all process groups, and each rank the communicators of its own."""
    for members in ([0, 2], [1], [2, 1]):
        group = dist.new_group(members)
        if rank in members:
            c = _communicator("tp:1", group)
            x = torch.tensor([float(rank)])
            assert c.all_reduce(x.clone()) == sum(members)
            order = c.ranks
            assert c.all_gather(x, 0).tolist() == [float(r) for r in order]
            c.destroy()
            c.destroy()


@ranks(3, lost=(2,), backend="gloo")
def test_a_lost_rank_is_named(rank):
    c = _communicator()
    c.all_reduce(torch.ones(1))
    if rank == 2:
        os._exit(1)
    with pytest.raises(symmem.PeerLost) as e:
        c.all_gatherv(torch.ones(2, 3), 0, [2, 2, 2])
    assert e.value.rank == 2
    dist.destroy_process_group()


def test_the_plugin_is_opt_in():
    vllm_stub.install()
    (entry,) = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "symmem"]
    platform, start = vllm_stub.CpuPlatform, entry.load()
    theirs = platform.get_device_communicator_cls()
    try:
        for value, expected in (("", theirs), ("0", theirs), ("1", "symmem.vllm.Communicator")):
            os.environ["SYMMEM_VLLM"] = value
            start()
            start()
            assert platform.get_device_communicator_cls() == expected
    finally:
        del os.environ["SYMMEM_VLLM"]


#: A rank of vLLM without a model.
PROGRAM = """
import sys, torch
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state as state

rank, config = int(sys.argv[2]), VllmConfig()
with set_current_vllm_config(config):
    state.init_distributed_environment(2, rank, "file://" + sys.argv[1], rank, "gloo")
    {body}
    print("done")
    sys.stdout.flush()
    __import__("os")._exit(0)
"""

TENSOR_PARALLEL = """
    state.initialize_model_parallel(tensor_model_parallel_size=2)
    tp = state.get_tp_group()
    kind = type(tp.device_communicator)
    assert kind.__module__ + "." + kind.__name__ == "symmem.vllm.Communicator", kind
    x = torch.full((4, 3), rank + 1.0)
    assert torch.equal(tp.all_reduce(x.clone()), torch.full((4, 3), 3.0))
    assert torch.equal(tp.all_gather(x, 0), torch.cat([torch.full((4, 3), 1.0), torch.full((4, 3), 2.0)]))
    assert torch.equal(tp.all_gatherv(x[: rank + 1], 0, [1, 2])[:, 0], torch.tensor([1.0, 2, 2]))
    assert torch.equal(tp.reduce_scatterv(x[:3], 0, [1, 2]), torch.full((rank + 1, 3), 3.0))
    if rank == 0:
        tp.send_tensor_dict({"x": x, "y": x[:0]}, 1)
    else:
        received = tp.recv_tensor_dict(0)
        assert torch.equal(received["x"], torch.ones(4, 3)) and received["y"].shape == (0, 3)
"""

#: The experts of a rank see the tokens of all data parallel ranks.
EXPERT_PARALLEL = """
    parallel = config.parallel_config
    parallel.data_parallel_size, parallel.data_parallel_rank, parallel.enable_expert_parallel = 2, rank, True
    state.initialize_model_parallel(tensor_model_parallel_size=1)
    from types import SimpleNamespace
    from vllm.distributed.device_communicators import all2all
    metadata = SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: [1, 2])
    all2all.get_forward_context = lambda: SimpleNamespace(dp_metadata=metadata)
    ep = state.get_ep_group()
    rows = [torch.full((r + 1, 3), r + 1.0) for r in range(2)]
    hidden, weights, ids = ep.dispatch(rows[rank], rows[rank][:, :2] / 2, rows[rank][:, :2].long())
    assert torch.equal(hidden, torch.cat(rows)), hidden
    assert torch.equal(weights, hidden[:, :2] / 2) and torch.equal(ids, hidden[:, :2].long())
    assert torch.equal(ep.combine(hidden * (rank + 1)), rows[rank] * 3)
"""


@pytest.mark.parametrize("body", [TENSOR_PARALLEL, EXPERT_PARALLEL], ids=["tensor parallel", "expert parallel"])
@pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")
def test_over_vllm(body):
    with tempfile.TemporaryDirectory(prefix="symmem-test-") as folder:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM.replace("{body}", body.strip()), f"{folder}/store", str(rank)],
                env={**os.environ, "SYMMEM_VLLM": "1", "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [process.communicate(timeout=200)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        for process, text in zip(started, said):
            assert process.returncode == 0 and "done" in text, text

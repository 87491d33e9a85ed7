"""What the default compiler of `torch.compile` makes of symmetric memory, on CUDA tensors and on CPU tensors.

The numbers are those of docs/parity.md. Older torches lack some of it: each test says what it needs.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from importlib.util import find_spec

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from cuda_ranks import device_of, leave

ops = torch.ops.symm_mem
HAS_HEADERS = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))


def _names(function):
    code = function.__code__
    return {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars}


def _needs(what, there):
    return pytest.mark.skipif(not there, reason=f"this torch's compiler {what}")


def _features():
    """What the compiler of this torch does; it is looked at and not asked for its version."""
    from torch._inductor import comm_lowering, scheduler
    from torch._inductor.codegen import wrapper

    return {
        "out": "register_out_variant" in _names(comm_lowering.register_symm_mem_lowerings),
        "copies": "_copy_input_to_comm_buffer" in _names(comm_lowering.register_symm_mem_lowerings),
        "apart": "CommBufferLayout" in _names(scheduler.BaseSchedulerNode.decide_inplace_update),
        "registers": hasattr(torch.library.Library, "register_symm_mem_args"),
        "ids": hasattr(wrapper, "secrets"),
        "rewrites": find_spec("torch._inductor.fx_passes.low_contention_collectives") is not None,
        "multicast": hasattr(ops, "_low_contention_all_gather_ce_multicast_out"),
    }


FEATURES = _features()
has_out = _needs("has no operators with `out`", FEATURES["out"])
has_copies = _needs("does not copy ordinary inputs", FEATURES["copies"])
keeps_apart = _needs("mixes up symmetric and ordinary buffers", FEATURES["apart"])
has_registration = _needs("has no register_symm_mem_args", FEATURES["registers"])
has_own_ids = _needs("draws ids from the generator that programs seed", FEATURES["ids"])
has_rewrite = _needs("does not rewrite all-gathers", FEATURES["rewrites"] and FEATURES["multicast"])
has_multicast_out = _needs("plans no output of an all-gather", FEATURES["multicast"])

CPU_LACKS = (
    "the compiler needs a C++ compiler and Python's headers"
    if not (HAS_HEADERS and shutil.which(os.environ.get("CXX", "g++")))
    else "this torch's compiler mixes up symmetric and ordinary buffers: they are planned on devices only"
    if not FEATURES["apart"]
    else ""
)
CUDA_LACKS = (
    "there is no CUDA device"
    if not torch.cuda.is_available()
    else "Triton or Python's headers are not there"
    if not HAS_HEADERS or find_spec("triton") is None
    else ""
)
on_cpu = pytest.param("cpu", marks=pytest.mark.skipif(bool(CPU_LACKS), reason=CPU_LACKS or "-"))
on_cuda = pytest.param("cuda", marks=pytest.mark.skipif(bool(CUDA_LACKS), reason=CUDA_LACKS or "-"))
on_all_devices = pytest.mark.parametrize("kind", [on_cpu, on_cuda])


@pytest.fixture(scope="module", autouse=True)
def _what_every_kernel_needs_is_built():
    """The first compilation of all takes long, and ranks have a time limit."""
    if not CPU_LACKS:
        torch.compile(lambda x: x + 1)(torch.ones(4))


def _device(kind, rank):
    return device_of(rank) if kind == "cuda" else torch.device(kind)


def _leave(kind):
    leave() if kind == "cuda" else dist.barrier()


def _compiled(function, *inputs):
    """What the compiled function gives, twice, and the code that was made of it."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    with warnings.catch_warnings():
        # An older torch's compiler wants it, and says all the same that nobody needs it.
        warnings.simplefilter("ignore")
        symm_mem.enable_symm_mem_for_group(world())
    # torch 2.11 numbers buffers by `random`, whose state a compilation restores: two graphs in a row would share a number.
    random.random()
    with config.patch({"_collective.auto_select": True, "fx_graph_cache": False}):
        compiled = torch.compile(function, fullgraph=True)
        result, codes = run_and_get_code(compiled, *inputs)
        again = compiled(*inputs)
    return result, again, "\n".join(codes)


def _sum(x):
    """The sum of the ranks' tensors, by the process group."""
    total = x.cpu()
    dist.all_reduce(total)
    return total.to(x.device)


def _agree(results, expected):
    for result in results:
        torch.testing.assert_close(result, expected)


def _matrices(rank, device, count):
    generator = torch.Generator().manual_seed(rank)
    return [torch.rand(8, 8, generator=generator).to(device) for _ in range(count)]


def _allocations(code):
    return re.findall(r"(\w+) = empty_strided_p2p\(", code)


@pytest.mark.skipif(bool(CPU_LACKS), reason=CPU_LACKS or "-")
@pytest.mark.parametrize(
    "modules", ["symmem.torch, torch._inductor.codegen.wrapper", "torch._inductor.codegen.wrapper, symmem.torch"]
)
def test_the_compiler_may_be_imported_before_and_after(modules):
    program = f"""
import {modules}, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sum = torch.compile(lambda x: torch.ops.symm_mem.one_shot_all_reduce(x + 1, "sum", "0"), fullgraph=True)
assert (sum(torch.ones(4)) == 2).all()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@on_all_devices
@ranks(2)
def test_t075_the_compiler_lowers_what_the_graph_makes(rank, kind):
    from torch.distributed import _functional_collectives as funcol

    name = world()
    x, weight = _matrices(rank, _device(kind, rank), 2)
    for make in (lambda x: x + 1, lambda x: (x + 1)[:4], lambda x: x @ weight):
        first, second, code = _compiled(lambda x, make=make: funcol.all_reduce(make(x), "sum", name), x)
        assert "one_shot_all_reduce" in code and len(_allocations(code)) == 1
        assert not re.search(rf"return \({_allocations(code)[0]}\b", code)
        _agree((first, second), _sum(make(x)))
    _leave(kind)


@on_all_devices
@ranks(2)
def test_t075_the_compiler_leaves_inputs_to_the_process_group(rank, kind):
    from torch.distributed import _functional_collectives as funcol

    name = world()
    (x,) = _matrices(rank, _device(kind, rank), 1)
    first, second, code = _compiled(lambda x: funcol.all_reduce(x, "sum", name), x)
    assert "one_shot_all_reduce" not in code and not _allocations(code)
    _agree((first, second), _sum(x))
    _leave(kind)


@on_all_devices
@ranks(2)
def test_t076_buffers_that_live_together_are_two(rank, kind):
    from torch.distributed import _functional_collectives as funcol

    name = world()
    x, v, w = _matrices(rank, _device(kind, rank), 3)

    def one_after_the_other(x):
        return funcol.all_reduce(funcol.all_reduce(x @ v, "sum", name) @ w, "sum", name) @ v

    def together(x):
        a, b = x @ v, x @ w
        return funcol.all_reduce(a, "sum", name) @ funcol.all_reduce(b, "sum", name) @ a

    first, second, code = _compiled(one_after_the_other, x)
    assert len(_allocations(code)) == 1
    _agree((first, second), _sum(_sum(x @ v) @ w) @ v)
    first, second, code = _compiled(together, x)
    assert len(_allocations(code)) == 2 and f"= empty_strided_{kind}(" in code
    _agree((first, second), _sum(x @ v) @ _sum(x @ w) @ (x @ v))
    _leave(kind)


@has_out
@on_all_devices
@ranks(2)
def test_t077_output_buffers_are_used_again(rank, kind):
    name = world()
    x, weight = _matrices(rank, _device(kind, rank), 2)

    def layers(x):
        for _ in range(3):
            x = ops.one_shot_all_reduce(x @ weight, "sum", name)
        return x @ weight

    first, second, code = _compiled(layers, x)
    assert code.count("one_shot_all_reduce_out.default(") == 3
    assert code.count("out=") >= 6 and code.count("# reuse") >= 2
    expected = x
    for _ in range(3):
        expected = _sum(expected @ weight)
    _agree((first, second), expected @ weight)
    _leave(kind)


@has_out
@on_all_devices
@ranks(2)
def test_t078_the_copying_form_writes_into_a_planned_buffer(rank, kind):
    name = world()
    device = _device(kind, rank)
    x, weight = _matrices(rank, device, 2)
    buffer = symm_mem.empty(8, 8, device=device)

    def layer(buffer, x):
        return ops.one_shot_all_reduce_copy(buffer, x @ weight, "sum", name) @ weight

    first, second, code = _compiled(layer, buffer, x)
    assert re.search(r"one_shot_all_reduce_copy_out\.default\(.*out=", code)
    _agree((first, second), _sum(x @ weight) @ weight)
    _leave(kind)


@has_multicast_out
@pytest.mark.parametrize("kind", [on_cpu])
@ranks(2)
def test_t079_the_compiler_plans_the_output_of_an_all_gather(rank, kind):
    """On a device this needs multicast; what is planned is the same."""
    name = world()
    (x,) = _matrices(rank, _device(kind, rank), 1)

    def gather(x):
        gathered = ops._low_contention_all_gather_ce_multicast(x, name)
        return torch.ops._c10d_functional.wait_tensor(gathered) + 1

    first, second, code = _compiled(gather, x)
    assert re.search(r"empty_strided_p2p\(\(16, 8\).*alloc_id=\d+", code)
    assert "_low_contention_all_gather_ce_multicast_out" in code
    _agree((first, second), torch.cat([_matrices(r, "cpu", 1)[0] for r in range(2)]) + 1)
    _leave(kind)


@has_rewrite
@pytest.mark.parametrize("multicast", [True, False])
@ranks(2)
def test_t080_a_rewrite_keeps_the_given_output(rank, multicast):
    """A rewrite of a graph that is not run: without multicast there is no form with an output, and nothing is changed."""
    from torch._inductor import config
    from torch._inductor.fx_passes import low_contention_collectives as passes
    from torch._subclasses.fake_tensor import FakeTensorMode

    functional, name = torch.ops._c10d_functional, world()
    graph = torch.fx.Graph()
    x, out = graph.placeholder("x"), graph.placeholder("out")
    with FakeTensorMode():
        x.meta["val"], out.meta["val"] = torch.empty(4, 4), torch.empty(8, 4)
    gathered = graph.call_function(functional.all_gather_into_tensor_out.default, (x, 2, name), {"out": out})
    graph.output(graph.call_function(functional.wait_tensor.default, (gathered,)))
    target = ops._low_contention_all_gather_ce_multicast if multicast else ops._low_contention_all_gather
    passes._select_low_contention_all_gather_target = lambda *_, **__: target.default
    wanted = {"low_contention_min_bytes_per_rank": 0, "low_contention_skip_overlap_check": True}
    with config.patch({f"aten_distributed_optimizations.{option}": value for option, value in wanted.items()}):
        passes.replace_collectives_with_low_contention(graph)
    (gather,) = (node for node in graph.nodes if "all_gather" in str(node.target))
    if multicast:
        assert gather.target is ops._low_contention_all_gather_ce_multicast_out.default
        assert gather.args == (x, name, out)
    else:
        assert gather is gathered and gather.kwargs == {"out": out}
    assert out in graph.nodes


@has_copies
@on_all_devices
@ranks(2)
def test_t081_ordinary_inputs_are_copied_in(rank, kind):
    name = world()
    (x,) = _matrices(rank, _device(kind, rank), 1)
    assert not symm_mem.is_symm_mem_tensor(x)
    first, second, code = _compiled(lambda x: ops.one_shot_all_reduce(x, "sum", name), x)
    assert len(_allocations(code)) == 1
    _agree((first, second), _sum(x))
    _leave(kind)


@keeps_apart
@on_all_devices
@ranks(2)
def test_t082_nothing_is_written_in_place_between_symmetric_and_ordinary_buffers(rank, kind):
    name = world()
    x, weight = _matrices(rank, _device(kind, rank), 2)

    def layer(x):
        return ops.one_shot_all_reduce(torch.relu(x @ weight) + 1, "sum", name) @ weight

    first, second, code = _compiled(layer, x)
    (buffer,) = _allocations(code)
    (kernel,) = re.findall(r"^ *(?:cpp|triton)\w*(?:\.run)?\((.*)\)$", code, re.MULTILINE)
    written = set(re.findall(r"\bbuf\d+\b", kernel))
    assert buffer in written and len(written) == 2 and "in_out_ptr" not in code
    _agree((first, second), _sum(torch.relu(x @ weight) + 1) @ weight)
    _leave(kind)


@has_registration
@on_all_devices
@ranks(2)
def test_t083_an_operator_of_the_program_gets_a_symmetric_argument(rank, kind):
    library = torch.library.Library("symmem_test", "DEF")
    library.define("reduce(Tensor input, Tensor bias, str group_name) -> Tensor")
    seen = []

    def reduce(input, bias, group_name):
        seen.append((symm_mem.is_symm_mem_tensor(input), symm_mem.is_symm_mem_tensor(bias)))
        return ops.one_shot_all_reduce(input, "sum", group_name) + bias

    for key in ("CPU", "CUDA"):
        library.impl("reduce", reduce, key)
    library.impl("reduce", lambda input, bias, group_name: torch.empty_like(input), "Meta")
    library.register_symm_mem_args("reduce", ["input"])
    name = world()
    (x,) = _matrices(rank, _device(kind, rank), 1)
    first, second, code = _compiled(lambda x: torch.ops.symmem_test.reduce(x + 1, x * 2, name), x)
    assert len(_allocations(code)) == 1 and seen == [(True, False)] * 2
    _agree((first, second), _sum(x + 1) + x * 2)
    _leave(kind)


@has_own_ids
@on_all_devices
@ranks(2)
def test_t084_ids_differ_though_the_program_seeds_its_generator(rank, kind):
    name = world()
    x, weight = _matrices(rank, _device(kind, rank), 2)
    ids = []
    for rows in (8, 4):
        random.seed(0)
        first, second, code = _compiled(lambda x: ops.one_shot_all_reduce(x @ weight, "sum", name), x[:rows].clone())
        ids += re.findall(r"alloc_id=(\d+)", code)
        _agree((first, second), _sum(x[:rows] @ weight))
    assert len(ids) == 2 and len(set(ids)) == 2
    _leave(kind)

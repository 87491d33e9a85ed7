"""Programs that name the backend `symmem`, or gloo, and nothing else of this library."""

import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

torch = pytest.importorskip("torch")

#: What an older torch has not: backends for each device, and by their names; splitting of groups without devices.
has_backends = pytest.mark.skipif(torch.__version__ < "2.14", reason="this torch has no backends in Python")

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples/python"

#: Says what the groups of a program are.
PROGRAM = """
import sys, torch, torch.distributed as dist
from datetime import timedelta

assert "symmem.torch" not in sys.modules or {loaded}
dist.init_process_group("{backend}", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
tensor = torch.ones(4)
dist.all_reduce(tensor)
part = dist.new_group([0, 1], timeout=timedelta(seconds=20))
dist.all_reduce(tensor, group=part)
assert tensor[0] == 4
kinds = [f"{{type(group).__module__}}:{{dist.get_backend(group)}}" for group in (dist.group.WORLD, part)]
print(*kinds)
dist.destroy_process_group()
"""


#: Ends a program over gloo: in one run of 80, a thread of torch's gloo aborts an interpreter that ends by itself.
GLOOS_END = "\nsys.stdout.flush()\n__import__('os')._exit(0)\n"


def _run(*command, **variables):
    """What two ranks of a program print."""
    with tempfile.TemporaryDirectory(prefix="symmem-test-") as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        started = [
            subprocess.Popen(
                [sys.executable, *command, f"{folder}/store", str(rank)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            ended = [process.communicate(timeout=200) for process in started]
        finally:
            for process in started:
                process.kill()
        for process, (_, said) in zip(started, ended):
            assert process.returncode == 0, said
        return [printed.strip() for printed, _ in ended]


def _program(backend, loaded=False, end="", **variables):
    return _run("-c", PROGRAM.format(backend=backend, loaded=loaded) + end, **variables)


def test_the_backend_is_found_without_an_import():
    ours = "symmem.torch._process_group:symmem"
    assert _program("symmem") == [f"{ours} {ours}"] * 2


@has_backends
def test_a_variable_replaces_gloo():
    ours, theirs = "symmem.torch._process_group:gloo", "torch.distributed.distributed_c10d:gloo"
    assert _program("gloo", end=GLOOS_END) == [f"{theirs} {theirs}"] * 2
    assert _program("gloo", end=GLOOS_END, SYMMEM_REPLACE_GLOO="0") == [f"{theirs} {theirs}"] * 2
    assert _program("gloo", loaded=True, SYMMEM_REPLACE_GLOO="1") == [f"{ours} {ours}"] * 2
    program = "import symmem.torch\n" + PROGRAM.format(backend="gloo", loaded=True)
    assert _run("-c", program, SYMMEM_REPLACE_GLOO="1") == [f"{ours} {ours}"] * 2


@has_backends
def test_groups_that_span_hosts_stay_gloos():
    program = "import os, sys\nos.environ['SYMMEM_HOST'] = 'host-' + sys.argv[2]\n" + PROGRAM + GLOOS_END
    program = program.format(backend="gloo", loaded=True)
    theirs = "torch.distributed.distributed_c10d:gloo"
    variables = {"SYMMEM_REPLACE_GLOO": "1", "SYMMEM_ADDR": "127.0.0.1"}
    assert _run("-c", program, **variables) == [f"{theirs} {theirs}"] * 2


@pytest.mark.parametrize("name", ["train_ddp", "train_fsdp", "tensor_parallel", "pipeline", "mixture_of_experts"])
@has_backends
def test_examples_differ_from_gloo_in_the_name_only(name):
    said = {}
    for backend in ("symmem", "gloo"):
        run = f"""
import runpy, socket, sys, torch.distributed as dist
begin, store, rank = dist.init_process_group, sys.argv[1], int(sys.argv[2])
dist.init_process_group = lambda name: begin(name, init_method="file://" + store, rank=rank, world_size=2)
sys.argv = ["{name}.py", "{backend}"]
runpy.run_path("{EXAMPLES / name}.py", run_name="__main__")
""" + (GLOOS_END if backend == "gloo" else "")
        said[backend] = [line.replace(backend, "BACKEND") for line in _run("-c", run)]
    assert said["symmem"] == said["gloo"] and any("BACKEND" in line for line in said["gloo"])

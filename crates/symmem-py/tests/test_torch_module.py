"""The package itself: versions, the module's questions, and what is not there."""

import pathlib
import subprocess
import sys

import pytest
from torch_ranks import ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem.torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from symmem.torch import _versions


def test_versions_that_are_too_old_are_refused():
    with pytest.raises(ImportError, match=r"works with torch 2\.11 to 2\.15, and this is torch 2\.5\.1"):
        _versions.check("2.5.1")
    with pytest.warns(UserWarning, match=r"this is torch 3\.0\.0"):
        _versions.check("3.0.0")
    _versions.check("2.11.0+cu130")


def test_installing_twice_changes_nothing():
    empty = torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p
    symmem.torch.install()
    symmem.torch.install("cpu")
    assert torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p is empty


def test_devices_that_are_not_there_are_unavailable():
    with pytest.raises(symmem.Unavailable, match="not on meta"):
        symmem.torch.install("meta")
    if not torch.cuda.is_available():
        with pytest.raises(symmem.Unavailable, match="torch has no CUDA device here"):
            symmem.torch.install("cuda")


def test_operators_of_devices_can_be_replaced():
    """Needs no device. In a process of its own, because registrations stay."""
    program = """
import torch, warnings
warnings.simplefilter("ignore")
import symmem.torch
from symmem.torch import _operators
_operators.register("cuda")
for name in ("one_shot_all_reduce", "get_remote_tensors"):
    dump = torch._C._dispatch_dump(f"symm_mem::{name}")
    kernels = [line for line in dump.splitlines() if line.startswith("CUDA")]
    assert kernels and "symmem" in kernels[0], dump
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_names_that_were_taken_before_the_import_are_this_librarys():
    program = """
import inspect, sys, types
from torch.distributed import _symmetric_memory as symm_mem
from torch.distributed._symmetric_memory import get_symm_mem_workspace, is_symm_mem_enabled_for_group
from torch.distributed._symmetric_memory import get_symm_mem_workspace as alias
other = sys.modules["other"] = types.ModuleType("other")
other.enabled = is_symm_mem_enabled_for_group
before, code = inspect.signature(get_symm_mem_workspace), get_symm_mem_workspace.__code__
kept = [get_symm_mem_workspace]
import symmem.torch, torch
assert symm_mem.get_symm_mem_workspace is get_symm_mem_workspace is alias
assert symm_mem.is_symm_mem_enabled_for_group is other.enabled
# torch's own function is as it was, and references outside of modules keep it.
assert kept[0] is not alias and kept[0].__code__ is code
assert inspect.signature(get_symm_mem_workspace) == before and get_symm_mem_workspace.__doc__
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
if not torch.accelerator.is_available():
    assert get_symm_mem_workspace("0", min_size=64).buffer_size >= 64
    assert is_symm_mem_enabled_for_group("0")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_the_package_cpu_tensors_are_refused():
    """What the package adds: PyTorch alone has no allocator for CPUs (W-30)."""
    program = """
import torch, torch.distributed._symmetric_memory as symm_mem
try:
    symm_mem.empty(4, device="cpu")
except RuntimeError as e:
    assert "does not support device type" in str(e)
import symmem.torch
assert symm_mem.is_symm_mem_tensor(symm_mem.empty(4, device="cpu"))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_py08_nvshmem_is_left_to_torch():
    assert isinstance(symm_mem.is_nvshmem_available(), bool)


@ranks(1)
def test_h12_functions_of_the_bindings(rank):
    from torch._C import _distributed_c10d as bindings
    from torch._C._autograd import DeviceType

    assert bindings._is_process_group_registered(world())
    assert not bindings._is_process_group_registered("no such group")
    # These know devices, and say so of a CPU.
    with pytest.raises(RuntimeError, match="for cpu over nvlink is not available"):
        bindings._detect_dma_connectivity(DeviceType.CPU, "nvlink")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator, whose streams these are")
def test_py13_side_streams_by_priority():
    stream = symm_mem._get_backend_stream(priority=-1)
    assert stream is symm_mem._get_backend_stream(-1) is not symm_mem._get_backend_stream()
    stream.wait_stream(torch.cpu.current_stream())
    with stream:
        done = torch.ones(2)
    assert done.sum() == 2


def test_py18_work_is_waited_for():
    output = torch.ones(2)
    torch._C._distributed_c10d._register_work(output, symm_mem.Work())
    assert symm_mem.Work().wait()
    assert torch.ops._c10d_functional.wait_tensor(output).sum() == 2


@ranks(2)
def test_t089_is_symm_mem_enabled_for_group(rank):
    assert not symm_mem.is_symm_mem_enabled_for_group("no such group")
    assert symm_mem.is_symm_mem_enabled_for_group(world())
    with symm_mem._test_mode():
        assert symm_mem.is_symm_mem_enabled_for_group("no such group")
    with symm_mem._test_mode({"one", "two"}):
        assert symm_mem.is_symm_mem_enabled_for_group("one")
        assert not symm_mem.is_symm_mem_enabled_for_group(world())


@ranks(2)
def test_h47_what_only_nccl_has(rank):
    handle = symm_mem.rendezvous(symm_mem.empty(4, device="cpu"), world())
    for call in (handle.get_multimem_cft_handle, lambda: handle.get_peer_cft_handle(0)):
        with pytest.raises(RuntimeError, match="only available on the NCCL"):
            call()
    with pytest.raises(NotImplementedError, match="boxed"):
        handle.boxed()
    assert "rank" in repr(handle)


@ranks(1)
def test_a_group_of_one_works(rank):
    tensor = symm_mem.empty(4, device="cpu").fill_(3)
    handle = symm_mem.rendezvous(tensor, world())
    handle.barrier()
    assert (torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", world()) == 3).all()
    assert dist.get_world_size() == handle.world_size == 1


def test_the_example_runs():
    example = pathlib.Path(__file__).parents[3] / "examples/python/tensor_parallel_mlp.py"
    run = subprocess.run([sys.executable, str(example), "2"], capture_output=True, text=True, check=True)
    assert "2 ranks: the same as the undivided model" in run.stdout

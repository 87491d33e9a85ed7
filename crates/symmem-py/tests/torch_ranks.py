"""Ranks as processes with a process group, by default over gloo, for the tests of `symmem.torch`."""

import importlib
import inspect
import multiprocessing
import os
import tempfile
import time
import traceback

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("symmem._native", reason="the native module is not installed")

# Some virtual machines list AMX and cannot run it: torch's own products of bfloat16 end the process there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
LIMIT = float(os.environ.get("SYMMEM_TEST_LIMIT", "120"))
GRACE = 5.0


def needs(name):
    """A test of an operator that not every torch has."""
    there = hasattr(torch.ops.symm_mem, name)
    return pytest.mark.skipif(not there, reason=f"this torch has no symm_mem::{name}")


def ranks(size, lost=(), hosts=None, backend="gloo"):
    """A test that `size` processes run; its first argument is the rank. Those of `lost` are not expected to return.

    With several sizes, one test for each of them. `hosts` names the host of each rank, `backend` that of the default process group.
    """
    sizes = (size,) if isinstance(size, int) else tuple(size)

    def decorate(body):
        def test(n=sizes[0], **arguments):
            _launch(n, lost, body.__module__, body.__name__, arguments, hosts, backend)

        parameters = list(inspect.signature(body).parameters.values())[1:]
        if len(sizes) > 1:
            parameters.append(inspect.Parameter("n", inspect.Parameter.POSITIONAL_OR_KEYWORD))
        test.__signature__ = inspect.Signature(parameters)
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.pytestmark = getattr(body, "pytestmark", [])
        test.body = body
        return test if len(sizes) == 1 else pytest.mark.parametrize("n", sizes)(test)

    return decorate


def on_hosts(hosts, test, **arguments):
    """Runs a test of another file with a rank on each of the named hosts."""
    _launch(len(hosts), (), test.body.__module__, test.body.__name__, arguments, hosts)


def _launch(size, lost, module, name, arguments, hosts=None, backend="gloo"):
    # Forked from a process that has loaded torch: each rank starts in no time.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed._symmetric_memory"])
    with tempfile.TemporaryDirectory(prefix="symmem-test-") as folder:
        pipes, processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            host = hosts[rank] if hosts else None
            job = (rank, size, module, name, arguments, folder, host, backend, theirs)
            process = context.Process(target=_rank, args=job)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        failures = _collect(pipes, processes)
    failures = {rank: text for rank, text in failures.items() if rank not in lost}
    if failures:
        pytest.fail("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failures.items())), pytrace=False)


def _collect(pipes, processes):
    """What went wrong, by rank. Once one rank has failed, the others have a little time only."""
    failures, waiting, deadline = {}, dict(enumerate(pipes)), time.monotonic() + LIMIT
    while waiting and time.monotonic() < deadline:
        for pipe in multiprocessing.connection.wait(waiting.values(), timeout=0.2):
            rank = next(r for r, p in waiting.items() if p is pipe)
            del waiting[rank]
            try:
                failed = pipe.recv()
            except EOFError:
                failed = "it ended without a word"
            if failed:
                failures[rank] = failed
                deadline = min(deadline, time.monotonic() + GRACE)
    for rank in waiting:
        failures[rank] = "it did not end"
    for process in processes:
        process.join(GRACE)
        if process.is_alive():
            process.kill()
            process.join()
    return failures


def _rank(rank, size, module, name, arguments, folder, host, backend, pipe):
    import torch.distributed as dist

    os.environ.setdefault("SYMMEM_TIMEOUT", "60")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    if host:
        os.environ.update(SYMMEM_HOST=host, SYMMEM_ADDR="127.0.0.1")
    try:
        import symmem.torch  # noqa: F401

        body = getattr(importlib.import_module(module), name).body
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
        os.environ["SYMMEM_TEST_FOLDER"] = folder
        body(rank, **arguments)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        pipe.send(None)
    except BaseException:  # noqa: BLE001  (the parent reports it, whatever it is)
        pipe.send(traceback.format_exc())
    finally:
        pipe.close()


def world():
    """The name of the default group."""
    import torch.distributed as dist

    return dist.group.WORLD.group_name

"""Runs a function of a test file as ranks: real processes, started by `symmem run`."""

import importlib
import os
import pathlib
import shutil
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent


def program():
    """The `symmem` program: of this Python's environment, or the one that SYMMEM_PROGRAM names."""
    beside = os.path.join(os.path.dirname(sys.executable), "symmem")
    return os.environ.get("SYMMEM_PROGRAM") or shutil.which(beside) or "symmem"


def start(n, body, **options):
    """Starts `n` ranks of `body(world)`."""
    rank = [sys.executable, __file__, body.__module__, body.__name__]
    command = [program(), "run", "-n", str(n), "--", *rank]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def run(n, body):
    """Runs `n` ranks of `body(world)`, all of which must succeed; what they printed."""
    job = start(n, body)
    try:
        output, _ = job.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        job.terminate()
        output, _ = job.communicate()
        raise AssertionError(f"the ranks did not end:\n{output}") from None
    assert job.returncode == 0, output
    return output


def main():
    sys.path.insert(0, str(TESTS))
    body = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    import symmem

    with symmem.World.from_env(timeout=30) as world:
        body(world)


if __name__ == "__main__":
    main()

"""Ranks started by other launchers, and the program that comes with the wheel."""

import shutil
import subprocess
import sys

import numpy
import pytest
import ranks
import symmem


def all_ranks_add_up(world):
    total = numpy.array([world.rank + 1])
    world.all_reduce(total)
    assert total[0] == 3 and world.size == 2


def launch(launcher):
    command = [*launcher, *ranks.command(all_ranks_add_up)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_torchrun_starts_ranks():
    pytest.importorskip("torch", reason="torch is not installed")
    launch([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"])


def test_mpirun_starts_ranks():
    if not shutil.which("mpirun"):
        pytest.skip("there is no mpirun")
    launch(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"])


def test_the_program_comes_with_the_package():
    said = subprocess.run([sys.executable, "-m", "symmem", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout.split()[-1] == symmem.__version__
    launch([sys.executable, "-m", "symmem", "run", "-n", "2", "--"])

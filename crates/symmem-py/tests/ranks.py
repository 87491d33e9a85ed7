"""Runs a function of a test file as ranks: real processes, started by `symmem run`."""

import importlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent


def program():
    """The `symmem` program: of this Python's environment, or the one that SYMMEM_PROGRAM names."""
    installed = os.path.join(os.path.dirname(sys.executable), "symmem")
    return os.environ.get("SYMMEM_PROGRAM") or shutil.which(installed) or "symmem"


def command(body):
    return [sys.executable, __file__, body.__module__, body.__name__]


def run(n, body):
    """Runs `n` ranks of `body(world)`, all of which must succeed; what they printed."""
    started = [program(), "run", "-n", str(n), "--", *command(body)]
    job = subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = ended(job)
    assert job.returncode == 0, output
    return output


def run_on_hosts(hosts, body):
    """Runs a rank of `body(world)` on each of the named hosts; all must succeed."""
    for rank, (code, output) in enumerate(run_apart(len(hosts), body, hosts)):
        assert code == 0, f"rank {rank}:\n{output}"


def run_apart(n, body, hosts=None):
    """Runs `n` ranks of `body(world)` that nobody ends when one dies; exit code and output of each.

    `hosts` names the host of each rank: ranks of two hosts connect as if they were on two machines.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def host(rank):
        return {"SYMMEM_HOST": hosts[rank], "SYMMEM_ADDR": "127.0.0.1"} if hosts else {}

    started = [
        subprocess.Popen(
            command(body),
            env={**os.environ, **job, **host(rank), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n)
    ]
    outputs = [ended(rank) for rank in started]
    return [(rank.returncode, output) for rank, output in zip(started, outputs)]


def ended(process):
    """What a process printed, once it has ended."""
    try:
        return process.communicate(timeout=120)[0]
    except subprocess.TimeoutExpired:
        process.terminate()
        raise AssertionError(f"it did not end:\n{process.communicate()[0]}") from None


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    sys.path.insert(0, str(TESTS))
    body = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    import symmem

    with symmem.World.from_env(timeout=30) as world:
        body(world)


if __name__ == "__main__":
    main()

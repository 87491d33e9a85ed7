"""All-reduce of CPU tensors from Python: PyTorch's operators over symmem, and torch.distributed over gloo.

    python benches/python/all_reduce.py --ranks 2 --bytes 4096

The rounds of all candidates alternate, so that what else the machine does falls on all of them alike. A call's time is what
rank 0 waits for it. Each rank's main thread is bound to a core of its own: left to itself, the kernel likes to put ranks
that gloo has just woken on one core, where they have to make way for each other (`--no-bind` shows that). The table has the
median over all calls of a candidate, and the 10th and 90th percentile.
"""

import argparse
import os
import statistics
import tempfile
import time

import symmem.torch  # noqa: F401
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.multiprocessing as mp

GLOO = "torch.distributed.all_reduce, gloo"


def candidates(count: int) -> dict:
    """What is compared, by name; each call reduces `count` float32."""
    group = dist.group.WORLD.group_name
    ordinary = torch.ones(count)
    symmetric = symm_mem.empty(count, device="cpu").fill_(1)
    symm_mem.rendezvous(symmetric, group)
    out = torch.empty(count)
    one_shot_out = torch.ops.symm_mem.one_shot_all_reduce_out.default
    one_shot = torch.ops.symm_mem.one_shot_all_reduce.default
    two_shot = torch.ops.symm_mem.two_shot_all_reduce_.default
    return {
        GLOO: lambda: dist.all_reduce(ordinary),
        "symm_mem.one_shot_all_reduce": lambda: one_shot(symmetric, "sum", group),
        "symm_mem.one_shot_all_reduce_out": lambda: one_shot_out(symmetric, "sum", group, out),
        "symm_mem.two_shot_all_reduce_": lambda: two_shot(symmetric, "max", group),
    }


def measure(rank: int, given: argparse.Namespace, store: str) -> None:
    ranks, nbytes, rounds, calls = given.ranks, given.bytes, given.rounds, given.calls
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    if given.bind:
        # This thread only: gloo's own threads exist by now, and stay free.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    todo = candidates(nbytes // 4)
    times: dict[str, list[float]] = {name: [] for name in todo}
    for number in range(rounds + 1):
        for name, call in todo.items():
            dist.barrier()
            taken = _times(call, calls)
            if number > 0:  # the first round warms up
                times[name] += taken
    if rank == 0:
        report(ranks, nbytes, times)
    dist.barrier()
    dist.destroy_process_group()


def _times(call, calls: int) -> list[float]:
    taken = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return taken


def report(ranks: int, nbytes: int, times: dict[str, list[float]]) -> None:
    gloo = statistics.median(times[GLOO])
    print(f"all-reduce of {nbytes} bytes, {ranks} ranks, torch {torch.__version__}, {os.cpu_count()} cores; us\n")
    print("| call | median | 10 % | 90 % | gloo's median is |\n|---|---|---|---|---|")
    for name, taken in times.items():
        tenths = statistics.quantiles(taken, n=10)
        median = statistics.median(taken)
        row = f"{median * 1e6:.1f} | {tenths[0] * 1e6:.1f} | {tenths[-1] * 1e6:.1f} | {gloo / median:.1f} x"
        print(f"| {name} | {row} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=300, help="calls of each candidate in each round")
    parser.add_argument(
        "--no-bind", dest="bind", action="store_false", help="leave the ranks to the kernel's scheduler"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(given, f"{folder}/store"), nprocs=given.ranks)


if __name__ == "__main__":
    main()

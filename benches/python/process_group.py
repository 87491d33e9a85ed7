"""Calls of torch.distributed on CPU tensors: process groups of symmem and of gloo, in one run.

    python benches/python/process_group.py --ranks 2

The rounds of both backends alternate, so that what else the machine does falls on both alike. A call's time is what rank 0 waits for it;
calls are synchronous. Each rank's main thread is bound to a core of its own (`--no-bind` leaves it to the kernel). Rounds in which other
programs used more of the processors than `--others` allows are left out, and repeated. The table has the median over all calls and the 10th and
90th percentile in microseconds, and how many times as long gloo's median is.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BACKENDS = ("gloo", "symmem")
CPU = torch.device("cpu")
KIB, MIB = 1 << 10, 1 << 20


def calls(rank: int, size: int, group: dist.ProcessGroup) -> dict:
    """What is measured, by name."""

    def floats(nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes // 4)

    def round_trip(tensor: torch.Tensor) -> None:
        for sender in (0, 1):
            if rank == sender:
                dist.send(tensor, 1 - sender, group=group)
            elif rank == 1 - sender:
                dist.recv(tensor, sender, group=group)

    small, page, large, huge = (floats(nbytes) for nbytes in (8, 4 * KIB, MIB, 16 * MIB))
    line, lines = floats(64), list(torch.empty(size, 16))
    backend = group._get_backend(CPU)
    # As DDP's buckets and FSDP2's buffers are, where the backend has memory of its own.
    owns = backend.supports_tensor_alloc(CPU)

    def bucket(nbytes: int) -> torch.Tensor:
        return backend.allocate_tensor(nbytes // 4, dtype=torch.float32, device=CPU).fill_(1) if owns else floats(nbytes)

    def functional() -> None:
        ops = torch.ops._c10d_functional
        ops.wait_tensor(ops.all_reduce(page, "max", group.group_name))

    bucket_large, bucket_huge, buckets = bucket(MIB), bucket(16 * MIB), bucket(size * 16 * MIB)
    own = buckets.chunk(size)[rank]
    part, given, received = torch.empty(huge.numel() // size), floats(128 * KIB), floats(128 * KIB)
    every = torch.empty(size * huge.numel())
    return {
        "`all_reduce`, 8 B": lambda: dist.all_reduce(small, dist.ReduceOp.MAX, group=group),
        "`all_reduce`, 4 KiB": lambda: dist.all_reduce(page, dist.ReduceOp.MAX, group=group),
        "`all_reduce`, 1 MiB": lambda: dist.all_reduce(large, dist.ReduceOp.MAX, group=group),
        "`all_reduce`, 16 MiB": lambda: dist.all_reduce(huge, dist.ReduceOp.MAX, group=group),
        "`all_reduce`, 1 MiB in the group's memory": lambda: dist.all_reduce(
            bucket_large, dist.ReduceOp.MAX, group=group
        ),
        "`all_reduce`, 16 MiB in the group's memory": lambda: dist.all_reduce(
            bucket_huge, dist.ReduceOp.MAX, group=group
        ),
        "functional `all_reduce`, 4 KiB": functional,
        "`barrier`": lambda: dist.barrier(group=group),
        "`all_gather`, 64 B": lambda: dist.all_gather(lines, line, group=group),
        "`reduce_scatter_tensor`, 16 MiB": lambda: dist.reduce_scatter_tensor(
            part, huge, dist.ReduceOp.MAX, group=group
        ),
        "`all_gather_into_tensor`, 16 MiB from each rank": lambda: dist.all_gather_into_tensor(
            every, huge, group=group
        ),
        "`reduce_scatter_tensor`, 16 MiB in the group's memory": lambda: dist.reduce_scatter_tensor(
            part, bucket_huge, dist.ReduceOp.MAX, group=group
        ),
        "`all_gather_into_tensor`, 16 MiB from each rank, in place in the group's memory": lambda: (
            dist.all_gather_into_tensor(buckets, own, group=group)
        ),
        "`all_to_all_single`, 128 KiB": lambda: dist.all_to_all_single(received, given, group=group),
        "`broadcast`, 1 MiB": lambda: dist.broadcast(large, 0, group=group),
        "`send` and `recv`, there and back, 8 B": lambda: round_trip(small),
        "`send` and `recv`, there and back, 1 MiB": lambda: round_trip(large),
    }


def wide() -> torch.nn.Module:
    """16.8 million parameters."""
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers)


def trained(model: torch.nn.Module, rank: int):
    """A step of training, which returns the loss."""
    torch.manual_seed(1 + rank)
    given = torch.randn(32, 2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(given) - given).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def steps(rank: int, size: int, group: dist.ProcessGroup) -> dict:
    """Steps of programs, by name."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    parallel = torch.nn.parallel.DistributedDataParallel(wide(), process_group=group, gradient_as_bucket_view=True)
    sharded, mesh = wide(), DeviceMesh.from_group(group, "cpu")
    for layer in (*(each for each in sharded if isinstance(each, torch.nn.Linear)), sharded):
        fully_shard(layer, mesh=mesh)
        if layer is not sharded:
            layer.set_allocate_memory_from_process_group_for_comm(True)
    hidden = 512
    shapes = [(hidden, 4 * hidden // size), (4 * hidden // size, hidden)]
    layers = [[torch.randn(shape) / 50 for shape in shapes] for _ in range(16)]
    token = torch.randn(1, hidden)

    @torch.no_grad()
    def decode() -> None:
        x = token
        for into, back in layers:
            y = torch.relu(x @ into) @ back
            dist.all_reduce(y, group=group)
            x = x + y

    return {
        "DDP step": trained(parallel, rank),
        "FSDP2 step": trained(sharded, rank),
        "TP decode, 8 layers": decode,
    }


def losses(rank: int, given: argparse.Namespace) -> None:
    """Whether 100 steps of DDP have the same losses three times."""
    for backend in BACKENDS:
        runs = []
        for _ in range(3):
            group = dist.new_group(backend=backend)
            model = torch.nn.parallel.DistributedDataParallel(wide(), process_group=group)
            step = trained(model, rank)
            runs.append([step().item() for _ in range(given.losses)])
        if rank == 0:
            same = "the same bits" if runs[0] == runs[1] == runs[2] else "different bits"
            print(f"{backend}: losses of {given.losses} steps, three times: {same}", flush=True)


def measure(rank: int, given: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=given.ranks)
    if given.losses:
        losses(rank, given)
        dist.destroy_process_group()
        return
    kind = steps if given.steps else calls
    todo = {backend: kind(rank, given.ranks, dist.new_group(backend=backend)) for backend in BACKENDS}
    for each in todo.values():
        for call in each.values():
            call()
    if given.bind:
        # This thread only: gloo's own threads exist by now, and stay free.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if rank == 0:
        print("| call | gloo | symmem | times |\n|---|--:|--:|--:|", flush=True)
    for name in todo["gloo"]:
        if not any(only in name for only in given.only.split(",")):
            continue
        times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        kept, until = 0, time.monotonic() + given.patience
        while kept < given.rounds and _agreed(until - time.monotonic()) > 0:
            before = _load()
            taken = {}
            for backend in BACKENDS:
                dist.barrier()
                taken[backend] = _times(todo[backend][name], given.seconds / given.rounds / 2)
            if _others(before) <= given.others:
                kept += 1
                for backend in BACKENDS:
                    times[backend] += taken[backend]
        if rank == 0 and kept < 2:
            print(f"| {name} | no quiet round | | |", flush=True)
        elif rank == 0:
            cells = [_cell(times[backend]) for backend in BACKENDS]
            ratio = statistics.median(times["gloo"]) / statistics.median(times["symmem"])
            print(f"| {name} | {cells[0]} | {cells[1]} | {ratio:.1f} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _load() -> tuple[float, float, float]:
    """The time, that of all processors at work, and that of this process."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, *interrupts = (int(field) for field in file.readline().split()[1:9])
    ticks = user + nice + system + sum(interrupts)
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


def _others(before: tuple[float, float, float]) -> float:
    """The share of all processors that other programs have used since, the same on all ranks."""
    elapsed, busy, own = (now - then for now, then in zip(_load(), before))
    total = torch.tensor([own])
    dist.all_reduce(total)
    return _agreed((busy - float(total)) / elapsed / (os.cpu_count() or 1))


def _agreed(value: float) -> float:
    """Rank 0's value."""
    shared = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(shared, 0)
    return float(shared)


def _times(call, seconds: float) -> list[float]:
    """Microseconds of as many calls as take that long, the same number on all ranks; the first is not counted."""
    begun = time.perf_counter()
    call()
    count = torch.tensor([max(3, min(200, int(seconds / (time.perf_counter() - begun))))])
    dist.broadcast(count, 0)
    taken = []
    for _ in range(int(count)):
        begun = time.perf_counter()
        call()
        taken.append(1e6 * (time.perf_counter() - begun))
    return taken


def _cell(taken: list[float]) -> str:
    tenths = statistics.quantiles(taken, n=10)
    return f"{statistics.median(taken):.3g} ({tenths[0]:.3g} to {tenths[-1]:.3g})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each call, in rounds that count")
    parser.add_argument("--others", type=float, default=0.1, help="share of the processors that others may use")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for quiet rounds of each call")
    parser.add_argument("--steps", action="store_true", help="measure steps of programs instead of calls")
    parser.add_argument("--losses", type=int, default=0, help="instead, compare the losses of so many steps of three runs")
    parser.add_argument("--only", default="", help="only calls with one of these, separated by commas, in their name")
    parser.add_argument("--no-bind", dest="bind", action="store_false", help="leave the ranks' cores to the kernel")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(arguments, f"{folder}/store"), nprocs=arguments.ranks)

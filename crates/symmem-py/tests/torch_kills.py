"""Kills ranks of torch programs at random moments: every survivor must name the right rank soon, and go on training without it.

    python crates/symmem-py/tests/torch_kills.py --rounds 1000 [--seed S] [--ranks 4]

A job trains with DDP, FSDP2 or pipeline stages over a process group of the backend `symmem`. One rank after another is killed with SIGKILL
after a random delay; the survivors report the error of their step, shrink the group, and train again, until one or two are left. A round is
one death. A run fails if a survivor hangs, gets another error, or blames a rank that was not killed.
"""

import argparse
import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
import traceback
from multiprocessing import connection

KINDS = ("ddp", "fsdp", "pipeline")
#: How long a survivor may take to report a death, or to train again.
LIMIT = 20.0


def _trainer(kind, group):
    """One step of training with the ranks of a group."""
    import torch
    import torch.distributed as dist

    rank, size = group.rank(), group.size()
    torch.manual_seed(0)
    wide = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 64))
    given = torch.randn(16, 64)
    if kind == "pipeline":
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
        stage = PipelineStage(layer, rank, size, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, n_microbatches=2 * size, loss_fn=torch.nn.functional.mse_loss)
        given = torch.randn(8 * size, 64)

        def step():
            layer.zero_grad()
            first = [given] if rank == 0 else []
            last = {"target": given, "losses": []} if rank == size - 1 else {}
            schedule.step(*first, **last)

        return step
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(wide, process_group=group, bucket_cap_mb=0.05)
    else:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in (wide[0], wide[2], wide):
            fully_shard(layer, mesh=mesh)
        for layer in (wide[0], wide[2]):
            layer.set_allocate_memory_from_process_group_for_comm(True)
        model = wide
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        # Of all ranks the same, so that all have the same loss if every sum is right.
        loss = (model(given) - given).square().mean()
        loss.backward()
        optimizer.step()
        losses = torch.empty(size)
        dist.all_gather_into_tensor(losses, loss.detach().reshape(1), group=group)
        assert (losses == losses[0]).all(), f"losses differ: {losses.tolist()}"

    return step


def _rank(rank, size, kind, store, pipe):
    """Trains until it is killed or alone. Tells of every first step, and of every death."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "symmem", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT)
        )
        import symmem.torch

        group = dist.group.WORLD
        while True:
            told = False
            try:
                step = _trainer(kind, group)
                while True:
                    step()
                    if not told:
                        told = True
                        pipe.send(("trains", group.size(), time.monotonic()))
            except RuntimeError as error:
                found = re.search(r"rank (\d+) (?:is gone|has left|was lost)", str(error))
                if found is None:
                    raise
                lost = dist.get_global_rank(group, int(found[1]))
                pipe.send(("lost", lost, time.monotonic()))
            group = symmem.torch.shrink(group)
    except BaseException:  # noqa: BLE001  (the parent reports it, whatever it is)
        pipe.send(("failed", traceback.format_exc(), time.monotonic()))


class Failed(Exception):
    """A broken promise."""


def _await(pipes, expected, until):
    """The next message of every rank, which must be of a kind."""
    messages, waiting = {}, dict(pipes)
    while waiting:
        left = until - time.monotonic()
        if left <= 0:
            raise Failed(f"HANG: no {expected!r} from ranks {sorted(waiting)} within {LIMIT} s, from others {messages}")
        for pipe in connection.wait(waiting.values(), timeout=left):
            rank = next(r for r, p in waiting.items() if p is pipe)
            try:
                messages[rank] = pipe.recv()
            except EOFError:
                raise Failed(f"rank {rank} ended") from None
            if messages[rank][0] != expected:
                raise Failed(f"rank {rank}: expected {expected!r}, got {messages[rank][0]!r}\n{messages[rank][1]}")
            del waiting[rank]
    return messages


def job(kind, size, rng, most):
    """Runs one job with up to `most` deaths. The seconds that each report of a death took."""
    context = multiprocessing.get_context("forkserver")
    preload = ["torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.device_mesh"]
    context.set_forkserver_preload([*preload, "symmem.torch"])
    taken, deaths = [], 0
    with tempfile.TemporaryDirectory(prefix="symmem-kills-") as folder:
        pipes, processes = {}, {}
        for rank in range(size):
            pipes[rank], theirs = context.Pipe(duplex=False)
            processes[rank] = context.Process(target=_rank, args=(rank, size, kind, f"{folder}/store", theirs))
            processes[rank].start()
            theirs.close()
        try:
            fewest = 2 if kind == "pipeline" else 1
            _await(pipes, "trains", time.monotonic() + 3 * LIMIT)
            while len(pipes) > fewest and deaths < most:
                victim = rng.choice(sorted(pipes))
                time.sleep(rng.random() * 0.03)
                begun = time.monotonic()
                os.kill(processes[victim].pid, signal.SIGKILL)
                pipes.pop(victim).close()
                deaths += 1
                told = _await(pipes, "lost", begun + LIMIT)
                wrong = {rank: lost for rank, (_, lost, _) in told.items() if lost != victim}
                if wrong:
                    raise Failed(f"rank {victim} was killed, but blamed were {wrong}")
                taken += [at - begun for _, _, at in told.values()]
                _await(pipes, "trains", time.monotonic() + LIMIT)
        finally:
            for process in processes.values():
                process.kill()
            for process in processes.values():
                process.join()
    return deaths, taken


def run(rounds, seed, ranks=4, kinds=KINDS, until=None):
    """So many deaths, or as many as there are until a time. How many of each kind, and the seconds of all reports."""
    deaths, taken, number = dict.fromkeys(kinds, 0), [], 0
    while (died := sum(deaths.values())) < rounds and (until is None or time.monotonic() < until):
        kind = kinds[number % len(kinds)]
        try:
            more, times = job(kind, ranks, random.Random(seed + number), rounds - died)
        except Failed as failed:
            raise Failed(f"job {number} ({kind}) of seed {seed}, after {died} deaths: {failed}") from None
        deaths[kind] += more
        taken += times
        number += 1
    return deaths, taken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no job after so many minutes")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    begun = time.monotonic()
    deaths, taken = run(given.rounds, given.seed, given.ranks, until=begun + 60 * given.minutes)
    cuts = statistics.quantiles(taken, n=100)
    print(
        f"{sum(deaths.values())} deaths ({deaths}) in {time.monotonic() - begun:.0f} s, {len(taken)} errors: "
        f"median {1e3 * cuts[49]:.1f} ms, 99 % {1e3 * cuts[98]:.1f} ms, longest {1e3 * max(taken):.1f} ms"
    )


if __name__ == "__main__":
    try:
        main()
    except Failed as failed:
        sys.exit(f"FAILED: {failed}")

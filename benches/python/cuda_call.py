"""What a call costs the host: operators of torch.ops.symm_mem on a GPU, over symmem, and over PyTorch's own symmetric memory.

    python benches/python/cuda_call.py --ranks 2 --bytes 4096

A process has one or the other, so there are two sets of ranks, which all live for the whole time and whose rounds alternate.
In a round, each rank puts calls into its stream one after the other without waiting for the device; the time of a call is
that of the round by the number of calls, on rank 0. Every round is followed by calls whose results are checked. Ranks may share a
GPU; they should do so under MPS.
"""

import argparse
import os
import statistics
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SETS = ("torch", "symmem")


def candidates(count: int, device: torch.device) -> dict:
    """What is compared, by name: a call, and a check of what it does to a tensor that is rank + 1 everywhere."""
    import torch.distributed._symmetric_memory as symm_mem

    group, ranks = dist.group.WORLD.group_name, dist.get_world_size()
    x = symm_mem.empty(count, device=device).fill_(0)
    handle = symm_mem.rendezvous(x, group)
    out = torch.zeros(count, device=device)
    ops = torch.ops.symm_mem
    one_shot, one_shot_out = ops.one_shot_all_reduce.default, ops.one_shot_all_reduce_out.default
    two_shot = ops.two_shot_all_reduce_.default
    total = ranks * (ranks + 1) // 2

    def checked(call):
        def check() -> None:
            x.fill_(dist.get_rank() + 1)
            handle.barrier()
            result = call()
            torch.cuda.synchronize()
            assert result is None or (result == total).all(), f"expected {total}, got {result}"
            dist.barrier()
            x.fill_(0)
            torch.cuda.synchronize()
            dist.barrier()

        return call, check

    return {
        "one_shot_all_reduce": checked(lambda: one_shot(x, "sum", group)),
        "one_shot_all_reduce_out": checked(lambda: one_shot_out(x, "sum", group, out)),
        "two_shot_all_reduce_": checked(lambda: two_shot(x, "sum", group)),
        "handle.barrier": checked(lambda: handle.barrier()),
    }


def rank_of(which: str, rank: int, given: argparse.Namespace, store: str, pipe) -> None:
    """A rank of one set: does a round of a candidate when told to, and answers with the time of a call."""
    try:
        # Must be there before the first symmetric tensor of torch's.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        if which == "symmem":
            import symmem.torch

            symmem.torch.install("cuda")
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=given.ranks)
        todo = candidates(given.bytes // 4, device)
        pipe.send(None)
        while (name := pipe.recv()) is not None:
            call, check = todo[name]
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(given.calls):
                call()
            taken = time.perf_counter() - begin
            torch.cuda.synchronize()
            whole = time.perf_counter() - begin
            dist.barrier()
            check()
            pipe.send((taken / given.calls, whole / given.calls))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as failure:
        pipe.send(RuntimeError(f"{which}, rank {rank}: {failure}\n{traceback.format_exc()}"))
        raise


class Ranks:
    """The ranks of one set, as processes."""

    def __init__(self, which: str, given: argparse.Namespace, folder: str) -> None:
        context = mp.get_context("spawn")
        self.pipes = []
        for rank in range(given.ranks):
            ours, theirs = context.Pipe()
            context.Process(
                target=rank_of, args=(which, rank, given, f"{folder}/{which}", theirs), daemon=True
            ).start()
            self.pipes.append(ours)
        self.answers()

    def round(self, name: str | None) -> tuple[float, float]:
        for pipe in self.pipes:
            pipe.send(name)
        return self.answers()[0] if name else (0.0, 0.0)

    def answers(self) -> list:
        every = []
        for pipe in self.pipes:
            if not pipe.poll(180):
                raise TimeoutError("a rank did not answer for three minutes")
            answer = pipe.recv()
            if isinstance(answer, Exception):
                raise answer
            every.append(answer)
        return every


def spread(times: list[float]) -> str:
    tenths = statistics.quantiles(times, n=10)
    return f"{statistics.median(times) * 1e6:.1f} ({tenths[0] * 1e6:.1f} to {tenths[-1] * 1e6:.1f})"


def report(given: argparse.Namespace, times: dict) -> None:
    print(f"{given.ranks} ranks, {given.bytes} bytes, torch {torch.__version__}, {torch.cuda.get_device_name(0)}")
    print(f"{given.rounds} rounds of {given.calls} calls; us for a call, median of rounds (10 % to 90 %)\n")
    for column, what in enumerate(("host, calls put into the stream", "host and device, until the stream is empty")):
        print(f"| {what} | torch | symmem | torch's median is |\n|---|---|---|---|")
        for name, (torchs, ours) in times.items():
            theirs, mine = ([pair[column] for pair in rounds] for rounds in (torchs, ours))
            ratio = statistics.median(theirs) / statistics.median(mine)
            print(f"| {name} | {spread(theirs)} | {spread(mine)} | {ratio:.2f} x |")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=100, help="calls of a round")
    given = parser.parse_args()
    names = ("one_shot_all_reduce", "one_shot_all_reduce_out", "two_shot_all_reduce_", "handle.barrier")
    times: dict = {name: ([], []) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        sets = [Ranks(which, given, folder) for which in SETS]
        for number in range(given.rounds + 2):
            for name, taken in times.items():
                for ranks, rounds in zip(sets, taken):
                    once = ranks.round(name)
                    if number >= 2:  # the first ones warm up
                        rounds.append(once)
        for ranks in sets:
            ranks.round(None)
    report(given, times)


if __name__ == "__main__":
    main()

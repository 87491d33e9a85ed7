"""PyTorch's symmetric memory on CUDA devices, which ranks may share.

Started once for each rank by `symmem bench --backend cuda --peers`, with RANK, LOCAL_RANK and WORLD_SIZE set, and
PEERS_OPS, PEERS_BYTES, PEERS_DTYPE, PEERS_ROUND, PEERS_TIME_MS and PEERS_PORT (a free one, for a store), which say of what;
PEERS_GRAPH=1 for graphs of twenty calls, PEERS_DEVICE for one device for all, PEERS_NEIGHBOURS for how many ranks share
one. Rank 0 writes JSON lines.
"""
import json
import os
import sys
import time

os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# Its blocks wait for those of other ranks, up to 24 of each. Where not all of them fit on the device, the last ranks' never
# start and none ever ends, unless each rank keeps to a part of the multiprocessors.
neighbours = int(os.environ.get("PEERS_NEIGHBOURS", "1"))
if neighbours > 4:
    os.environ.setdefault("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(100 // neighbours))

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

SYSTEM = "torch-symm-mem"
IN_GRAPH = 20
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def asked(name, default=""):
    return os.environ.get("PEERS_" + name, default)


rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ops = asked("OPS", "barrier all_reduce reduce_scatter").split()
sizes = [int(number) for number in asked("BYTES", "1024,1048576").split(",")]
name = asked("DTYPE", "f32")
kind = TYPES[name]
in_graph = asked("GRAPH", "1") == "1"
seconds = int(asked("TIME_MS", "200")) / 1e3
local = int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count()
device = torch.device("cuda", int(asked("DEVICE", str(local))))
torch.cuda.set_device(device)
store = dist.TCPStore("127.0.0.1", int(asked("PORT", "29555")), size, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
group = dist.group.WORLD.group_name
stream = torch.cuda.Stream()


def agree(number):
    """Rank 0's number, for all."""
    box = torch.tensor([number], dtype=torch.int64)
    dist.broadcast(box, 0)
    return int(box)


def everywhere(here):
    box = torch.tensor([int(here)], dtype=torch.int64)
    dist.all_reduce(box, dist.ReduceOp.MIN)
    return bool(box)


def captured(call):
    """Something that makes so many calls."""
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    if not in_graph:
        return lambda count: [call() for _ in range(count)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(IN_GRAPH):
            call()
    return lambda count: [graph.replay() for _ in range(count // IN_GRAPH)]


def calls_in_sample(nbytes):  # as rows/devices.rs of the benchmark has them
    if in_graph:
        return IN_GRAPH * (25 if nbytes <= 1 << 20 else 5 if nbytes <= 16 << 20 else 1)
    return 200 if nbytes <= 16 << 20 else IN_GRAPH


def sample(run, count):
    """From the last rank's start to the last rank's end: the two readings of this one."""
    dist.barrier()
    start = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    with torch.cuda.stream(stream):
        run(count)
    stream.synchronize()
    return start, time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def times(call, nbytes):
    """Microseconds of a call, sorted."""
    count, run = calls_in_sample(nbytes), captured(call)
    first = [sample(run, count) for _ in range(5)][2:]
    one = sum(end - start for start, end in first) / len(first) / 1e9
    samples = agree(max(5, min(100, int(seconds / max(one, 1e-6)))))
    own = torch.tensor([sample(run, count) for _ in range(samples)], dtype=torch.int64)
    all_ranks = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(all_ranks, own)
    latest = torch.stack(all_ranks).amax(0)
    return sorted(((latest[:, 1] - latest[:, 0]).double() / count / 1e3).tolist())


def emit(op, dtype, nbytes, algorithm, found, right):
    if rank > 0:
        return
    at = lambda tenths: round(found[len(found) * tenths // 10], 4)
    record = {
        "system": SYSTEM, "collective": op, "ranks": size, "bytes": nbytes, "dtype": dtype, "backend": "cuda",
        "memory": "symmetric" if dtype != "-" else "-", "algorithm": algorithm, "samples": len(found),
        "median_us": at(5), "p10_us": at(1), "p90_us": at(9), "verified": right, "near": 0.0,
        "round": int(asked("ROUND", "1")),
    }
    if in_graph:
        record["graph"] = True
    print(json.dumps(record), flush=True)


def numbers(of, turn, count):
    """What rank `of` has in this turn: small integers, whose sum is exact in every type."""
    seeded = torch.Generator(device=device).manual_seed(1 + of + 1000 * turn)
    return torch.randint(0, 8, (count,), generator=seeded, device=device, dtype=torch.uint8).to(kind)


turns = 0


def is_right(x, call, result, part):
    """Once on fresh inputs: whether `part` of the sum of all is the result."""
    global turns
    turns += 1
    x.copy_(numbers(rank, turns, x.numel()))
    total = numbers(0, turns, x.numel())
    for other in range(1, size):
        total += numbers(other, turns, x.numel())
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    right = torch.equal(result, total[part])
    dist.barrier()
    return everywhere(right)


def measured(x, call, result, part, nbytes):
    right = is_right(x, call, result, part)
    x.zero_()  # sums of sums would soon be infinite
    torch.cuda.synchronize()
    found = times(call, nbytes)
    return found, is_right(x, call, result, part) and right


def all_reduce(x, nbytes):
    out, everything = torch.empty_like(x), slice(None)
    one_shot = lambda: torch.ops.symm_mem.one_shot_all_reduce_out(x, "sum", group, out)
    two_shot = lambda: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group)
    ways = {"one-shot": (one_shot, out), "two-shot": (two_shot, x)}
    if nbytes > 4 << 20:  # every rank reads everything: long behind by now, and seconds for 8 ranks
        del ways["one-shot"]
    figures = []
    for algorithm, (call, result) in ways.items():
        found, right = measured(x, call, result, everything, nbytes)
        figures.append((agree(int(found[len(found) // 2] * 1e3)), algorithm, found, right))
    _, algorithm, found, right = min(figures, key=lambda figure: (not figure[3], figure[0]))
    emit("all_reduce", name, nbytes, algorithm, found, right)


def reduce_scatter(x, nbytes):
    block = x.numel() // size
    out = torch.empty(block, dtype=kind, device=device)
    call = lambda: torch.ops.symm_mem.reduce_scatter_out(x, group, False, out)
    part = slice(rank * block, (rank + 1) * block)
    found, right = measured(x, call, out, part, nbytes)
    emit("reduce_scatter", name, nbytes, "-", found, right)


def barrier(handle):
    right = True
    for turn in range(1, 2 * size + 1):  # each rank in turn is late, and all see it arrive
        if turn % size == rank:
            time.sleep(0.002)
        store.add(f"arrived{turn}", 1)
        with torch.cuda.stream(stream):
            handle.barrier()
        stream.synchronize()
        right &= store.add(f"arrived{turn}", 0) == size
    dist.barrier()
    emit("barrier", "-", 0, "-", times(lambda: handle.barrier(), 0), everywhere(right))


# One allocation, of which each size takes the beginning.
most = max(sizes) * (size if "reduce_scatter" in ops else 1)
memory = symm_mem.empty(most // kind.itemsize, dtype=kind, device=device)
handle = symm_mem.rendezvous(memory, group)
if "barrier" in ops:
    barrier(handle)
for nbytes in sizes:
    for op, measure, blocks in [("all_reduce", all_reduce, 1), ("reduce_scatter", reduce_scatter, size)]:
        try:
            if op in ops:
                measure(memory[: blocks * nbytes // kind.itemsize], nbytes)
        except RuntimeError as error:  # a length that it does not take, on all ranks alike
            print(f"{op} of {nbytes} bytes: {error}", file=sys.stderr)
dist.barrier()
torch.cuda.synchronize()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # the teardown is not measured, and ranks that are gone would only disturb it

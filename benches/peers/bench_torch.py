"""torch.distributed over Gloo, or DeepSpeed's shared-memory all-reduce ($PEERS_NAME says which).

Started once for each rank, with RANK, WORLD_SIZE, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT set.
"""
import ctypes
import glob
import importlib.util
import os
import sys
import time

import torch
import torch.distributed as dist

if sys.argv[1:] == ["build"]:  # peers.sh: DeepSpeed's extension, before anything is timed
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

    ShareMemCommBuilder().load(verbose=False)
    sys.exit()

peer = os.environ["PEERS_NAME"]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
S = ctypes.CDLL(os.path.join(os.environ["PEERS_BUILD"], "libsync.so"))
S.sync_record.argtypes = [ctypes.c_int, ctypes.c_double, ctypes.c_double, ctypes.c_double]
S.sync_plan.argtypes = S.sync_warm.argtypes = [ctypes.c_double, ctypes.c_size_t]
S.sync_batch.argtypes = S.sync_reads.argtypes = [ctypes.c_size_t]
S.sync_size.restype = ctypes.c_size_t
S.sync_dtype.restype = ctypes.c_char_p
S.sync_dirty.argtypes = S.sync_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
S.sync_emit.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int]
now = time.perf_counter_ns


def calls(n, prep, call):
    t = now()
    for _ in range(n):
        if prep:
            prep()
        call()
    return (now() - t) / n


def bench(op, nbytes, right, prep, call, result=None, dtype=None):  # sync_bench of sync.c, in Python
    batch, reads = S.sync_batch(nbytes), dtype is None and S.sync_reads(nbytes)
    warm = S.sync_warm(calls(3, prep, call), nbytes) + 2
    n = S.sync_plan(calls(warm, prep, call), nbytes)
    S.sync_settle()
    for i in range(n):
        if prep:
            prep()
        S.sync_meet(i)
        start = now()
        for _ in range(batch):
            call()
        end = end_of_read = now()
        if reads and result is not None:
            S.sync_read(result.data_ptr(), result.numel() * result.element_size())
            end_of_read = now()
        S.sync_record(i, start, end, end_of_read)
        S.sync_barrier()
    S.sync_emit(op.encode(), (dtype or name).encode(), nbytes, n, int(reads), int(right))


def dirty(t):
    p, n = t.data_ptr(), t.numel() * t.element_size()
    return lambda: S.sync_dirty(p, n)


def tensor(nbytes, value=1.0):
    return torch.full((nbytes // kind.itemsize,), value, dtype=kind)


def barrier_is_right():  # sync_bench_barrier of sync.c
    right = True
    for turn in range(1, 21):
        S.sync_arrive(turn)
        dist.barrier()
        right &= bool(S.sync_all_arrived(turn))
    return right


def collective(op, b):
    """Input, result and call; checked once on numbers that tell ranks apart, before anything is timed."""
    total = size * (size + 1) // 2
    if op == "all_reduce":
        x = tensor(b, 1 + rank)
        return x, x, lambda: reduce_(x), lambda: bool((x == total).all())
    if op == "broadcast":
        x = tensor(b, 1 + rank)
        return x, x, lambda: dist.broadcast(x, 0), lambda: bool((x == 1).all())
    if op == "all_gather":
        x, y = tensor(b, 1 + rank), tensor(b * size)
        right = lambda: all(bool((part == 1 + r).all()) for r, part in enumerate(y.chunk(size)))
        return x, y, lambda: dist.all_gather_into_tensor(y, x), right
    if op == "reduce_scatter":
        x, y = tensor(b * size, 1 + rank), tensor(b)
        return x, y, lambda: dist.reduce_scatter_tensor(y, x), lambda: bool((y == total).all())
    if op == "reduce":  # in place, and what the others are left with is anything
        x = tensor(b, 1 + rank)
        return x, x if rank == 0 else None, lambda: dist.reduce(x, 0), lambda: rank > 0 or bool((x == total).all())
    if op == "gather":
        x, y = tensor(b, 1 + rank), tensor(b * size) if rank == 0 else None
        parts = list(y.chunk(size)) if rank == 0 else None
        right = lambda: rank > 0 or all(bool((part == 1 + r).all()) for r, part in enumerate(parts))
        return x, y, lambda: dist.gather(x, parts), right
    if op == "scatter":
        x, y = torch.cat([tensor(b, 1 + r) for r in range(size)]), tensor(b)
        parts = list(x.chunk(size)) if rank == 0 else None
        return x, y, lambda: dist.scatter(y, parts), lambda: bool((y == 1 + rank).all())
    x, y = tensor(b * size, 1 + rank), tensor(b * size)
    right = lambda: all(bool((part == 1 + r).all()) for r, part in enumerate(y.chunk(size)))
    return x, y, lambda: dist.all_to_all_single(y, x), right


TYPES = {
    "f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16,
    "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
}
name = S.sync_dtype().decode()
kind = TYPES.get(name)
if peer == "deepspeed-shm":
    so = glob.glob(os.environ["TORCH_EXTENSIONS_DIR"] + "/**/deepspeed_shm_comm.so", recursive=True)[0]
    spec = importlib.util.spec_from_file_location("deepspeed_shm_comm", so)
    ext = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ext)
    os.sched_setaffinity(0, {rank % os.cpu_count()})  # what deepspeed --bind_cores_to_rank does
    ext.initialize(size, rank)
    reduce_ = torch.ops.deepspeed.inference_all_reduce_
else:
    dist.init_process_group("gloo", rank=rank, world_size=size)
    reduce_ = dist.all_reduce
S.sync_init(rank, size)

if peer == "gloo" and S.sync_wants(b"barrier"):
    bench("barrier", 0, barrier_is_right(), None, dist.barrier, dtype="-")
ops = ["all_reduce"]
if peer == "gloo":
    ops += ["reduce_scatter", "all_gather", "broadcast", "all_to_all", "reduce", "gather", "scatter"]
sizes = [S.sync_size(0)]
while sizes[-1]:
    sizes.append(S.sync_size(len(sizes)))
for op in ops if kind is not None else []:
    for b in sizes[:-1] if S.sync_wants(op.encode()) else []:
        x, y, call, right = collective(op, b)
        call()
        own = op not in ("broadcast", "scatter") or rank == 0  # whether this rank has an input
        bench(op, b, right(), dirty(x) if own else None, call, y)

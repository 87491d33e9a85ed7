"""The collective group of `symmem.ray`: over a stub of Ray's interface, and over Ray where it is installed."""

import importlib.util
import multiprocessing
import os
import pathlib
import socket
import tempfile
import threading
import time
import traceback

import pytest
import ray_stub

np = pytest.importorskip("numpy")
symmem = pytest.importorskip("symmem")

HAS_RAY = importlib.util.find_spec("ray") is not None
HAS_TORCH = importlib.util.find_spec("torch") is not None
NAME = "group"

# What ranks do. `c` is `ray.util.collective`, or the stub of it, and `ops` its operators.


def every_operation_is_its_definition(c, ops, rank, size):
    """Every operation on arrays of both kinds, contiguous and not."""
    for wrap, unwrap in KINDS():
        for dtype in ("float32", "int64", "uint8"):
            every = [np.arange(12, dtype=dtype).reshape(4, 3) % 3 + r + 1 for r in range(size)]
            for cut in (lambda x: x, lambda x: x.T, lambda x: x[::2]):
                one_of_each(c, ops, rank, size, lambda r: cut(wrap(every[r].copy())), unwrap)


def KINDS():
    yield lambda x: x, lambda x: np.asarray(x)
    if HAS_TORCH:
        import torch

        yield torch.from_numpy, lambda x: x.numpy()


def one_of_each(c, ops, rank, size, mine, unwrap):
    every = np.stack([unwrap(mine(r)) for r in range(size)])
    definitions = {ops.SUM: every.sum(0), ops.PRODUCT: every.prod(0), ops.MIN: every.min(0), ops.MAX: every.max(0)}
    for op, result in definitions.items():
        x = mine(rank)
        c.allreduce(x, NAME, op)
        assert (unwrap(x) == result).all(), op
        x = mine(rank)
        c.reduce(x, size - 1, NAME, op)
        assert (unwrap(x) == (result if rank == size - 1 else every[rank])).all(), op
        x, given = mine(0), [mine((rank + r) % size) for r in range(size)]
        c.reducescatter(x, given, NAME, op)
        assert (unwrap(x) == result).all(), op
        assert all((unwrap(one) == every[(rank + r) % size]).all() for r, one in enumerate(given))
    x = mine(rank)
    c.broadcast(x, size - 1, NAME)
    assert (unwrap(x) == every[-1]).all()
    out = [mine(0) for _ in range(size)]
    c.allgather(out, mine(rank), NAME)
    assert all((unwrap(one) == every[r]).all() for r, one in enumerate(out))
    c.barrier(NAME)
    if rank == 0:
        c.send(mine(0), size - 1, NAME)
    elif rank == size - 1:
        x = mine(rank)
        c.recv(x, 0, NAME)
        assert (unwrap(x) == every[0]).all()


def what_one_rank_refuses_no_rank_waits_for(c, ops, rank, size):
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    wrong = {
        "not an array": lambda: c.get_group_handle(NAME).allreduce([[1, 2]]),
        "read-only": lambda: c.allreduce(read_only, NAME),
        "no type": lambda: c.allreduce(np.array(["a"]), NAME),
        "another shape": lambda: c.allgather([np.zeros(4)] * size, np.zeros(3), NAME),
        "another type": lambda: c.reducescatter(np.zeros(3), [np.zeros(3, "f4")] * size, NAME),
    }
    for what, call in wrong.items():
        began = time.monotonic()
        if rank == 0:
            with pytest.raises((symmem.Usage, BufferError, TypeError)):
                call()
        else:
            with pytest.raises(symmem.PeerFailed) as e:
                c.allreduce(np.zeros(3), NAME)
            assert e.value.rank == 0, what
        assert time.monotonic() - began < 15, what
    x = np.ones(3)
    c.allreduce(x, NAME)
    assert (x == size).all()
    # What may not be written may be read.
    given = read_only if rank == 0 else np.ones(3)
    c.broadcast(given, 0, NAME)
    assert (given == 0).all()


def ranks_that_call_with_different_arguments_get_an_error(c, ops, rank, size):
    with pytest.raises(symmem.Mismatch):
        c.allreduce(np.zeros(3 + rank), NAME)
    with pytest.raises(symmem.Mismatch):
        c.allreduce(np.zeros(3), NAME, ops.MAX if rank else ops.SUM)
    c.barrier(NAME)


def a_rank_that_leaves_is_named(c, ops, rank, size):
    c.barrier(NAME)
    if rank == size - 1:
        c.destroy_collective_group(NAME)
        return
    began = time.monotonic()
    with pytest.raises(symmem.PeerLost) as e:
        c.allreduce(np.zeros(3), NAME)
    assert e.value.rank == size - 1
    assert time.monotonic() - began < 15
    # Processes that end stay until the others were told: of two ranks that have left, they may name either.
    if "SYMMEM_TEST_FOLDER" not in os.environ:
        return
    folder = pathlib.Path(os.environ["SYMMEM_TEST_FOLDER"])
    (folder / f"told-{rank}").touch()
    while len(list(folder.glob("told-*"))) < size - 1 and time.monotonic() - began < 15:
        time.sleep(0.01)


# Over the stub.


def _rank(body, rank, size, folder, pipe, before):
    try:
        os.environ.update(SYMMEM_TIMEOUT="30", SYMMEM_TEST_FOLDER=folder)
        ray_stub.install(folder)
        if before:
            globals()[before](folder, rank)
        import symmem.ray

        group = symmem.ray.Group(size, rank, NAME)
        assert os.listdir(folder) == [] or rank
        globals()[body](ray_stub.Collective(group), ray_stub.ReduceOp, rank, size)
        group.destroy_group()
        group.destroy_group()
        with pytest.raises(symmem.Usage, match="was destroyed"):
            group.barrier()
        pipe.send(None)
    except BaseException:  # noqa: BLE001  (the parent reports it, whatever it is)
        pipe.send(traceback.format_exc())


def _run(body, size, before=None):
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="symmem-test-") as folder:
        ends, processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(body.__name__, rank, size, folder, theirs, before))
            process.start()
            theirs.close()
            ends.append(mine)
            processes.append(process)
        failed = {}
        for rank, end in enumerate(ends):
            failed[rank] = end.recv() if end.poll(100) else "it did not end"
        for process in processes:
            process.join(10)
            process.kill()
    assert not any(failed.values()), "\n".join(f"rank {rank}: {text}" for rank, text in failed.items() if text)


BODIES = [
    every_operation_is_its_definition,
    what_one_rank_refuses_no_rank_waits_for,
    ranks_that_call_with_different_arguments_get_an_error,
    a_rank_that_leaves_is_named,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("size", [2, 3])
def test_over_a_stub(body, size):
    _run(body, size)


def announce_what_is_gone(folder, rank):
    """An entry of a group that has ended: nothing listens there, or another group's store does."""
    import json

    from symmem._ray_store import Server

    import ray

    if rank == 0:
        time.sleep(1)
        return
    other = Server("127.0.0.1", "theirs")
    if rank == 1:
        other.close()
    key = f"symmem:job:{NAME}".encode()
    ray.experimental.internal_kv._internal_kv_put(key, json.dumps([*other.address[:2], "ours"]).encode())


def test_what_a_former_group_announced_is_passed_over():
    _run(every_operation_is_its_definition, 3, before="announce_what_is_gone")


def on_a_host_of_its_own(folder, rank):
    """As if each rank were on another machine."""
    os.environ["SYMMEM_HOST"] = f"host-{rank}"


def test_ranks_may_be_on_several_nodes():
    _run(every_operation_is_its_definition, 2, before="on_a_host_of_its_own")


def no_rank_0(folder, rank):
    """Rank 1 waits for a rank 0 that never comes."""
    import symmem.ray

    os.environ["SYMMEM_TIMEOUT"] = "1"
    with pytest.raises(symmem.Timeout, match="rank 0 did not come within 1 s"):
        symmem.ray.Group(2, 1, "another")


def alone(c, ops, rank, size):
    x = np.ones(3)
    c.allreduce(x, NAME)
    assert (x == 1).all()


def test_a_missing_rank_0_is_a_timeout():
    _run(alone, 1, before="no_rank_0")


def test_a_store_answers_as_torchs_do_and_refuses_other_tokens():
    from symmem._ray_store import Server, Store

    server = Server("127.0.0.1", "token")
    store, other = Store(*server.address), Store(*server.address)
    everything = bytes(range(256))
    store.set("k", everything)
    assert other.get("k") == everything and other.check(["k"]) and not other.check(["k", "no"])
    assert other.compare_set("k", b"no", b"new") == everything
    assert other.compare_set("k", everything, b"new") == b"new" == store.get("k")
    assert store.compare_set("none", b"old", b"new") == b"old" and not store.check(["none"])
    assert store.compare_set("none", b"", b"new") == b"new" == store.get("none")
    store.append("k", b"er")
    store.append("fresh", b"a")
    assert store.get("k") == b"newer" and store.get("fresh") == b"a"
    assert store.delete_key("fresh") and not store.delete_key("fresh")
    threads = [threading.Thread(target=lambda s=s: [s.add("n", 2) for _ in range(100)]) for s in (store, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.add("n", -400) == 0 and store.num_keys() == 3
    with pytest.raises(KeyError):
        store.get("no")
    with pytest.raises(OSError, match="another store"):
        Store(*server.address[:2], "wrong")
    for one in (store, other, server):
        one.close()
    with pytest.raises(OSError):
        Store(*server.address)


def test_strangers_who_wait_at_a_store_are_few_and_do_not_stay(monkeypatch):
    from symmem import _ray_store

    monkeypatch.setattr(_ray_store, "PATIENCE", 0.5)
    server, before = _ray_store.Server("127.0.0.1", "token"), threading.active_count()
    known = _ray_store.Store(*server.address)
    waiting = [socket.create_connection(server.address[:2], 5) for _ in range(_ray_store.STRANGERS + 50)]
    assert threading.active_count() - before <= _ray_store.STRANGERS + 1
    known.set("k", b"v")  # whoever has shown the token goes on
    limit = time.monotonic() + 30
    while True:
        try:
            late = _ray_store.Store(*server.address)
            break
        except OSError:
            assert time.monotonic() < limit
            time.sleep(0.05)
    assert late.get("k") == b"v"
    for one in (*waiting, known, late, server):
        one.close()


# Over Ray.


def _in_actor(body, rank, size):
    import test_ray

    import ray.util.collective as c

    getattr(test_ray, body)(c, c.types.ReduceOp, rank, size)
    return os.getpid()


@pytest.fixture(scope="module")
def started():
    ray = pytest.importorskip("ray", reason="ray is not installed")
    import symmem.ray

    here = os.path.dirname(__file__)
    paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        "env_vars": {"PYTHONPATH": paths, "SYMMEM_TIMEOUT": "60"},
        "worker_process_setup_hook": symmem.ray.register,
    }
    ray.init(num_cpus=4, include_dashboard=False, runtime_env=environment, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()


def _actors(ray, size):
    @ray.remote(num_cpus=0)
    class Rank:
        def call(self, function, *arguments):
            return function(*arguments)

    return [Rank.remote() for _ in range(size)]


def _destroy(name):
    import ray.util.collective as c

    c.destroy_collective_group(name)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_over_ray(started, body):
    import ray.util.collective as c

    size = 2
    actors = _actors(started, size)
    c.create_collective_group(actors, size, list(range(size)), backend="symmem", group_name=NAME)
    calls = [actor.call.remote(_in_actor, body.__name__, rank, size) for rank, actor in enumerate(actors)]
    assert len(set(started.get(calls, timeout=100))) == size
    started.get([actor.call.remote(_destroy, NAME) for actor in actors], timeout=30)
    for actor in actors:
        started.kill(actor)


def _reduced(size, rank):
    import ray.util.collective as c

    c.init_collective_group(size, rank, backend="symmem", group_name="again")
    x = np.full(4, rank + 1.0)
    c.allreduce(x, "again")
    return x.tolist()


def _reduce():
    import ray.util.collective as c

    c.allreduce(np.zeros(4), "again")


def test_over_ray_a_killed_actor_is_named_and_the_group_can_be_made_again(started):
    actors = _actors(started, 3)
    for _ in range(2):
        reduced = started.get([a.call.remote(_reduced, 3, rank) for rank, a in enumerate(actors)], timeout=100)
        assert reduced == [[6.0] * 4] * 3
        started.kill(actors[0])
        for actor in actors[1:]:
            with pytest.raises(symmem.PeerLost) as e:
                started.get(actor.call.remote(_reduce), timeout=30)
            assert e.value.cause.rank == 0
            started.get(actor.call.remote(_destroy, "again"), timeout=30)
        actors[0] = _actors(started, 1)[0]



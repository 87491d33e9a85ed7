"""`symmem.nccl` compared with `torch.cuda.nccl`: the same calls on the same tensors, in one process, over all its devices."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem
import torch.cuda.nccl as theirs
from symmem import nccl as ours

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

DTYPES = [
    torch.float32,
    torch.float16,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]


def _tensors(count, dtype=torch.float32, seed=0):
    """One tensor for each device, with the same numbers whenever it is called."""
    torch.manual_seed(seed)
    made = [torch.randint(0, 20, (count,)).to(dtype) for _ in range(torch.cuda.device_count())]
    return [tensor.to(f"cuda:{device}") for device, tensor in enumerate(made)]


def _same(ours, theirs):
    torch.cuda.synchronize()
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        assert one.device == other.device and torch.equal(one, other)


def test_the_library_is_one_that_torch_can_use_too():
    assert ours.version()[0] == theirs.version()[0] and ours.version() >= (2, 19)


def test_what_is_available_is_what_torch_says():
    x = _tensors(4)
    for tensors in (x, [x[0], x[0]], [torch.ones(3)], [x[0].to_sparse()], [torch.ones(4, 4, device="cuda").t()]):
        assert ours.is_available(tensors) == theirs.is_available(tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 1000, 1 << 20])
def test_all_reduce_gives_what_torch_gives(dtype, count):
    for op in (0, 1, 2, 3):
        x, y = _tensors(count, dtype), _tensors(count, dtype)
        ours.all_reduce(x, op=op)
        theirs.all_reduce(y, op=op)
        _same(x, y)
        out, other = _tensors(count, dtype, 1), _tensors(count, dtype, 2)
        ours.all_reduce(x, out, op)
        theirs.all_reduce(y, other, op)
        _same(out, other)


def test_reduce_broadcast_all_gather_and_reduce_scatter_give_what_torch_gives():
    n = torch.cuda.device_count()
    for dtype in DTYPES:
        x, y = _tensors(32 * n, dtype), _tensors(32 * n, dtype)
        out = [torch.empty(32, dtype=dtype, device=one.device) for one in x]
        other = [torch.empty_like(one) for one in out]
        ours.reduce_scatter(x, out)
        theirs.reduce_scatter(y, other)
        _same(out, other)
        ours.all_gather(out, x)
        theirs.all_gather(other, y)
        _same(x, y)
        for root in range(n):
            x, y = _tensors(128, dtype, root), _tensors(128, dtype, root)
            ours.broadcast(x, root)
            theirs.broadcast(y, root)
            _same(x, y)
            ours.reduce(x, root=root)
            theirs.reduce(y, root=root)
            _same([x[root]], [y[root]])
            result = torch.empty_like(x[root])
            ours.reduce(x, result, root)
            theirs.reduce(y, root=root)
            _same([result], [y[root]])


def test_what_torch_only_moves_is_moved_here_too():
    n = torch.cuda.device_count()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bool):
        x = [one.to(dtype) for one in _tensors(64)]
        y = [one.clone() for one in x]
        ours.broadcast(x, n - 1)
        theirs.broadcast(y, n - 1)
        _same([one.view(torch.uint8) for one in x], [one.view(torch.uint8) for one in y])


def test_streams_of_torch_order_the_work():
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 22, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(3)
    ours.all_reduce([x], streams=[stream])
    with torch.cuda.stream(stream):
        x.add_(1)
    stream.synchronize()
    assert (x == 4).all()
    # Without one it is the current stream.
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(7)
        ours.all_reduce([x])
        x.add_(1)
    stream.synchronize()
    assert (x == 8).all()


def test_a_communicator_of_one_rank_works_and_goes():
    for _ in range(3):
        comm = ours.init_rank(1, ours.unique_id(), 0)
        x = torch.ones(100, device="cuda")
        ours.all_reduce([x], comms=comm)
        out = torch.empty(100, device="cuda")
        ours.all_gather([x], [out], comms=[comm])
        torch.cuda.synchronize()
        assert (out == 1).all()
        comm.check()
        part = comm.split(0)
        assert (part.rank, part.size, part.device) == (0, 1, torch.cuda.current_device())
        assert comm.split(None) is None
        del part, comm


def test_a_rank_that_never_comes_is_a_timeout():
    with pytest.raises(symmem.Timeout) as raised:
        ours.init_rank(2, ours.unique_id(), 0, timeout=2)
    assert raised.value.waiting_for == [1]


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"])
def test_wrong_arguments_are_refused_with_torchs_words(name):
    x = torch.ones(4, device="cuda")
    second = name in ("all_gather", "reduce_scatter")

    def said(module, *arguments):
        try:
            getattr(module, name)(*arguments, *(arguments if second else ()))
        except (RuntimeError, TypeError) as error:
            kind = TypeError if isinstance(error, TypeError) else RuntimeError
            return kind, str(error).splitlines()[0]
        return None

    wrong = [x, [torch.ones(3)], [x, x], [5], [x, x.double()], [torch.ones(4, 4, device="cuda").t()], [x.to_sparse()]]
    for given in wrong:
        assert said(ours, given) == said(theirs, given), given
    odd = said(ours, [x.short()])
    assert odd and odd[0] is RuntimeError and odd[1].startswith("Unconvertible NCCL type")
    assert said(theirs, [x.short()])[1].startswith("Unconvertible NCCL type")

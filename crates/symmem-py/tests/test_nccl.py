"""`symmem.nccl`: the calls of `torch.cuda.nccl`, against a library that stands in for NCCL and devices that are none."""

import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref

import fake_nccl
import numpy
import pytest
import symmem
from fake_nccl import OnDevice, live, needs_it, on_devices, run
from symmem import nccl

F32 = numpy.float32


def _refused(kind, text, call, *arguments, **named):
    with pytest.raises(kind) as raised:
        call(*arguments, **named)
    assert text in str(raised.value), raised.value
    return raised.value


def _in_threads(count, body):
    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_without_the_library_every_call_says_why():
    code = (
        "import symmem, warnings; from symmem import nccl\n"
        "for call in (nccl.version, nccl.unique_id, lambda: nccl.init_rank(1, bytes(128), 0, device=0)):\n"
        "    try: call()\n"
        "    except symmem.Unavailable as error: print(error.what, '|', error)\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always'); print(nccl.is_available([]), len(seen))\n"
    )
    env = {**os.environ, "SYMMEM_NCCL": "/nowhere/libnccl.so.2"}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    lines = said.splitlines()
    assert lines[0].startswith("NCCL | NCCL is not available: NCCL could not be loaded: /nowhere/"), said
    assert lines[1].startswith("NCCL | ") and " is not available: " in lines[2] and lines[3] == "False 1", said


def _version_and_id():
    assert nccl.version() == (2, 32, 3)
    uid = nccl.unique_id()
    assert isinstance(uid, bytes) and len(uid) == 128
    assert nccl.unique_id() != uid


def _available():
    assert nccl.is_available(on_devices(3, lambda i: [1.0]))
    assert not nccl.is_available([OnDevice([1.0], 0), OnDevice([1.0], 0)])
    assert not nccl.is_available([numpy.ones(3)])
    assert not nccl.is_available([OnDevice(numpy.ones((2, 2)), 0, strides=(8, 16))])


def _all_reduce():
    for kind in (list, tuple, set):
        x = on_devices(4, lambda i: numpy.full(128, i, F32))
        nccl.all_reduce(kind(x))
        assert all((one.values == 6).all() for one in x), kind
    before = live()[0]
    x, out = on_devices(3, lambda i: [i + 1, 10]), on_devices(3, lambda i: [0, 0])
    for op, expected in ((0, [6, 30]), (1, [6, 1000]), (2, [3, 10]), (3, [1, 10]), (4, [2, 10])):
        nccl.all_reduce(x, out, op)
        assert [one.tolist() for one in out] == [expected] * 3
    assert [one.tolist() for one in x] == [[1, 10], [2, 10], [3, 10]]
    # Communicators are kept for each list of devices, in its order.
    assert live()[0] == before + 3
    nccl.all_reduce([x[1], x[0]])
    nccl.all_reduce([x[1], x[0]])
    assert live()[0] == before + 5


def _reduce():
    for kind in (list, tuple):
        x = on_devices(3, lambda i: [i + 1])
        nccl.reduce(kind(x))
        assert [one.tolist() for one in x] == [[6], [2], [3]]
    x, out = on_devices(3, lambda i: [i + 1]), OnDevice([0], 2)
    nccl.reduce(x, out, root=2)
    assert out.tolist() == [6] and [one.tolist() for one in x] == [[1], [2], [3]]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        outs = on_devices(3, lambda i: [0])
        nccl.reduce(x, root=1, outputs=outs)
        nccl.reduce(x, outs, 1)
    assert [one.category for one in seen] == [FutureWarning] * 2
    assert [one.tolist() for one in outs] == [[0], [6], [0]]
    _refused(ValueError, "'output' and 'outputs' can not be both specified", nccl.reduce, x, out, outputs=outs)
    _refused(RuntimeError, "invalid root", nccl.reduce, x, root=3)
    _refused(RuntimeError, "invalid root", nccl.reduce, x, root=-1)
    _refused(RuntimeError, "input and output must be on the same device", nccl.reduce, x, OnDevice([0], 1), root=2)


def _broadcast():
    for root in range(3):
        x = on_devices(3, lambda i: numpy.full(5, i + 1, numpy.int8))
        nccl.broadcast(x, root)
        assert all((one.values == root + 1).all() for one in x)
    flags = on_devices(2, lambda i: [i == 1, False])
    nccl.broadcast(flags, 1)
    assert flags[0].tolist() == [True, False]
    _refused(RuntimeError, "invalid root", nccl.broadcast, x, 3)


def _gather_and_scatter():
    for kind in (list, tuple):
        x, out = on_devices(3, lambda i: [i, i + 10]), on_devices(3, lambda i: [0] * 6)
        nccl.all_gather(kind(x), kind(out))
        assert [one.tolist() for one in out] == [[0, 10, 1, 11, 2, 12]] * 3
        part = on_devices(3, lambda i: [0, 0])
        nccl.reduce_scatter(kind(out), kind(part))
        assert [one.tolist() for one in part] == [[0, 30], [3, 33], [6, 36]]
    text = "output must be of size input_size * size_multiplier"
    _refused(RuntimeError, text, nccl.all_gather, x, x)
    _refused(RuntimeError, text, nccl.reduce_scatter, x, x)


def _checks():
    x = on_devices(2, lambda i: [1.0, 2.0])
    bare = "Inputs should be a collection of tensors"
    for call in (nccl.all_reduce, nccl.reduce, nccl.broadcast):
        _refused(TypeError, bare, call, x[0])
        _refused(TypeError, bare, call, 5)
        _refused(RuntimeError, "input sequence can't be empty" if call is nccl.all_reduce else "", call, [])
        _refused(TypeError, "expected Tensor at 1 (got int)", call, [x[0], 5])
        _refused(TypeError, "expected Tensor at 0 (got ndarray)", call, [numpy.ones(2)])
        _refused(RuntimeError, "number of streams is not equal to number of inputs", call, x, streams=[0])
        _refused(TypeError, "comm is not a sequence", call, x, comms=5)
        _refused(RuntimeError, "number of communicators is not equal to number of inputs", call, x, comms=[])
        _refused(RuntimeError, "inputs must be on unique devices", call, [x[0], OnDevice([1.0, 2.0], 0)])
        dtype = "all inputs and outputs must be of the same Tensor dtype"
        _refused(RuntimeError, dtype, call, [x[0], OnDevice(numpy.ones(2, F32), 1)])
        contiguous = "all inputs and outputs have to be contiguous"
        _refused(RuntimeError, contiguous, call, [x[0], OnDevice([1.0, 2.0], 1, strides=(16,))])
        count = "all inputs must have the same number of elements"
        _refused(RuntimeError, count, call, [x[0], OnDevice([1.0], 1)])
    for call in (nccl.all_gather, nccl.reduce_scatter):
        _refused(TypeError, bare, call, x[0], x)
        _refused(TypeError, bare, call, x, x[0])
    lengths = "but got input of length 2 and output of length 1"
    _refused(RuntimeError, lengths, nccl.all_reduce, x, x[:1])
    same = "input and output must be on the same device"
    _refused(RuntimeError, same, nccl.all_reduce, x, [x[1], x[0]])
    for dtype in (numpy.int16, numpy.uint16, numpy.uint32, numpy.complex64):
        odd = on_devices(2, lambda i: numpy.ones(2, dtype))  # noqa: B023
        _refused(RuntimeError, f"Unconvertible NCCL type {numpy.dtype(dtype)}", nccl.all_reduce, odd)
    _refused(RuntimeError, "Unknown data type found in stream list", nccl.all_reduce, x, streams=["a", "b"])
    _refused(RuntimeError, "Expected a sequence of streams", nccl.all_reduce, x, streams=5)
    _refused(ValueError, "expected a Communicator of init_rank (got int)", nccl.all_reduce, x, comms=[5, 5])
    # Of all these NCCL has seen nothing.
    assert fake_nccl.library().fakeNcclCalls(b"ncclAllReduce") == 0 and live() == [0] * 5


def _dtypes():
    for dtype in ("float32", "float16", "float64", "int64", "int32", "int8", "uint8"):
        x = on_devices(2, lambda i: numpy.full(3, i + 2, dtype))  # noqa: B023
        nccl.all_reduce(x)
        assert x[0].values.dtype == dtype and x[1].tolist() == [5, 5, 5]


def _streams():
    class Torchs:
        cuda_stream = 0x77

    class Any:
        def __cuda_stream__(self):
            return (0, 0x78)

    x = on_devices(3, lambda i: [1.0])
    nccl.all_reduce(x, streams=[Torchs(), None, 0x79])
    nccl.all_reduce(x, streams=(Any(), 0, 0))
    assert x[0].tolist() == [9.0]


def _ranks():
    uid, ended = nccl.unique_id(), []

    def rank(number):
        comm = nccl.init_rank(3, uid, number, device=number)
        x, out = OnDevice([number + 1.0], number), OnDevice([0.0] * 3, number)
        nccl.all_reduce([x], comms=comm)
        assert x.tolist() == [6.0]
        nccl.all_gather([x], [out], comms=[comm])
        assert out.tolist() == [6.0] * 3
        part = OnDevice([0.0], number)
        nccl.reduce_scatter([out], [part], comms=[comm])
        assert part.tolist() == [18.0]
        nccl.reduce([part], comms=[comm], root=1)
        assert part.tolist() == [54.0 if number == 1 else 18.0]
        nccl.broadcast([part], 1, comms=[comm])
        half = comm.split(number % 2, -number)
        assert (comm.rank, comm.size, comm.device) == (number, 3, number)
        assert (half.rank, half.size) == ((0, 1) if number == 1 else (1 - number // 2, 2))
        comm.check()
        del half
        comm.close()
        assert comm.raw == 0
        _refused(symmem.Unavailable, "it was closed", nccl.all_reduce, [x], comms=comm)
        ended.append(part.tolist())

    _in_threads(3, rank)
    assert ended == [[54.0]] * 3 and live() == [0] * 5


def _init_rank_refuses():
    _refused(RuntimeError, "invalid unique_id (expected 128 bytes, got 3)", nccl.init_rank, 1, b"abc", 0)
    _refused(symmem.Usage, "expected a rank in [0, 2), got 2", nccl.init_rank, 2, nccl.unique_id(), 2, device=0)
    _refused(symmem.Unavailable, "this process sees 4 devices", nccl.init_rank, 1, nccl.unique_id(), 0, device=9)
    lost = _refused(symmem.Timeout, "no answer from rank 1", nccl.init_rank, 2, nccl.unique_id(), 0, timeout=0.1)
    assert isinstance(lost, TimeoutError) and lost.waiting_for == [1]
    assert live() == [0] * 5


def _interrupted():
    def raise_it(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        nccl.init_rank(2, nccl.unique_id(), 0, timeout=0)  # which is for ever
    assert live() == [0] * 5


def _failures():
    fake = fake_nccl.library()
    x = on_devices(2, lambda i: [1.0])
    nccl.all_reduce(x)
    fake.fakeNcclFail(b"ncclAllReduce", 3, 1)
    error = _refused(symmem.Driver, "NCCL Error 3: internal error", nccl.all_reduce, x)
    assert error.call == "ncclAllReduce" and isinstance(error, RuntimeError)
    _refused(RuntimeError, "NCCL Error 4: invalid argument", nccl.all_reduce, x, op=99)
    # A communicator that has broken is made anew.
    fake.fakeNcclAsyncError(-1, 6)
    _refused(RuntimeError, "NCCL Error 6: remote process exited", nccl.all_reduce, x)
    nccl.all_reduce(x)
    assert live()[0] == 2
    nccl._communicators.clear()
    assert live() == [0] * 5


def _old():
    fake_nccl.library().fakeNcclVersion(22105)
    assert nccl.version() == (2, 21, 5)
    comm = nccl.init_rank(1, nccl.unique_id(), 0)
    _refused(symmem.Usage, "expected other ranks to leave out", comm.shrink, [0])
    uid, said = nccl.unique_id(), []

    def rank(number):
        comm = nccl.init_rank(2, uid, number, device=number)
        said.append(str(_refused(symmem.Unavailable, "", comm.shrink, [1 - number])))

    _in_threads(2, rank)
    assert all("ncclCommShrink needs NCCL 2.27, 2.21.5 is loaded" in text for text in said) and len(said) == 2


def _registered():
    class Owner:
        pass

    comm, owner = nccl.init_rank(1, nccl.unique_id(), 0), Owner()
    kept = weakref.ref(owner)
    registration = nccl.register_external_nccl_comm("group", comm.raw, 0, owner)
    del owner
    gc.collect()
    assert (registration.group_name, registration.comm_ptr, registration.device) == ("group", comm.raw, 0)
    assert registration.active and kept() is not None
    found = nccl.external_nccl_comm("group", 0)
    x = OnDevice([2.0], 0)
    nccl.all_reduce([x], comms=found)
    del found
    registration.unregister()
    registration.unregister()
    gc.collect()
    assert not registration.active and kept() is None and nccl.external_nccl_comm("group", 0) is None
    with nccl.register_external_nccl_comm("group", comm.raw, 0) as registration:
        assert nccl.external_nccl_comm("group", 0) is not None
    assert not registration.active and nccl.external_nccl_comm("group", 0) is None
    null = "expected a communicator of NCCL, got a null pointer"
    _refused(RuntimeError, null, nccl.register_external_nccl_comm, "group", 0, 0)
    nccl.all_reduce([x], comms=comm)  # it was left alone
    del comm
    assert live() == [0] * 5


@needs_it
def test_n02_n03_t401_version_and_unique_id():
    run(_version_and_id)


@needs_it
def test_n01_is_available_wants_contiguous_arrays_on_devices_of_their_own():
    run(_available)


@needs_it
def test_n05_t404_all_reduce():
    run(_all_reduce)


@needs_it
def test_n06_t403_reduce():
    run(_reduce)


@needs_it
def test_n07_t402_broadcast_honours_the_root():
    run(_broadcast)


@needs_it
def test_n08_n09_t406_t407_all_gather_and_reduce_scatter():
    run(_gather_and_scatter)


@needs_it
def test_n10_t405_wrong_arguments_are_refused_before_nccl_sees_them():
    run(_checks)


@needs_it
def test_n10_every_type_that_nccl_reduces():
    run(_dtypes)


@needs_it
def test_n10_streams_of_any_library():
    run(_streams)


@needs_it
def test_n04_ranks_meet_by_an_id():
    run(_ranks)


@needs_it
def test_n04_what_cannot_be_a_rank_is_refused():
    run(_init_rank_refuses)


@needs_it
def test_l130_old_versions_say_what_they_lack():
    run(_old)


@needs_it
def test_l135_t097_t098_t099_t100_communicators_of_others_are_registered():
    run(_registered)


@needs_it
def test_a_wait_for_a_rank_ends_by_ctrl_c():
    run(_interrupted)


@needs_it
def test_failures_name_nccls_code_and_broken_communicators_are_made_anew():
    run(_failures)


def _said(module, name, *arguments, **named):
    """What a call raises, by the kinds that both have, and what it warns of."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises((TypeError, RuntimeError, ValueError)) as raised:
            getattr(module, name)(*arguments, **named)
    kinds = [kind for kind in (TypeError, RuntimeError, ValueError) if isinstance(raised.value, kind)]
    return kinds[0], str(raised.value).splitlines()[0], [(one.category, str(one.message)) for one in seen]


def test_n10_t405_what_is_wrong_is_said_in_torchs_words():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    theirs = pytest.importorskip("torch.cuda.nccl")
    if not hasattr(torch._C, "_nccl_all_reduce"):
        pytest.skip("this torch has no NCCL")
    x = torch.ones(4)
    wrong = [((given,), {}) for given in (x, 5, [x], (x,), {x}, [5], ["a"], [x, x])]
    wrong += [(([x],), {"streams": given}) for given in ([None, None], [], ["a"])]
    wrong += [(([x],), {"comms": given}) for given in (5, [])]
    for name in nccl.__all__:
        for given, named in wrong:
            given = given * 2 if name in ("all_gather", "reduce_scatter") else given
            if name == "reduce" and isinstance(given[0], set):
                continue  # of which torch takes the first in vain
            assert _said(nccl, name, *given, **named) == _said(theirs, name, *given, **named), (name, given, named)
    for named in ({"output": x, "outputs": [x]}, {"outputs": [x]}, {"output": [x]}, {"root": -1}):
        assert _said(nccl, "reduce", [x], **named) == _said(theirs, "reduce", [x], **named), named
    assert not nccl.is_available([x])


def test_the_five_collectives_are_what_a_star_imports():
    assert sorted(nccl.__all__) == ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"]
    assert nccl.SUM == 0

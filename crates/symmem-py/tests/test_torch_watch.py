"""What looks for failures on devices before and after torch's own waits: without a device, on functions that do nothing."""

import inspect
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import symmem
from symmem import _native, _torch_watch


def _torch():
    """As much of torch as is looked at; what its functions were called with."""
    calls = []

    class Base:
        def synchronize(self, *arguments):
            calls.append(("stream", *arguments))
            return "waited"

    class Stream(Base):
        pass

    class Event:
        def synchronize(self):
            calls.append(("event",))

    class CUDAGraph:
        def replay(self):
            """Replays."""
            calls.append(("replay",))

    def synchronize(device=None):
        """Waits."""
        calls.append(("device", device))

    cuda = types.SimpleNamespace(CUDAGraph=CUDAGraph, Stream=Stream, Event=Event, synchronize=synchronize)
    accelerator = types.SimpleNamespace(synchronize=synchronize)
    return types.SimpleNamespace(cuda=cuda, accelerator=accelerator), calls


@pytest.fixture
def fake(monkeypatch):
    former, there = _torch_watch._replaced[:], _torch_watch._replaced
    there.clear()
    checks = []
    monkeypatch.setattr(_native, "check_failures", lambda: checks.append(len(calls)))
    made, calls = _torch()
    yield made, calls, checks
    _torch_watch.uninstall()
    there.extend(former)


def test_every_wait_looks_before_and_after(fake):
    made, calls, checks = fake
    _torch_watch.install(made)
    made.cuda.CUDAGraph().replay()
    made.cuda.synchronize(3)
    assert made.cuda.Stream().synchronize() == "waited"
    made.cuda.Event().synchronize()
    made.accelerator.synchronize()
    assert calls == [("replay",), ("device", 3), ("stream",), ("event",), ("device", None)]
    assert checks == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


def test_a_failure_from_before_keeps_a_graph_from_being_replayed(fake, monkeypatch):
    made, calls, _ = fake
    _torch_watch.install(made)

    def failed():
        raise symmem.PeerLost("all_reduce: rank 1 is gone")

    monkeypatch.setattr(_native, "check_failures", failed)
    for _ in range(2):
        with pytest.raises(symmem.PeerLost, match="rank 1"):
            made.cuda.CUDAGraph().replay()
        with pytest.raises(symmem.PeerLost, match="rank 1"):
            made.cuda.synchronize()
    assert calls == []


def test_names_and_signatures_stay_and_all_is_put_back(fake):
    made, *_ = fake
    before = (made.cuda.CUDAGraph.replay, made.cuda.synchronize, made.cuda.Event.synchronize)
    _torch_watch.install(made)
    once = made.cuda.synchronize
    _torch_watch.install(made)
    assert made.cuda.synchronize is once is not before[1]
    assert (
        str(inspect.signature(once)) == "(device=None)" and once.__doc__ == "Waits." and once.__name__ == "synchronize"
    )
    _torch_watch.uninstall()
    assert (made.cuda.CUDAGraph.replay, made.cuda.synchronize, made.cuda.Event.synchronize) == before
    assert "synchronize" not in vars(made.cuda.Stream)  # its base has it
    _torch_watch.uninstall()


def test_torch_has_all_that_is_watched():
    owners = [(owner.__name__, name) for owner, name in _torch_watch._places(torch)]
    assert owners[:4] == [
        ("CUDAGraph", "replay"),
        ("torch.cuda", "synchronize"),
        ("Stream", "synchronize"),
        ("Event", "synchronize"),
    ]


def test_without_devices_nothing_has_failed():
    symmem._native.check_failures()

"""The shared object that stands in for NCCL, and arrays of "devices" that are memory of this process.

Tests that need it run in a Python of their own, `run`, which finds both NCCL and a CUDA driver in that file.
"""

import ctypes
import functools
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy
import pytest

TESTS = pathlib.Path(__file__).parent


@functools.cache
def path(library="nccl"):
    """Where cargo has put it: as SYMMEM_FAKE_NCCL says, or in the build folder. Likewise for "nvshmem"."""
    named = os.environ.get(f"SYMMEM_FAKE_{library.upper()}")
    folder = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or TESTS.parents[2] / "target")
    built = [folder / kind / f"libsymmem_fake_{library}.so" for kind in ("debug", "release")]
    candidates = [pathlib.Path(named)] if named else built
    return next((candidate for candidate in candidates if candidate.exists()), None)


needs_it = pytest.mark.skipif(path() is None, reason="cargo build -p symmem-fake-nccl has not been run")


def run(body, devices=4, **variables):
    """Runs a function of a test file with the fake, and these variables set; what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(path(), os.path.join(folder, "libcuda.so.1"))
        named = {"LD_LIBRARY_PATH": folder, "SYMMEM_NCCL": str(path()), "SYMMEM_FAKE_CUDA_DEVICES": str(devices)}
        named.update(variables)
        command = [sys.executable, __file__, body.__module__, body.__name__]
        done = subprocess.run(
            command, env={**os.environ, **named}, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@functools.cache
def library():
    """The fake itself, as the test tells it what to do."""
    loaded = ctypes.CDLL(os.environ["SYMMEM_NCCL"])
    loaded.fakeNcclFail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    loaded.fakeNcclCalls.argtypes = [ctypes.c_char_p]
    return loaded


def live():
    """Communicators, windows, allocations, registrations and operators that there are."""
    return [library().fakeNcclLive(what) for what in range(5)]


class OnDevice:
    """An array that says it is on a device, but lies in numpy's."""

    def __init__(self, values, device, dtype=None, strides=None):
        self.values = numpy.asarray(values)
        self.number = device
        self._dtype = dtype or self.values.dtype.str
        self._strides = strides

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.values.shape,
            "typestr": self._dtype,
            "data": (self.values.ctypes.data, False),
            "strides": self._strides,
            "version": 3,
        }

    def __dlpack_device__(self):
        return (2, self.number)

    def tolist(self):
        return self.values.tolist()


def on_devices(count, make):
    """One array for each device: `make(i)`."""
    return [OnDevice(make(i), i) for i in range(count)]


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    module = __import__(sys.argv[1])
    getattr(module, sys.argv[2])()

"""Where memory of devices comes from: chosen by name, and nothing else in its place.

A driver, NCCL and NVSHMEM are shared objects that stand in for them, for a world of one rank.
"""

import os
import subprocess
import sys
import threading
import time

import fake_nccl
import pytest
import symmem
from fake_nccl import live, needs_it, run
from symmem import nccl

BACKENDS = ("cuda", "nccl", "nvshmem")
NOWHERE = {"SYMMEM_NCCL": "/nowhere/libnccl.so.2", "SYMMEM_NVSHMEM": "/nowhere/libnvshmem_host.so.3"}

needs_both = pytest.mark.skipif(
    not (fake_nccl.path() and fake_nccl.path("nvshmem")),
    reason="cargo build -p symmem-fake-nccl -p symmem-fake-nvshmem has not been run",
)


def _unavailable(text, call, *arguments, **named):
    with pytest.raises(symmem.Unavailable) as raised:
        call(*arguments, **named)
    assert text in str(raised.value), raised.value


def test_a_device_that_is_not_there_is_unavailable_from_every_backend():
    code = (
        "import symmem\n"
        "world = symmem.World.connect(0, 1)\n"
        "for backend in ('cuda', 'nccl', 'nvshmem'):\n"
        "    for call in (world.alloc, world.pool):\n"
        "        try: call(64, device='cuda:99', backend=backend)\n"
        "        except symmem.Unavailable as error: print(error.what)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert len(said.splitlines()) == 6, said


def test_memory_of_the_host_has_no_backend():
    with symmem.World.connect(0, 1) as world:
        assert world.alloc(8).backend is None
        for call in (world.alloc, world.pool):
            with pytest.raises(symmem.Usage, match="a device for memory of a backend"):
                call(8, backend="nccl")
        handle = world.alloc(8).rendezvous(world)
        for ask in (nccl.communicator_of, nccl.window_of, nccl.cft_handle):
            _unavailable("only available on memory of NCCL", ask, handle)


def _without_the_libraries():
    with symmem.World.connect(0, 1) as world:
        for backend, file in (("nccl", "/nowhere/libnccl.so.2"), ("nvshmem", "/nowhere/libnvshmem_host.so.3")):
            for call in (world.alloc, world.pool):
                _unavailable(file, call, 64, device=0, backend=backend)
            _unavailable(file, symmem.empty, 4, "float32", world, device=0, backend=backend)
            os.environ["SYMMEM_CUDA_BACKEND"] = backend
            _unavailable(file, world.alloc, 64, device=0)
            _unavailable(file, symmem.empty, 4, "float32", world, device=0)
            assert world.alloc(64, device=0, backend="cuda").backend == "cuda"
        _unavailable("/nowhere/libnccl.so.2", nccl.register_external_nccl_comm, world, 1, 0)


@needs_it
def test_without_a_library_its_backend_is_unavailable_and_no_other_is_taken():
    run(_without_the_libraries, **NOWHERE)


def _by_name():
    with symmem.World.connect(0, 1) as world:
        for backend in BACKENDS:
            memory = world.alloc(4096, device="cuda:0", backend=backend)
            assert (memory.backend, memory.device, memory.nbytes) == (backend, "cuda:0", 4096)
            handle = memory.rendezvous(world)
            assert handle.buffer_ptrs == [memory.address] and handle.memory.backend == backend
            assert handle.buffer_ptrs_dev and handle.signal_pad_ptrs_dev
            pool = world.pool(1 << 20, device="cuda:0", backend=backend)
            parts = [pool.alloc(64) for _ in range(3)]
            assert {part.backend for part in parts} == {backend}
            assert symmem.find(parts[1].address).backend == backend
            array = symmem.empty((3, 4), "float32", world, device=0, backend=backend)
            assert symmem.rendezvous(array, world).handle.memory.backend == backend
        for wrong in ("tape", "CUDA", ""):
            with pytest.raises(symmem.Usage, match="a backend of devices among cuda, nccl, nvshmem"):
                world.alloc(64, device=0, backend=wrong)


@needs_both
def test_a_backend_is_chosen_by_name():
    run(_by_name, SYMMEM_NVSHMEM=str(fake_nccl.path("nvshmem")))


def _by_environment():
    with symmem.World.connect(0, 1) as world:
        for backend in BACKENDS:
            os.environ["SYMMEM_CUDA_BACKEND"] = backend
            assert world.alloc(64, device=0).backend == backend
            assert world.pool(1 << 20, device=0).alloc(64).backend == backend
            assert world.alloc(64, device=0, backend="cuda").backend == "cuda"
        os.environ["SYMMEM_CUDA_BACKEND"] = "tape"
        with pytest.raises(symmem.Usage, match="SYMMEM_CUDA_BACKEND"):
            world.alloc(64, device=0)


@needs_both
def test_the_environment_chooses_where_the_program_does_not():
    run(_by_environment, SYMMEM_NVSHMEM=str(fake_nccl.path("nvshmem")))


def _persistent():
    with symmem.World.connect(0, 1) as world:
        first = world.alloc(64, device=0, backend="nccl", persistent_id=3)
        address = first.address
        first.close()
        assert world.alloc(64, device=0, backend="nccl", persistent_id=3).address == address
        with pytest.raises(symmem.Usage, match="the backend of the previous allocation with id 3, nccl"):
            world.alloc(64, device=0, backend="cuda", persistent_id=3)


@needs_it
def test_an_id_stays_with_its_backend():
    run(_persistent)


def _windows():
    with symmem.World.connect(0, 1) as world:
        for options in ({}, {"pad_bytes": 4096}, {"persistent_id": 1}):
            before = live()[2]
            made = world.alloc(4096, device=0, backend="nccl", **options)
            assert live()[2] == before + 1, options
            made.close()
        kept = live()[2]
        memory = world.alloc(4096, device=0, backend="nccl")
        handle = memory.rendezvous(world)
        comm = nccl.communicator_of(handle)
        assert (comm.rank, comm.size, comm.device) == (0, 1, 0)
        assert nccl.window_of(handle) and live()[:3] == [1, 1, kept + 1]
        endpoint, offset = nccl.cft_handle(handle, 0)
        assert nccl.cft_handle(handle)[1] == offset and endpoint != nccl.cft_handle(handle)[0]
        with pytest.raises(symmem.Usage, match=r"a rank in \[0, 1\)"):
            nccl.cft_handle(handle, 1)
        other = world.alloc(64, device=0, backend="cuda").rendezvous(world)
        for ask in (nccl.communicator_of, nccl.window_of, nccl.cft_handle):
            _unavailable("its backend is cuda: only available on memory of NCCL", ask, other)
        memory.close()
        del handle, comm, other
        assert live()[1:3] == [0, kept]


@needs_it
def test_a_rendezvous_registers_memory_of_nccl_as_a_window():
    run(_windows)


def _external():
    with symmem.World.connect(0, 1) as world:
        theirs = nccl.init_rank(1, nccl.unique_id(), 0, device=0)
        memory = world.alloc(4096, device=0, backend="nccl")
        with nccl.register_external_nccl_comm(world, theirs.raw, 0, theirs) as registration:
            assert nccl.external_nccl_comm(world.name, 0).raw == theirs.raw
            handle = memory.rendezvous(world)
            assert nccl.communicator_of(handle).raw == theirs.raw
        registration.unregister()
        again = world.alloc(4096, device=0, backend="nccl").rendezvous(world)
        assert nccl.communicator_of(again).raw != theirs.raw
        with pytest.raises(symmem.Usage, match="null"):
            nccl.register_external_nccl_comm(world, 0, 0)
        memory.close()
        del handle


@needs_it
def test_memory_is_registered_on_a_communicator_of_somebody_else():
    run(_external)


def _ends_without_the_lock():
    with symmem.World.connect(0, 1) as world:
        memory = world.alloc(4096, device=0)
        handle = memory.rendezvous(world)
        assert handle.buffer_ptrs_dev  # a table on the device, which goes with the handle
        things = [memory.view(), handle, memory]
        del memory, handle
        fake_nccl.library().fakeCudaBusy(500)
        ticks, done = [], threading.Event()

        def tick():
            while not done.wait(0.01):
                ticks.append(time.monotonic())

        other = threading.Thread(target=tick)
        other.start()
        begin = time.monotonic()
        things.clear()
        end = time.monotonic()
        done.set()
        other.join()
        fake_nccl.library().fakeCudaBusy(0)
        assert end - begin > 0.4
        assert sum(begin < at < end for at in ticks) > 5, "nobody else ran while the device was waited for"


@needs_it
def test_other_threads_run_while_memory_of_a_device_goes():
    run(_ends_without_the_lock)


def _streams_of_consumers():
    waits = fake_nccl.library().fakeCudaStreamWaits
    with symmem.World.connect(0, 1) as world:
        memory = world.alloc(4096, device=0)
        handle = memory.rendezvous(world)
        arrays = [memory.view("float32"), handle.view(0), memory.view("float32").view("int32", (8,))]

        def waited(array, **stream):
            before = waits()
            assert "dltensor" in repr(array.__dlpack__(**stream))
            return waits() - before

        assert [waited(array, stream=1) for array in arrays] == [0, 0, 0]  # nothing was put into any stream
        for array in arrays:
            for used, stream, expected in (
                (0x700, {"stream": 0x700}, 0),  # its own work comes first by itself
                (0x700, {"stream": -1}, 0),  # the consumer sees to that
                (0x700, {"stream": 0x800}, 1),
                (0x700, {"stream": 1}, 1),
                (0x700, {"stream": 2}, 1),
                (0x700, {}, 1),  # the default stream
                (0, {}, 0),
                (0, {"stream": 1}, 0),
                (0, {"stream": 0x800}, 1),
            ):
                handle.fill32(0, 0, 7, stream=used)
                assert waited(array, **stream) == expected, (used, stream)
                waited(array, stream=0x900)  # nothing is left for the next
                assert waited(array, stream=0x900) == 0
        for wrong in (0, -2):
            with pytest.raises(BufferError, match="stream"):
                arrays[0].__dlpack__(stream=wrong)


@needs_it
def test_a_consumers_stream_comes_after_what_the_library_has_put_into_others():
    run(_streams_of_consumers)

"""Memory, arrays and what other libraries make of them."""

import numpy
import pytest
import ranks
import symmem


def arrays_are_the_memory_itself(world):
    memory = world.alloc(4096)
    array = memory.view("float32", (16, 64))
    for made in (numpy.asarray(array), numpy.from_dlpack(array)):
        assert made.shape == (16, 64) and made.dtype == "float32"
        assert made.ctypes.data == memory.address and made.flags.writeable
    numpy.asarray(array)[3, 5] = 7
    assert numpy.asarray(memory.view("float32"))[3 * 64 + 5] == 7


def test_arrays_are_the_memory_itself():
    ranks.run(1, arrays_are_the_memory_itself)


def peers_see_what_a_rank_writes(world):
    memory = world.alloc(400)
    own = numpy.asarray(memory.view("int32"))
    own[:] = world.rank + 1
    handle = memory.rendezvous(world)
    handle.barrier()
    for rank in range(world.size):
        peer = numpy.asarray(handle.view(rank).view("int32"))
        assert (peer == rank + 1).all()


def test_peers_see_what_a_rank_writes():
    ranks.run(2, peers_see_what_a_rank_writes)


def an_array_outlives_everything_it_came_from(world):
    memory = world.alloc(1 << 20)
    handle = memory.rendezvous(world)
    own = numpy.asarray(memory.view())
    peer = numpy.asarray(handle.view((world.rank + 1) % world.size))
    own[:] = world.rank + 1
    world.barrier()
    memory.close()
    world.close()
    del memory, handle
    assert (own == world.rank + 1).all()
    assert (peer == (world.rank + 1) % world.size + 1).all()


def test_an_array_outlives_everything_it_came_from():
    ranks.run(2, an_array_outlives_everything_it_came_from)


def an_address_finds_its_memory(world):
    memory = world.alloc(1000)
    for offset in (0, 1, 999):
        assert symmem.find(memory.address + offset).address == memory.address
    assert symmem.find(memory.address + 1000) is None
    assert symmem.find(0) is None
    address = memory.address
    array = memory.view()
    del memory
    assert symmem.find(address).nbytes == 1000  # the array keeps it
    del array
    assert symmem.find(address) is None


def test_an_address_finds_its_memory():
    ranks.run(1, an_address_finds_its_memory)


def tensors_are_the_memory_itself(world):
    import torch

    memory = world.alloc(4096)
    tensor = torch.from_dlpack(memory.view("bfloat16", (4, 8)))
    assert tensor.data_ptr() == memory.address and tensor.shape == (4, 8)
    tensor.fill_(world.rank + 1)
    handle = memory.rendezvous(world)
    handle.collective("all_reduce", tensor.dtype, 0, tensor.numel())
    assert (tensor == sum(range(1, world.size + 1))).all()
    out = torch.empty(2 * 32, dtype=torch.bfloat16)
    handle.collective("all_gather", tensor.dtype, 0, 32, out)
    assert (out == tensor[0, 0]).all()


def test_tensors_are_the_memory_itself():
    pytest.importorskip("torch", reason="torch is not installed")
    ranks.run(2, tensors_are_the_memory_itself)


def views_beyond_the_memory_are_refused(world):
    memory = world.alloc(100)
    handle = memory.rendezvous(world)
    for wrong in (
        lambda: memory.view("float32", (26,)),
        lambda: memory.view("float32", (1,), 2),
        lambda: memory.view("float32", (2**40, 2**40)),
        lambda: memory.view("no such type"),
        lambda: handle.view(world.size),
        lambda: handle.view(0, 101),
        lambda: handle.collective("all_reduce", "float32", 0, 26),
        lambda: handle.collective("all_reduce", "float32", 2, 4),
        lambda: handle.collective("all_reduce", "float32", 0, 4, op="no such operator"),
        lambda: handle.collective("no such collective", "float32", 0, 4),
    ):
        with pytest.raises(symmem.Usage, match="expected .* got"):
            wrong()
    with pytest.raises(symmem.Usage, match="DLPack"):
        memory.view("bfloat16").numpy()
    handle.collective("all_reduce", "float32", 0, 25)


def test_views_beyond_the_memory_are_refused():
    ranks.run(2, views_beyond_the_memory_are_refused)


def sizes_and_types_that_cannot_be_are_refused(world):
    for wrong in (-1, (3, -2)):
        with pytest.raises(symmem.Usage, match=r"empty: rank 0: expected sizes of at least 0, got \(.*-"):
            symmem.empty(wrong, "float32", world)
    with pytest.raises(symmem.Usage, match="empty: expected .*, got"):
        symmem.empty(3, "float3", world)
    for empty in (0, (2, 0), (0, 4)):
        x = symmem.rendezvous(symmem.empty(empty, "float32", world), world)
        assert x.reduce_scatter(axis=-1).size == 0
    x = symmem.rendezvous(symmem.empty((3, 4), "float32", world), world)
    array = numpy.asarray(x.array)
    array[:] = numpy.arange(12).reshape(3, 4)
    assert (x.reduce_scatter(axis=-1) == array).all()


def test_sizes_and_types_that_cannot_be_are_refused():
    ranks.run(1, sizes_and_types_that_cannot_be_are_refused)


class Elsewhere:
    """An array that says that it lies on a device of another kind."""

    def __init__(self, kind):
        self.kind, self.values = kind, numpy.zeros(4, "float32")

    def __dlpack_device__(self):
        return (self.kind, 0)

    def __dlpack__(self, **_):
        return self.values.__dlpack__()


def arrays_of_other_devices_are_refused(world):
    x = symmem.rendezvous(symmem.empty(4, "float32", world), world)
    for kind, name in ((10, "ROCm"), (11, "ROCm"), (14, "another device"), (8, "another device")):
        for call, *arguments in ((x.get, 0), (world.all_reduce,)):
            with pytest.raises(BufferError, match=f"of the host or of CUDA, got one of {name}"):
                call(*arguments, Elsewhere(kind))
    assert (x.get(0, Elsewhere(1)).values == 0).all()


def test_arrays_of_other_devices_are_refused():
    ranks.run(1, arrays_of_other_devices_are_refused)


def memory_of_the_host_has_no_streams(world):
    array = world.alloc(64).view("float32")
    for stream in (None, -1):
        assert "dltensor" in repr(array.__dlpack__(stream=stream))
    for stream in (0, 1, 2, 1 << 20, -2):
        with pytest.raises(BufferError, match="stream"):
            array.__dlpack__(stream=stream)


def test_memory_of_the_host_has_no_streams():
    ranks.run(1, memory_of_the_host_has_no_streams)


def every_type_is_moved(world):
    n, me = world.size, world.rank
    for dtype in ("bool", "complex64", "complex128"):
        x = symmem.rendezvous(symmem.empty((n, 2), dtype, world), world)
        values = [(numpy.arange(2 * n).reshape(n, 2) * (rank + 1 + 2j)).astype(dtype) for rank in range(n)]
        x.local[:] = values[me]
        assert (x.all_gather() == numpy.stack(values)).all()
        assert (x.all_to_all() == numpy.stack([value[me] for value in values])).all()
        splits = symmem.rendezvous(symmem.empty(n, "int64", world), world)
        splits.local[:] = 1
        out = numpy.zeros((n, 2), dtype)
        x.all_to_all_v(splits, out)
        assert (out == numpy.stack([value[me] for value in values])).all()
        x.put((me + 1) % n, values[me])
        x.barrier()
        assert (x.local == values[(me - 1) % n]).all()
        x.barrier()
        x.broadcast(1)
        assert (x.local == values[0]).all()
        x.all_reduce()
        assert (x.local == (values[0] if dtype == "bool" else n * values[0])).all()
    for name in ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        assert symmem.Array.itemsize_of(name) == 1


def test_every_type_is_moved():
    ranks.run(2, every_type_is_moved)

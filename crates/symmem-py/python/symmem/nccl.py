"""NCCL's collectives over arrays on devices, called as `torch.cuda.nccl` is.

One process, one array for each device; or, with `comms` of `init_rank`, one process for each rank::

    import symmem.nccl as nccl

    nccl.all_reduce([torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1")])

    uid = nccl.unique_id()                          # on one rank, and sent to the others
    comm = nccl.init_rank(world_size, uid, rank)
    nccl.all_reduce([x], comms=[comm])

Arrays are tensors of torch, or have `__cuda_array_interface__` or DLPack. Calls put work into `streams`, by default torch's current
streams, or the default streams without torch. Unlike in `torch.cuda.nccl`, waits have a time limit: if a rank is missing, the call
raises `symmem.Timeout`, and the communicator is aborted.
"""

from __future__ import annotations

import atexit
import math
import sys
import warnings
from collections.abc import Collection, Container, Sequence
from typing import Any, NamedTuple

from symmem._external import Registration, clear, external_nccl_comm, register_external_nccl_comm  # noqa: F401
from symmem._native import (
    Communicator,
    Error,
    Handle,
    Usage,
    nccl_call,
    nccl_cft_handle,
    nccl_communicator_of,
    nccl_unique_id,
    nccl_version,
    nccl_window_of,
)

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"]

SUM = 0  # ncclRedOp_t, named as in `torch.cuda.nccl`, which has no names for the others

_CUDA = 2  # kDLCUDA
_TYPES = {"float32", "float16", "float64", "bfloat16", "int64", "int32", "int8", "uint8"} | {
    "float8_e4m3fn",
    "float8_e5m2",
}
_KINDS = {"f": "float", "i": "int", "u": "uint", "b": "bool", "c": "complex"}

_communicators: dict[tuple[int, ...], list[Communicator]] = {}


def is_available(tensors: Collection[Any]) -> bool:
    """Whether collectives accept these: dense, contiguous and on different devices."""
    try:
        nccl_version()
    except Error as error:
        warnings.warn(str(error), stacklevel=2)
        return False
    devices: set[int] = set()
    for tensor in tensors:
        place = _place(tensor)
        if place is None or not place.dense or not place.contiguous or place.device in devices:
            return False
        devices.add(place.device)
    return True


def version() -> tuple[int, int, int] | tuple[int, int, int, str]:
    """The version of NCCL: (major, minor, patch), and a suffix if there is one."""
    major, minor, patch, suffix = nccl_version()
    return (major, minor, patch) if suffix is None else (major, minor, patch, suffix)


def unique_id() -> bytes:
    """The unique id, 128 bytes, with which the ranks of a new communicator connect."""
    return nccl_unique_id()


def init_rank(
    num_ranks: int, uid: bytes, rank: int, *, device: int | None = None, timeout: float | None = None
) -> Communicator:
    """Creates this rank's end of a communicator on `device`, by default torch's current device or 0. Collective."""
    if len(uid) != 128:
        raise Usage(f"invalid unique_id (expected 128 bytes, got {len(uid)})")
    if device is None:
        torch = sys.modules.get("torch")
        device = torch.cuda.current_device() if torch and torch.cuda.is_available() else 0
    return Communicator.init_rank(num_ranks, bytes(uid), rank, device, timeout)


def communicator_of(handle: Handle) -> Communicator:
    """The communicator on which a rendezvous registered memory with `backend="nccl"`. Its owner closes it."""
    return nccl_communicator_of(handle)


def window_of(handle: Handle) -> int:
    """NCCL's window (`ncclWindow_t`) of such memory. Raises `Unavailable` if NCCL made none."""
    return nccl_window_of(handle)


def cft_handle(handle: Handle, peer: int | None = None) -> tuple[int, int]:
    """The endpoint and offset with which NCCL's kernels reach such memory of `peer`, or of all ranks. Needs NCCL 2.31.2."""
    return nccl_cft_handle(handle, peer)


def all_reduce(
    inputs: Collection[Any],
    outputs: Collection[Any] | None = None,
    op: int = SUM,
    streams: Sequence[Any] | None = None,
    comms: Communicator | Sequence[Communicator] | None = None,
) -> None:
    """Reduces all inputs into each of the outputs, or in place."""
    outputs = inputs if outputs is None else outputs
    _check_collections(inputs, outputs)
    call = _Call("all_reduce", inputs, outputs, streams, comms)
    call.check(1, 1)
    call.make(op)


def reduce(
    inputs: Collection[Any],
    output: Any = None,
    root: int = 0,
    op: int = SUM,
    streams: Sequence[Any] | None = None,
    comms: Communicator | Sequence[Communicator] | None = None,
    *,
    outputs: Sequence[Any] | None = None,
) -> None:
    """Reduces all inputs into `output`, or in place into the root's input."""
    _check_collections(inputs)
    if outputs is not None:
        if output is not None:
            raise ValueError(
                "'output' and 'outputs' can not be both specified. 'outputs' is deprecated in favor of 'output', "
                "taking in a single output tensor. The signature of reduce is: "
                "reduce(inputs, output=None, root=0, op=SUM, streams=None, comms=None)."
            )
        output = _deprecated(outputs, root, " with argument 'output' instead")
    elif isinstance(output, Sequence) and not _is_tensor(output):
        output = _deprecated(output, root, "")
    call = _Call("reduce", inputs, None, streams, comms)
    call.check_root(root)
    call.reduce_to(output, root)
    call.make(op, root)


def _deprecated(outputs: Sequence[Any], root: int, how: str) -> Any:
    """Warns with torch's text, which programs may filter by."""
    name = "`nccl.reduce`" if how else "nccl.reduce"
    text = f"{name} with an output tensor list is deprecated. Please specify a single output tensor{how}."
    warnings.warn(text, FutureWarning, stacklevel=3)
    return outputs[root]


def broadcast(
    inputs: Collection[Any],
    root: int = 0,
    streams: Sequence[Any] | None = None,
    comms: Communicator | Sequence[Communicator] | None = None,
) -> None:
    """Copies the root's elements to all, in place."""
    _check_collections(inputs)
    call = _Call("broadcast", inputs, inputs, streams, comms)
    call.check_root(root)
    call.check(1, 1)
    call.make(SUM, root)


def all_gather(
    inputs: Collection[Any],
    outputs: Collection[Any],
    streams: Sequence[Any] | None = None,
    comms: Communicator | Sequence[Communicator] | None = None,
) -> None:
    """Copies all inputs, in order, into each of the outputs."""
    _check_collections(inputs, outputs)
    call = _Call("all_gather", inputs, outputs, streams, comms)
    call.check(call.size, 1)
    call.make()


def reduce_scatter(
    inputs: Collection[Any],
    outputs: Collection[Any],
    op: int = SUM,
    streams: Sequence[Any] | None = None,
    comms: Communicator | Sequence[Communicator] | None = None,
) -> None:
    """Reduces all inputs, and gives each output its part."""
    _check_collections(inputs, outputs)
    call = _Call("reduce_scatter", inputs, outputs, streams, comms)
    call.check(1, call.size)
    call.make(op)


class _Operand(NamedTuple):
    """An array on a device."""

    address: int
    count: int
    dtype: str
    device: int
    dense: bool
    contiguous: bool


class _Call:
    """A collective: its arguments, their checks, and the call on all communicators at once."""

    def __init__(self, name: str, inputs: Any, outputs: Any, streams: Any, comms: Any) -> None:
        self.name = name
        self.inputs = _extract(inputs)
        self.outputs = None if outputs is None else _extract(outputs)
        self.streams = _streams(streams, len(self.inputs))
        self.comms = _comms(comms, len(self.inputs))
        self.size = self.comms[0].size if self.comms else len(self.inputs)
        self.first: _Operand | None = None
        self.sources: list[_Operand] = []
        self.targets: list[tuple[int, int]] = []

    def check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise Usage("invalid root")

    def check(self, input_multiplier: int, output_multiplier: int) -> None:
        """Each input with the output of its number."""
        outputs = self.outputs or []
        if not self.inputs:
            raise Usage("input sequence can't be empty")
        if len(self.inputs) != len(outputs):
            raise Usage(
                "inputs and outputs sequences have to be of the same length, but got input of length "
                f"{len(self.inputs)} and output of length {len(outputs)}"
            )
        for source, target in zip(self.inputs, outputs):
            self._check_input(source)
            self._check_output(target, input_multiplier, output_multiplier)

    def reduce_to(self, output: Any, root: int) -> None:
        """The root's output, by default its input. Other ranks have no output."""
        if not self.inputs:
            raise Usage("input sequence can't be empty")
        ranks = [comm.rank for comm in self.comms] if self.comms else list(range(len(self.inputs)))
        for rank, source in zip(ranks, self.inputs):
            self._check_input(source)
            if rank == root:
                self._check_output(source if output is None else _extract([output])[0], 1, 1)
            else:
                self.targets.append((0, 0))

    def _check_input(self, given: Any) -> None:
        found = self._check_one(given)
        if found.count != self.count:
            raise Usage("all inputs must have the same number of elements")
        if any(found.device == other.device for other in self.sources):
            raise Usage("inputs must be on unique devices")
        self.sources.append(found)

    def _check_output(self, given: Any, input_multiplier: int, output_multiplier: int) -> None:
        found = self._check_one(given)
        if found.device != self.sources[-1].device:
            raise Usage("input and output must be on the same device")
        if found.count * output_multiplier != self.count * input_multiplier:
            raise Usage("output must be of size input_size * size_multiplier")
        self.targets.append((found.address, found.count))

    def _check_one(self, given: Any) -> _Operand:
        found = _place(given)
        if found is None or not found.dense:
            raise Usage("input and output elements have to be cuda dense Tensors")
        self.first = self.first or found
        if found.dtype != self.first.dtype:
            raise Usage("all inputs and outputs must be of the same Tensor dtype")
        if not found.contiguous:
            raise Usage("all inputs and outputs have to be contiguous")
        return found

    @property
    def count(self) -> int:
        return self.first.count if self.first else 0

    def _element(self) -> str:
        """The type for NCCL: booleans are bytes, and so are 8-bit floats that are only moved."""
        dtype = self.first.dtype if self.first else ""
        moved = self.name in ("broadcast", "all_gather")
        if dtype == "bool" or (moved and dtype.startswith("float8_")):
            return "uint8"
        if dtype not in _TYPES:
            raise Usage(f"Unconvertible NCCL type {dtype}")
        return dtype

    def make(self, op: int = SUM, root: int = 0) -> None:
        element = self._element()
        devices = tuple(place.device for place in self.sources)
        streams = [_current(device) if s is None else s for device, s in zip(devices, self.streams)]
        sources = [(place.address, place.count) for place in self.sources]
        comms = self.comms or _cached(devices)
        try:
            nccl_call(self.name, comms, sources, self.targets, streams, element, op, root)
        except BaseException:
            if not self.comms:
                _forget_broken(devices)
            raise


def _cached(devices: tuple[int, ...]) -> list[Communicator]:
    """The communicators of these devices in this process, created by the first call."""
    if devices not in _communicators:
        _communicators[devices] = Communicator.of_devices(list(devices))
    return _communicators[devices]


def _forget_broken(devices: tuple[int, ...]) -> None:
    """After a failure: drop communicators that no longer work. The next call creates new ones."""
    try:
        for comm in _communicators.get(devices, []):
            comm.check()
    except Error:
        for comm in _communicators.pop(devices, []):
            comm.abort()


def _clear() -> None:
    _communicators.clear()
    clear()


# At exit, before the driver is unloaded.
atexit.register(_clear)


def _is_torch_tensor(given: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, getattr(torch, "Tensor", ()))


def _is_tensor(given: Any) -> bool:
    """Whether it is one of torch's, or an array on a device."""
    if _is_torch_tensor(given) or hasattr(given, "__cuda_array_interface__"):
        return True
    return hasattr(given, "__dlpack__") and given.__dlpack_device__()[0] == _CUDA


def _check_collections(*collections: Any) -> None:
    if any(not isinstance(given, Container) or _is_tensor(given) for given in collections):
        raise TypeError("Inputs should be a collection of tensors")


def _extract(given: Any) -> list[Any]:
    tensors = list(given)
    for at, tensor in enumerate(tensors):
        if not _is_tensor(tensor):
            raise TypeError(f"expected Tensor at {at} (got {type(tensor).__name__})")
    return tensors


def _place(given: Any) -> _Operand | None:
    """The array's memory; None if it is not on a device."""
    if _is_torch_tensor(given):
        if not given.is_cuda:
            return None
        dense = not given.is_sparse and str(given.layout) == "torch.strided"
        dtype = str(given.dtype).removeprefix("torch.")
        address = given.data_ptr() if dense else 0
        return _Operand(address, given.numel(), dtype, given.get_device(), dense, dense and given.is_contiguous())
    interface = getattr(given, "__cuda_array_interface__", None)
    if interface is not None:
        return _of_interface(given, interface)
    if hasattr(given, "__dlpack__") and given.__dlpack_device__()[0] == _CUDA:
        return _of_dlpack(given)
    return None


def _of_interface(given: Any, interface: dict[str, Any]) -> _Operand:
    shape, typestr = interface["shape"], interface["typestr"]
    bits = 8 * int(typestr[2:])
    dtype = "bool" if typestr[1] == "b" else f"{_KINDS.get(typestr[1], typestr[1])}{bits}"
    strides = interface.get("strides")
    return _Operand(
        interface["data"][0],
        math.prod(shape),
        dtype,
        _device(given),
        dense=interface.get("mask") is None,
        contiguous=strides is None or _is_contiguous(shape, strides, bits // 8),
    )


def _of_dlpack(given: Any) -> _Operand:
    from symmem._native import span

    device = given.__dlpack_device__()[1]
    try:
        address, size, dtype = span(given)
    except BufferError:
        return _Operand(0, 0, "", device, dense=True, contiguous=False)
    return _Operand(address, size // _item_size(dtype), dtype, device, dense=True, contiguous=True)


def _item_size(dtype: str) -> int:
    digits = "".join(filter(str.isdigit, dtype.split("_")[0]))
    return int(digits) // 8 if digits else 1


def _is_contiguous(shape: Sequence[int], strides: Sequence[int], size: int) -> bool:
    if 0 in shape:
        return True
    for length, stride in zip(reversed(shape), reversed(strides)):
        if length > 1 and stride != size:
            return False
        size *= length
    return True


def _device(given: Any) -> int:
    """The number of an array's device, from DLPack or CuPy: `__cuda_array_interface__` does not have it."""
    if hasattr(given, "__dlpack_device__"):
        return given.__dlpack_device__()[1]
    device = getattr(given, "device", 0)
    return int(getattr(device, "id", device))


def _streams(given: Any, count: int) -> list[int | None]:
    """The streams by address; None for the current stream."""
    if given is None:
        return [None] * count
    if not isinstance(given, Sequence):
        raise Usage("Expected a sequence of streams")
    if len(given) != count:
        raise Usage("number of streams is not equal to number of inputs")
    return [None if stream is None else _stream(stream) for stream in given]


def _stream(given: Any) -> int:
    """A stream of torch, CuPy or any library with `__cuda_stream__`, or its address (`cudaStream_t`)."""
    if isinstance(given, int):
        return given
    for attribute in ("cuda_stream", "ptr"):
        if isinstance(getattr(given, attribute, None), int):
            return getattr(given, attribute)
    if hasattr(given, "__cuda_stream__"):
        return given.__cuda_stream__()[1]
    raise Usage("Unknown data type found in stream list. Need torch.cuda.Stream or None")


def _current(device: int) -> int:
    torch = sys.modules.get("torch")
    return torch.cuda.current_stream(device).cuda_stream if torch and torch.cuda.is_initialized() else 0


def _comms(given: Any, count: int) -> list[Communicator]:
    if given is None:
        return []
    if isinstance(given, Communicator):
        given = [given]
    if not isinstance(given, Sequence):
        raise TypeError("comm is not a sequence")
    for comm in given:
        if not isinstance(comm, Communicator):
            raise Usage(f"expected a Communicator of init_rank (got {type(comm).__name__})")
    if len(given) != count:
        raise Usage("number of communicators is not equal to number of inputs")
    return list(given)

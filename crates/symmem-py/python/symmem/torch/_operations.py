"""The operations of a process group on CPU tensors.

One method for each operation, by torch's name, called with torch's lists of tensors and options. They differ in which tensors are read
and written; `_run` does the rest. A call with `asyncOp` unset is made in the thread of the caller, and `DONE` is its work.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch._C._distributed_c10d import Work as _Work
from torch.utils import _pytree as pytree

from symmem import _native
from symmem.torch import _errors
from symmem.torch._futures import Done, Several, Work
from symmem.torch._parts import DTYPES

Tensors = list[torch.Tensor]

RedOpType = dist.ReduceOp.RedOpType

#: The library's names of torch's operators.
OPERATORS = {
    RedOpType.SUM: "sum",
    RedOpType.AVG: "avg",
    RedOpType.PRODUCT: "prod",
    RedOpType.MIN: "min",
    RedOpType.MAX: "max",
    RedOpType.BAND: "and",
    RedOpType.BOR: "or",
    RedOpType.BXOR: "xor",
}

#: Options of calls that are given none.
ALL_REDUCE, REDUCE, REDUCE_SCATTER = _c10d.AllreduceOptions(), _c10d.ReduceOptions(), _c10d.ReduceScatterOptions()
ALL_GATHER, GATHER, SCATTER = _c10d.AllgatherOptions(), _c10d.GatherOptions(), _c10d.ScatterOptions()
BROADCAST, ALL_TO_ALL, BARRIER = _c10d.BroadcastOptions(), _c10d.AllToAllOptions(), _c10d.BarrierOptions()

#: The work of a call that was done when it returned.
DONE = Done()


def _spans(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Addresses and numbers of elements."""
    spans: list[int] = []
    for tensor in tensors:
        spans += (tensor.data_ptr(), tensor.numel())
    return spans


def _pieces(tensor: torch.Tensor, lengths: Sequence[int], parts: int) -> list[int]:
    """Addresses and numbers of elements of a tensor's parts along its first axis; equal parts without lengths."""
    rows = tensor.shape[0] if tensor.dim() else tensor.numel()
    lengths = lengths or [rows // parts] * parts
    row = tensor.numel() // rows if rows else 0
    spans, at, size = [], tensor.data_ptr(), tensor.element_size()
    for length in lengths:
        spans += (at, length * row)
        at += length * row * size
    return spans


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets):
        target.copy_(source)


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor if it is contiguous and aligned to its elements, else a copy that is. A tensor over a buffer of bytes need not be."""
    is_aligned = tensor.data_ptr() % min(tensor.element_size(), 8) == 0
    return tensor.contiguous() if is_aligned else tensor.clone(memory_format=torch.contiguous_format)


def _dense(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _recorded(title: str) -> Callable[[Callable[..., _Work]], Callable[..., _Work]]:
    """An operation that torch's profiler shows under the backend's name, as it shows those of torch's backends."""

    def decorate(operation: Callable[..., _Work]) -> Callable[..., _Work]:
        takes_tensors = operation.__name__.endswith("_single")
        wrong = list if takes_tensors else torch.Tensor

        @functools.wraps(operation)
        def call(self: Operations, *arguments: object, **named: object) -> _Work:
            if arguments and isinstance(arguments[0], wrong):
                expected = "a tensor" if takes_tensors else "a list of tensors"
                got = type(arguments[0]).__name__
                raise TypeError(
                    f"rank {self._rank}: {title}: expected {expected} and options as torch.distributed gives them, got {got}"
                )
            if not torch.autograd._profiler_enabled():
                return operation(self, *arguments, **named)
            # Of outputs and inputs, the event has the inputs.
            leaves = [pytree.tree_leaves(argument) for argument in arguments[1::-1]]
            tensors = next((each for each in leaves if each and isinstance(each[0], torch.Tensor)), [])
            event = torch.autograd._record_function_with_args_enter(f"{self.label}:{title}", *tensors)

            # In another thread: the profiler takes an event that ends in its own thread for a part of what that thread did.
            def end() -> None:
                self.calls.later(lambda: torch.autograd._record_function_with_args_exit(event))

            try:
                work = operation(self, *arguments, **named)
            except Exception:
                end()
                raise
            work.get_future().add_done_callback(lambda _: end())
            return work

        return call

    return decorate


class Operations:
    """The calls of one process group on this rank."""

    def __init__(self, native: _native.Group, name: str, label: str) -> None:
        self.native = native
        self.name_of_group = name
        #: The name by which the program asked for the backend, in the profiler's events.
        self.label = label
        self.calls = _native.ProcessGroup(native, list(DTYPES.items()))
        self._collective = self.calls.collective
        self._rank, self._size = native.rank, native.size
        self._sequence = 0
        self._coalesced: list[_Work] | None = None

    # How calls are made.

    def _named(self, error: Exception) -> Exception:
        return _errors.of_group(error, self._rank, self.name_of_group)

    def _refuse(self, error: Exception) -> Exception:
        """The error of a call that this rank has not made, and never will: the other ranks do not wait for it."""
        try:
            self.calls.refuse()
        except _native.Error:
            pass  # the group is gone, which `error` says
        return error

    def _usage(self, op: str, expected: str, got: object) -> Exception:
        return self._refuse(self._usage_of_one(op, expected, got))

    def _usage_of_one(self, op: str, expected: str, got: object) -> ValueError:
        """The error of what is no call of the group: nobody waits for this rank."""
        text = f"rank {self._rank}: {op} in process group {self.name_of_group}: expected {expected}, got {got}"
        return ValueError(text)

    def _check(self, op: str, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise self._usage(op, "dense tensors", f"one of layout {tensor.layout}; call to_dense() first")
            if tensor.dtype is not tensors[0].dtype:
                raise self._usage(op, f"tensors of {tensors[0].dtype}", f"one of {tensor.dtype}")
            if not tensor.is_cpu:
                raise self._usage(op, "tensors on the CPU", f"one on {tensor.device}")

    def _run(
        self,
        op: str,
        inputs: Tensors,
        outputs: Tensors,
        opts: object,
        *,
        reduction: str = "sum",
        root: int = 0,
        spans: tuple[Callable, Callable] = (_spans, _spans),
    ) -> _Work:
        """Make a collective that reads `inputs` and writes `outputs`. Of each, it gets the `spans`."""
        self._check(op, [*inputs, *outputs])
        self._sequence += 1
        waits = not opts.asyncOp
        read = inputs if _dense(inputs) else [tensor.contiguous() for tensor in inputs]
        written = outputs if _dense(outputs) else [tensor.contiguous() for tensor in outputs]
        back = None if written is outputs else lambda: _copy(written, outputs)
        tensor = (outputs or inputs)[0]
        try:
            given = spans[0](read), spans[1](written), tensor.dtype, reduction, root, waits, (read, written)
            call = self._collective(op, *given, None if waits else back)
        except _native.Error as error:
            raise self._named(error) from None
        if call is not None:
            return self._pending(call, outputs)
        if back is not None:
            back()
        return DONE if waits else Done(outputs)

    def _pending(self, call: _native.ProcessGroupCall, outputs: Tensors) -> _Work:
        work = Work(call, outputs, self._named)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _reduction(self, op: str, tensors: Tensors, opts: object) -> tuple[str, Tensors]:
        """The library's name of an operator, and what it applies to."""
        given = opts.reduceOp
        name = OPERATORS.get(given.op)
        if name is not None:
            return name, tensors
        if given.op == RedOpType.PREMUL_SUM:
            # An older torch has the factor in what it pickles only.
            factor = given.factor if hasattr(given, "factor") else given.__getstate__()[1]
            return "sum", [tensor * factor for tensor in tensors]
        raise self._usage(op, "a reduction", given)

    # Reductions.

    @_recorded("all_reduce")
    def allreduce(self, tensors: Tensors, opts: object = ALL_REDUCE) -> _Work:
        """Reduce tensors in place."""
        tensor = tensors[0]
        reduction = OPERATORS.get(opts.reduceOp.op)
        # The short way of the commonest call; `_run` has all checks.
        is_plain = tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
        if len(tensors) == 1 and reduction is not None and is_plain:
            self._sequence += 1
            waits, span = not opts.asyncOp, (tensor.data_ptr(), tensor.numel())
            try:
                call = self._collective("all_reduce", (), span, tensor.dtype, reduction, 0, waits, tensor)
            except _native.Error as error:
                raise self._named(error) from None
            return self._pending(call, tensors) if call is not None else DONE if waits else Done(tensors)
        return self._each(lambda tensor: self._allreduce_one(tensor, opts), tensors)

    def _allreduce_one(self, tensor: torch.Tensor, opts: object) -> _Work:
        self._check("all_reduce", [tensor])
        reduction, (scaled,) = self._reduction("all_reduce", [tensor], opts)
        if scaled is not tensor:
            tensor.copy_(scaled)
        return self._run("all_reduce", [], [tensor], opts, reduction=reduction)

    def _each(self, call: Callable[..., _Work], *lists: Sequence) -> _Work:
        """One call for each tensor, as one work."""
        works = [call(*one) for one in zip(*lists)]
        return works[0] if len(works) == 1 else Several(works)

    allreduce_coalesced = allreduce

    def allreduce_sparse(self, tensors: Tensors, opts: object = ALL_REDUCE) -> _Work:
        """Refuse sparse tensors."""
        self._check("all_reduce", tensors)
        return self.allreduce(tensors, opts)

    @_recorded("reduce")
    def reduce(self, tensors: Tensors, opts: object = REDUCE) -> _Work:
        """Reduce a tensor to the root, in place."""
        root = opts.rootRank
        self._check("reduce", tensors)
        reduction, inputs = self._reduction("reduce", tensors, opts)
        outputs = tensors if self._rank == root else []
        return self._run("reduce", inputs, outputs, opts, reduction=reduction, root=root)

    @_recorded("reduce_scatter")
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: object = REDUCE_SCATTER) -> _Work:
        """Reduce lists of tensors; each rank gets its entry."""
        reduction, parts = self._reduction("reduce_scatter", inputs[0], opts)
        self._count("reduce_scatter", parts)
        return self._run("reduce_scatter", parts, outputs, opts, reduction=reduction)

    @_recorded("_reduce_scatter_base")
    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: object = REDUCE_SCATTER) -> _Work:
        """Reduce tensors; each rank gets its equal part."""
        return self._reduce_scatter_single(output, given, opts)

    def _reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: object) -> _Work:
        reduction, inputs = self._reduction("reduce_scatter", [given], opts)
        return self._run("reduce_scatter", inputs, [output], opts, reduction=reduction)

    @_recorded("_reduce_scatter_base")
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: object = REDUCE_SCATTER
    ) -> _Work:
        """`reduce_scatter_single` of several tensors."""
        return self._each(lambda *pair: self._reduce_scatter_single(*pair, opts), outputs, inputs)

    # Data movement.

    def _count(self, op: str, tensors: Tensors) -> None:
        if len(tensors) != self._size:
            raise self._usage(op, f"a list of {self._size} tensors", f"one of {len(tensors)}")

    @_recorded("broadcast")
    def broadcast(self, tensors: Tensors, opts: object = BROADCAST) -> _Work:
        """Copy the root's tensor to all ranks."""
        return self._run("broadcast", [], tensors, opts, root=opts.rootRank)

    @_recorded("all_gather")
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: object = ALL_GATHER) -> _Work:
        """Copy all ranks' tensors to lists on all ranks."""
        self._count("all_gather", outputs[0])
        return self._run("all_gather", inputs, outputs[0], opts)

    @_recorded("_all_gather_base")
    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: object = ALL_GATHER) -> _Work:
        """Copy all ranks' tensors to one on all ranks."""
        return self._run("all_gather", [given], [output], opts)

    @_recorded("_all_gather_base")
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: object = ALL_GATHER) -> _Work:
        """`all_gather_single` of several tensors."""
        return self._each(lambda *pair: self._run("all_gather", pair[1:], pair[:1], opts), outputs, inputs)

    @_recorded("all_gather")
    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: object = ALL_GATHER) -> _Work:
        """`allgather` of several tensors: each entry of the list has one rank's tensors."""
        every = [[of_rank[i] for of_rank in outputs] for i in range(len(inputs))]
        return self._each(lambda out, one: self._run("all_gather", [one], out, opts), every, inputs)

    @_recorded("gather")
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: object = GATHER) -> _Work:
        """Copy all ranks' tensors to a list on the root."""
        root = opts.rootRank
        if self._rank == root:
            self._count("gather", outputs[0] if outputs else [])
        return self._run("gather", inputs, outputs[0] if self._rank == root else [], opts, root=root)

    @_recorded("gather")
    def gather_single(self, output: torch.Tensor | None, given: torch.Tensor, opts: object = GATHER) -> _Work:
        """Copy all ranks' tensors to one on the root."""
        root = opts.rootRank
        return self._run("gather", [given], [output] if self._rank == root else [], opts, root=root)

    @_recorded("scatter")
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: object = SCATTER) -> _Work:
        """Copy the entries of the root's list to the ranks."""
        root = opts.rootRank
        if self._rank == root:
            self._count("scatter", inputs[0] if inputs else [])
        return self._run("scatter", inputs[0] if self._rank == root else [], outputs, opts, root=root)

    @_recorded("all_to_all")
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: object = ALL_TO_ALL) -> _Work:
        """Send entry r of the list to rank r."""
        self._count("all_to_all", inputs)
        self._count("all_to_all", outputs)
        return self._run("all_to_all", inputs, outputs, opts)

    @_recorded("all_to_all")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_lengths: Sequence[int],
        input_lengths: Sequence[int],
        opts: object = ALL_TO_ALL,
    ) -> _Work:
        """Send part r of the first axis to rank r, with parts of given lengths."""
        for tensor, lengths in ((given, input_lengths), (output, output_lengths)):
            self._check_lengths(tensor, lengths)
        size = self._size
        spans = (
            lambda tensors: _pieces(tensors[0], input_lengths, size),
            lambda tensors: _pieces(tensors[0], output_lengths, size),
        )
        return self._run("all_to_all", [given], [output], opts, spans=spans)

    def _check_lengths(self, tensor: torch.Tensor, lengths: Sequence[int]) -> None:
        rows = tensor.shape[0] if tensor.dim() else tensor.numel()
        if lengths and (len(lengths) != self._size or sum(lengths) != rows):
            raise self._usage("all_to_all", f"{self._size} lengths that add up to {rows} rows", list(lengths))
        if not lengths and rows % self._size:
            raise self._usage("all_to_all", f"rows that {self._size} ranks divide", rows)

    # Messages.

    @_recorded("send")
    def send(self, tensors: Tensors, to: int, tag: int) -> _Work:
        """Send a tensor to a rank."""
        tensor = _sendable(self._message("send", tensors))
        span = tensor.data_ptr(), tensor.numel(), tensor.dtype
        try:
            call = self.calls.send(*span, to, tag, tensor)
        except _native.Error as error:
            raise self._named(error) from None
        return DONE if call is None else self._pending(call, tensors)

    @_recorded("recv")
    def recv(self, tensors: Tensors, source: int, tag: int) -> _Work:
        """Receive a tensor from a rank."""
        return self._receive(tensors, source, tag)

    @_recorded("recvAnySource")
    def recv_anysource(self, tensors: Tensors, tag: int) -> _Work:
        """Receive a tensor from any rank."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> _Work:
        tensor = self._message("recv", tensors)
        dense = _sendable(tensor)
        finish = None if dense is tensor else lambda: _copy([dense], [tensor])
        span = dense.data_ptr(), dense.numel(), dense.dtype
        try:
            call = self.calls.receive(*span, source, tag, dense, finish)
        except _native.Error as error:
            raise self._named(error) from None
        return self._pending(call, tensors)

    def _message(self, op: str, tensors: Tensors) -> torch.Tensor:
        if len(tensors) != 1 or tensors[0].layout is not torch.strided or not tensors[0].is_cpu:
            got = [f"{tensor.layout} on {tensor.device}" for tensor in tensors]
            raise ValueError(f"rank {self._rank}: {op}: expected one dense tensor on the CPU, got {got}")
        return tensors[0]

    # Several calls as one.

    def start_coalescing(self) -> None:
        """Collect the works of calls until `end_coalescing`."""
        self._coalesced = []

    def end_coalescing(self) -> _Work:
        """The works of the calls since `start_coalescing`, as one."""
        works, self._coalesced = self._coalesced or [], None
        return Several(works) if works else DONE

    # Meeting, and ending.

    @_recorded("barrier")
    def barrier(self, opts: object = BARRIER) -> _Work:
        """Wait for all ranks."""
        self._sequence += 1
        try:
            call = self.calls.barrier(not opts.asyncOp)
        except _native.Error as error:
            raise self._named(error) from None
        return DONE if call is None else self._pending(call, [])

    def monitored_barrier(self, opts: object = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. The error names all that are missing, on every rank."""
        limit = getattr(opts, "timeout", opts)
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else -1.0
        try:
            # A barrier that is no call of the group's sequence: the group goes on after a timeout.
            self.native.barrier(max(seconds, 1e-6) if seconds >= 0 else None, channel=self.native.channels - 1)
        except _native.Timeout as error:
            missing = ", ".join(str(rank) for rank in error.waiting_for)
            which = f"Ranks {missing}" if len(error.waiting_for) > 1 else f"Rank {missing}"
            text = (
                f"[Rank {self._rank}]: {which} failed to pass monitoredBarrier in {1000 * error.after:.0f} ms: {error}"
            )
            named = self._named(type(error)(text))
            named.__dict__.update(error.__dict__)
            raise named from None
        except _native.Error as error:
            raise self._named(error) from None

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of all later calls."""
        self.native.timeout = min(timeout.total_seconds(), sys.maxsize / 1e9)

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: numbers begin at 0 on every rank."""

    def abort(self) -> None:
        """End all calls with an error, and refuse later ones."""
        self.calls.abort()

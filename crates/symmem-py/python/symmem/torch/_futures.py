"""Works and futures of a process group's calls."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work as _Work

from symmem import _native

NEVER = timedelta(0)


class Work(_Work):
    """A call that may not be done yet. Its error is raised by `wait`, and is that of its future."""

    def __init__(
        self, call: _native.ProcessGroupCall, outputs: list[torch.Tensor], named: Callable[[Exception], Exception]
    ) -> None:
        super().__init__()
        self._call = call
        self._outputs = outputs
        self._named = named
        self._future: torch.futures.Future | None = None

    def wait(self, timeout: timedelta = NEVER) -> bool:
        """Wait until the call is done, or for as long as `timeout` if it is positive. Raise the call's error."""
        seconds = timeout.total_seconds()
        try:
            self._call.wait(seconds if seconds > 0 else None)
        except _native.Error as error:
            raise self._named(error) from None
        return True

    def is_completed(self) -> bool:
        """Whether the call is done, with success or an error."""
        return self._call.done()

    def is_success(self) -> bool:
        """Whether the call is done without an error."""
        return self._call.done() and self._call.error() is None

    def exception(self) -> Exception | None:
        """The error of a call that is done, or None."""
        error = self._call.error()
        return self._named(error) if isinstance(error, _native.Error) else error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the call writes."""
        return self._outputs

    def synchronize(self) -> None:
        """Wait until the call is done."""
        self.wait()

    def source_rank(self) -> int:
        """The sender of a message that was received from any rank."""
        return self._call.wait()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future with the tensors that the call writes, or with its error."""
        if self._future is None:
            done = torch.futures.Future()
            # What a callback raises is the error of the new future for C++ as well; `set_exception` is one for Python only.
            self._future = done.then(self._checked)
            self._call.then(lambda: done.set_result(None))
        return self._future

    def _checked(self, _: torch.futures.Future) -> list[torch.Tensor]:
        error = self.exception()
        if error is not None:
            raise error
        return self._outputs


class Done(_Work):
    """A call that was done when it returned."""

    def __init__(self, outputs: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self._outputs = outputs or []

    def wait(self, timeout: timedelta = NEVER) -> bool:
        """Return True."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    is_success = is_completed

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[torch.Tensor]:
        """The tensors that the call wrote."""
        return self._outputs

    def synchronize(self) -> None:
        """Do nothing."""

    def get_future(self) -> torch.futures.Future:
        """A future that is done."""
        future = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class Several(_Work):
    """Several calls, as one."""

    def __init__(self, works: list[_Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = NEVER) -> bool:
        """Wait for all calls. Raise the first error."""
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        """Whether all calls are done."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all calls are done without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        """The first error."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The tensors that the calls write."""
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:
        """Wait for all calls."""
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """A future with the tensors of all calls, or with the first error."""
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda done: [tensor for future in done.value() for tensor in future.value()])

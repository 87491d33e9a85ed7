"""Side streams and work objects without an accelerator, where everything is synchronous."""

from __future__ import annotations

import functools
from datetime import timedelta

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import Work as _Work


class Stream(torch.cpu.Stream):
    """A stream of a CPU: a context that changes nothing, because CPUs have no streams."""

    def __enter__(self) -> object:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@functools.cache
def side_stream(priority: int) -> Stream:
    """The stream of a priority, as PyTorch has for devices."""
    return Stream(priority)


class Work(symm_mem.Work):
    """PyTorch's work: `wait` makes the caller's stream wait for the stream that was current when this was made."""

    def __init__(self) -> None:
        self._in_stream = torch.accelerator.is_available()
        if self._in_stream:
            super().__init__()
        else:
            _Work.__init__(self)

    def wait(self, timeout: timedelta = timedelta(seconds=0)) -> bool:
        """Wait for it. Always returns True."""
        return super().wait(timeout) if self._in_stream else True

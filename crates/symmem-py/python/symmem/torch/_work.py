"""Side streams, and work to wait for, where there is no accelerator: all is done when it is called."""

from __future__ import annotations

import functools
from datetime import timedelta

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import Work as _Work


class Stream(torch.cpu.Stream):
    """A stream of a CPU, which has none: a context that changes nothing."""

    def __enter__(self) -> object:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@functools.cache
def side_stream(priority: int) -> Stream:
    """One for each priority, as PyTorch has it for devices."""
    return Stream(priority)


class Work(symm_mem.Work):
    """PyTorch's work: what the current stream has when it is made, and `wait` has the stream of its caller wait for that."""

    def __init__(self) -> None:
        self._in_stream = torch.accelerator.is_available()
        if self._in_stream:
            super().__init__()
        else:
            _Work.__init__(self)

    def wait(self, timeout: timedelta = timedelta(seconds=0)) -> bool:
        """Wait for it; True, as there is no way to fail."""
        return super().wait(timeout) if self._in_stream else True

"""torch moves a CPU storage elsewhere to share it with other processes; symmetric memory has to stay where it is."""

from __future__ import annotations

import functools

import torch

#: What `share_memory_` calls, and what sends a tensor to another process.
_MOVES = ("_share_fd_cpu_", "_share_filename_cpu_")


def install() -> None:
    """Have storages in symmetric memory refuse to be moved."""
    for name in _MOVES:
        former = getattr(torch.UntypedStorage, name)
        if not hasattr(former, "symmem"):
            setattr(torch.UntypedStorage, name, _refusing(former))


def _refusing(former):
    @functools.wraps(former)
    def share(self, *arguments, **named):
        if getattr(self, "symmem_owner", None) is not None:
            raise RuntimeError(
                "share_memory_: a symmetric tensor cannot be moved to other shared memory, peers would go on with the "
                "former; send a clone of it to other processes"
            )
        return former(self, *arguments, **named)

    share.symmem = True
    return share

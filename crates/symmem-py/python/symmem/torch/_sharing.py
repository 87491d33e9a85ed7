"""Refuses to share symmetric tensors through torch, which would move them to other memory."""

from __future__ import annotations

import functools

import torch

#: The methods that `share_memory_` and `torch.multiprocessing` call.
_MOVES = ("_share_fd_cpu_", "_share_filename_cpu_")


def install() -> None:
    """Make storages in symmetric memory refuse to be moved."""
    for name in _MOVES:
        former = getattr(torch.UntypedStorage, name)
        if not hasattr(former, "symmem"):
            setattr(torch.UntypedStorage, name, _refusing(former))


def _refusing(former):
    @functools.wraps(former)
    def share(self, *arguments, **named):
        if getattr(self, "symmem_owner", None) is not None:
            raise RuntimeError(
                "share_memory_: expected an ordinary tensor, got a symmetric one, which peers use where it is; share a clone of it"
            )
        return former(self, *arguments, **named)

    share.symmem = True
    return share

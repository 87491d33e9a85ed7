"""Errors of process groups: the library's, with the group's name, and torch's class for them as a base."""

from __future__ import annotations

import functools

import torch.distributed as dist

from symmem import _native

#: The first torch's code that looks for failures of a backend catches.
Failure = getattr(dist, "DistBackendError", RuntimeError)


@functools.cache
def _class(kind: type[Exception]) -> type[Exception]:
    """A class that is both an error of the library and one of torch's."""
    return type(kind.__name__, (kind, Failure), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def of_group(error: _native.Error, rank: int, group: str) -> Exception:
    """The same error, which also names this rank and the process group."""
    if isinstance(error, Failure):
        return error
    place = f"rank {rank} of process group {group}"
    # Programs that were written for gloo look for the word.
    late = isinstance(error, _native.Timeout)
    named = _class(type(error))(f"{error}, at the timeout of {place}" if late else f"{error} ({place})")
    named.__dict__.update(error.__dict__)
    return named

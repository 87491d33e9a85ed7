"""A refusal reaches all: ranks that make a call do not wait for one that refused it before it began."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

from symmem import _native
from symmem.torch import _groups, _memory

#: Whether the operator that a thread is in has waited for others: what it refuses then, they have not waited for.
_state = threading.local()


def has_begun() -> None:
    """Note that the operator that this thread is in has waited for other ranks."""
    _state.begun = True


def told(operator: Callable) -> Callable:
    """The same collective operator, whose refusals are told to the ranks of its group."""
    place = list(inspect.signature(operator).parameters).index("group_name")

    @functools.wraps(operator)
    def call(*arguments: object, **named: object) -> object:
        _state.begun = False
        try:
            return operator(*arguments, **named)
        except _native.Usage as error:
            refused = error
        except _native.Error:
            raise  # a call that began: all ranks have their own
        except Exception as error:  # noqa: BLE001  (it is raised below)
            refused = error
        if not (_state.begun or hasattr(refused, "symmem_told")):
            refused.symmem_told = True  # by whichever operator is the innermost
            name = named["group_name"] if "group_name" in named else arguments[place]
            _tell(name, (arguments, named), refused)
        raise refused

    return call


def _tell(group_name: str, given: object, refused: Exception) -> None:
    """Take this rank's part in a call that it refuses."""
    try:
        group = _groups.of(group_name)
        if not isinstance(refused, _native.Error) and len(refused.args) == 1:
            refused.args = (f"{refused.args[0]} (rank {group.rank} of group {group.name})",)
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        device = _on_device(tensors, group)
        if device is None:
            group.native.refuse()
        elif not torch.cuda.is_current_stream_capturing():
            _refuse_in_stream(*device)
    except Exception as error:  # noqa: BLE001  (what is raised is the refusal)
        refused.__context__ = error


def _on_device(tensors: list[torch.Tensor], group: _groups.Group) -> tuple[_native.Handle, int] | None:
    """Memory of a device on which peers' kernels wait: that of the call, or else any that the group has there. None on the host."""
    found = (_memory.find(tensor) for tensor in tensors)
    symmetric = next((allocation for allocation in found if allocation is not None), None)
    if symmetric is not None:
        # Peers are at the rendezvous, on the host, if this rank has not been there.
        handle, number = symmetric.known_handle(group), symmetric.number
        on_host = symmetric.on_host
    else:
        number = next((tensor.device.index for tensor in tensors if tensor.is_cuda), None)
        handle, on_host = group.handle_on(number), number is None
    return None if on_host or handle is None else (handle, number)


def _refuse_in_stream(handle: _native.Handle, number: int) -> None:
    """Put a barrier into the stream, which is another call than any that peers make here; a rank that refuses too makes it as well.

    It is not waited for: peers that never make the call would be. What comes of it is told by the next call on the group.
    """
    handle.group_barrier(_groups.stream(number))

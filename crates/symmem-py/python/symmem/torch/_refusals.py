"""Notifying the other ranks of a refused call, so that they do not wait for this rank."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

from symmem import _native
from symmem.torch import _groups, _memory

#: Whether a thread's current operator has waited for other ranks. Then they do not wait for its refusal.
_state = threading.local()


def has_begun() -> None:
    """Record that this thread's current operator has waited for other ranks."""
    _state.begun = True


def told(operator: Callable) -> Callable:
    """The same collective operator, which notifies the ranks of its group if it refuses a call."""
    place = list(inspect.signature(operator).parameters).index("group_name")

    @functools.wraps(operator)
    def call(*arguments: object, **named: object) -> object:
        _state.begun = False
        try:
            return operator(*arguments, **named)
        except _native.Usage as error:
            refused = error
        except _native.Error:
            raise  # the call had started: all ranks have their own error
        except Exception as error:  # noqa: BLE001  (it is raised below)
            refused = error
        if not (_state.begun or hasattr(refused, "symmem_told")):
            refused.symmem_told = True  # by the innermost operator
            name = named["group_name"] if "group_name" in named else arguments[place]
            _tell(name, (arguments, named), refused)
        raise refused

    return call


def _tell(group_name: str, given: object, refused: Exception) -> None:
    """Refuse a call in the group, and name this rank in the error."""
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
    """Device memory on which peers' kernels wait: that of the call, or any of the group on the device. None on the host."""
    found = (_memory.find(tensor) for tensor in tensors)
    symmetric = next((allocation for allocation in found if allocation is not None), None)
    if symmetric is not None:
        # Without a handle, this rank has not been at the rendezvous, where its peers wait on the host.
        handle, number = symmetric.known_handle(group), symmetric.number
        on_host = symmetric.on_host
    else:
        number = next((tensor.device.index for tensor in tensors if tensor.is_cuda), None)
        handle, on_host = group.handle_on(number), number is None
    return None if on_host or handle is None else (handle, number)


def _refuse_in_stream(handle: _native.Handle, number: int) -> None:
    """Put a barrier into the stream. It differs from the peers' call, which fails; a peer that also refuses makes the same barrier.

    Do not wait for it, because peers may never make the call. The next call on the group raises its failure.
    """
    handle.group_barrier(_groups.stream(number))

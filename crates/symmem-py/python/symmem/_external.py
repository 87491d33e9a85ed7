"""Communicators of NCCL that somebody else has made, by the names of groups."""

from __future__ import annotations

from typing import Any

from symmem._native import Communicator, External, Group


class Registration:
    """A communicator that was made elsewhere, known under the name of a group and a device until it is unregistered."""

    def __init__(self, group_name: str, comm_ptr: int, device: int, comm: Any = None) -> None:
        self.group_name = group_name
        self.comm_ptr = comm_ptr
        self.device = device
        self.communicator: Communicator | None = Communicator.adopt(comm_ptr, device)
        self._comm = comm  # so that it is not destroyed meanwhile
        self._uses: list[External] = []

    @property
    def active(self) -> bool:
        return self.communicator is not None

    def use_for(self, group: Group) -> None:
        """Has later rendezvous of a group register memory of NCCL on this communicator, which has the same ranks."""
        self._uses.append(External.register(group, self.device, self.comm_ptr))

    def unregister(self) -> None:
        """Forgets it; doing so again does nothing. Memory that is registered on the communicator stays so."""
        for use in self._uses:
            use.unregister()
        self._uses.clear()
        self.communicator = self._comm = None
        if _registrations.get((self.group_name, self.device)) is self:
            del _registrations[self.group_name, self.device]

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unregister()


_registrations: dict[tuple[str, int], Registration] = {}


def register_external_nccl_comm(group: str | Group, comm_ptr: int, device: Any, comm: Any = None) -> Registration:
    """Makes a communicator (`ncclComm_t`) of somebody else known for a group and a device; `comm` is kept alive with it.

    It lasts until `unregister`, the end of a `with`, or the next registration of the same two. Given a `symmem.Group`, and
    not only a name, its later rendezvous register memory with `backend="nccl"` on the communicator. Every rank registers
    its own before.
    """
    number = number_of(device)
    name = group.name if isinstance(group, Group) else group
    registration = Registration(name, comm_ptr, number, comm)
    if isinstance(group, Group):
        registration.use_for(group)
    _registrations[name, number] = registration
    return registration


def number_of(device: Any) -> int:
    """The number of a device: of one of torch's that says none, the current one's."""
    if isinstance(device, int):
        return device
    import torch

    number = torch.device(device).index
    return torch.cuda.current_device() if number is None else number


def registration_of(group_name: str, device: int) -> Registration | None:
    """What is registered for a group and a device."""
    return _registrations.get((group_name, device))


def external_nccl_comm(group_name: str, device: int) -> Communicator | None:
    """The communicator that is registered for a group and a device, if one is."""
    found = registration_of(group_name, device)
    return found.communicator if found else None


def clear() -> None:
    """Forgets all."""
    for registration in list(_registrations.values()):
        registration.unregister()

"""External NCCL communicators, by the names of groups."""

from __future__ import annotations

from typing import Any

from symmem._native import Communicator, External, Group


class Registration:
    """An external communicator, registered for the name of a group and a device until it is unregistered."""

    def __init__(self, group_name: str, comm_ptr: int, device: int, comm: Any = None) -> None:
        self.group_name = group_name
        self.comm_ptr = comm_ptr
        self.device = device
        self.communicator: Communicator | None = Communicator.adopt(comm_ptr, device)
        self._comm = comm  # keeps it alive
        self._uses: list[External] = []

    @property
    def active(self) -> bool:
        return self.communicator is not None

    def use_for(self, group: Group) -> None:
        """Uses this communicator, which has the same ranks, for NCCL memory in later rendezvous of the group."""
        self._uses.append(External.register(group, self.device, self.comm_ptr))

    def unregister(self) -> None:
        """Ends the registration; a second call does nothing. Memory that is registered on the communicator stays registered."""
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
    """Registers an external communicator (`ncclComm_t`) for a group and a device. It keeps `comm` alive.

    The registration ends with `unregister`, at the end of a `with` block, or with the next registration for the same group and
    device. If `group` is a `symmem.Group`, its later rendezvous register memory with `backend="nccl"` on the communicator. Every rank
    must register its own communicator first.
    """
    number = number_of(device)
    name = group.name if isinstance(group, Group) else group
    registration = Registration(name, comm_ptr, number, comm)
    if isinstance(group, Group):
        registration.use_for(group)
    _registrations[name, number] = registration
    return registration


def number_of(device: Any) -> int:
    """The number of a device; a device of torch without a number is the current one."""
    if isinstance(device, int):
        return device
    import torch

    number = torch.device(device).index
    return torch.cuda.current_device() if number is None else number


def registration_of(group_name: str, device: int) -> Registration | None:
    """The registration for a group and a device, if there is one."""
    return _registrations.get((group_name, device))


def external_nccl_comm(group_name: str, device: int) -> Communicator | None:
    """The communicator registered for a group and a device, if there is one."""
    found = registration_of(group_name, device)
    return found.communicator if found else None


def clear() -> None:
    """Ends all registrations."""
    for registration in list(_registrations.values()):
        registration.unregister()

"""Recovery after a call that timed out or was interrupted."""

from __future__ import annotations

import torch.distributed as dist

from symmem.torch import _groups
from symmem.torch._process_group import ProcessGroup


def resync(group: dist.ProcessGroup | str | None = None, timeout: float | None = None) -> None:
    """Bring the ranks of a group back in step after a call that timed out or was interrupted. All ranks call it.

    `group` is a process group or its name, by default the group of all ranks. Until all ranks have called this, every operator of the
    group raises `symmem.OutOfStepError`. Then everything works again, on CPU tensors and on devices. The elements of the failed call
    are unspecified. For a process group of the backend `symmem`, this includes its own calls. A group that lost a rank does not recover. `timeout` is in seconds, by default the group's; after a timeout this
    may be called again.
    """
    name = group if isinstance(group, str) else (group or dist.group.WORLD).group_name
    ours = _groups.process_group(name)
    if isinstance(ours, ProcessGroup):
        ours.cpu.native.resync(timeout)
        if not _groups.has_joined(ours):
            return
    _groups.of(name).native.resync(timeout)

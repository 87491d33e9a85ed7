"""Coming back in step after a call that timed out or was interrupted."""

from __future__ import annotations

import torch.distributed as dist

from symmem.torch import _groups


def resync(group: dist.ProcessGroup | str | None = None, timeout: float | None = None) -> None:
    """Bring a group whose calls no longer pair up back in step; collective over its ranks.

    `group` is a process group or its name, by default that of all ranks. After a call that timed out or was interrupted, every
    operator of the group raises `symmem.OutOfStepError` on all ranks until they have called this. Then all of it works again, on
    CPU tensors and on devices; the elements of the call that failed hold whatever it left there. A group of which a rank was
    lost stays so. `timeout` is in seconds, by default the group's; after a timeout it may be called again.
    """
    name = group if isinstance(group, str) else (group or dist.group.WORLD).group_name
    _groups.of(name).native.resync(timeout)

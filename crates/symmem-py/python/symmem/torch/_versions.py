"""The versions of torch that this package supports."""

import warnings

import torch
import torch.distributed

OLDEST = (2, 11)
NEWEST = (2, 15)
#: The first in which a backend of process groups can be written in Python, and is found by its name.
WITH_BACKENDS = (2, 14)


def release(version: str = torch.__version__) -> tuple[int, ...]:
    """Its first two numbers."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def has_backends() -> bool:
    """Whether this torch takes a backend of process groups in Python."""
    return release() >= WITH_BACKENDS


def check(version: str = torch.__version__) -> None:
    """Refuse a torch that is too old. Warn about one that is newer than any tested."""
    found = release(version)
    tried = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if found < OLDEST:
        raise ImportError(f"symmem.torch works with torch {tried}, and this is torch {version}: please upgrade torch")
    if not torch.distributed.is_available():
        raise ImportError(f"symmem.torch needs torch.distributed, which this torch {version} was built without")
    if found > NEWEST:
        warnings.warn(f"symmem.torch was tried with torch {tried}, and this is torch {version}", stacklevel=3)

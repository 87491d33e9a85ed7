"""The versions of torch that this package supports."""

import warnings

import torch
import torch.distributed

OLDEST = (2, 11)
NEWEST = (2, 15)


def check(version: str = torch.__version__) -> None:
    """Refuse a torch that is too old. Warn about one that is newer than any tested."""
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    tried = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if release < OLDEST:
        raise ImportError(f"symmem.torch works with torch {tried}, and this is torch {version}: please upgrade torch")
    if not torch.distributed.is_available():
        raise ImportError(f"symmem.torch needs torch.distributed, which this torch {version} was built without")
    if release > NEWEST:
        warnings.warn(f"symmem.torch was tried with torch {tried}, and this is torch {version}", stacklevel=3)

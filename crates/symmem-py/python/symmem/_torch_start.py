"""What torch calls at the end of its import, as the package's metadata says."""

import os
import sys

#: Process groups that are asked for as gloo shall be this library's.
REPLACES_GLOO = os.environ.get("SYMMEM_REPLACE_GLOO", "0") not in ("", "0")


def start() -> None:
    """Replace gloo if the environment asks for it. Make a torch that does not look for backends by their names know ours."""
    if "symmem.torch" in sys.modules:
        return  # it imports torch, and does all that itself
    if REPLACES_GLOO:
        import symmem.torch  # noqa: F401  (which replaces it)

        return
    import torch.distributed

    known = getattr(torch.distributed, "Backend", None)
    if known is not None and not hasattr(known, "_ensure_backend_registered"):
        known.register_backend("symmem", _create, extended_api=True, devices=["cpu"])


def _create(*given: object) -> object:
    from symmem.torch._process_group import create

    return create(*given)

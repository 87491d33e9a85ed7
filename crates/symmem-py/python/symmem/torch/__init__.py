"""PyTorch's symmetric memory on CPU tensors.

After `import symmem.torch`, code written for `torch.distributed._symmetric_memory` and `torch.ops.symm_mem` runs unchanged on CPU
tensors. CUDA tensors use torch's own backends, unless `install("cuda")` is called.
"""

from symmem._torch_start import REPLACES_GLOO
from symmem.torch import _versions

_versions.check()

from symmem.torch._autograd import AllToAllVDev2d, AllToAllVDev2dOffset
from symmem.torch._handle import SymmetricMemory
from symmem.torch._install import BACKEND, install
from symmem.torch._pool import MemPool, use_mem_pool
from symmem.torch._process_group import register, replace_gloo
from symmem.torch._shrink import shrink
from symmem.torch._steps import resync
from symmem.torch._workspace import workspace

__all__ = [
    "BACKEND",
    "AllToAllVDev2d",
    "AllToAllVDev2dOffset",
    "MemPool",
    "SymmetricMemory",
    "install",
    "replace_gloo",
    "resync",
    "shrink",
    "use_mem_pool",
    "workspace",
]

install("cpu")
register()
if REPLACES_GLOO:
    replace_gloo()

"""What vLLM calls in each of its processes, as the package's metadata says."""

import os


def start() -> None:
    """Make vLLM's groups of CPU ranks this library's, if `SYMMEM_VLLM` asks for it. May be called again."""
    if os.environ.get("SYMMEM_VLLM", "0") in ("", "0"):
        return
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.get_device_communicator_cls = classmethod(lambda cls: "symmem.vllm.Communicator")

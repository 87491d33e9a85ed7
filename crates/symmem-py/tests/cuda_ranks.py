"""What the tests of `symmem.torch` on CUDA tensors share. Ranks share devices where there are more ranks than devices."""

import symmem.torch
import torch
import torch.distributed as dist


def device_of(rank):
    """This rank's device, with the library installed for it."""
    symmem.torch.install("cuda")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def leave():
    """Nobody's memory goes while a peer's kernels may use it."""
    torch.cuda.synchronize()
    dist.barrier()


def delay():
    """Has the current stream do nothing for a while."""
    torch.cuda._sleep(50_000_000)

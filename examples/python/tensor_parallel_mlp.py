"""A two-layer perceptron whose weights are divided among ranks, on CPUs, checked against the undivided one.

The first layer is divided by columns and the second by rows, so each rank computes a part of the sum that is the output.
The parts are summed in symmetric memory, by the operator that one would call on GPUs. Run it as

    python examples/python/tensor_parallel_mlp.py 2
    torchrun --nproc-per-node 2 examples/python/tensor_parallel_mlp.py
"""

import os
import sys
import tempfile

import symmem.torch  # noqa: F401  (symmetric memory on CPU tensors)
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.multiprocessing as mp

BATCH, WIDTH, HIDDEN = 32, 64, 256


class TensorParallelMLP(torch.nn.Module):
    """relu(x @ up) @ down, of which this rank has a part of the hidden units."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        rank, size = group.rank(), group.size()
        self.up = torch.nn.Parameter(up.chunk(size, dim=1)[rank].contiguous())
        self.down = torch.nn.Parameter(down.chunk(size, dim=0)[rank].contiguous())
        self.group_name = group.group_name
        self.partial = symm_mem.empty(BATCH, WIDTH, device=up.device)
        symm_mem.rendezvous(self.partial, group)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = torch.relu(x @ self.up) @ self.down
        return torch.ops.symm_mem.one_shot_all_reduce_copy(self.partial, part, "sum", self.group_name)


def weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input and weights, the same on all ranks."""
    torch.manual_seed(0)
    return torch.randn(BATCH, WIDTH), torch.randn(WIDTH, HIDDEN) / WIDTH**0.5, torch.randn(HIDDEN, WIDTH) / HIDDEN**0.5


def check(group: dist.ProcessGroup) -> None:
    x, up, down = weights()
    expected = torch.relu(x @ up) @ down
    model = TensorParallelMLP(up, down, group)
    for call in (model, torch.compile(model, backend="aot_eager")):
        torch.testing.assert_close(call(x), expected, rtol=1e-4, atol=1e-4)
    if group.rank() == 0:
        print(f"{group.size()} ranks: the same as the undivided model")


def main(rank: int | None = None, size: int | None = None, store: str | None = None) -> None:
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    check(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(main, args=(ranks, f"{folder}/store"), nprocs=ranks)

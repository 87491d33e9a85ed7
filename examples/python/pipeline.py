"""Training in pipeline stages on CPUs: with gloo, only the name of the backend would be another one.

torchrun --nproc-per-node 2 examples/python/pipeline.py [gloo]
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "symmem")
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(size)]
stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=2 * size, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.5)

inputs = torch.randn(64, 32)
targets = inputs.roll(1, 1).tanh() / 2
first = last = None
for step in range(30):
    optimizer.zero_grad()
    losses = []
    schedule.step(
        *([inputs] if rank == 0 else []), **({"target": targets, "losses": losses} if rank == size - 1 else {})
    )
    optimizer.step()
    last = torch.stack(losses).mean().detach() if losses else None
    first = last if first is None else first

if rank == size - 1:
    assert last < 0.9 * first, (first, last)
    print(f"loss {first:.4f} to {last:.4f} in {size} stages over {dist.get_backend()}")
dist.destroy_process_group()

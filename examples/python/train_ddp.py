"""Data-parallel training on CPUs: with gloo, only the name of the backend would be another one.

torchrun --nproc-per-node 2 examples/python/train_ddp.py [gloo]
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "symmem")
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)

inputs = torch.randn(64, 16)
targets = inputs.sum(1, keepdim=True).sin()
for step in range(30):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(parallel(inputs.chunk(size)[rank]), targets.chunk(size)[rank])
    loss.backward()
    optimizer.step()

dist.all_reduce(loss := loss.detach(), dist.ReduceOp.AVG)
assert loss < 0.4, loss
if rank == 0:
    print(f"loss {loss:.4f} with {size} ranks over {dist.get_backend()}")
dist.destroy_process_group()

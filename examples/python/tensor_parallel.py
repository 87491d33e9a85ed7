"""A perceptron with torch's tensor parallelism (DTensor) on CPUs: with gloo, only the name of the backend would be another one.

torchrun --nproc-per-node 2 examples/python/tensor_parallel.py [gloo]
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "symmem")
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
inputs = torch.randn(32, 64)
expected = model(inputs)
expected.sum().backward()
gradient = model[0].weight.grad.chunk(size)[rank].clone()
model.zero_grad()

parallelize_module(model, init_device_mesh("cpu", (size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
output = model(inputs)
output.sum().backward()
torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(model[0].weight.grad.to_local(), gradient, rtol=1e-4, atol=1e-4)
if rank == 0:
    print(f"{size} ranks over {dist.get_backend()}: the same as the undivided model")
dist.destroy_process_group()

"""A mixture of experts on CPUs, with two experts on each rank: with gloo, only the name of the backend would be another one.

torchrun --nproc-per-node 2 examples/python/mixture_of_experts.py [gloo]
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "symmem")
rank, size = dist.get_rank(), dist.get_world_size()

WIDTH, EACH, CHOSEN = 16, 2, 2


def route(router, tokens):
    """The experts that each token chooses, and their weights."""
    weights, experts = router(tokens).softmax(-1).topk(CHOSEN)
    return weights / weights.sum(-1, keepdim=True), experts


def exchanged(rows, received, sent):
    """The rows that ranks send to this one. Their gradients go the same way back."""
    rows = all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)
    return torch.ops._c10d_functional.wait_tensor(rows)


def mixture(router, mine, tokens):
    """Each token's weighted sum of what its experts, which are on their own ranks, make of it."""
    weights, experts = route(router, tokens)
    order = experts.flatten().argsort(stable=True)
    sent = experts.flatten().bincount(minlength=size * EACH).view(size, EACH)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    splits = received.sum(1).tolist(), sent.sum(1).tolist()

    dispatched = exchanged(tokens[order // CHOSEN], *splits)
    # They come by rank, and of each rank by expert.
    local = torch.arange(EACH).repeat(size).repeat_interleave(received.flatten())
    rows = [(local == i).nonzero().flatten() for i in range(EACH)]
    outputs = torch.cat([one(dispatched[at]) for one, at in zip(mine, rows)])
    combined = exchanged(outputs[torch.cat(rows).argsort()], *reversed(splits))
    return torch.zeros_like(tokens).index_add(0, order // CHOSEN, combined * weights.flatten()[order, None])


def undivided(router, every, tokens):
    """The same with all experts on one rank."""
    weights, experts = route(router, tokens)
    outputs = torch.stack([one(tokens) for one in every], 1)
    return (outputs.gather(1, experts[..., None].expand(-1, -1, WIDTH)) * weights[..., None]).sum(1)


torch.manual_seed(0)
router = torch.nn.Linear(WIDTH, size * EACH)
layers = [(torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, WIDTH)) for _ in range(size * EACH)]
every = [torch.nn.Sequential(*one) for one in layers]
mine = torch.nn.ModuleList(every[rank * EACH : (rank + 1) * EACH])
tokens = [torch.randn(32 + 8 * r, WIDTH, requires_grad=True) for r in range(size)]  # of each rank, another number
learned = [tokens[rank], *router.parameters(), *mine.parameters()]

expected = [undivided(router, every, given) for given in tokens]
gradients = torch.autograd.grad(sum(output.square().sum() for output in expected), learned)

output = mixture(router, mine, tokens[rank])
output.square().sum().backward()
for parameter in router.parameters():  # which all ranks have
    dist.all_reduce(parameter.grad)
torch.testing.assert_close(output, expected[rank], rtol=1e-4, atol=1e-4)
for parameter, gradient in zip(learned, gradients):
    torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)
if rank == 0:
    print(f"{size * EACH} experts on {size} ranks over {dist.get_backend()}: the same as on one rank")
dist.destroy_process_group()

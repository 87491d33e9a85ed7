"""As much of vLLM as `symmem.vllm` uses, where it is not installed: the classes that its communicators derive from."""

import sys
import types

import torch
import torch.distributed as dist


class DeviceCommunicatorBase:
    def __init__(self, cpu_group, device=None, device_group=None, unique_name="", use_all2all=False):
        self.cpu_group, self.device_group, self.unique_name = cpu_group, device_group, unique_name
        self.device = device or torch.device("cpu")
        self.world_size, self.ranks = dist.get_world_size(cpu_group), dist.get_process_group_ranks(cpu_group)
        self.rank_in_group = dist.get_group_rank(cpu_group, dist.get_rank())
        self.use_all2all = unique_name.split(":")[0] == "ep" and use_all2all
        self.all2all_manager = None

    def reduce_scatter(self, input_, dim=-1):
        rows = input_.movedim(dim, 0).contiguous()
        output = rows.new_empty((rows.shape[0] // self.world_size, *rows.shape[1:]))
        dist.reduce_scatter_tensor(output, rows, group=self.device_group)
        return output.movedim(0, dim).contiguous()

    def broadcast(self, tensor, src=0):
        dist.broadcast(tensor, self.ranks[src], self.device_group)
        return tensor

    def send(self, tensor, dst):
        dist.send(tensor, self.ranks[dst], self.device_group)

    def recv(self, size, dtype, src):
        tensor = torch.empty(size, dtype=dtype)
        dist.recv(tensor, self.ranks[src], self.device_group)
        return tensor


class CpuCommunicator(DeviceCommunicatorBase):
    def __init__(self, *arguments, **named):
        raise AssertionError("it would make shared memory of its own")

    def all_reduce(self, input_):
        self.dist_module.all_reduce(input_, group=self.device_group)
        return input_

    def gather(self, input_, dst=0, dim=-1):
        out = [torch.empty_like(input_) for _ in self.ranks] if self.rank_in_group == dst else None
        self.dist_module.gather(input_, out, dst=self.ranks[dst], group=self.device_group)
        return torch.cat(out, dim) if out else None

    def all_gather(self, input_, dim=-1):
        out = input_.new_empty((self.world_size * input_.shape[0], *input_.shape[1:]))
        self.dist_module.all_gather_into_tensor(out, input_, group=self.device_group)
        return torch.cat(out.chunk(self.world_size), dim)

    def send_tensor_dict(self, tensor_dict, dst):
        assert self.supports_tensor_dict
        self.dist_module.send_tensor_dict(tensor_dict, dst)

    def recv_tensor_dict(self, src):
        assert self.supports_tensor_dict
        return self.dist_module.recv_tensor_dict(src)

    def dispatch(self, hidden_states, topk_weights, topk_ids, is_sequence_parallel=False, extra_tensors=None):
        tensors = [hidden_states, topk_weights, topk_ids]
        return self.all2all_manager.dispatch(*tensors, is_sequence_parallel, extra_tensors=extra_tensors)

    def combine(self, hidden_states, is_sequence_parallel=False):
        return self.all2all_manager.combine(hidden_states, is_sequence_parallel)


class AgRsAll2AllManager:
    """vLLM's takes the group, and the rows of each rank, from its own state: here they are set."""

    communicator = sizes = None

    def __init__(self, cpu_group):
        self.world_size = dist.get_world_size(cpu_group)

    def dispatch(self, hidden_states, topk_weights, topk_ids, is_sequence_parallel=False, extra_tensors=None):
        tensors = [hidden_states, topk_weights, topk_ids, *(extra_tensors or [])]
        gathered = self.communicator.all_gatherv(tensors, dim=0, sizes=self.sizes)
        return (*gathered[:3], gathered[3:]) if extra_tensors is not None else tuple(gathered)

    def combine(self, hidden_states, is_sequence_parallel=False):
        return self.communicator.reduce_scatterv(hidden_states, dim=0, sizes=self.sizes)


class CpuPlatform:
    @classmethod
    def get_device_communicator_cls(cls):
        return "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"


def install():
    """Makes `import vllm` find this."""
    contents = {
        "vllm": {},
        "vllm.platforms": {},
        "vllm.platforms.cpu": {"CpuPlatform": CpuPlatform},
        "vllm.distributed": {},
        "vllm.distributed.device_communicators": {},
        "vllm.distributed.device_communicators.cpu_communicator": {"CpuCommunicator": CpuCommunicator},
        "vllm.distributed.device_communicators.all2all": {"AgRsAll2AllManager": AgRsAll2AllManager},
    }
    for name, names in contents.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(names)

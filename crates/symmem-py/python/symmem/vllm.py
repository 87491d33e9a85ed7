"""vLLM's communicator of CPU ranks, over this library.

`SYMMEM_VLLM=1` puts it in the place of vLLM's own. Imports vLLM.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from symmem.torch._process_group import NAME, ProcessGroup

__all__ = ["Communicator", "Distributed"]

#: The tag of messages that carry a dictionary.
TAG = 0x7EB


class Communicator(CpuCommunicator):
    """A `CpuCommunicator` whose calls go through a process group of this library, whatever the name of the group.

    It adds the operations that vLLM's has not: `all_gatherv` and `reduce_scatterv`, over which vLLM dispatches tokens to experts and
    combines their results.
    """

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        **named: Any,
    ) -> None:
        # Not that of vLLM's class, which makes shared memory of its own.
        super(CpuCommunicator, self).__init__(cpu_group, device, device_group, unique_name, **named)
        self._made = not isinstance(device_group, ProcessGroup)
        if self._made:
            # The ranks of the group alone make it, at this same point of theirs.
            self.device_group = dist.new_group(self.ranks, backend=NAME, use_local_synchronization=True)
        self.dist_module = Distributed(self.device_group)
        self.supports_tensor_dict = True
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)
        log = logging.getLogger("symmem")
        log.info("vLLM's group %s: symmem on rank %d of %d", unique_name, self.rank_in_group, self.world_size)

    def destroy(self) -> None:
        """Leave the process group, if it is this communicator's own. vLLM ends its own groups itself."""
        if self._made and self.device_group is not None:
            dist.destroy_process_group(self.device_group)
            self.device_group = None

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenate all ranks' tensors along the first axis, of which rank r has `sizes[r]` rows.

        Without sizes, all ranks have the same number. Of a list, each tensor by itself.
        """
        if isinstance(input_, torch.Tensor):
            return self._all_gatherv([input_], dim, sizes)[0]
        return self._all_gatherv(input_, dim, sizes)

    def _all_gatherv(self, inputs: Sequence[torch.Tensor], dim: int, sizes: list[int] | None) -> list[torch.Tensor]:
        if dim != 0:
            raise self._wrong("all_gatherv", "dim 0", dim)
        rank, outputs = self.rank_in_group, []
        for one in inputs:
            counts = self._counts("all_gatherv", sizes, one.shape[0])
            if counts[rank] != one.shape[0]:
                raise self._wrong("all_gatherv", f"{counts[rank]} rows, which sizes has for rank {rank}", one.shape[0])
            output = one.new_empty((sum(counts), *one.shape[1:]))
            dist.all_gather(list(output.split(counts)), one, group=self.device_group)
            outputs.append(output)
        return outputs

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """Sum all ranks' tensors; rank r gets `sizes[r]` rows along an axis, without sizes equal parts."""
        if not -input_.dim() <= dim < input_.dim():
            raise self._wrong("reduce_scatterv", f"a dim of a tensor of shape {tuple(input_.shape)}", dim)
        rows = input_.movedim(dim, 0).contiguous()
        counts = self._counts("reduce_scatterv", sizes, rows.shape[0] // self.world_size)
        if sum(counts) != rows.shape[0]:
            expected = f"sizes that add up to {rows.shape[0]} rows, or none and rows for {self.world_size} equal parts"
            raise self._wrong("reduce_scatterv", expected, counts)
        output = rows.new_empty((counts[self.rank_in_group], *rows.shape[1:]))
        dist.reduce_scatter(output, list(rows.split(counts)), group=self.device_group)
        return output.movedim(0, dim).contiguous()

    def _counts(self, op: str, sizes: list[int] | None, own: int) -> list[int]:
        """The rows of each rank."""
        counts = [own] * self.world_size if sizes is None else list(sizes)
        if len(counts) != self.world_size:
            raise self._wrong(op, f"{self.world_size} sizes", counts)
        return counts

    def _wrong(self, op: str, expected: str, got: object) -> Exception:
        """The error of a call that this rank refuses: the other ranks do not wait for it."""
        return self.device_group.cpu._usage(op, expected, got)


class Distributed:
    """What vLLM's class calls in place of `torch.distributed`."""

    all_reduce = staticmethod(dist.all_reduce)
    gather = staticmethod(dist.gather)
    all_gather_into_tensor = staticmethod(dist.all_gather_into_tensor)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def send_tensor_dict(self, tensor_dict: dict[str, torch.Tensor | Any], dst: int) -> None:
        """Send a dictionary of tensors, and of values that JSON has, to a rank of the group."""
        head: list[tuple[str, Any, Any]] = []
        tensors = []
        for key, value in tensor_dict.items():
            if isinstance(value, torch.Tensor):
                head.append((key, str(value.dtype).removeprefix("torch."), list(value.shape)))
                tensors.append(value)
            else:
                head.append((key, None, value))
        try:
            text = json.dumps(head).encode()
        except (TypeError, ValueError) as error:
            raise TypeError(f"send_tensor_dict: expected tensors and values that JSON has: {error}") from None
        if json.loads(text) != [list(entry) for entry in head]:
            raise TypeError("send_tensor_dict: expected tensors and values that JSON keeps as they are")
        header = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        for tensor in (torch.tensor([len(text)]), header, *tensors):
            if tensor.numel():
                dist.send(tensor.contiguous(), group=self.group, group_dst=dst, tag=TAG)

    def recv_tensor_dict(self, src: int) -> dict[str, torch.Tensor | Any]:
        """Receive a dictionary from a rank of the group."""
        length = self._received(torch.empty(1, dtype=torch.int64), src)
        header = self._received(torch.empty(int(length), dtype=torch.uint8), src)
        received = {}
        for key, dtype, value in json.loads(header.numpy().tobytes()):
            if dtype is not None:
                value = self._received(torch.empty(value, dtype=getattr(torch, dtype)), src)
            received[key] = value
        return received

    def _received(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        if tensor.numel():
            dist.recv(tensor, group=self.group, group_src=src, tag=TAG)
        return tensor

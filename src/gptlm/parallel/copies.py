"""ZeRO groups that are copies of each other: fewer replicas than all share one optimizer state.

ZeRO reduces gradients inside a group, once for each micro-batch in stages 2 and 3. Before the update the shards are
averaged over the groups, so every group computes the same norm, overflow and weights. As in PyTorch's hybrid sharding
(arXiv 2304.11277, section 3.2.2) there are two reductions of D/S and S processes in place of one of D.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptlm.parallel.process_groups import Mesh
from gptlm.upstream.deepspeed import average_gradients, check_copies, wrap_step

CHUNK = 1 << 26  # elements in host memory that are on the GPU at a time


class Copies:
    """What the ZeRO groups of `mesh` agree on.

    Raises:
        GptlmError: if this version of DeepSpeed cannot average over them.
    """

    def __init__(self, mesh: Mesh):
        check_copies()
        self.group, self.number = mesh.copy_group, mesh.copies
        self.first = dist.get_global_rank(mesh.copy_group, 0)

    @torch.no_grad()
    def broadcast_weights(self, model: Any) -> None:
        """Let all groups start from the weights of the first one, as DeepSpeed does inside a group."""
        for parameter in model.parameters():
            shard = getattr(parameter, "ds_tensor", parameter)  # of stage 3
            self._on_device(shard.data, lambda part: dist.broadcast(part, self.first, group=self.group))

    def attach(self, engine: Any) -> None:
        """Average gradients over the groups before each step of `engine`."""
        optimizer = engine.optimizer
        wrap_step(optimizer, before=lambda: average_gradients(optimizer, self.average))

    @torch.no_grad()
    def average(self, gradients: Tensor) -> None:
        """The mean of `gradients` over the groups, in place."""
        gradients.div_(self.number)  # before the sum, which might overflow in float16
        self._on_device(gradients, lambda part: dist.all_reduce(part, group=self.group))

    def _on_device(self, tensor: Tensor, communicate: Any) -> None:
        """Call `communicate` with `tensor`; NCCL needs what is in host memory on the GPU."""
        if tensor.is_cuda or dist.get_backend(self.group) != "nccl":
            communicate(tensor)
            return
        for part in tensor.view(-1).split(CHUNK):
            moved = part.cuda()
            communicate(moved)
            part.copy_(moved)

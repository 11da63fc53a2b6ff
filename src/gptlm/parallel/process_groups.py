"""Process groups: of tensor, data and pipeline parallelism, and of ranks that share one optimizer state."""

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from gptlm.parallel.dims import ParallelDims
from gptlm.upstream.deepspeed import check_replicated_shards, initialized_with, wrap_step


class Mpu:
    """DeepSpeed's interface for process groups ("model parallel unit").

    ZeRO shards over `data_group`; the gradient norm is summed over `model_group` as well.
    """

    data_group: Any
    data_rank: int
    data_size: int
    model_group: Any
    model_rank: int
    model_size: int

    def get_data_parallel_group(self) -> Any:
        return self.data_group

    def get_data_parallel_rank(self) -> int:
        return self.data_rank

    def get_data_parallel_world_size(self) -> int:
        return self.data_size

    def get_model_parallel_group(self) -> Any:
        return self.model_group

    def get_model_parallel_rank(self) -> int:
        return self.model_rank

    def get_model_parallel_world_size(self) -> int:
        return self.model_size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def as_mpu(self) -> AbstractContextManager[None]:
        """Inside, `deepspeed.initialize` makes an engine that uses these groups; raises GptlmError if it does not."""
        return initialized_with(self)


class Mesh(Mpu):
    """The process groups of tensor, data and pipeline parallelism. Creating it is a collective operation.

    Rank = (pipeline x data degree + data) x tensor degree + tensor, so that the processes of a tensor-parallel group,
    which communicate most, are neighbours (as in Megatron-LM).

    Attributes:
        tensor_rank, data_rank, pipeline_rank: this process's coordinates.
        tensor_group: processes that split each layer.
        pipeline_group: processes that split the stack of layers, first stage first.
        data_group: replicas.
        model_group: all processes of one replica.
        tied_group: first and last stage, which both hold the embedding; None on other stages.
    """

    def __init__(self, dims: ParallelDims):
        self.dims = dims
        rank = dist.get_rank()
        tensor, data, pipeline = dims.tensor, dims.data, dims.pipeline
        self.tensor_rank = rank % tensor
        self.data_rank = rank // tensor % data
        self.pipeline_rank = rank // (tensor * data)
        self.data_size, self.model_size = data, tensor * pipeline
        self.model_rank = self.pipeline_rank * tensor + self.tensor_rank

        def at(p: int, d: int, t: int) -> int:
            return (p * data + d) * tensor + t

        ps, ds, ts = range(pipeline), range(data), range(tensor)
        self.tensor_group = _new_groups([[at(p, d, t) for t in ts] for p in ps for d in ds])
        self.data_group = _new_groups([[at(p, d, t) for d in ds] for p in ps for t in ts])
        self.pipeline_group = _new_groups([[at(p, d, t) for p in ps] for d in ds for t in ts])
        self.model_group = _new_groups([[at(p, d, t) for p in ps for t in ts] for d in ds])
        self.tied_group = _new_groups([sorted({at(0, d, t), at(pipeline - 1, d, t)}) for d in ds for t in ts])

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.dims.pipeline - 1

    @property
    def needs_tokens(self) -> bool:
        """Whether a batch's ids or targets are used here; the stages between need its shape only."""
        return self.is_first_stage or self.is_last_stage


class ShardGroups(Mpu):
    """Data-parallel ranks in groups that share one optimizer state; the groups are replicas of each other.

    ZeRO reduces gradients and shards inside a group, `attach` averages them over the groups.

    Args:
        degree: ranks per group; divides the world size.
    """

    def __init__(self, degree: int):
        world, rank = dist.get_world_size(), dist.get_rank()
        self.data_rank, self.data_size = rank % degree, degree
        self.data_group = _new_groups([list(range(start, start + degree)) for start in range(0, world, degree)])
        self.replicas = world // degree
        self.replica_group = _new_groups([list(range(offset, world, degree)) for offset in range(degree)])
        self.model_group, self.model_rank, self.model_size = _new_groups([[single] for single in range(world)]), 0, 1

    def attach(self, engine: Any) -> None:
        """Average gradients over the replicas before each step of `engine` (ZeRO stage 1)."""
        check_replicated_shards()
        wrap_step(engine.optimizer, before=lambda: self._average(engine.optimizer))

    def _average(self, zero_optimizer: Any) -> None:
        for gradients in zero_optimizer.averaged_gradients.values():
            for gradient in gradients or ():
                dist.all_reduce(gradient, group=self.replica_group)
                gradient /= self.replicas


def _new_groups(groups: list[list[int]]) -> Any:
    """Create all `groups`, as every process must; returns the one that holds this process, or None."""
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next((group for ranks, group in made if dist.get_rank() in ranks), None)

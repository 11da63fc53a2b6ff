"""Process groups of tensor, data and pipeline parallelism, and of ranks that share one optimizer state."""

from typing import Any

import torch.distributed as dist

from gptlm.parallel.dims import ParallelDims, Ranks


class Mesh:
    """The process groups of tensor, data and pipeline parallelism. Creating it is a collective operation.

    `ParallelDims.rank_at` says which rank is where.

    Args:
        shards: replicas that share one optimizer state; divides their number. None: all.

    Attributes:
        tensor_rank, data_rank, pipeline_rank: this process's coordinates.
        tensor_group: processes that split each layer.
        pipeline_group: processes that split the stack of layers, first stage first.
        model_group: all processes of one replica.
        tied_group: first and last stage, which both hold the embedding; None on other stages.
        zero_group: `shards` replicas between which ZeRO reduces gradients and shards.
        copy_group: processes with the same shards, in the `copies` ZeRO groups.
    """

    def __init__(self, dims: ParallelDims, shards: int | None = None):
        self.dims, self.shards = dims, shards or dims.data
        self.tensor_rank, self.data_rank, self.pipeline_rank = dims.place_of(dist.get_rank())
        self.model_size = dims.tensor * dims.pipeline
        self.model_rank = self.pipeline_rank * dims.tensor + self.tensor_rank
        self.copies = dims.data // self.shards
        groups, singles = dims.groups(self.shards), dict[int, Any]()
        self.tensor_group = _new_groups(groups.tensor, singles)
        self.pipeline_group = _new_groups(groups.pipeline, singles)
        self.model_group = _new_groups(groups.model, singles)
        self.tied_group = _new_groups(groups.tied, singles)
        self.zero_group = _new_groups(groups.zero, singles)
        self.copy_group = _new_groups(groups.copies, singles)

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

    # DeepSpeed's interface for process groups ("model parallel unit"). Its data-parallel group is the ZeRO group: it
    # shards over it. The gradient norm is summed over the model-parallel group as well.

    def get_data_parallel_group(self) -> Any:
        return self.zero_group

    def get_data_parallel_rank(self) -> int:
        return self.data_rank % self.shards

    def get_data_parallel_world_size(self) -> int:
        return self.shards

    def get_model_parallel_group(self) -> Any:
        return self.model_group

    def get_model_parallel_rank(self) -> int:
        return self.model_rank

    def get_model_parallel_world_size(self) -> int:
        return self.model_size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def _new_groups(groups: Ranks, singles: dict[int, Any]) -> Any:
    """Create all `groups`, as every process must; returns the one that holds this process, or None.

    Args:
        singles: groups of one process by rank, which are made once.
    """
    found = None
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(ranks)
        else:
            if ranks[0] not in singles:
                singles[ranks[0]] = dist.new_group(ranks)
            group = singles[ranks[0]]
        if dist.get_rank() in ranks:
            found = group
    return found

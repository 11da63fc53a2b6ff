"""Which process does what: tensor parallelism fastest, then data parallelism, then the pipeline.

Rank = (pipeline x data degree + data) x tensor degree + tensor, so that the processes which exchange most lie next to
each other. A mesh is also the `mpu` by which DeepSpeed learns its groups: ZeRO shards over data-parallel processes
only, and the gradient norm is taken over all that share a replica.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from gptlm.parallel.dims import ParallelDims


class Mpu:
    """The `mpu` by which DeepSpeed learns its groups, given the three of data and the three of model parallelism."""

    def get_model_parallel_group(self) -> Any:
        raise NotImplementedError

    def get_model_parallel_rank(self) -> int:
        raise NotImplementedError

    def get_model_parallel_world_size(self) -> int:
        raise NotImplementedError

    def get_tensor_model_parallel_group(self) -> Any:
        return self.get_model_parallel_group()

    def get_tensor_model_parallel_rank(self) -> int:
        return self.get_model_parallel_rank()

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.get_model_parallel_world_size()

    @contextmanager
    def as_mpu(self) -> Iterator[None]:
        """Inside, `deepspeed.initialize` makes engines that use these groups."""
        import deepspeed

        original = deepspeed.initialize
        deepspeed.initialize = partial(original, mpu=self)
        try:
            yield
        finally:
            deepspeed.initialize = original


class Mesh(Mpu):
    """The process groups of this process. Every process has to make it, at the same time.

    Attributes:
        tensor_rank, data_rank, pipeline_rank: this process's place.
        tensor_group: processes that split each layer; `pipeline_group`: that split the stack of layers, first stage
            first; `data_group`: replicas; `replica_group`: all processes of one replica.
        tied_group: those that hold the embedding, first and last stage; None on the others.
    """

    def __init__(self, dims: ParallelDims):
        self.dims = dims
        rank = dist.get_rank()
        tensor, data, pipeline = dims.tensor, dims.data, dims.pipeline
        self.tensor_rank = rank % tensor
        self.data_rank = rank // tensor % data
        self.pipeline_rank = rank // (tensor * data)

        def at(p: int, d: int, t: int) -> int:
            return (p * data + d) * tensor + t

        stages, replicas, shares = range(pipeline), range(data), range(tensor)
        self.tensor_group = _own([[at(p, d, t) for t in shares] for p in stages for d in replicas])
        self.data_group = _own([[at(p, d, t) for d in replicas] for p in stages for t in shares])
        self.pipeline_group = _own([[at(p, d, t) for p in stages] for d in replicas for t in shares])
        self.replica_group = _own([[at(p, d, t) for p in stages for t in shares] for d in replicas])
        ends = [sorted({at(0, d, t), at(pipeline - 1, d, t)}) for d in replicas for t in shares]
        self.tied_group = _own(ends)

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.dims.pipeline - 1

    @property
    def needs_tokens(self) -> bool:
        """Whether a batch's ids or targets are used here; stages between need its shape only."""
        return self.is_first_stage or self.is_last_stage

    # What DeepSpeed asks for

    def get_data_parallel_group(self) -> Any:
        return self.data_group

    def get_data_parallel_rank(self) -> int:
        return self.data_rank

    def get_data_parallel_world_size(self) -> int:
        return self.dims.data

    def get_model_parallel_group(self) -> Any:
        return self.replica_group

    def get_model_parallel_rank(self) -> int:
        return self.pipeline_rank * self.dims.tensor + self.tensor_rank

    def get_model_parallel_world_size(self) -> int:
        return self.dims.tensor * self.dims.pipeline


def _own(groups: list[list[int]]) -> Any:
    """Make all `groups`; the one that holds this process, or None."""
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next((group for ranks, group in made if dist.get_rank() in ranks), None)


class ShardGroups(Mpu):
    """Data-parallel ranks in groups that share one optimizer state; the groups are replicas of each other.

    ZeRO shards inside a group, and `average` brings the gradients of the replicas together before a step.

    Args:
        degree: ranks per group; divides the world.
    """

    def __init__(self, degree: int):
        world, rank = dist.get_world_size(), dist.get_rank()
        shards = [dist.new_group(list(range(start, start + degree))) for start in range(0, world, degree)]
        replicas = [dist.new_group(list(range(offset, world, degree))) for offset in range(degree)]
        alone = [dist.new_group([single]) for single in range(world)]
        self.degree, self.replicas = degree, world // degree
        self.shard_group, self.replica_group = shards[rank // degree], replicas[rank % degree]
        self.rank_in_shard, self.alone = rank % degree, alone[rank]

    def get_data_parallel_group(self) -> Any:
        return self.shard_group

    def get_data_parallel_rank(self) -> int:
        return self.rank_in_shard

    def get_data_parallel_world_size(self) -> int:
        return self.degree

    def get_model_parallel_group(self) -> Any:
        return self.alone

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    def average(self, zero_optimizer: Any) -> None:
        """Mean over the replicas of the gradients this rank updates with (ZeRO stage 1)."""
        for gradients in zero_optimizer.averaged_gradients.values():
            for gradient in gradients or ():
                dist.all_reduce(gradient, group=self.replica_group)
                gradient /= self.replicas

    def attach(self, engine: Any) -> None:
        """Average over the replicas before each step of `engine`."""
        optimizer = engine.optimizer
        step = optimizer.step

        def averaged_step(*arguments: Any, **more: Any) -> Any:
            self.average(optimizer)
            return step(*arguments, **more)

        optimizer.step = averaged_step

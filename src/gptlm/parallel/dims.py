"""Degrees of parallelism. The command line imports this, so torch is not imported here."""

from dataclasses import dataclass
from typing import NamedTuple

from gptlm.errors import UsageError, named

Ranks = list[list[int]]


class Place(NamedTuple):
    """Coordinates of a process among those that split a layer, the replicas, and the stages."""

    tensor: int
    data: int
    pipeline: int


class Groups(NamedTuple):
    """The ranks of all process groups.

    Attributes:
        tensor: processes that split each layer.
        pipeline: processes that split the stack of layers, first stage first.
        model: all processes of one replica.
        tied: first and last stage, which both hold the embedding.
        zero: replicas that share one optimizer state.
        copies: processes with the same shards, one of each group in `zero`.
    """

    tensor: Ranks
    pipeline: Ranks
    model: Ranks
    tied: Ranks
    zero: Ranks
    copies: Ranks


@dataclass(frozen=True)
class ParallelDims:
    """How `world` processes are divided.

    Attributes:
        world: all processes.
        tensor: processes that split each layer.
        pipeline: processes that split the stack of layers.
    """

    world: int
    tensor: int = 1
    pipeline: int = 1

    @property
    def data(self) -> int:
        """Model replicas; ranks that shard one optimizer state count as several."""
        return self.world // (self.tensor * self.pipeline)

    @property
    def is_model_parallel(self) -> bool:
        """Whether a replica of the model is split over several processes."""
        return self.tensor * self.pipeline > 1

    def __str__(self) -> str:
        return f"tensor degree {self.tensor}, pipeline degree {self.pipeline}"

    def rank_at(self, place: Place) -> int:
        """Megatron-LM's order, in which the processes of a tensor-parallel group are neighbours: they communicate most.

        Replicas are next, so that pipeline stages, which communicate least, are furthest apart.
        """
        return (place.pipeline * self.data + place.data) * self.tensor + place.tensor

    def place_of(self, rank: int) -> Place:
        return Place(rank % self.tensor, rank // self.tensor % self.data, rank // (self.tensor * self.data))

    def groups(self, shards: int) -> Groups:
        """With `shards` replicas that share one optimizer state, which are neighbours in the data dimension."""
        ts, ds, ps = range(self.tensor), range(self.data), range(self.pipeline)
        at = self.rank_at
        zero = [range(start, start + shards) for start in range(0, self.data, shards)]
        copies = [range(first, self.data, shards) for first in range(shards)]
        return Groups(
            tensor=[[at(Place(t, d, p)) for t in ts] for p in ps for d in ds],
            pipeline=[[at(Place(t, d, p)) for p in ps] for d in ds for t in ts],
            model=[[at(Place(t, d, p)) for p in ps for t in ts] for d in ds],
            tied=[sorted({at(Place(t, d, 0)), at(Place(t, d, self.pipeline - 1))}) for d in ds for t in ts],
            zero=[[at(Place(t, d, p)) for d in part] for p in ps for t in ts for part in zero],
            copies=[[at(Place(t, d, p)) for d in part] for p in ps for t in ts for part in copies],
        )

    @classmethod
    def of(cls, world: int, tensor: int, pipeline: int) -> "ParallelDims":
        """Degrees below 1 mean 1, as in PaddleNLP.

        Raises:
            UsageError: if tensor x pipeline does not divide the number of processes.
        """
        tensor, pipeline = max(tensor, 1), max(pipeline, 1)
        model = tensor * pipeline
        if world % model:
            fitting = -(-world // model) * model
            raise UsageError(
                f"{named('tensor_parallel_degree')} ({tensor}) x {named('pipeline_parallel_degree')} ({pipeline}) = "
                f"{model} does not divide the number of processes ({world}); launch {fitting}: torchrun "
                f"--nproc_per_node {fitting} ..., or lower the degrees"
            )
        return cls(world, tensor, pipeline)


def bubble_fraction(stages: int, chunks: int, micro_batches: int) -> float:
    """The idle share of a pipeline step: (P - 1) / (V m + P - 1) (arXiv 2104.04473, section 2.2)."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)

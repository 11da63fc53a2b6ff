"""Degrees of parallelism. The command line imports this, so torch is not imported here."""

from dataclasses import dataclass

from gptlm.errors import UsageError, named


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

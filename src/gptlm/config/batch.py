"""The batch equation: global = micro x accumulation x data-parallel replicas."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """Samples: in one forward pass, per replica and optimizer step, and per optimizer step over all replicas."""

    micro: int
    accumulation: int
    data_parallel: int

    @property
    def local(self) -> int:
        return self.micro * self.accumulation

    @property
    def total(self) -> int:
        return self.local * self.data_parallel

    def __str__(self) -> str:
        return f"{self.micro} x {self.accumulation} x {self.data_parallel}"

"""The batch equation: global = micro x accumulation x data-parallel replicas."""

from collections.abc import Mapping
from dataclasses import dataclass

from gptlm.errors import UsageError, named


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


NAMES = {
    "micro": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "local": "local_batch_size",
    "total": "global_batch_size",
}


def solve(given: Mapping[str, int], *, replicas: int, sharding: int = 1, micro: int = 8) -> Batch:
    """The batch of any subset of its sizes.

    Args:
        given: some of "micro", "accumulation", "local", "total".
        replicas: data-parallel replicas, those that share shards included; `sharding` of them share.
        micro: the micro-batch where nothing fixes it.

    Raises:
        UsageError: if the sizes contradict each other or do not divide; names the nearest that do. The first line of
            a message about the global batch is FleetX's.
    """
    for name, size in given.items():
        if size < 1:
            raise UsageError(f"{named(NAMES[name])} {size}: expected at least 1")
    total, local = given.get("total"), given.get("local")
    step = given.get("micro", 1) * given.get("accumulation", 1)
    if total is not None and local is None:
        if total % replicas:
            near = _nearest(total, step * replicas)
            raise UsageError(
                f"global_batch_size[{total}] should be divided by dp_degree[{replicas // sharding}] times "
                f"sharding_degree[{sharding}]\n  {named('global_batch_size')} {total} on {replicas} data-parallel "
                f"replicas; {near}"
            )
        local = total // replicas
    elif total is not None and local is not None and total != local * replicas:
        raise UsageError(
            f"global_batch_size[{total}] should be divided by local_batch_size[{local}] when dp_degree is "
            f"[{replicas // sharding}] and sharding_degree is [{sharding}]\n  {named('global_batch_size')} {total} is "
            f"not {named('local_batch_size')} {local} x {replicas} data-parallel replicas = {local * replicas}; give "
            "one of them"
        )
    if local is None:
        return Batch(given.get("micro", micro), given.get("accumulation", 1), replicas)
    return _split(local, given, replicas, total is not None)


def _split(local: int, given: Mapping[str, int], replicas: int, by_total: bool) -> Batch:
    """Micro-batch and accumulation of a local batch."""
    whole = (
        f"{named('global_batch_size')} {local * replicas} on {replicas} replica{'s' if replicas > 1 else ''}"
        if by_total
        else f"{named('local_batch_size')} {local}"
    )
    size, steps = given.get("micro"), given.get("accumulation")
    if size is None and steps is None:
        return Batch(local, 1, replicas)
    if size is not None and steps is not None and size * steps != local:
        raise UsageError(
            f"{whole}: {local} samples per replica are not {named('per_device_train_batch_size')} {size} x "
            f"{named('gradient_accumulation_steps')} {steps} = {size * steps}; leave one of them out"
        )
    known, name = (size, NAMES["micro"]) if size is not None else (steps or 1, NAMES["accumulation"])
    if local % known:
        unit = known * replicas if by_total else known
        near = _nearest(local * replicas if by_total else local, unit)
        raise UsageError(f"{whole}: {local} samples per replica is not a multiple of {named(name)} {known}; {near}")
    other = local // known
    return Batch(known, other, replicas) if size is not None else Batch(other, known, replicas)


def _nearest(size: int, unit: int) -> str:
    below = size // unit * unit
    return f"the nearest that work are {below} and {below + unit}" if below else f"the nearest that works is {unit}"

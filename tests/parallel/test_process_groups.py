"""Who exchanges with whom among eight processes, in Megatron's order: tensor fastest, then data, then the pipeline.

torch's own backend without exchange ("fake") lets one process be each of eight in turn.
"""

from dataclasses import dataclass

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gptlm.parallel.dims import ParallelDims
from gptlm.parallel.process_groups import Mesh

ALL, EACH = [[0, 1, 2, 3, 4, 5, 6, 7]], [[0], [1], [2], [3], [4], [5], [6], [7]]
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
FOURS = [[0, 4], [1, 5], [2, 6], [3, 7]]
EVEN_ODD = [[0, 2, 4, 6], [1, 3, 5, 7]]
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
GROUPS = {  # (tensor, pipeline, data): the groups that split layers, that are replicas, and that split the stack
    (1, 1, 8): (EACH, ALL, EACH),
    (8, 1, 1): (ALL, EACH, EACH),
    (1, 2, 4): (EACH, HALVES, FOURS),
    (1, 4, 2): (EACH, PAIRS, EVEN_ODD),
    (2, 1, 4): (PAIRS, EVEN_ODD, EACH),
    (2, 2, 2): (PAIRS, [[0, 2], [1, 3], [4, 6], [5, 7]], FOURS),
}
TIED = {(1, 4, 2): [[0, 6], [1, 7]], (1, 2, 4): FOURS, (2, 2, 2): FOURS}  # first and last stage of each column
COPIES = {  # (tensor, pipeline, replicas that share): the groups that share, and those with the same shards
    (1, 1, 2): (PAIRS, EVEN_ODD),
    (1, 1, 1): (EACH, ALL),
    (1, 1, 8): (ALL, EACH),
    (2, 1, 2): ([[0, 2], [1, 3], [4, 6], [5, 7]], FOURS),
    (1, 2, 2): (PAIRS, [[0, 2], [1, 3], [4, 6], [5, 7]]),
}
REPLICAS = {(1, 4, 2): EVEN_ODD, (1, 2, 4): FOURS, (2, 2, 2): [[0, 1, 4, 5], [2, 3, 6, 7]], (2, 1, 4): PAIRS}


@dataclass(frozen=True)
class Place:
    """A process's ranks in its groups, and the groups."""

    tensor_rank: int
    data_rank: int
    pipeline_rank: int
    tensor: list[int]
    data: list[int]
    pipeline: list[int]
    replica: list[int]
    tied: list[int] | None
    copies: list[int]


def places(tensor: int, pipeline: int, shards: int | None = None) -> list[Place]:
    """The place of each of eight processes; `data`: those that share an optimizer state."""
    found = []
    for rank in range(8):
        dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
        try:
            mesh = Mesh(ParallelDims.of(8, tensor, pipeline), shards)
            groups = (mesh.tensor_group, mesh.zero_group, mesh.pipeline_group, mesh.model_group, mesh.tied_group)
            groups += (mesh.copy_group,)
            assert mesh.get_data_parallel_rank() == dist.get_rank(mesh.zero_group)
            ranks = [group and dist.get_process_group_ranks(group) for group in groups]
            found.append(Place(mesh.tensor_rank, mesh.data_rank, mesh.pipeline_rank, *ranks))
        finally:
            dist.destroy_process_group()
    return found


@pytest.mark.parametrize("degrees", GROUPS)
def test_each_process_is_in_one_group_of_each_kind(degrees):
    found = places(*degrees[:2])
    for kind, wanted in zip(("tensor", "data", "pipeline"), GROUPS[degrees], strict=True):
        assert sorted(rank for group in wanted for rank in group) == list(range(8))
        for rank, place in enumerate(found):
            group = getattr(place, kind)
            assert group in wanted and group[getattr(place, f"{kind}_rank")] == rank


@pytest.mark.parametrize("degrees", COPIES)
def test_groups_that_share_and_their_copies(degrees):
    for rank, place in enumerate(places(*degrees)):
        for group, wanted in zip((place.data, place.copies), COPIES[degrees], strict=True):
            assert rank in group and group in wanted


@pytest.mark.parametrize("degrees", REPLICAS)
def test_the_processes_of_a_replica(degrees):
    assert {tuple(place.replica) for place in places(*degrees[:2])} == {tuple(group) for group in REPLICAS[degrees]}


@pytest.mark.parametrize("degrees", TIED)
def test_first_and_last_stage_share_the_embedding(degrees):
    wanted = TIED[degrees]
    for rank, place in enumerate(places(*degrees[:2])):
        assert place.tied == next((group for group in wanted if rank in group), None)

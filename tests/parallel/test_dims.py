"""Degrees and the ranks of all groups, of up to 1,024 processes. `test_process_groups.py` makes such groups."""

from itertools import pairwise

import pytest

from gptlm.errors import UsageError
from gptlm.parallel.dims import ParallelDims, Place

NODE = 8  # GPUs


def test_data_parallel_replicas():
    assert ParallelDims.of(8, 2, 2).data == 2
    assert ParallelDims.of(8, -1, 0) == ParallelDims(8, 1, 1)


@pytest.mark.parametrize(("world", "tensor", "pipeline", "fitting"), [(1, 2, 1, 2), (6, 2, 2, 8), (4, 1, 3, 6)])
def test_a_world_that_does_not_fit_names_one_that_does(world, tensor, pipeline, fitting):
    with pytest.raises(UsageError, match=f"--nproc_per_node {fitting} \\.\\.\\., "):
        ParallelDims.of(world, tensor, pipeline)


def divisors(number):
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


LAYOUTS = [
    ParallelDims.of(world, tensor, pipeline)
    for world in (8, 12, 16, 24, 32, 48, 60, 64)
    for tensor in divisors(world)
    for pipeline in divisors(world // tensor)
] + [ParallelDims(1024, 8, 16)]


def megatron(dims):
    """Megatron-LM's `initialize_model_parallel` (2022): tensor, data and pipeline groups by its loops."""
    world, tensor, pipeline = dims.world, dims.tensor, dims.pipeline
    per_stage = world // pipeline
    data = []
    for stage in range(pipeline):
        for j in range(tensor):
            data.append(list(range(stage * per_stage + j, (stage + 1) * per_stage, tensor)))
    tensors = [list(range(i * tensor, (i + 1) * tensor)) for i in range(world // tensor)]
    pipelines = [list(range(i, world, per_stage)) for i in range(per_stage)]
    return tensors, data, pipelines


def test_groups_are_those_that_megatron_publishes():
    """The example in its source: 16 GPUs, tensor degree 2, pipeline degree 4."""
    dims = ParallelDims.of(16, 2, 4)
    groups = dims.groups(dims.data)
    assert sorted(groups.zero) == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert sorted(groups.tensor) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert sorted(groups.pipeline) == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_every_rank_is_in_one_group_of_each_kind_in_every_layout():
    """In Megatron's order, with the right sizes; a rank's coordinate is its place in the group."""
    assert len(LAYOUTS) > 100
    for dims in LAYOUTS:
        groups = dims.groups(dims.data)
        assert (groups.tensor, groups.zero, groups.pipeline) == megatron(dims), dims
        ends = 1 if dims.pipeline == 1 else 2
        sizes = (dims.tensor, dims.pipeline, dims.tensor * dims.pipeline, ends, dims.data, 1)
        for kind, size in zip(groups, sizes, strict=True):
            assert {len(group) for group in kind} == {size}, dims
            members = sorted(rank for group in kind for rank in group)
            tied = dims.pipeline > 2 and kind is groups.tied  # stages between the ends have no embedding
            assert len(set(members)) == len(members) == (dims.tensor * dims.data * 2 if tied else dims.world), dims
        for name, kind in (("tensor", groups.tensor), ("data", groups.zero), ("pipeline", groups.pipeline)):
            for group in kind:
                assert [getattr(dims.place_of(rank), name) for rank in group] == list(range(len(group))), dims
        for stages, ends in zip(groups.pipeline, groups.tied, strict=True):
            assert sorted({stages[0], stages[-1]}) == ends
            steps = {after - before for before, after in pairwise(stages)}
            assert steps <= {dims.tensor * dims.data}  # the neighbours of a stage
        for replica in groups.model:
            assert len({dims.place_of(rank).data for rank in replica}) == 1
        assert all(dims.rank_at(dims.place_of(rank)) == rank for rank in range(dims.world))


def test_tensor_groups_lie_within_a_node_where_they_fit():
    for dims in LAYOUTS:
        if NODE % dims.tensor == 0:
            assert all(len({rank // NODE for rank in group}) == 1 for group in dims.groups(1).tensor), dims
    last = ParallelDims.of(1024, 8, 16)
    assert last.place_of(1023) == Place(7, 7, 15)


def test_replicas_that_share_an_optimizer_state_are_neighbours():
    """Within a tensor column and a stage; each shard is once in each group, also with fewer shards than replicas."""
    for dims in LAYOUTS:
        for shards in divisors(dims.data):
            groups = dims.groups(shards)
            for kind, size in ((groups.zero, shards), (groups.copies, dims.data // shards)):
                assert sorted(rank for group in kind for rank in group) == list(range(dims.world))
                assert {len(group) for group in kind} == {size}
            places = {rank: number for group in groups.zero for number, rank in enumerate(group)}
            for group in groups.zero:
                first = dims.place_of(group[0])
                steps = [Place(first.tensor, first.data + number, first.pipeline) for number in range(shards)]
                assert [dims.place_of(rank) for rank in group] == steps and first.data % shards == 0
                if NODE % (dims.tensor * shards) == 0:
                    assert len({rank // NODE for rank in group}) == 1
            for group in groups.copies:
                first = dims.place_of(group[0])
                assert len({places[rank] for rank in group}) == 1
                assert {dims.place_of(rank)[::2] for rank in group} == {(first.tensor, first.pipeline)}

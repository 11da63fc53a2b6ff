import pytest

from gptlm.errors import UsageError
from gptlm.parallel.dims import ParallelDims


def test_data_parallel_replicas():
    assert ParallelDims.of(8, 2, 2).data == 2
    assert ParallelDims.of(8, -1, 0) == ParallelDims(8, 1, 1)


@pytest.mark.parametrize(("world", "tensor", "pipeline", "fitting"), [(1, 2, 1, 2), (6, 2, 2, 8), (4, 1, 3, 6)])
def test_a_world_that_does_not_fit_names_one_that_does(world, tensor, pipeline, fitting):
    with pytest.raises(UsageError, match=f"--nproc_per_node {fitting} \\.\\.\\., "):
        ParallelDims.of(world, tensor, pipeline)

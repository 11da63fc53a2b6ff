"""The batch equation: any subset of its sizes, and what contradicts itself."""

import itertools

import pytest

from gptlm.config.batch import solve
from gptlm.errors import UsageError


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_every_subset_that_fixes_the_batch_gives_it(micro, accumulation, replicas):
    sizes = {
        "micro": micro,
        "accumulation": accumulation,
        "local": micro * accumulation,
        "total": micro * accumulation * replicas,
    }
    solved = 0
    for count in range(5):
        for names in itertools.combinations(sizes, count):
            fixes = {"micro", "accumulation"} <= {*names} or (
                {"local", "total"} & {*names} and {*names} - {"local", "total"}
            )
            if fixes:
                batch = solve({name: sizes[name] for name in names}, replicas=replicas)
                assert (batch.micro, batch.accumulation, batch.total) == (micro, accumulation, sizes["total"])
                solved += 1
    assert solved == 10  # both factors and any others, or one of them and a product


@pytest.mark.parametrize(
    ("given", "micro", "accumulation"),
    [
        ({}, 8, 1),
        ({"accumulation": 2}, 8, 2),
        ({"micro": 4}, 4, 1),
        ({"total": 32}, 4, 1),  # OneFlow: all of it at once
        ({"local": 6}, 6, 1),
        ({"micro": 4, "total": 64}, 4, 2),
    ],
)
def test_what_is_left_open(given, micro, accumulation):
    batch = solve(given, replicas=8)
    assert (batch.micro, batch.accumulation) == (micro, accumulation)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"total": 60},
            "global_batch_size[60] should be divided by dp_degree[4] times sharding_degree[2]\n"
            "  --global_batch_size 60 on 8 data-parallel replicas; the nearest that work are 56 and 64",
        ),
        ({"total": 60, "micro": 4}, "the nearest that work are 32 and 64"),
        ({"total": 3}, "the nearest that works is 8"),
        (
            {"total": 65, "local": 8},
            "global_batch_size[65] should be divided by local_batch_size[8] when dp_degree is [4] and sharding_degree "
            "is [2]\n  --global_batch_size 65 is not --local_batch_size 8 x 8 data-parallel replicas = 64; give one of "
            "them",
        ),
        ({"local": 8, "micro": 3}, "local_batch_size 8: 8 samples per replica is not a multiple of "),
        ({"local": 8, "micro": 3}, "per_device_train_batch_size 3; the nearest that work are 6 and 9"),
        ({"total": 64, "micro": 3}, "the nearest that work are 48 and 72"),
        (
            {"total": 64, "micro": 2, "accumulation": 3},
            "2 x --gradient_accumulation_steps 3 = 6; leave one of them out",
        ),
        ({"micro": 0}, "per_device_train_batch_size 0: expected at least 1"),
        ({"total": -8}, "global_batch_size -8: expected at least 1"),
    ],
)
def test_what_contradicts_itself(given, says):
    with pytest.raises(UsageError) as error:
        solve(given, replicas=8, sharding=2)
    assert says in str(error.value)

"""Mutated pickles end in a result or in GptlmError, in processes that a crash or too much memory would end."""

import argparse
import io
import pickle
import random
from collections import OrderedDict
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch

from gptlm.errors import GptlmError
from gptlm.pickles.safe_pickle import Arguments, StandIn, read_pickle
from gptlm.pickles.torch_file import Storage, read_torch
from tests.fuzz.mutations import mutated, mutated_zip
from tests.fuzz.workers import limit_memory, start_workers

KINDS = ("pdparams-2", "pdparams-4", "pdparams-5", "zip", "old")
WORKERS, BATCH = 2, 20


def content(kind):
    """The bytes of a file of `kind` as its library writes it."""
    weights = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "t": np.arange(6.0).reshape(2, 3).T}
    weights |= {
        "bits": np.arange(3, dtype=np.uint16),
        "scalar": np.float32(2),
        "named": ("w_0", np.ones(2, np.float16)),
    }
    if kind.startswith("pdparams"):
        return pickle.dumps({**weights, "StructuredToParameterName@@": {"w": "w_0"}}, protocol=int(kind[-1]))
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    saved = {
        "model": OrderedDict(
            w=whole, t=whole.t(), part=whole[1:3, 2], bf=whole.bfloat16(), p=torch.nn.Parameter(whole)
        ),
        "args": argparse.Namespace(layers=2, params_dtype=torch.bfloat16, device=torch.device("cpu"), names=["a"]),
        "rng": [random.Random(1).getstate()[1][:9], np.arange(9, dtype=np.uint32), torch.Size([2, 3])],
        "set": {1, 2},
        **weights,
    }
    file = io.BytesIO()
    torch.save(saved, file, _use_new_zipfile_serialization=kind == "zip")
    return file.getvalue()


def used(found):
    """Read every number in `found`: what is not theirs would crash here."""
    waiting, seen = [found], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray):
            assert value.dtype.kind in "biufc"
            value.tobytes()
        elif isinstance(value, (torch.Tensor, Storage)):
            (value if isinstance(value, torch.Tensor) else value.tensor()).clone().double().sum().item()
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif isinstance(value, (Arguments, StandIn)):
            waiting += vars(value).values()


def prepare():
    """Called in each worker."""
    limit_memory()
    torch.set_num_threads(1)


def cases(kind, numbers, folder):
    """Read the files of `kind` of these `numbers`. Returns those that end badly, and how many have a result."""
    path, data, bad, results = folder / f"{kind}-{numbers[0]}", content(kind), [], 0
    read = read_pickle if kind.startswith("pdparams") else read_torch
    for number in numbers:
        chance = random.Random(f"{kind} {number}")
        path.write_bytes((mutated_zip if kind == "zip" else mutated)(data, chance))
        try:
            found = read(path)
            results += 1
            used(found)
        except GptlmError:
            pass
        except BaseException as error:  # also MemoryError, and what the reader should have refused
            bad.append((number, repr(error)[:300]))
    path.unlink()
    return bad, results


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutated_pickles(tmp_path, count):
    batches = [(kind, range(start, min(start + BATCH, count))) for kind in KINDS for start in range(0, count, BATCH)]
    with start_workers(WORKERS, prepare) as workers:
        waiting = {batch: workers.submit(cases, *batch, tmp_path) for batch in batches}
        results = dict.fromkeys(KINDS, 0)
        for (kind, numbers), ended in waiting.items():
            try:
                bad, read = ended.result()
            except BrokenProcessPool:
                pytest.fail(f"a worker crashed, at the earliest in {kind} {numbers}")
            assert bad == [], kind
            results[kind] += read
    assert all(0 < read < count for read in results.values()), results  # neither all refused nor all unchanged

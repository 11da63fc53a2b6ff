"""Mutated pickles end in a result or in GptlmError, in processes that a crash or too much memory would end."""

import argparse
import io
import multiprocessing
import pickle
import pickletools
import random
import resource
import struct
import zipfile
from collections import OrderedDict
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest
import torch

from gptlm.errors import GptlmError
from gptlm.pickles.safe_pickle import Arguments, StandIn, read_pickle
from gptlm.pickles.torch_file import Storage, read_torch

KINDS = ("pdparams-2", "pdparams-4", "pdparams-5", "zip", "old")
WORKERS, BATCH, EXTRA_MEMORY = 2, 20, 1 << 30
NUMBERS = [0, 1, -1, 63, 255, 2**15, 2**31 - 1, -(2**31), 2**32 - 1, 2**40, 2**62, 2**63 - 1, -(2**63)]
PARTS = [  # instructions that have broken readers of pickles, or could
    b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8I00\nI01\ntR",
    b"cnumpy\ndtype\n(X\x02\x00\x00\x00f4I00\nI01\ntR(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\x7fK\x08K?tb",
    b"cnumpy\nndarray\n",
    b"cnumpy.core.multiarray\nscalar\n",
    b"cnumpy.core.numeric\n_frombuffer\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch\nFloatStorage\n",
    b"ctorch.storage\nUntypedStorage\n",
    b"cargparse\nNamespace\n)R",
    b"ccollections\nOrderedDict\n)R",
    b"ccopyreg\n_reconstructor\n",
    b"cbuiltins\ngetattr\n",
    *(bytes([code]) for code in b"RboOiQP0122345]}l)(tds.ueajhgrqp\x81\x92\x85\x86\x87\x88\x89\x8f\x90\x91\x94N"),
]


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


def places(data):
    """Positions of the instructions of the pickles in `data`."""
    found = []
    file = io.BytesIO(data)
    try:
        while True:
            found += [position for _, _, position in pickletools.genops(file)]
    except Exception:  # the end, or what follows the pickles
        return found or [0]


def mutated(data, chance):
    """A few changes: of single bytes, of instructions, of numbers, of lengths."""
    made, starts = bytearray(data), places(data)
    if chance.random() < 0.3:  # only arguments of instructions: sizes, lengths, places
        for _ in range(chance.randrange(1, 3)):
            at = chance.choice(starts) + 1
            made[at : at + 1] = bytes([chance.choice((0, 1, 2, 3, 4, 6, 24, 127, 128, 255))])
        return bytes(made)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.choice((chance.choice(starts), chance.randrange(len(made) or 1)))
        match chance.randrange(8):
            case 0:
                made[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                made[at : at + 1] = bytes([made[at] ^ 1 << chance.randrange(8)]) if at < len(made) else b""
            case 2:
                made[at:at] = chance.choice(PARTS)
            case 3:
                made[at : at + 1] = chance.choice(PARTS)
            case 4:
                number = chance.choice(NUMBERS)
                made[at:at] = pickle.dumps(number, protocol=2)[2:-1]
            case 5:
                value = chance.choice(NUMBERS) & 0xFFFFFFFF
                made[at + 1 : at + 5] = struct.pack("<I", value)
            case 6:
                other, length = chance.choice(starts), chance.randrange(1, 60)
                made[at:at] = data[other : other + length]
            case 7:
                del made[at : at + chance.randrange(1, 20)]
    return bytes(made)


def mutated_zip(data, chance):
    """Mostly the pickle in it is changed, else the zip."""
    if chance.random() < 0.2:
        return mutated(data, chance)
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(file, "w") as after:
        for entry in before.namelist():
            part = before.read(entry)
            if entry.endswith("data.pkl"):
                part = mutated(part, chance)
            elif "/data/" in entry and chance.random() < 0.1:
                part = part[: chance.randrange(len(part) + 1)]
            after.writestr(entry, part)
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


def limit_memory():
    """Called in each worker: an allocation beyond what is there and `EXTRA_MEMORY` fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + EXTRA_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
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
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context, initializer=limit_memory) as workers:
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

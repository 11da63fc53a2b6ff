"""The random states of a process in a checkpoint: `rng_state*.json`, or the pickle that older versions wrote."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gptlm.errors import GptlmError, reason_of
from gptlm.json_text import parse_json
from gptlm.pickles.torch_file import read_torch


def file_name(process: int, processes: int) -> str:
    """The file of one process of `processes`."""
    return "rng_state.json" if processes == 1 else f"rng_state_{process}.json"


def save(path: Path) -> None:
    """Write the states of this process's generators: Python's, numpy's, torch's, and those of its GPUs."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "cpu": _text(torch.random.get_rng_state()),
    }
    if torch.cuda.is_available():
        if dist.is_initialized():
            states["cuda"] = list(map(_text, torch.cuda.random.get_rng_state_all()))
        else:
            states["cuda"] = _text(torch.cuda.random.get_rng_state())
    path.write_text(json.dumps(states) + "\n", encoding="utf-8")


def load(path: Path) -> str | None:
    """Restore what `save` wrote into `path`, or what older versions wrote beside it (`.pth`).

    Returns:
        Why that is impossible; None: it is done.
    """
    file = next((file for file in (path, path.with_suffix(".pth")) if file.is_file()), None)
    if file is None:
        return f"{path.name} is missing"
    try:
        states = parse_json(file.read_text(encoding="utf-8")) if file == path else read_torch(file)
        (version, words, gauss), cuda = states["python"], states.get("cuda")
        kind, keys, position, has_gauss, cached = states["numpy"]
        random.setstate((version, tuple(words), gauss))
        np.random.set_state((kind, np.asarray(keys, np.uint32), position, has_gauss, cached))
        torch.random.set_rng_state(_state(states["cpu"]))
        if torch.cuda.is_available() and isinstance(cuda, list):
            torch.cuda.random.set_rng_state_all(map(_state, cuda))
        elif torch.cuda.is_available() and cuda is not None:
            torch.cuda.random.set_rng_state(_state(cuda))
    except GptlmError as error:
        return str(error)
    except Exception as error:  # each generator has its own errors for a state that is not one
        return f"{file.name}: {reason_of(error)}"
    return None


def _text(state: Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _state(stored: str | Tensor) -> Tensor:
    """(n,) uint8, from `_text` or a pickle."""
    return torch.tensor(list(bytes.fromhex(stored)), dtype=torch.uint8) if isinstance(stored, str) else stored

"""gptlm: train, fine-tune, evaluate and run GPT-style language models on the HuggingFace stack.

From Python: `from gptlm import pretrain, sft, load, generate, evaluate, GPTTrainer`. The names are imported when they
are used, so that `import gptlm` and the commands import nothing heavy.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PLACES = {
    "pretrain": "gptlm.api.training",
    "sft": "gptlm.api.training",
    "load": "gptlm.api.inference",
    "generate": "gptlm.api.inference",
    "evaluate": "gptlm.api.inference",
    "GPTTrainer": "gptlm.training.trainer",
    "GptlmError": "gptlm.errors",
    "UsageError": "gptlm.errors",
    "Evaluation": "gptlm.api.results",
    "Generation": "gptlm.api.results",
    "Loaded": "gptlm.api.results",
    "TrainResult": "gptlm.api.results",
}
__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'gptlm' has no attribute {name!r}")
    found = getattr(import_module(_PLACES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)

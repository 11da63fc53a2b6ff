"""The one way to a `from_pretrained` of transformers and PEFT: no Python of a model folder ever runs."""

from pathlib import Path
from typing import Any

from gptlm.errors import GptlmError
from gptlm.model.files import CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, read_json

KERNEL_KEYS = ("attn_implementation", "_attn_implementation")  # "owner/name" is compiled code of the hub


def load_pretrained(loader: Any, source: str, *, onto: Any = None, **options: Any) -> Any:
    """`loader.from_pretrained(source, **options)` for a class of transformers or PEFT, without remote code.

    Where the folder names Python of its own (`auto_map`) although transformers has the class, that of transformers is
    used. transformers never asks on the terminal.

    Args:
        onto: the model that PEFT puts adapters on, its first argument.

    Raises:
        GptlmError: if the folder can be loaded by its own code only, or its generation_config.json is damaged.
        Exception: whatever else the library raises.
    """
    folder = Path(source)
    _refuse_kernels(folder)
    if (folder / GENERATION_CONFIG).is_file():
        read_json(folder / GENERATION_CONFIG)  # transformers ignores a damaged one, and a text would not end
    try:
        places = (source,) if onto is None else (onto, source)
        return loader.from_pretrained(*places, **options, trust_remote_code=False)
    except ValueError as error:
        asked = _code_named_in(folder)
        if asked is None or "trust_remote_code" not in str(error):
            raise
        raise GptlmError(
            f"{asked}: code of a folder is never run, and transformers has no class for it; "
            "give a GPT-2 folder with tokenizer.json, or with vocab.json and merges.txt"
        ) from None


def _code_named_in(folder: Path) -> str | None:
    """The file of `folder` that names Python to run, and what it names; None if none does."""
    for name in (TOKENIZER_CONFIG, CONFIG):
        path = folder / name
        found = read_json(path).get("auto_map") if path.is_file() else None
        if found:
            return f"{path} is refused: its auto_map asks for the Python code {str(found)[:200]}"
    return None


def _refuse_kernels(folder: Path) -> None:
    """Raises GptlmError if config.json asks for a compiled kernel, which transformers would download and load."""
    path = folder / CONFIG
    config = read_json(path) if path.is_file() else {}
    for key in KERNEL_KEYS:
        if "/" in str(config.get(key) or ""):
            raise GptlmError(
                f"{path} is refused: {key} {config[key]!r} asks for compiled code of the hub, which is never loaded; "
                "remove the key"
            )

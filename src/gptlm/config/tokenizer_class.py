"""A tokenizer's class as PaddleNLP and transformers name it (`GPTTokenizer`): the files of a folder decide here."""

import re
from pathlib import Path

from gptlm.config.parser import Parsed
from gptlm.errors import named

CLASS = re.compile(r"[A-Z]\w*Tokenizer(Fast)?")
GPT2_CLASSES = ("GPTTokenizer", "GPT2Tokenizer", "GPT2TokenizerFast")  # what a GPT-2 folder holds anyway


def is_class(name: str | None) -> bool:
    """Whether `name` is a class and no folder."""
    return bool(name and CLASS.fullmatch(name) and not Path(name).exists())


def drop_class(parsed: Parsed, flag: str) -> None:
    """Take a class out of `flag`, with a line unless it is GPT-2's own."""
    name = parsed.values[flag]
    if not is_class(name):
        return
    parsed.set(flag, None, "default")
    if name not in GPT2_CLASSES:
        parsed.note(
            f"--{named(flag)} {name} has no effect: the files of {parsed.values['model_name_or_path'] or 'the model'} "
            "say what tokenizer it is"
        )

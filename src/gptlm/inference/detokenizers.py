"""Undo the tokenization of public corpora with the steps of Megatron's `tasks/zeroshot_gpt/detokenizer.py`, in order.

One step of the original for WikiText is omitted: it matches slashes only and does not change prose.
"""

import re

Step = tuple[str, str]

WIKITEXT_MARKS: tuple[Step, ...] = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
WIKITEXT_PAIRS: tuple[Step, ...] = (  # remove blanks just inside a pair
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
)
WIKITEXT_REST: tuple[Step, ...] = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
PTB: tuple[Step, ...] = (
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),
    ("$ 1", "$1"),
    ("# 1", "#1"),
)


def detokenize(text: str, how: str) -> str:
    """`text` as prose; `how` is "wikitext" or "ptb"; "lambada" and "none" change nothing."""
    if how == "wikitext":
        text = _replace(text, WIKITEXT_MARKS)
        for pattern, replacement in WIKITEXT_PAIRS:
            text = re.sub(pattern, replacement, text)
        return _replace(text, WIKITEXT_REST)
    return _replace(text, PTB) if how == "ptb" else text


def _replace(text: str, steps: tuple[Step, ...]) -> str:
    for old, new in steps:
        text = text.replace(old, new)
    return text

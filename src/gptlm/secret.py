"""Tokens that a command line may hold: no text shows them, neither messages, logs and files nor the command itself."""

import re
from collections.abc import Sequence

HIDDEN = "(hidden)"
FLAGS = {  # flag -> its shortest form that the commands accept
    "hub_token": "hub_t",
    "push_to_hub_token": "push_to_hub_t",
    "token": "token",
    "use_auth_token": "use_a",
    "hf_token": "hf_t",
}
OF_UPLOADS = ("hub_token", "push_to_hub_token")
OF_THE_HUB = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")  # under a mistyped flag, too


class Secret:
    """A text that is printed and written as "(hidden)"."""

    __slots__ = ("value",)

    def __init__(self, value: str):
        self.value = value

    def __str__(self) -> str:
        return HIDDEN

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


def hidden(words: Sequence[str]) -> list[str]:
    """The words of a command line for messages and files."""
    return [OF_THE_HUB.sub(HIDDEN, word) for word in without_secrets(words, HIDDEN)[0]]


def without_secrets(words: Sequence[str], instead: str) -> tuple[list[str], str | None]:
    """`words` with `instead` as the value of each flag that holds a token, and the last value of --hub_token."""
    kept: list[str] = []
    token, flag = None, None
    for word in words:
        parts = word.split("=")
        if word.startswith("--") or word in ("-o", "-c"):
            flag = _secret_flag(word) if len(parts) == 1 else None
        elif flag is not None:
            token = word if flag in OF_UPLOADS else token
            kept.append(instead)
            continue
        for place in range(1, min(len(parts), 3)):  # --hub_token=X, -o hub_token=X and --override=hub_token=X
            if (inside := _secret_flag(parts[place - 1])) is not None:
                token = "=".join(parts[place:]) if inside in OF_UPLOADS else token
                word = "=".join([*parts[:place], instead])
                break
        kept.append(word)
    return kept, token


def _secret_flag(word: str) -> str | None:
    """The flag of `FLAGS` that `word` is, perhaps shortened."""
    name = word.lstrip("-").replace("-", "_")
    return next((flag for flag, short in FLAGS.items() if flag.startswith(name) and name.startswith(short)), None)

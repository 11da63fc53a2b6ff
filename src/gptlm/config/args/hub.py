"""Arguments of the upload to the HuggingFace hub. Names and defaults are those of transformers' TrainingArguments."""

import re
from dataclasses import dataclass

from gptlm.config.field import arg
from gptlm.secret import Secret

CHECKPOINTS = ("checkpoint", "all_checkpoints")


def bad_strategy(value: str) -> str | None:
    if value in CHECKPOINTS:
        return f"{value}: checkpoints with their optimizer state are not uploaded; give every_save or end"
    return None if value in ("end", "every_save") else f"{value!r}: expected end or every_save"


def bad_token(token: Secret) -> str | None:
    is_word = re.fullmatch(r"[\w.~+/=-]+", token.value, re.ASCII)  # what a header may hold (RFC 6750)
    return None if is_word else "is no token: it holds blanks or other characters; copy it again"


@dataclass(frozen=True, kw_only=True)
class RepositoryArguments:
    """Upload"""

    push_to_hub: bool = arg(
        False,
        "upload the model to the HuggingFace hub, with tokenizer and model card, after a training also with results "
        "and report",
    )
    hub_model_id: str | None = arg(
        None,
        "repository to upload to, NAME or OWNER/NAME, created if it does not exist; unset: the name of the output "
        "folder",
    )
    hub_token: Secret | None = arg(
        None,
        "token with write permission; HF_TOKEN in the environment is safer, as other users see command lines (ps); "
        "unset: HF_TOKEN, or the token of hf auth login",
        check=bad_token,
    )
    hub_private_repo: bool | None = arg(
        None, "the new repository is private, or public; unset: the default of its owner"
    )
    hub_revision: str | None = arg(None, "branch to upload to, created if it does not exist; unset: main")


@dataclass(frozen=True, kw_only=True)
class HubArguments(RepositoryArguments):
    """Upload"""

    hub_strategy: str = arg(
        "every_save",
        "when to upload; end: after training, every_save: also the model of each checkpoint, while training continues",
        check=bad_strategy,
    )
    hub_always_push: bool = arg(
        False, "--hub_strategy every_save: wait for an upload that is not finished, do not skip the next one"
    )

"""The tokenizer of a fine-tuning run, and checks that model, checkpoint and adapters were trained with it."""

import logging
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from gptlm.config.run import SftRun
from gptlm.data.templates import is_plain
from gptlm.errors import GptlmError
from gptlm.model.adapter_files import read_adapter_config
from gptlm.model.files import has_tokenizer
from gptlm.model.templates import use_eos, use_template, warn_of_text_tokens
from gptlm.model.tokenizer import add_tokens, fingerprint, load_tokenizer
from gptlm.recipes.common.model import tokenizer_folder

logger = logging.getLogger(__name__)

SHOWN = 5  # tokens in a message


def find_sft_tokenizer(run: SftRun) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """The tokenizer, and the ids that are new to the model.

    They are those of tokens added here, of rows missing in its embedding, and of rows that the adapters have.

    Raises:
        GptlmError: if there is none, or it has no end-of-text token.
    """
    adapters = run.lora.lora_path if run.adapters and has_tokenizer(run.adapters) else None
    name = run.model.tokenizer_name_or_path or adapters or run.model.model_name_or_path or ""
    tokenizer = load_tokenizer(tokenizer_folder(name))
    if tokenizer.eos_token_id is None and not run.data.eos_token:
        raise GptlmError(f"the tokenizer of {name} has no eos_token, with which a response ends; give --eos_token")
    _warn_of_other_ids(run, name, tokenizer)
    before, rows = len(tokenizer), run.shape.vocab_size
    if before > rows and name != adapters:
        logger.warning(
            "the tokenizer of %s has %d entries, the model's embedding %d rows: %d new rows start from random values; "
            "is it the model's own tokenizer?", name, before, rows, before - rows,
        )  # fmt: skip
    if run.data.chat_template is None and is_plain(tokenizer.chat_template):
        tokenizer.chat_template = None  # saved by fine-tuning without one, which encodes the same again
    of_template = use_template(tokenizer, run.data.chat_template)
    if tokens := [*of_template, *run.data.additional_special_tokens]:
        add_tokens(tokenizer, tokens)
    use_eos(tokenizer, run.data.eos_token)
    warn_of_text_tokens(tokenizer)
    new = set(range(min(before, rows), len(tokenizer)))
    if run.adapters and name == adapters:
        new |= set(_rows_in(run.adapters))
    return tokenizer, sorted(new)


def check_tokenizer(checkpoint: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises GptlmError if `checkpoint` was trained with another tokenizer, so that its ids mean other tokens."""
    if not has_tokenizer(checkpoint):
        return
    saved = load_tokenizer(str(checkpoint))
    if fingerprint(saved) == fingerprint(tokenizer):
        return
    there, here = saved.get_vocab(), tokenizer.get_vocab()
    differences = [
        f"{where}: {' '.join(tokens[:SHOWN])}{' ...' if len(tokens) > SHOWN else ''}"
        for where, tokens in (("only there", sorted(there.keys() - here)), ("only here", sorted(here.keys() - there)))
        if tokens
    ]
    raise GptlmError(
        f"the checkpoint {checkpoint} was trained with another tokenizer ({'; '.join(differences) or 'other ids'}); "
        "give the same --tokenizer_name_or_path and --additional_special_tokens, another --output_dir, or "
        "--overwrite_output_dir"
    )


def check_added_tokens(adapters: Path, tokenizer: PreTrainedTokenizerBase, new_tokens: list[int]) -> None:
    """Raises GptlmError if `adapters` have rows for other added tokens than the run's `new_tokens`."""
    ids = _rows_in(adapters)
    here = _names(tokenizer, new_tokens)
    there = _names(load_tokenizer(str(adapters)), ids) if has_tokenizer(adapters) else here[: len(ids)]
    if ids != new_tokens or there != here:
        raise GptlmError(
            f"the adapters in {adapters} have rows for the added tokens {' '.join(there) or '(none)'}, the run adds "
            f"{' '.join(here) or '(none)'}: give the same --additional_special_tokens and tokenizer, or start from the "
            f"merged model (gptlm merge-lora --lora_path {adapters} --output_path MERGED)"
        )


def _rows_in(adapters: Path) -> list[int]:
    """The ids of the tokens that `adapters` have rows of the embedding for."""
    rows = read_adapter_config(adapters).get("trainable_token_indices") or {}
    return sorted(rows.get("wte", ()) if isinstance(rows, dict) else rows)


def _names(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    return [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]


def _warn_of_other_ids(run: SftRun, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if the tokenizer `name` gives other ids than the model's own."""
    model = run.model.model_name_or_path or ""
    if name == model or not has_tokenizer(Path(model)):
        return
    own, ids = load_tokenizer(model).get_vocab(), tokenizer.get_vocab()
    moved = sum(ids.get(token) != number for token, number in own.items())
    if moved:
        logger.warning(
            "%d of the %d entries of the model's own tokenizer (%s) have no or another id in that of %s: the model was "
            "trained with the ids of its own", moved, len(own), model, name,
        )  # fmt: skip

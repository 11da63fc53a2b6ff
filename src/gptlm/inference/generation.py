"""Continuing prompts."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from gptlm.errors import GptlmError
from gptlm.model.gpt import GPTLMHeadModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; without `do_sample` it is the likeliest."""

    do_sample: bool = False
    top_k: int = 50
    top_p: float = 1.0
    temperature: float = 1.0


def continue_prompts(
    model: GPTLMHeadModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    batch_size: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    stop_at_eol: bool = False,
) -> Iterator[str]:
    """The text added to each prompt, in order. Without sampling a result does not depend on the batch size.

    Args:
        max_prompt_tokens: a longer prompt keeps its end.
        stop_at_eol: stop at a line break as well as at the end-of-text token.

    Raises:
        GptlmError: if a prompt leaves no room in the position table.
    """
    rows = [_encode(tokenizer, prompt, max_prompt_tokens) for prompt in prompts]
    max_new_tokens = min(max_new_tokens, _room(model.config.n_positions, max(map(len, rows)), max_new_tokens))
    pad = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
    options = _options(model, tokenizer, max_new_tokens, sampling, stop_at_eol, pad)
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        ids, mask = _left_padded(batch, pad)
        try:
            with torch.inference_mode():
                out = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), **options)
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise GptlmError(
                "the model's probabilities are no numbers: its weights are damaged, or --temperature is too small"
            ) from error
        yield from tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str, longest: int) -> list[int]:
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not ids:
        ids = [tokenizer.eos_token_id]  # an empty prompt: start a new document
    return ids[-longest:]


def _room(positions: int, longest: int, wanted: int) -> int:
    """New tokens that fit after the longest prompt; fewer than wanted is said, none is an error."""
    room = positions - longest
    if room < 1:
        raise GptlmError(
            f"a prompt of {longest} tokens fills the position table of {positions}; shorten it, or give "
            f"--src_length {positions // 2}"
        )
    if room < wanted:
        logger.warning(
            "%d new tokens do not fit the position table of %d after the longest prompt: %d are added at most",
            wanted,
            positions,
            room,
        )
    return room


def _left_padded(rows: Sequence[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, (rows, longest) int64 each; padding stands on the left, new tokens follow the prompt directly."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _options(
    model: GPTLMHeadModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    sampling: Sampling,
    stop_at_eol: bool,
    pad: int,
) -> dict[str, Any]:
    stops = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if stop_at_eol:
        stops += tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": sampling.do_sample,
        "pad_token_id": pad,
        "eos_token_id": stops or None,
        "use_cache": True,
    }
    if sampling.do_sample:
        options |= {"top_k": sampling.top_k, "top_p": sampling.top_p, "temperature": sampling.temperature}
    if model.config.vocab_size > len(tokenizer):  # padded rows of the embedding are no tokens
        options["suppress_tokens"] = list(range(len(tokenizer), model.config.vocab_size))
    return options

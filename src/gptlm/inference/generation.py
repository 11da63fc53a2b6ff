"""Continuing prompts. A row is the ids of one prompt."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, takewhile
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from gptlm.errors import GptlmError

logger = logging.getLogger(__name__)


SAMPLING_WORDS = ("top_k", "top_p", "temperature")
BEAM_WORDS = ("length_penalty", "early_stopping")
LINE_BREAK = "\u010a"  # how byte-level vocabularies write "\n"


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; without `do_sample` it is the likeliest, with `num_beams` the likeliest text.

    Names and meanings are those of transformers' generate; `top_k` 0 and `top_p` 1.0 are off.
    """

    do_sample: bool = False
    top_k: int = 50
    top_p: float = 1.0
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    num_return_sequences: int = 1

    def options(self) -> dict[str, Any]:
        """What `generate` is told; words that would have no effect are left out, it warns of them."""
        idle = (() if self.do_sample else SAMPLING_WORDS) + (() if self.num_beams > 1 else BEAM_WORDS)
        return {name: value for name, value in asdict(self).items() if name not in idle}


GREEDY = Sampling()


def continue_prompts(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    batch_size: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_at_eol: bool = False,
) -> Iterator[str]:
    """The text added to each prompt, in order. Without sampling a result does not depend on the batch size.

    Args:
        max_prompt_tokens: a longer prompt keeps its end.
        stop_at_eol: stop at a line break as well as at the end-of-text token.

    Raises:
        GptlmError: if a prompt leaves no room in the position table.
    """
    rows = encode_prompts(tokenizer, prompts, max_prompt_tokens)
    settings = {"batch_size": batch_size, "max_new_tokens": max_new_tokens, "stop_at_eol": stop_at_eol}
    for ids in continue_apart(model, tokenizer, rows, sampling=sampling, **settings):  # type: ignore[arg-type]
        yield text_of(tokenizer, ids)


def continue_rows(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[list[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_at_eol: bool = False,
) -> Iterator[list[int]]:
    """The ids added to each row, in order, up to the first that ends it; `num_return_sequences` for each row.

    The model is called for `batch_size` rows at a time, and no row gets more new ids than fit behind the longest one.

    Raises:
        GptlmError: if a row leaves no room in the position table.
    """
    check_rows(model, rows, max_new_tokens)
    stops = stop_ids(tokenizer, stop_at_eol)
    options = generate_options(model, tokenizer, sampling, stops)
    options["max_new_tokens"] = min(max_new_tokens, model.config.n_positions - max(map(len, rows)))
    for start in range(0, len(rows), batch_size):
        yield from _continue_batch(model, rows[start : start + batch_size], options, stops)


def continue_apart(
    model: Any, tokenizer: PreTrainedTokenizerBase, rows: Sequence[list[int]], *, max_new_tokens: int, **settings: Any
) -> Iterator[list[int]]:
    """As `continue_rows`, but a row near the end of the position table goes alone: others get what they get alone."""
    check_rows(model, rows, max_new_tokens)
    for group in _groups(rows, model.config.n_positions - max_new_tokens):
        room = model.config.n_positions - max(map(len, group))
        yield from continue_rows(model, tokenizer, group, max_new_tokens=min(max_new_tokens, room), **settings)


def _continue_batch(
    model: Any, batch: Sequence[list[int]], options: dict[str, Any], stops: list[int]
) -> Iterator[list[int]]:
    ids, mask = _left_padded(batch)
    try:
        with torch.inference_mode():
            out = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), **options)
    except RuntimeError as error:
        raise sampling_error(error) from error
    for added in out[:, ids.shape[1] :].tolist():
        yield before(added, stops)


def sampling_error(error: RuntimeError) -> Exception:
    """`error` in the user's words, if it is about probabilities."""
    if "probability tensor" not in str(error):
        return error
    return GptlmError(
        "the model's probabilities are no numbers: its weights are damaged, or --temperature is too small"
    )


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """`ids` as text without special tokens; a character whose last bytes are missing at the end is left out."""
    text = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return text.rstrip("\ufffd")


def before(ids: list[int], stops: Sequence[int]) -> list[int]:
    """`ids` up to the first of `stops`."""
    return list(takewhile(lambda token: token not in stops, ids))


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], longest: int) -> list[list[int]]:
    """The ids of each prompt; a longer one keeps its last `longest` ids, which the log says.

    Raises:
        GptlmError: for an empty prompt, if the tokenizer has no end-of-text token to start from.
    """
    rows = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    if tokenizer.eos_token_id is None and not all(rows):
        raise GptlmError("a prompt is empty and the tokenizer has no end-of-text token to start from; give some text")
    cut = sum(len(row) > longest for row in rows)
    if cut:
        logger.warning(
            "%d of %d prompts are longer than --src_length %d (the longest has %d tokens): their last %d are used",
            *(cut, len(rows), longest, max(map(len, rows)), longest),
        )
    return [row[-longest:] or [tokenizer.eos_token_id] for row in rows]  # empty: start a new document


def check_rows(model: Any, rows: Sequence[list[int]], wanted: int) -> None:
    """Raises GptlmError if a row cannot be continued; says so if one gets less than the `wanted` new tokens."""
    positions, longest, largest = model.config.n_positions, max(map(len, rows)), max(map(max, rows))
    if largest >= model.config.vocab_size:
        raise GptlmError(
            f"a prompt holds the token id {largest}, the model knows ids below {model.config.vocab_size}: tokenizer "
            "and model do not belong together"
        )
    if longest >= positions:
        raise GptlmError(
            f"a prompt of {longest} tokens fills the position table of {positions}; shorten it, or give "
            f"--src_length {positions // 2}"
        )
    if positions - longest < wanted:
        logger.warning(
            "%d new tokens do not fit the position table of %d after a prompt of %d tokens: %d are added at most",
            *(wanted, positions, longest, positions - longest),
        )


def stop_ids(tokenizer: PreTrainedTokenizerBase, stop_at_eol: bool) -> list[int]:
    """Ids that end a continuation: end of text and, if asked for, every token with a line break in it."""
    stops = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if stop_at_eol:
        signs = ("\n", LINE_BREAK)
        stops += sorted(i for token, i in tokenizer.get_vocab().items() if any(sign in token for sign in signs))
    return stops


def generate_options(
    model: Any, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, stops: list[int]
) -> dict[str, Any]:
    """Keywords of `generate`, the same for every batch. Rows of the embedding without a token are never drawn."""
    options = sampling.options() | {
        "pad_token_id": tokenizer.eos_token_id or 0,
        "eos_token_id": stops or None,
        "use_cache": True,
    }
    unknown = sorted(set(range(model.config.vocab_size)) - set(tokenizer.get_vocab().values()))
    return options | ({"suppress_tokens": unknown} if unknown else {})


def _groups(rows: Sequence[list[int]], longest: int) -> Iterator[Sequence[list[int]]]:
    """`rows` in order: neighbours of at most `longest` ids together, each longer one alone."""
    for fits, group in groupby(rows, key=lambda row: len(row) <= longest):
        members = list(group)
        yield from [members] if fits else [[row] for row in members]


def _left_padded(rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, (rows, longest) int64 each; padding stands on the left, new tokens follow the prompt directly.

    A row is padded with its own first token: the mask hides it, and a repetition penalty finds no token in a row that
    would not be there without padding.
    """
    width = max(map(len, rows))
    ids = torch.tensor([row[:1] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask

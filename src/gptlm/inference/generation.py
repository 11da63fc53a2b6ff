"""Continuing prompts. A row is the ids of one prompt."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, takewhile
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
)
from transformers.generation.streamers import BaseStreamer

from gptlm.data.special_tokens import log_spelled
from gptlm.errors import GptlmError
from gptlm.model.build import check_finite

logger = logging.getLogger(__name__)


SAMPLING_WORDS = ("top_k", "top_p", "temperature")
BEAM_WORDS = ("length_penalty", "early_stopping")
MOST_NAMED = 10
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
        GptlmError: if a prompt leaves no room in the position table, or the logits are not finite.
    """
    rows = encode_prompts(tokenizer, prompts, max_prompt_tokens)
    check_rows(rows, model.config.n_positions, model.config.vocab_size, max_new_tokens)
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

    The model is called for `batch_size` rows at a time, and no row of a batch gets more new ids than fit behind its
    longest one. Rows must have passed `check_rows`.

    Raises:
        GptlmError: if the logits are not finite.
    """
    stops = stop_ids(model, tokenizer, stop_at_eol)
    options = generate_options(model, tokenizer, sampling, stops)
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        ids, mask = _left_padded(batch)
        out = generate(model, ids, mask, options, max_new_tokens)
        for added in out[:, ids.shape[1] :].tolist():
            yield before(added, stops)


def continue_apart(
    model: Any, tokenizer: PreTrainedTokenizerBase, rows: Sequence[list[int]], *, max_new_tokens: int, **settings: Any
) -> Iterator[list[int]]:
    """As `continue_rows`, but a row near the end of the position table goes alone: others get what they get alone."""
    for group in _groups(rows, model.config.n_positions - max_new_tokens):
        yield from continue_rows(model, tokenizer, group, max_new_tokens=max_new_tokens, **settings)


def generate(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    options: dict[str, Any],
    max_new_tokens: int,
    streamer: BaseStreamer | None = None,
) -> torch.Tensor:
    """transformers' `generate` under `options` alone: the generation_config.json of the model does not count.

    Args:
        model: a network, or one with PEFT's adapters.
        ids, mask: (rows, T) int64.
        options: from `generate_options`.
        max_new_tokens: fewer are added where the position table ends.

    Returns:
        (rows x num_return_sequences, T + new) ids.

    Raises:
        GptlmError: if the logits are not finite.
    """
    network = getattr(model, "get_base_model", lambda: model)()  # PEFT's wrapper adds nothing to generating
    room = network.config.n_positions - ids.shape[1]
    config = GenerationConfig(**options, max_new_tokens=min(max_new_tokens, room))
    stored, network.generation_config = network.generation_config, GenerationConfig()  # it fills in what is not set
    try:
        with torch.inference_mode():
            return network.generate(
                ids.to(network.device),
                attention_mask=mask.to(network.device),
                generation_config=config,
                logits_processor=LogitsProcessorList([_FiniteLogits(network)]),
                streamer=streamer,
            )
    finally:
        network.generation_config = stored


class _FiniteLogits(LogitsProcessor):
    """Ends generation where logits are NaN or infinite: no search method notices, all of them choose some token."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        check_finite(scores.amax(-1), self.model)  # NaN and +inf are the maximum, -inf if it stands alone
        return scores


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """`ids` as text without special tokens; a character whose last bytes are missing at the end is left out."""
    text = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return text.rstrip("\ufffd")


def before(ids: list[int], stops: Sequence[int]) -> list[int]:
    """`ids` up to the first of `stops`."""
    return list(takewhile(lambda token: token not in stops, ids))


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    longest: int,
    names: Sequence[str] | None = None,
    *,
    truncation_side: str = "left",
    allow_special_tokens: bool = False,
) -> list[list[int]]:
    """The ids of each prompt; a longer one keeps `longest` ids, which the log says.

    Args:
        names: of the prompts, for messages.
        truncation_side: "left" keeps the last ids of a longer prompt, "right" the first.
        allow_special_tokens: a special token that a prompt spells becomes its id; else it stays text.

    Raises:
        GptlmError: for an empty prompt, if the tokenizer has no end-of-text token to start from.
    """
    names = names or numbered(len(prompts))
    if not allow_special_tokens:
        log_spelled("prompts", tokenizer, prompts)
    literal = not allow_special_tokens
    rows = [
        tokenizer(prompt, add_special_tokens=False, split_special_tokens=literal)["input_ids"] for prompt in prompts
    ]
    empty = [name for name, row in zip(names, rows, strict=True) if not row]
    if tokenizer.eos_token_id is None and empty:
        raise GptlmError(
            f"{empty[0]}: the prompt has no tokens and the tokenizer no end-of-text token to start from; give some text"
        )
    cut = [name for name, row in zip(names, rows, strict=True) if len(row) > longest]
    if cut:
        logger.warning(
            "%d of %d prompts are longer than --src_length %d (the longest has %d tokens), only their %s %d tokens "
            "are used (--truncation_side %s): %s",
            *(len(cut), len(rows), longest, max(map(len, rows)), "last" if truncation_side == "left" else "first"),
            *(longest, truncation_side, some_of(cut)),
        )
    rows = [row[-longest:] if truncation_side == "left" else row[:longest] for row in rows]
    return [row or [tokenizer.eos_token_id] for row in rows]  # empty: start a new document


def check_rows(
    rows: Sequence[list[int]], positions: int, vocab_size: int, wanted: int, names: Sequence[str] | None = None
) -> None:
    """Judge prompts before they are continued; log those that get fewer than the `wanted` new tokens.

    Args:
        positions, vocab_size: of the model.
        names: of the rows, for messages.

    Raises:
        GptlmError: if a row has an id beyond the vocabulary, or fills the position table.
    """
    named = list(zip(names or numbered(len(rows)), rows, strict=True))
    for name, row in named:
        if max(row) >= vocab_size:
            raise GptlmError(
                f"{name}: the prompt holds the token id {max(row)}, the model knows ids below {vocab_size}: tokenizer "
                "and model do not belong together"
            )
        if len(row) >= positions:
            raise GptlmError(
                f"{name}: the prompt of {len(row)} tokens fills the position table of {positions}; shorten it, or "
                f"give --src_length {positions // 2}"
            )
    short = [name for name, row in named if len(row) > positions - wanted]
    if short:
        logger.warning(
            "%d of %d prompts leave no room for %d new tokens in the position table of %d (the longest leaves room for "
            "%d): %s",
            *(len(short), len(rows), wanted, positions, positions - max(map(len, rows)), some_of(short)),
        )


def numbered(count: int) -> list[str]:
    """Names of prompts that have no others."""
    return [f"prompt {number}" for number in range(1, count + 1)]


def some_of(names: Sequence[str]) -> str:
    """The first `MOST_NAMED` of `names` for a message, and how many more there are."""
    more = f"; and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return "; ".join(names[:MOST_NAMED]) + more


def stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase, stop_at_eol: bool) -> list[int]:
    """Ids that end a continuation: end of text, end of turn and, if asked for, every token with a line break in it.

    Ends of turns are the added tokens among the `eos_token_id` of the model's generation_config.json: which ids end
    a text belongs to the vocabulary, unlike everything else in that file.
    """
    stops = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ends = model.generation_config.eos_token_id
    added = tokenizer.added_tokens_decoder
    stops += [end for end in (ends if isinstance(ends, list) else [ends]) if end in added and end not in stops]
    if stop_at_eol:
        signs = ("\n", LINE_BREAK)
        stops += sorted(i for token, i in tokenizer.get_vocab().items() if any(sign in token for sign in signs))
    return stops


def generate_options(
    model: Any, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, stops: list[int]
) -> dict[str, Any]:
    """Fields of a GenerationConfig, the same for every batch. Rows of the embedding without a token are never drawn."""
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


class _Closed(Exception):
    """Nobody reads on."""


class Stream(BaseStreamer):
    """The text added to one row, as an iterator of pieces; joined they are what `continue_prompts` gives.

    Near the end of the position table it gets what fits. Whoever stops reading ends the work.

    Attributes:
        ids: of the tokens so far, without the one that ended the text.

    Raises:
        GptlmError: if the row cannot be continued, or the logits are not finite.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        row: list[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop_at_eol: bool = False,
    ):
        check_rows([row], model.config.n_positions, model.config.vocab_size, 1, ["the prompt"])
        self.ids: list[int] = []
        self._model, self._tokenizer, self._row = model, tokenizer, row
        self._stops = stop_ids(model, tokenizer, stop_at_eol)
        self._options = generate_options(model, tokenizer, sampling, self._stops)
        self._max_new_tokens = max_new_tokens
        self._queue: SimpleQueue[str | Exception | None] = SimpleQueue()
        self._before_prompt, self._closed, self._said = True, False, 0

    def __iter__(self) -> Iterator[str]:
        thread = Thread(target=self._work, daemon=True)
        thread.start()
        try:
            while (piece := self._queue.get()) is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            self._closed = True
            thread.join()

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`, first with the prompt."""
        if self._closed:
            raise _Closed
        if self._before_prompt:
            self._before_prompt = False
            return
        self.ids = before([*self.ids, *value.tolist()], self._stops)
        text = text_of(self._tokenizer, self.ids)
        if len(text) > self._said:
            self._queue.put(text[self._said :])
            self._said = len(text)

    def end(self) -> None:
        """Called by `generate` behind the last token."""

    def _work(self) -> None:
        ids = torch.tensor([self._row])
        try:
            generate(self._model, ids, torch.ones_like(ids), self._options, self._max_new_tokens, streamer=self)
            self._queue.put(None)
        except _Closed:
            pass
        except Exception as error:
            self._queue.put(error)

"""Generation: prompts -> rows of token ids -> continuations, in batches or as a stream."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, takewhile
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from gptlm.data.encoder import log_special_tokens
from gptlm.errors import GptlmError, named
from gptlm.model.build import check_finite
from gptlm.model.tokenizer import encode_texts

logger = logging.getLogger(__name__)

SAMPLING_FIELDS = ("top_k", "top_p", "temperature")
BEAM_FIELDS = ("length_penalty", "early_stopping")
MOST_NAMED = 10  # prompts that a message lists
LINE_BREAKS = ("\n", "\u010a")  # in entries of a vocabulary; the second is the one of byte-level BPE


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: greedy search by default, beam search with `num_beams`, else sampling.

    Names and meanings are those of `GenerationConfig`; `top_k` 0 and `top_p` 1.0 have no effect.
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
        """Fields of a GenerationConfig, without those that have no effect: `generate` warns about them."""
        unused = (() if self.do_sample else SAMPLING_FIELDS) + (() if self.num_beams > 1 else BEAM_FIELDS)
        return {name: value for name, value in asdict(self).items() if name not in unused}


GREEDY = Sampling()


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    longest: int,
    names: Sequence[str] | None = None,
    *,
    truncation_side: str = "left",
    allow_special_tokens: bool = False,
) -> list[list[int]]:
    """The ids of each prompt, at most `longest`; the log names prompts that are truncated.

    Args:
        names: of the prompts, for messages.
        truncation_side: "left" keeps the last ids of a longer prompt, "right" the first.
        allow_special_tokens: encode special tokens in a prompt as their ids, not as text.

    Raises:
        GptlmError: for an empty prompt, if the tokenizer has no end-of-text token to start from.
    """
    names = names or numbered(len(prompts))
    if not allow_special_tokens:
        log_special_tokens("prompts", tokenizer, prompts)
    rows = encode_texts(tokenizer, prompts, allow_special_tokens)
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
    return [row or [tokenizer.eos_token_id] for row in rows]  # GPT-2 starts a document with the end-of-text token


def check_rows(
    rows: Sequence[list[int]], positions: int, vocab_size: int, wanted: int, names: Sequence[str] | None = None
) -> None:
    """Check prompts before generation; the log names those that get fewer than `wanted` new tokens.

    Args:
        positions, vocab_size: of the model.
        names: of the rows, for messages.

    Raises:
        GptlmError: if a row has an id beyond the vocabulary, or fills the position table.
    """
    names = names or numbered(len(rows))
    for name, row in zip(names, rows, strict=True):
        if max(row) >= vocab_size:
            raise GptlmError(
                f"{name}: the prompt holds the token id {max(row)}, the model knows ids below {vocab_size}: the "
                "tokenizer is not the one of this model"
            )
        if len(row) >= positions:
            raise GptlmError(
                f"{name}: the prompt of {len(row)} tokens fills the position table of {positions}; shorten it, or "
                f"give {named('src_length')} {positions // 2}"
            )
    short = [name for name, row in zip(names, rows, strict=True) if len(row) > positions - wanted]
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


def continue_rows(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[list[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_at_eol: bool = False,
    independent: bool = False,
) -> Iterator[list[int]]:
    """The new ids of each row, in order, without the one that ends it; `num_return_sequences` for each row.

    Args:
        rows: ids of prompts that passed `check_rows`. All rows of a batch get as many new ids as fit behind the
            longest one.
        independent: give a row near the end of the position table a batch of its own, so that the others get
            `max_new_tokens`. Without sampling the result then does not depend on the batch size.

    Raises:
        GptlmError: if the logits are not finite.
    """
    stops = stop_ids(model, tokenizer, stop_at_eol)
    options = generate_options(model, tokenizer, sampling, stops)
    positions = model.config.n_positions
    for batch in _batches(rows, batch_size, positions - max_new_tokens if independent else positions):
        ids, mask = _left_padded(batch)
        out = generate(model, ids, mask, options, max_new_tokens)
        for added in out[:, ids.shape[1] :].tolist():
            yield before(added, stops)


def _batches(rows: Sequence[list[int]], size: int, longest: int) -> Iterator[list[list[int]]]:
    """`rows` in order: up to `size` neighbours of at most `longest` ids together, each longer row alone."""
    for fits, group in groupby(rows, key=lambda row: len(row) <= longest):
        members, step = list(group), size if fits else 1
        yield from (members[start : start + step] for start in range(0, len(members), step))


def _left_padded(rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, (rows, longest) int64 each. Padding is on the left, so that new tokens follow the prompt directly.

    The mask hides the padding from attention, but not from a repetition penalty. A row is therefore padded with its own
    first token, which the penalty applies to anyway.
    """
    width = max(map(len, rows))
    ids = torch.tensor([row[:1] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def generate(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    options: dict[str, Any],
    max_new_tokens: int,
    streamer: BaseStreamer | None = None,
) -> torch.Tensor:
    """transformers' `generate` with `options` alone: the generation_config.json of the model is ignored.

    Args:
        model: a network, or one with PEFT's adapters.
        ids, mask: (rows, length) int64.
        options: from `generate_options`.
        max_new_tokens: fewer are generated where the position table ends.

    Returns:
        (rows x num_return_sequences, length + new) ids.

    Raises:
        GptlmError: if the logits are not finite.
    """
    network = getattr(model, "get_base_model", lambda: model)()  # PEFT's own `generate` only forwards to it
    left = network.config.n_positions - ids.shape[1]
    config = GenerationConfig(**options, max_new_tokens=min(max_new_tokens, left))
    # transformers takes fields that `config` leaves unset from the model's own generation_config.
    stored, network.generation_config = network.generation_config, GenerationConfig()
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
    """Raises where logits are NaN or infinite. `generate` itself does not notice and chooses some token."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        check_finite(scores.amax(-1), self.model)  # NaN and +inf are the maximum; -inf is if all logits are -inf
        return scores


def generate_options(
    model: Any, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, stops: list[int]
) -> dict[str, Any]:
    """Fields of a GenerationConfig, the same for every batch. Padding rows of the embedding are never generated."""
    options = sampling.options() | {
        "pad_token_id": tokenizer.eos_token_id or 0,
        "eos_token_id": stops or None,
        "use_cache": True,
    }
    unknown = sorted(set(range(model.config.vocab_size)) - set(tokenizer.get_vocab().values()))
    return options | ({"suppress_tokens": unknown} if unknown else {})


def stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase, stop_at_eol: bool) -> list[int]:
    """Ids that end a continuation: end of text, end of turn and, with `stop_at_eol`, every token with a line break.

    Ends of turns are the added tokens among `eos_token_id` of the model's generation_config.json. This is the one field
    of that file that belongs to the vocabulary and not to a way of generating.
    """
    stops = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ends = model.generation_config.eos_token_id
    added = tokenizer.added_tokens_decoder
    stops += [end for end in (ends if isinstance(ends, list) else [ends]) if end in added and end not in stops]
    if stop_at_eol:
        stops += sorted(i for token, i in tokenizer.get_vocab().items() if any(sign in token for sign in LINE_BREAKS))
    return stops


def before(ids: list[int], stops: Sequence[int]) -> list[int]:
    """`ids` up to the first of `stops`."""
    return list(takewhile(lambda token: token not in stops, ids))


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """`ids` as text without special tokens and without an incomplete character at the end."""
    text = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return text.rstrip("\ufffd")


class Stream(BaseStreamer):
    """Iterates over the continuation of one row in pieces of text; joined they equal `text_of` all of its ids.

    A piece never ends inside a character. Closing the iterator ends the generation.

    Not transformers' TextIteratorStreamer: it emits the text of the token that ends the continuation, holds symbols
    back until the next space, and keeps an incomplete character at the end. It also has no way to stop the generation,
    and its reader waits forever if `generate` raises.

    Attributes:
        ids: new ids so far, without the one that ended the text.

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
        self._model, self._tokenizer, self._row, self._max_new_tokens = model, tokenizer, row, max_new_tokens
        self._stops = stop_ids(model, tokenizer, stop_at_eol)
        self._options = generate_options(model, tokenizer, sampling, self._stops)
        self._queue: SimpleQueue[str | Exception | None] = SimpleQueue()
        self._has_prompt, self._closed, self._length = False, False, 0

    def __iter__(self) -> Iterator[str]:
        thread = Thread(target=self._generate, daemon=True)  # daemon: Ctrl-C does not wait for it
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
        """Called by `generate` with the prompt, then with each new id."""
        if self._closed:
            raise _Closed
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.ids = before([*self.ids, *value.tolist()], self._stops)
        text = text_of(self._tokenizer, self.ids)
        if len(text) > self._length:
            self._queue.put(text[self._length :])
            self._length = len(text)

    def end(self) -> None:
        """Called by `generate` after the last id; `_generate` ends the queue."""

    def _generate(self) -> None:
        ids = torch.tensor([self._row])
        try:
            generate(self._model, ids, torch.ones_like(ids), self._options, self._max_new_tokens, streamer=self)
            self._queue.put(None)
        except _Closed:
            pass
        except Exception as error:
            self._queue.put(error)


class _Closed(Exception):
    """The reader closed the stream."""

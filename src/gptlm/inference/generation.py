"""Generation: prompts -> rows of token ids -> continuations, in batches or as a stream."""

import logging
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from gptlm.data.encoder import log_special_tokens
from gptlm.errors import GptlmError, named
from gptlm.inference.decoding import Decoder
from gptlm.inference.sampling import GREEDY, Sampling
from gptlm.model.build import check_finite
from gptlm.model.tokenizer import encode_texts

logger = logging.getLogger(__name__)

MOST_NAMED = 10  # prompts that a message lists
LINE_BREAKS = ("\n", "\u010a")  # in entries of a vocabulary; the second is the one of byte-level BPE


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
    graph: bool = True,
    sharded: bool = False,
    decoder: Decoder | None = None,
) -> Iterator[list[int]]:
    """The new ids of each row, in order, without the one that ends it; `num_return_sequences` for each row.

    Each row gets `max_new_tokens`, or as many as fit into the position table. Without sampling the result does not
    depend on the batch size. Beam search, and a model whose weights are sharded, use transformers' `generate`.

    Args:
        rows: ids of prompts that passed `check_rows`.
        batch_size: rows that are continued at the same time.
        graph: replay steps as a CUDA graph, on a GPU.
        sharded: the processes gather weights together, so each has to run the model equally often.
        decoder: from `batch_decoder` for these rows and settings, to be used once more.

    Raises:
        GptlmError: if the logits are not finite.
    """
    stops = stop_ids(model, tokenizer, stop_at_eol)
    if sharded or sampling.num_beams > 1:
        options = generate_options(tokenizer, sampling, stops, unknown_ids(model, tokenizer))
        yield from _continue_by_transformers(model, rows, options, stops, batch_size, max_new_tokens)
        return
    if not rows:
        return
    copies = sampling.num_return_sequences
    slots = batch_size * copies
    decoder = decoder or batch_decoder(model, tokenizer, rows, max_new_tokens, slots=slots, graph=graph)
    repeated = [row for row in rows for _ in range(copies)]
    done: dict[int, list[int]] = {}
    following = 0
    for row in decoder.decode(repeated, max_new_tokens, sampling, stops):
        if row.ended:
            done[row.number] = row.new
        while following in done:
            yield done.pop(following)
            following += 1


def batch_decoder(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[list[int]],
    max_new_tokens: int,
    *,
    slots: int,
    graph: bool = True,
) -> Decoder:
    """A decoder for `rows`, with `slots` of them at the same time."""
    capacity = min(model.config.n_positions, max(map(len, rows)) + max_new_tokens)
    return Decoder(model, slots=slots, capacity=capacity, never=unknown_ids(model, tokenizer), graph=graph)


def _continue_by_transformers(
    model: Any,
    rows: Sequence[list[int]],
    options: dict[str, Any],
    stops: list[int],
    batch_size: int,
    max_new_tokens: int,
) -> Iterator[list[int]]:
    for batch in _batches(rows, batch_size, model.config.n_positions - max_new_tokens):
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
    tokenizer: PreTrainedTokenizerBase, sampling: Sampling, stops: list[int], never: list[int]
) -> dict[str, Any]:
    """Fields of a GenerationConfig, the same for every batch."""
    options = sampling.options() | {
        "pad_token_id": tokenizer.eos_token_id or 0,
        "eos_token_id": stops or None,
        "use_cache": True,
    }
    return options | ({"suppress_tokens": never} if never else {})


def unknown_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Padding rows of the embedding, which are never generated."""
    return sorted(set(range(model.config.vocab_size)) - set(tokenizer.get_vocab().values()))


def stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase, stop_at_eol: bool) -> list[int]:
    """Ids that end a continuation: end of text, end of turn and, with `stop_at_eol`, every token with a line break.

    Ends of turns are the added tokens among `eos_token_id` of the model's generation_config.json. This is the one field
    of that file that belongs to the vocabulary and not to a way of generating.
    """
    stops = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ends = model.generation_config.eos_token_id
    added = tokenizer.added_tokens_decoder
    found = [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]  # None: there is none
    stops += [end for end in found if end in added and end not in stops]
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


class Stream:
    """Iterates over the continuation of one row in pieces of text; joined they equal `text_of` all of its ids.

    A piece never ends inside a character. On a GPU it has the text of a few tokens. Closing the iterator ends the
    generation.

    Args:
        decoder: with one slot, as from `stream_decoder`; streams of a model should share it.

    Attributes:
        ids: new ids so far, without the one that ended the text.

    Raises:
        GptlmError: if the row cannot be continued, or the logits are not finite.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        row: list[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop_at_eol: bool = False,
    ):
        model = decoder.network
        check_rows([row], model.config.n_positions, model.config.vocab_size, 1, ["the prompt"])
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._progress = decoder.decode([row], max_new_tokens, sampling, stop_ids(model, tokenizer, stop_at_eol))

    def __iter__(self) -> Iterator[str]:
        for piece in self.steps():
            if piece:
                yield piece

    def steps(self) -> Iterator[str]:
        """The pieces and an empty text for each step without one, so that a reader can close the iterator there."""
        length = 0
        for row in self._progress:
            self.ids = list(row.new)
            text = text_of(self._tokenizer, self.ids)
            yield text[length:]
            length = max(length, len(text))


def stream_decoder(model: Any, tokenizer: PreTrainedTokenizerBase, graph: bool = True) -> Decoder:
    """A decoder for streams, whose rows have any length."""
    never = unknown_ids(model, tokenizer)
    return Decoder(model, slots=1, capacity=model.config.n_positions, never=never, graph=graph)

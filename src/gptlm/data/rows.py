"""Rows of fine-tuning: the token ids of an example, and its loss mask.

Masks come from places in the text, never from ids: an end-of-text token is a target where a response ends, whatever the
padding id is.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from gptlm.data.conversations import Chat, Content, Example, Span, Turn
from gptlm.data.encoder import special_tokens
from gptlm.errors import GptlmError, named

if TYPE_CHECKING:  # worker processes import this module, and transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

CHUNK = 1000  # examples that are encoded together; bounds the memory of the offsets
PADDLE_END = " </s>"  # PaddleNLP's end of text, literal text that becomes several ids


@dataclass(frozen=True)
class Text:
    """A text to tokenize.

    Attributes:
        literal: spans in which a special token stays text; None: everywhere.
    """

    text: str
    literal: tuple[Span, ...] | None = None


@dataclass(frozen=True)
class Encoded:
    """Ids, and the span of characters of each."""

    ids: list[int]
    spans: Sequence[Span]


class _Spans(Sequence[Span]):
    """The spans of `(place, encoding)` pieces, made when they are read: most texts are not truncated."""

    def __init__(self, pieces: list[tuple[int, Any]]):
        self.pieces = pieces

    @cached_property
    def spans(self) -> list[Span]:
        return [(place + start, place + stop) for place, piece in self.pieces for start, stop in piece.offsets]

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, places: Any) -> Any:
        return self.spans[places]


Encode = Callable[[Sequence[Text]], list[Encoded]]


@dataclass(frozen=True)
class Row:
    """One encoded example.

    Attributes:
        ids: (n,) int32.
        loss_mask: (n,) bool; whether the id is a target.
        prompt_length: ids before the last response; generation continues them.
        skipped_turns: turns at the end of the conversation that do not fit.
        response: text of the last response, whole.
        truncated_prompts, truncated_responses: how many were longer than their limit.
        earlier: (ids before it, its text) of each response before the last one.
        end_id: the id that ends its responses; None: they have no end.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    prompt_length: int
    skipped_turns: int = 0
    response: str = ""
    truncated_prompts: int = 0
    truncated_responses: int = 0
    earlier: tuple[tuple[int, str], ...] = ()
    end_id: int | None = None


@dataclass(frozen=True)
class Lengths:
    """Limits in tokens: of a prompt, of a response with its end, of a row."""

    source: int
    target: int
    total: int

    def prompt_budget(self, response: int) -> int:
        """Tokens of a prompt before a response of `response` tokens: the prompt is truncated first."""
        return min(self.source, max(self.total - response, 1))


@dataclass
class _Part:
    """A prompt and its response, in ids.

    Attributes:
        prompt: with responses before it that are not targets.
        truncatable: places in `prompt` that can be removed, in the order of removal.
        context: places in `prompt` that are never targets.
        end: ids after the response that end it.
        is_text: the response is a plain text, see `Turn`.
    """

    prompt: list[int] = field(default_factory=list)
    truncatable: list[int] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    response: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    text: str = ""
    in_loss: bool = True
    is_text: bool = False


@dataclass(frozen=True)
class Encoder:
    """Rows from examples.

    Attributes:
        encode: texts -> ids and their characters.
        eos_id: ends every whole response for which no chat template has an end of its own.
        train_on_prompt: prompts are targets, too.
        side: of a prompt that is too long: "left" truncates its beginning, "right" its end.
    """

    encode: Encode
    eos_id: int
    lengths: Lengths
    train_on_prompt: bool = False
    side: str = "left"

    def rows(self, examples: Iterable[Example]) -> list[Row]:
        """A row for each example, in order; its loss mask can be empty."""
        iterator, found = iter(examples), list[Row]()
        while chunk := list(islice(iterator, CHUNK)):
            encoded = iter(self.encode([text for example in chunk for text in _texts(example)]))
            found += [self._row(example, encoded) for example in chunk]
        return found

    def _row(self, example: Example, encoded: Iterator[Encoded]) -> Row:
        if isinstance(example, Chat):
            parts, rest = self._chat_parts(example, next(encoded))
            return self._joined(parts, rest, self.eos_id if example.end_id is None else example.end_id)
        texts = [(turn, next(encoded), next(encoded)) for turn in example]
        longest = max((len(response.ids) + 1 for _, _, response in texts), default=0)
        total = sum(len(prompt.ids) + len(response.ids) + 2 for _, prompt, response in texts)
        fits = longest <= self.lengths.target and total <= min(self.lengths.source, self.lengths.total)
        return self._joined([self._turn_part(*text, fits=fits) for text in texts], [], self.eos_id)

    def _turn_part(self, turn: Turn, prompt: Encoded, response: Encoded, *, fits: bool) -> _Part:
        """`fits`: nothing is truncated, so that it need not be known what could be."""
        texts = (Content(0, len(turn.prompt), "user"),) if turn.texts is None else turn.texts
        truncatable = [] if fits else places_to_cut(prompt.spans, texts, self.side)
        ids = response.ids[:-1] if response.ids[-1:] == [self.eos_id] else response.ids
        # the first token of a response needs one before it that predicts it
        before, end = prompt.ids or [self.eos_id], [self.eos_id]
        return _Part(before, truncatable, [], ids, end, turn.response, turn.in_loss, turn.is_text)

    def _chat_parts(self, chat: Chat, encoded: Encoded) -> tuple[list[_Part], list[int]]:
        """A part for each response, and the ids after the last one."""
        contents, ids, spans = chat.contents or (), encoded.ids, encoded.spans
        parts, done = list[_Part](), 0
        for one in chat.responses:
            first = _first_after(spans, one.start, done)
            last = next((place for place in range(first, len(spans)) if spans[place][0] >= one.stop), len(spans))
            end = min(_first_after(spans, one.text_stop, first), last)
            truncatable = places_to_cut(spans[done:first], contents, self.side)
            parts.append(_Part(ids[done:first], truncatable, [], ids[first:end], ids[end:last], one.text, one.in_loss))
            done = last
        rest = ids[done:]
        if chat.end_id is None and parts:  # the template does not end responses
            message_follows = any(content.start >= chat.responses[-1].stop for content in contents)
            parts[-1].end += [*([] if message_follows else rest), self.eos_id]
            rest = []
        return parts, rest

    def _joined(self, parts: Sequence[_Part], rest: list[int], end_id: int) -> Row:
        """Turns that do not fit whole are skipped, except the first; then the ids after them are skipped, too."""
        parts, after = _with_context(parts, self.side)
        ids: list[int] = []
        mask: list[bool] = []
        responses: list[tuple[int, str]] = []
        pending: list[int] = []  # the end of a truncated response, needed only if another turn follows
        skipped = truncated_prompts = truncated_responses = 0
        for number, part in enumerate(parts):
            kept, response = self._truncate(part)
            space = self.lengths.total - len(ids) - len(pending)
            if not response or (ids and len(kept) + len(response) > space):
                skipped = len(parts) - number
                break
            ids += pending
            mask += [False] * len(pending)
            responses.append((0 if part.is_text else len(ids) + len(kept), part.text))
            truncated_prompts += len(kept) < len(part.prompt)
            is_whole = len(response) == len(part.response) + len(part.end)
            truncated_responses += not is_whole
            pending = [] if is_whole else part.end
            context = set(part.context)
            trained = self.train_on_prompt
            mask += [place not in context for place in kept] if trained else [False] * len(kept)
            mask += [True] * len(response)
            ids += part.prompt if len(kept) == len(part.prompt) else [part.prompt[place] for place in kept]
            ids += response
        tail = [*after.prompt, *rest]
        if responses and not skipped and not pending and len(ids) + len(tail) <= self.lengths.total:
            ids += tail
            mask += [False] * len(after.prompt) + [self.train_on_prompt] * len(rest)
        prompt_length, text = responses[-1] if responses else (0, "")
        truncated = (truncated_prompts, truncated_responses)
        return Row(*_arrays(ids, mask), prompt_length, skipped, text, *truncated, tuple(responses[:-1]), end_id)

    def _truncate(self, part: _Part) -> tuple[Sequence[int], list[int]]:
        """Places of the prompt that are kept, and the response; a truncated response has no end."""
        fixed = max(len(part.prompt) - len(part.truncatable), 1)
        whole = [*part.response, *part.end]
        limit = self.lengths.total - fixed if part.is_text else min(self.lengths.target, self.lengths.total - fixed)
        response = whole if len(whole) <= limit else part.response[: max(limit, 0)]
        budget = self.lengths.prompt_budget(len(response))
        if len(part.prompt) > budget < fixed:
            return [], []
        if len(part.prompt) <= budget:
            return range(len(part.prompt)), response
        removed = set(part.truncatable[: len(part.prompt) - budget])
        return [place for place in range(len(part.prompt)) if place not in removed], response


def _texts(example: Example) -> list[Text]:
    if isinstance(example, Chat):
        return [Text(example.text, tuple((content.start, content.stop) for content in example.contents or ()))]
    return [text for turn in example for text in (Text(turn.prompt + turn.cue), Text(turn.response))]


def _with_context(parts: Sequence[_Part], side: str) -> tuple[list[_Part], _Part]:
    """Responses that are not targets become part of the next prompt; those after the last target are returned apart."""
    found, before = list[_Part](), _Part()
    for part in parts:
        start = len(before.prompt)
        prompt = before.prompt + part.prompt
        moved = [start + place for place in part.truncatable]
        truncatable = before.truncatable + moved if side == "left" else moved + before.truncatable
        context = before.context + [start + place for place in part.context]
        if part.in_loss:
            found.append(replace(part, prompt=prompt, truncatable=truncatable, context=context))
            before = _Part()
            continue
        response = list(range(len(prompt), len(prompt) + len(part.response)))
        truncatable = truncatable + response if side == "left" else response[::-1] + truncatable
        context += list(range(len(prompt), len(prompt) + len(part.response) + len(part.end)))
        before = _Part(prompt + part.response + part.end, truncatable, context)
    return found, before


def places_to_cut(tokens: Sequence[Span], contents: Sequence[Content], side: str) -> list[int]:
    """Places of tokens that lie in one of `contents`, in the order of removal: system messages last."""
    step = 1 if side == "left" else -1
    found: list[int] = []
    for content in sorted(contents, key=lambda content: (content.role == "system", step * content.start)):
        inside = [place for place, (a, b) in enumerate(tokens) if content.start <= a and b <= content.stop]
        found += inside[::step]
    return found


def _first_after(tokens: Sequence[Span], start: int, begin: int) -> int:
    """Place of the first token from `begin` on that ends after character `start`."""
    return next((place for place in range(begin, len(tokens)) if tokens[place][1] > start), len(tokens))


def _arrays(ids: list[int], mask: list[bool]) -> tuple[np.ndarray, np.ndarray]:
    found = np.array(ids, dtype=np.int32), np.array(mask, dtype=bool)
    found[1][:1] = False  # nothing predicts the first token
    return found


@dataclass(frozen=True)
class PaddleEncoder:
    """Rows from examples, id for id as PaddleNLP's `finetune_generation.py`: prompts lose their end.

    Attributes:
        encode: texts -> ids; a special token in a text becomes its id.
        eos_id: the end-of-text id, used only where there is no prompt.
        end_of_text: the end-of-text token, which is removed where a chat template ends responses with it.
    """

    encode: Callable[[list[str]], list[list[int]]]
    eos_id: int
    lengths: Lengths
    train_on_prompt: bool = False
    end_of_text: str = ""

    def rows(self, examples: Iterable[Example]) -> list[Row]:
        """A row for each example, in order; its loss mask can be empty."""
        found = [self._turns(example) for example in examples]
        turns = [turn for example in found for turn in example]
        prompts = self.encode([turn.prompt + turn.cue + PADDLE_END for turn in turns])
        responses = self.encode([turn.response + PADDLE_END for turn in turns])
        names = sorted({turn.cue for turn in turns})
        cues = dict(zip(names, self.encode(names), strict=True))
        encoded = zip((cues[turn.cue] for turn in turns), prompts, responses, strict=True)
        return [self._row(example, [next(encoded) for _ in example]) for example in found]

    def _turns(self, example: Example) -> list[Turn]:
        """The turns that are targets; the text between them belongs to their prompts."""
        if not isinstance(example, Chat):
            if any(turn.is_text for turn in example):
                raise GptlmError(f"{named('paddle_compat')} encodes prompts and responses; these are plain texts")
            return [turn for turn in example if turn.in_loss]
        turns, done = [], 0
        for one in example.responses:
            if one.in_loss:
                text, stop = example.text[one.start : one.stop], one.stop
                if not text.endswith(self.end_of_text):  # then line breaks after it are part of the response
                    stop += len(example.text[stop:]) - len(example.text[stop:].lstrip())
                    text = example.text[one.start : stop]
                turns.append(Turn(example.text[done : one.start], text.removesuffix(self.end_of_text)))
                done = stop
        return turns

    def _row(self, example: list[Turn], turns: list[tuple[list[int], list[int], list[int]]]) -> Row:
        """From (cue, prompt with cue, response) each; turns that do not fit whole are skipped, except the first."""
        ids: list[int] = []
        mask: list[bool] = []
        prompt_length = skipped = truncated_prompts = truncated_responses = 0
        last = ""
        for number, (cue, prompt, response) in enumerate(turns):
            source, target = self._truncate(cue, prompt or [self.eos_id], response)
            if not target or (ids and len(source) + len(target) > self.lengths.total - len(ids)):
                skipped = len(turns) - number
                break
            prompt_length, last = len(ids) + len(source), example[number].response
            truncated_prompts += len(source) < len(prompt)
            truncated_responses += len(target) < len(response)
            ids += source + target
            mask += [self.train_on_prompt] * len(source) + [True] * len(target)
        return Row(*_arrays(ids, mask), prompt_length, skipped, last, truncated_prompts, truncated_responses)

    def _truncate(self, cue: list[int], prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
        target = response[: min(self.lengths.target, self.lengths.total - 1)]
        budget = self.lengths.prompt_budget(len(target))
        if len(prompt) <= budget:
            return prompt, target
        kept = cue[-budget:] if cue else []
        return prompt[: budget - len(kept)] + kept, target


def text_encoder(tokenizer: "PreTrainedTokenizerBase", allow_special_tokens: bool = False) -> Encode:
    """Encodes texts without adding special tokens.

    Args:
        allow_special_tokens: a special token in a literal span becomes its id, too.
    """
    pattern = special_tokens(tokenizer)
    backend = tokenizer.backend_tokenizer

    def pieces(text: Text) -> Iterator[tuple[int, str, bool]]:
        """(place, piece, is_literal): special tokens in literal spans are cut out."""
        if text.literal is None or allow_special_tokens:
            yield 0, text.text, not allow_special_tokens
            return
        done = 0
        for start, stop in text.literal:
            for match in pattern.finditer(text.text, start, stop):  # as transformers' `sanitize_control_tokens`
                yield done, text.text[done : match.start()], False
                yield match.start(), match.group(), True
                done = match.end()
        yield done, text.text[done:], False

    def encode(texts: Sequence[Text]) -> list[Encoded]:
        cut = [list(pieces(text)) for text in texts]
        found: dict[bool, Iterator] = {}
        backend.no_truncation()
        backend.no_padding()
        for literal in (False, True):
            batch = [piece for parts in cut for _, piece, is_literal in parts if is_literal == literal]
            backend.encode_special_tokens = literal
            found[literal] = iter(backend.encode_batch(batch, add_special_tokens=False) if batch else ())
        results = []
        for parts in cut:
            encoded = [(place, next(found[literal])) for place, _, literal in parts]
            ids = encoded[0][1].ids if len(encoded) == 1 else [id for _, piece in encoded for id in piece.ids]
            results.append(Encoded(ids, _Spans(encoded)))
        return results

    return encode

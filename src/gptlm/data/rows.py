"""Rows: the token ids of an example, and which of them are targets of the loss.

Masks come from places in the text, never from ids: an end-of-text token is a target where an answer ends, whatever the
padding id is.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from gptlm.data.special_tokens import special_tokens
from gptlm.data.turns import Chat, Content, Example, Span, Turn

AT_ONCE = 1000  # examples that are encoded together; bounds the memory that offsets take


@dataclass(frozen=True)
class Text:
    """What is tokenized at once.

    Attributes:
        literal: spans in which a special token that is spelled stays text; None: everywhere.
    """

    text: str
    literal: tuple[Span, ...] | None = None


@dataclass(frozen=True)
class Encoded:
    """Ids, and the characters that each stands for."""

    ids: list[int]
    spans: list[Span]


Encode = Callable[[Sequence[Text]], list[Encoded]]


@dataclass(frozen=True)
class Row:
    """One encoded example.

    Attributes:
        ids: (n,) int32.
        learnt: (n,) bool; whether the id is a target.
        prompt: ids before the last answer, all of them given: what generation continues.
        left_out: turns at the end of the conversation that had no room.
        answer: text of the last answer, whole.
        cut_prompts, cut_answers: how many were longer than their limit.
        earlier: (ids before it, its text) of each answer before the last one.
        end: the id that ends its answers; None: they have no end.
    """

    ids: np.ndarray
    learnt: np.ndarray
    prompt: int
    left_out: int = 0
    answer: str = ""
    cut_prompts: int = 0
    cut_answers: int = 0
    earlier: tuple[tuple[int, str], ...] = ()
    end: int | None = None


@dataclass(frozen=True)
class Lengths:
    """Limits in tokens: of a prompt, of an answer with its end, of a row."""

    source: int
    target: int
    total: int


@dataclass
class _Part:
    """A prompt and the answer to it.

    Attributes:
        given: ids of the prompt, with answers before it that are not targets.
        cuttable: places in `given` that may be cut, those first that are cut first.
        context: places in `given` that are never targets.
        target: ids of the answer.
        end: ids behind it that end it.
    """

    given: list[int] = field(default_factory=list)
    cuttable: list[int] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    text: str = ""
    learnt: bool = True


@dataclass(frozen=True)
class Encoder:
    """Rows from examples.

    Attributes:
        encode: texts -> ids and their characters.
        end: the end-of-text id, which ends every whole answer for which no chat template has an end of its own.
        learn_prompts: prompts are targets, too.
        side: of a prompt that is too long: "left" cuts its beginning, "right" its end.
    """

    encode: Encode
    end: int
    lengths: Lengths
    learn_prompts: bool = False
    side: str = "left"

    def rows(self, examples: Iterable[Example]) -> list[Row]:
        """A row for each example, in order; one without any target has none left and is still there."""
        iterator, found = iter(examples), list[Row]()
        while chunk := list(islice(iterator, AT_ONCE)):
            texts = [text for example in chunk for text in self._texts(example)]
            encoded = iter(self.encode(texts))
            found += [self._row(example, encoded) for example in chunk]
        return found

    def _texts(self, example: Example) -> list[Text]:
        if isinstance(example, Chat):
            contents = example.contents or ()
            return [Text(example.text, tuple((content.start, content.stop) for content in contents))]
        return [text for turn in example for text in (Text(turn.prompt + turn.cue), Text(turn.answer))]

    def _row(self, example: Example, encoded: Iterator[Encoded]) -> Row:
        if isinstance(example, Chat):
            parts, rest = self._chat_parts(example, next(encoded))
            return self._joined(parts, rest, self.end if example.end is None else example.end)
        pairs = [(turn, next(encoded), next(encoded)) for turn in example]
        return self._joined(self._turn_parts(pairs), [], self.end)

    def _turn_parts(self, turns: Sequence[tuple[Turn, Encoded, Encoded]]) -> list[_Part]:
        parts = []
        for turn, prompt, answer in turns:
            whole = (Content(0, len(turn.prompt), "user"),)
            cuttable = _cuttable(prompt.spans, whole if turn.texts is None else turn.texts, self.side)
            target = answer.ids[:-1] if answer.ids[-1:] == [self.end] else answer.ids
            part = _Part(prompt.ids or [self.end], cuttable, [], target, [self.end])
            part.text, part.learnt = turn.answer, turn.learnt
            parts.append(part)
        return parts

    def _chat_parts(self, chat: Chat, encoded: Encoded) -> tuple[list[_Part], list[int]]:
        """A part for each answer, and the ids behind the last one."""
        contents, spans = chat.contents or (), encoded.spans
        parts, done = list[_Part](), 0
        for answer in chat.answers:
            first = _first(spans, answer.start, done)
            last = _last(spans, answer.stop, first)
            close = min(_first(spans, answer.close, first), last)
            cuttable = _cuttable(spans[done:first], contents, self.side)
            part = _Part(encoded.ids[done:first], cuttable, [], encoded.ids[first:close], encoded.ids[close:last])
            part.text, part.learnt = answer.text, answer.learnt
            parts.append(part)
            done = last
        rest = encoded.ids[done:]
        if chat.end is None and parts:  # the template does not end the answer
            behind = any(content.start >= chat.answers[-1].stop for content in contents)
            parts[-1].end += [*([] if behind else rest), self.end]
            rest = []
        return parts, rest

    def _joined(self, parts: Sequence[_Part], rest: list[int], end: int) -> Row:
        """Turns that do not fit whole are left out, but for the first; then what stands behind them is, too."""
        parts, behind = _with_context(parts, self.side)
        ids: list[int] = []
        learnt: list[bool] = []
        places: list[tuple[int, str]] = []
        pending: list[int] = []  # the end of an answer that was cut, where another turn follows
        left_out = cut_prompts = cut_answers = 0
        for number, part in enumerate(parts):
            source, target = self._cut(part)
            room = self.lengths.total - len(ids) - len(pending)
            if not target or (ids and len(source) + len(target) > room):
                left_out = len(parts) - number
                break
            ids += pending
            learnt += [False] * len(pending)
            places.append((len(ids) + len(source), part.text))
            cut_prompts += len(source) < len(part.given)
            whole = len(target) == len(part.target) + len(part.end)
            cut_answers += not whole
            pending = [] if whole else part.end
            context = set(part.context)
            learnt += [self.learn_prompts and place not in context for place in source] + [True] * len(target)
            ids += [part.given[place] for place in source] + target
        tail = [*behind.given, *rest]
        if places and not left_out and not pending and len(ids) + len(tail) <= self.lengths.total:
            ids += tail
            learnt += [False] * len(behind.given) + [self.learn_prompts] * len(rest)
        if learnt:
            learnt[0] = False  # nothing foretells the first token
        prompt, text = places[-1] if places else (0, "")
        cut = (cut_prompts, cut_answers)
        masks = np.array(ids, dtype=np.int32), np.array(learnt, dtype=bool)
        return Row(*masks, prompt, left_out, text, *cut, tuple(places[:-1]), end)

    def _cut(self, part: _Part) -> tuple[list[int], list[int]]:
        """Places of the prompt that stay, and the answer. The prompt gives way; an answer that is cut has no end."""
        fixed = max(len(part.given) - len(part.cuttable), 1)
        whole = [*part.target, *part.end]
        limit = min(self.lengths.target, self.lengths.total - fixed)
        target = whole if len(whole) <= limit else part.target[: max(limit, 0)]
        budget = min(self.lengths.source, max(self.lengths.total - len(target), 1))
        if len(part.given) <= budget:
            return list(range(len(part.given))), target
        if fixed > budget:
            return [], []
        gone = set(part.cuttable[: len(part.given) - budget])
        return [place for place in range(len(part.given)) if place not in gone], target


def _with_context(parts: Sequence[_Part], side: str) -> tuple[list[_Part], _Part]:
    """Answers that are no targets become part of the prompt after them; those behind the last target are apart."""
    found, before = list[_Part](), _Part()
    for part in parts:
        begin = len(before.given)
        given = before.given + part.given
        moved = [begin + place for place in part.cuttable]
        cuttable = before.cuttable + moved if side == "left" else moved + before.cuttable
        context = before.context + [begin + place for place in part.context]
        if part.learnt:
            found.append(_Part(given, cuttable, context, part.target, part.end, part.text))
            before = _Part()
            continue
        said = list(range(len(given), len(given) + len(part.target)))
        cuttable = cuttable + said if side == "left" else said[::-1] + cuttable
        context += list(range(len(given), len(given) + len(part.target) + len(part.end)))
        before = _Part(given + part.target + part.end, cuttable, context)
    return found, before


def _cuttable(tokens: Sequence[Span], contents: Sequence[Content], side: str) -> list[int]:
    """Places of tokens that lie in one of `contents`, in the order in which they are cut: system messages last."""
    way = 1 if side == "left" else -1
    found: list[int] = []
    for content in sorted(contents, key=lambda content: (content.role == "system", way * content.start)):
        inside = [place for place, (a, b) in enumerate(tokens) if content.start <= a and b <= content.stop]
        found += inside[::way]
    return found


def _first(tokens: Sequence[Span], start: int, begin: int) -> int:
    """Place of the first token that reaches beyond `start`."""
    return next((place for place in range(begin, len(tokens)) if tokens[place][1] > start), len(tokens))


def _last(tokens: Sequence[Span], stop: int, begin: int) -> int:
    """Place behind the last token that begins before `stop`."""
    return next((place for place in range(begin, len(tokens)) if tokens[place][0] >= stop), len(tokens))


def text_encoder(tokenizer: PreTrainedTokenizerBase, allow_special_tokens: bool = False) -> Encode:
    """Encodes texts without special tokens of the tokenizer's own.

    Args:
        allow_special_tokens: a special token that is spelled in a literal text becomes its id, too.
    """
    spelled = special_tokens(tokenizer)

    def pieces(text: Text) -> Iterator[tuple[int, str, bool]]:
        """(place, piece, literal): transformers' `sanitize_control_tokens` cuts out the tokens that are spelled."""
        if text.literal is None or allow_special_tokens:
            yield 0, text.text, not allow_special_tokens
            return
        done = 0
        for start, stop in text.literal:
            for match in spelled.finditer(text.text, start, stop):
                yield done, text.text[done : match.start()], False
                yield match.start(), match.group(), True
                done = match.end()
        yield done, text.text[done:], False

    def encode(texts: Sequence[Text]) -> list[Encoded]:
        cut = [list(pieces(text)) for text in texts]
        found: dict[bool, Iterator] = {}
        for literal in (False, True):
            batch = [piece for parts in cut for _, piece, kind in parts if kind == literal]
            done = tokenizer(batch, add_special_tokens=False, split_special_tokens=literal) if batch else None
            found[literal] = iter(done.encodings or () if done else ())
        results = []
        for parts in cut:
            whole = Encoded([], [])
            for place, _, literal in parts:
                encoding = next(found[literal])
                whole.ids.extend(encoding.ids)
                whole.spans.extend((place + start, place + stop) for start, stop in encoding.offsets)
            results.append(whole)
        return results

    return encode


def with_targets(rows: Iterable[Row]) -> list[Row]:
    """Those from which something can be learnt."""
    return [row for row in rows if row.learnt.any()]

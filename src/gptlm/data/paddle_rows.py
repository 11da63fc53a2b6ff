"""PaddleNLP's encoding of examples: its end of text is literal text, and prompts lose their end."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from gptlm.data.rows import Lengths, Row
from gptlm.data.turns import Chat, Example, Turn

END_TEXT = " </s>"


@dataclass(frozen=True)
class PaddleEncoder:
    """Rows from examples, id for id as PaddleNLP's `finetune_generation.py` makes them.

    Attributes:
        encode: texts -> ids; a special token that is spelled becomes its id.
        end: the end-of-text id; it stands only where there is no prompt.
        end_of_text: the end-of-text token, which is taken away where a chat template ends answers with it.
    """

    encode: Callable[[list[str]], list[list[int]]]
    end: int
    lengths: Lengths
    learn_prompts: bool = False
    end_of_text: str = ""

    def rows(self, examples: Iterable[Example]) -> list[Row]:
        """A row for each example, in order; one without any target has none left and is still there."""
        found = [self._turns(example) for example in examples]
        turns = [turn for example in found for turn in example]
        prompts = self.encode([turn.prompt + turn.cue + END_TEXT for turn in turns])
        answers = self.encode([turn.answer + END_TEXT for turn in turns])
        names = sorted({turn.cue for turn in turns})
        cues = dict(zip(names, self.encode(names), strict=True))
        encoded = zip((cues[turn.cue] for turn in turns), prompts, answers, strict=True)
        return [self._row(example, [next(encoded) for _ in example]) for example in found]

    def _turns(self, example: Example) -> list[Turn]:
        """The turns that are targets; the text between them belongs to their prompts."""
        if not isinstance(example, Chat):
            return [turn for turn in example if turn.learnt]
        turns, done = [], 0
        for answer in example.answers:
            if answer.learnt:
                text, stop = example.text[answer.start : answer.stop], answer.stop
                if not text.endswith(self.end_of_text):  # then line breaks behind it are part of the answer
                    stop += len(example.text[stop:]) - len(example.text[stop:].lstrip())
                    text = example.text[answer.start : stop]
                turns.append(Turn(example.text[done : answer.start], text.removesuffix(self.end_of_text)))
                done = stop
        return turns

    def _row(self, example: list[Turn], turns: list[tuple[list[int], list[int], list[int]]]) -> Row:
        """Of (cue, prompt with cue, answer) each; turns that do not fit whole are left out, but for the first."""
        ids: list[int] = []
        learnt: list[bool] = []
        prompt_end = left_out = cut_prompts = cut_answers = 0
        last = ""
        for number, (cue, prompt, answer) in enumerate(turns):
            source, target = self._cut(cue, prompt or [self.end], answer)
            if not target or (ids and len(source) + len(target) > self.lengths.total - len(ids)):
                left_out = len(turns) - number
                break
            prompt_end, last = len(ids) + len(source), example[number].answer
            cut_prompts += len(source) < len(prompt)
            cut_answers += len(target) < len(answer)
            ids += source + target
            learnt += [self.learn_prompts] * len(source) + [True] * len(target)
        if learnt:
            learnt[0] = False  # nothing foretells the first token
        masks = np.array(ids, dtype=np.int32), np.array(learnt, dtype=bool)
        return Row(*masks, prompt_end, left_out, last, cut_prompts, cut_answers)

    def _cut(self, cue: list[int], prompt: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
        """The prompt gives way to the answer."""
        target = answer[: min(self.lengths.target, self.lengths.total - 1)]
        budget = min(self.lengths.source, max(self.lengths.total - len(target), 1))
        if len(prompt) <= budget:
            return prompt, target
        kept = cue[-budget:] if cue else []
        return prompt[: budget - len(kept)] + kept, target

"""A continuation piece by piece, while it is made. A piece never ends inside a character."""

from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from gptlm.inference.generation import (
    GREEDY,
    Sampling,
    before,
    check_rows,
    generate,
    generate_options,
    stop_ids,
    text_of,
)


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

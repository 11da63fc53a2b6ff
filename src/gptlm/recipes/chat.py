"""A conversation with a model in the terminal: messages from standard input, answers to standard output."""

import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from gptlm.config.args.chat import ChatArguments
from gptlm.data.text_files import check_text, decode
from gptlm.errors import GptlmError
from gptlm.inference.chat import ChatPrompts
from gptlm.inference.decoding import Decoder
from gptlm.inference.generation import Stream, stream_decoder
from gptlm.recipes.predict import load, log_to, sampling_of, uses_graph
from gptlm.signals import forget_interrupt

logger = logging.getLogger(__name__)

HELP = "/clear begins a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def chat(arguments: ChatArguments, notes: tuple[str, ...] = ()) -> None:
    """Answer each line of standard input until it ends, or until /exit.

    Raises:
        GptlmError: if the model cannot be loaded, or a piped message cannot be answered.
    """
    log_to(notes, stderr=True)
    model, tokenizer = load(arguments)
    prompts = ChatPrompts(tokenizer, arguments.chat_template, allow_special_tokens=arguments.allow_special_tokens)
    decoder = stream_decoder(model, tokenizer, uses_graph(arguments, model))
    talk = Talk(arguments, decoder, tokenizer, prompts)
    torch.manual_seed(arguments.seed)
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        sys.stderr.write(f"{HELP}\n")
    for line in _typed() if on_terminal else _piped():
        word = line.strip()
        if word == "/exit":
            return
        if word == "/clear":
            talk.clear()
        elif word.startswith("/") and on_terminal and " " not in word:
            sys.stderr.write(f"{word} is not a command: {HELP}\n")
        elif word:
            _answer(talk, line, on_terminal)


def _answer(talk: "Talk", message: str, on_terminal: bool) -> None:
    """Print the answer piece by piece. On a terminal Ctrl-C ends it, and an error is printed."""
    try:
        for piece in talk.answer(message):
            print(piece, end="", flush=True)
        print(flush=True)
    except KeyboardInterrupt:
        if not on_terminal:
            raise
        forget_interrupt()
        print(" [stopped]", flush=True)
    except GptlmError as error:
        if not on_terminal:
            raise
        sys.stderr.write(f"{error}\n")


class Talk:
    """The messages so far, and their answers.

    Args:
        decoder: with one slot, as from `stream_decoder`.
        prompts: of the decoder's model.
    """

    def __init__(
        self, arguments: ChatArguments, decoder: Decoder, tokenizer: PreTrainedTokenizerBase, prompts: ChatPrompts
    ):
        self._arguments, self._decoder, self._tokenizer, self._prompts = arguments, decoder, tokenizer, prompts
        self.messages: list[dict[str, Any]] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything but the message of the system."""
        system = self._arguments.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def answer(self, message: str) -> Iterator[str]:
        """Pieces of the answer. Message and answer, as far as it is read, become part of the conversation.

        Raises:
            GptlmError: if the message is not valid Unicode, or does not fit; it is forgotten then.
        """
        check_text(message, "the message")
        self.messages.append({"role": "user", "content": message})
        try:
            stream = self._stream()
        except GptlmError:
            self.messages.pop()
            raise
        pieces: list[str] = []
        try:
            for piece in stream:
                pieces.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _stream(self) -> Stream:
        arguments, positions = self._arguments, self._decoder.network.config.n_positions
        longest = positions - min(arguments.tgt_length, positions // 2)
        ids, left_out = self._prompts.fitting(self.messages, longest)
        if len(ids) >= positions:
            raise GptlmError(f"the message has {len(ids)} tokens with its template, the model {positions} positions")
        if left_out:
            logger.warning("the %d oldest messages do not fit and are left out; /clear begins anew", left_out)
        return Stream(
            self._decoder,
            self._tokenizer,
            ids,
            max_new_tokens=arguments.tgt_length,
            sampling=sampling_of(arguments),
            stop_at_eol=bool(arguments.stop_at_eol),
        )


def _typed() -> Iterator[str]:
    """Lines of a person at a terminal, which they can edit."""
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401 - gives `input` editing and history
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(flush=True)
            return
        except KeyboardInterrupt:
            forget_interrupt()
            sys.stderr.write(f"\n{HELP}\n")


def _piped() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        yield decode(line, f"standard input, line {number}").rstrip("\r\n")

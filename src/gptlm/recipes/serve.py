"""A local web page to try a model, built with gradio: controls on the left, streamed texts or a chat on the right."""

import html
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from gptlm.config.args.inference import PredictArguments
from gptlm.data.text_files import check_text
from gptlm.errors import GptlmError, named, reason_of
from gptlm.inference.chat import ChatPrompts
from gptlm.inference.decoding import Decoder
from gptlm.inference.generation import Stream, encode_prompts, stream_decoder
from gptlm.inference.sampling import Sampling
from gptlm.recipes.common.main_thread import MainThread
from gptlm.recipes.common.own_requests import OwnRequests
from gptlm.recipes.predict import load, log_to, sampling_of, uses_graph

logger = logging.getLogger(__name__)

LONGEST_PROMPT = 100_000  # characters, checked before they become tokens
MOST_WAITING = 32  # requests; one is answered at a time

Message = dict[str, str]


def serve(arguments: PredictArguments, notes: tuple[str, ...] = ()) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        GptlmError: if gradio is not installed, the port is taken, or the model cannot be loaded.
    """
    log_to(notes)
    gradio = _gradio()
    _check_free(arguments.host, arguments.port)
    model, tokenizer = load(arguments)
    decoder = stream_decoder(model, tokenizer, uses_graph(arguments, model))
    _warm_up(decoder, tokenizer, arguments)
    writer = _Writer(gradio, decoder, tokenizer, arguments)
    page = _page(gradio, writer, arguments)
    page.queue(default_concurrency_limit=1, api_open=False, max_size=MOST_WAITING)
    _, url, _ = page.launch(
        server_name=arguments.host,
        server_port=arguments.port,
        share=False,
        quiet=True,
        show_error=True,
        prevent_thread_lock=True,
        footer_links=[],
        app_kwargs={"middleware": [(OwnRequests, (arguments.host,), {})]},
    )
    logger.info("the page is open at %s (Ctrl-C ends it)", url)
    try:
        writer.main.run()
    except KeyboardInterrupt:
        logger.info("ended")
    finally:
        page.close(verbose=False)


def _warm_up(decoder: Decoder, tokenizer: PreTrainedTokenizerBase, arguments: PredictArguments) -> None:
    """Make two tokens, so that the first request does not wait for kernels to be compiled and captured."""
    started, row = time.perf_counter(), [next(iter(tokenizer.get_vocab().values()))] * 2
    sampling = replace(sampling_of(arguments), num_beams=1)
    list(Stream(decoder, tokenizer, row, max_new_tokens=2, sampling=sampling))
    logger.info("the first tokens took %.1f s", time.perf_counter() - started)


class _Writer:
    """The event handlers of the page."""

    def __init__(
        self,
        gradio: ModuleType,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        arguments: PredictArguments,
    ):
        self.gradio, self.decoder, self.tokenizer, self.arguments = gradio, decoder, tokenizer, arguments
        self.main = MainThread(MOST_WAITING)

    def write(self, prompt: str, *controls: Any) -> Iterator[tuple[str, str]]:
        """Yields the text so far, and the speed, after each new piece: gradio replaces the content of a text box.

        gradio closes the iterator when the reader has left, which ends the generation.

        Args:
            controls: the values of `_controls`.
        """
        with self._shown_errors():
            self._check(prompt, "the prompt")
            (row,) = encode_prompts(
                self.tokenizer,
                [prompt],
                self.arguments.src_length,
                ["the prompt"],
                truncation_side=self.arguments.truncation_side,
                allow_special_tokens=self.arguments.allow_special_tokens,
            )
            yield from self._continued(row, *controls)

    def chat(self, messages: list[Message], message: str, *controls: Any) -> Iterator[tuple[Any, ...]]:
        """Yields the conversation twice (as state, and to be shown), an empty box for the next message, and the speed.

        Args:
            messages: the conversation before `message`.
            controls: the values of `_controls`.
        """
        with self._shown_errors():
            self._check(message, "the message")
            asked = [*messages, {"role": "user", "content": message}]
            (row,) = self.main.stream(lambda: iter([self._encode(asked, int(controls[0]))]))
            for text, speed in self._continued(row, *controls):
                said = [*asked, {"role": "assistant", "content": text}]
                yield said, said, "", speed

    def _encode(self, messages: list[Message], new_tokens: int) -> list[int]:
        """The ids of a conversation, without its oldest messages if it is too long; in the main thread."""
        positions = self.decoder.network.config.n_positions
        row, left_out = self.chats.fitting(messages, positions - min(new_tokens, positions // 2))
        if len(row) >= positions:
            raise GptlmError(f"the message has {len(row)} tokens with its template, the model {positions} positions")
        if left_out:
            logger.info("the %d oldest messages of a conversation do not fit and are left out", left_out)
        return row

    @cached_property
    def chats(self) -> ChatPrompts:
        """Made when the first message comes: it warns if the tokenizer has no template."""
        allow = self.arguments.allow_special_tokens
        return ChatPrompts(self.tokenizer, self.arguments.chat_template, allow_special_tokens=allow)

    def _check(self, text: str, name: str) -> None:
        if len(text) > LONGEST_PROMPT:
            raise GptlmError(f"{name} has {len(text):,} characters, at most {LONGEST_PROMPT:,} are read")
        check_text(text, name)

    def _continued(
        self,
        row: list[int],
        new_tokens: float,
        do_sample: bool,
        top_k: float,
        top_p: float,
        temperature: float,
        penalty: float,
        seed: float | None,
        stop_at_eol: bool,
    ) -> Iterator[tuple[str, str]]:
        sampling = Sampling(do_sample, int(top_k), float(top_p), float(temperature), float(penalty))
        torch.manual_seed(int(seed or 0))
        settings: dict[str, Any] = {"max_new_tokens": int(new_tokens), "stop_at_eol": stop_at_eol}
        stream = Stream(self.decoder, self.tokenizer, row, sampling=sampling, **settings)
        text, started = "", time.perf_counter()
        try:
            for piece in stream.steps():
                text += piece
                yield text, _speed(len(stream.ids), started)
        except GeneratorExit:
            logger.info("a request was abandoned after %d characters", len(text))
            raise
        yield text, _speed(len(stream.ids), started)

    @contextmanager
    def _shown_errors(self) -> Iterator[None]:
        """Errors become sentences on the page."""
        try:
            yield
        except GptlmError as error:
            raise self._shown(str(error)) from error
        except Exception as error:
            logger.exception("a request failed")
            raise self._shown(f"the model could not continue this: {reason_of(error)}") from error

    def _shown(self, sentence: str) -> Exception:
        """gradio's error, whose text the page takes for HTML."""
        return self.gradio.Error(html.escape(sentence, quote=False), print_exception=False)  # type: ignore[no-any-return]


def _speed(tokens: int, started: float) -> str:
    return f"{tokens} tokens, {tokens / max(time.perf_counter() - started, 1e-9):.1f} tokens/s"


def _page(gradio: ModuleType, writer: _Writer, arguments: PredictArguments) -> Any:
    """One event of the model at a time: the two tabs share its cache."""
    positions = writer.decoder.network.config.n_positions
    alone = {"concurrency_id": "model", "concurrency_limit": 1}
    with gradio.Blocks(title=f"gptlm: {arguments.model_name_or_path}", analytics_enabled=False) as page:
        gradio.Markdown(f"### {arguments.model_name_or_path}")
        with gradio.Row():
            with gradio.Column():
                controls = _controls(gradio, arguments, positions)
                speed = gradio.Textbox(label="Speed", interactive=False, elem_id="speed")
            with gradio.Column(scale=2):
                with gradio.Tab("Text"):
                    prompt = gradio.Textbox(label="Prompt", lines=6, elem_id="prompt", max_length=LONGEST_PROMPT)
                    with gradio.Row():
                        start = gradio.Button("Continue", variant="primary")
                        stop = gradio.Button("Stop")
                    text = gradio.Textbox(
                        label="Continuation", lines=18, interactive=False, buttons=["copy"], elem_id="continuation"
                    )
                with gradio.Tab("Chat"):
                    _chat_tab(gradio, writer, controls, speed, alone)
        words = [prompt, *controls]
        run = gradio.on([start.click, prompt.submit], writer.write, words, [text, speed], api_name="continue", **alone)
        stop.click(None, cancels=[run])
    return page


def _chat_tab(gradio: ModuleType, writer: _Writer, controls: list[Any], speed: Any, alone: dict[str, Any]) -> None:
    messages = gradio.State([])
    # as Markdown, an answer could name pictures that the browser would load from elsewhere
    shown = gradio.Chatbot(label="Conversation", render_markdown=False, height=420, elem_id="conversation")
    message = gradio.Textbox(label="Message", elem_id="message", max_length=LONGEST_PROMPT)
    with gradio.Row():
        send, stop, clear = (
            gradio.Button("Send", variant="primary"),
            gradio.Button("Stop answer"),
            gradio.Button("Clear"),
        )
    outputs = [messages, shown, message, speed]
    words = [messages, message, *controls]
    run = gradio.on([send.click, message.submit], writer.chat, words, outputs, api_name="chat", **alone)
    stop.click(None, cancels=[run])
    clear.click(lambda: ([], [], "", ""), None, outputs, cancels=[run], api_name="clear")


def _controls(gradio: ModuleType, arguments: PredictArguments, positions: int) -> list[Any]:
    """The controls in the order of the parameters of `_Writer._continued`; the flags are their initial values."""
    slider = gradio.Slider
    longest = positions - 1
    return [
        slider(1, longest, min(arguments.tgt_length, longest), step=1, label="New tokens, at most"),
        gradio.Checkbox(arguments.do_sample, label="Sample (else the likeliest token)"),
        slider(0, max(200, arguments.top_k), arguments.top_k, step=1, label="top_k (0: off)"),
        slider(0.01, 1, arguments.top_p, step=0.01, label="top_p (1: off)"),
        slider(0.05, max(3, arguments.temperature), arguments.temperature, step=0.05, label="temperature"),
        slider(
            0.5,
            max(3, arguments.repetition_penalty),
            arguments.repetition_penalty,
            step=0.05,
            label="repetition_penalty (1: off)",
        ),
        gradio.Number(arguments.seed, label="seed", precision=0, minimum=0, maximum=2**32 - 1),
        gradio.Checkbox(bool(arguments.stop_at_eol), label="Stop at a line break"),
    ]


def _gradio() -> ModuleType:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError as error:
        raise GptlmError(
            f"--serve needs gradio ({reason_of(error)}); install it with pip install 'gptlm[serve]'"
        ) from error
    return gradio


def _check_free(host: str, port: int) -> None:
    """Raises GptlmError, before the weights are loaded, if the port is taken."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        reason = str(error).split(" (while")[0]
        raise GptlmError(f"the page cannot listen on {host}:{port} ({reason}); give another {named('port')}") from error

"""A local web page to try a model, built with gradio: prompt and controls on the left, streamed text on the right."""

import html
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from gptlm.config.args.inference import PredictArguments
from gptlm.data.text_files import check_text
from gptlm.errors import GptlmError, named, reason_of
from gptlm.inference.decoding import Decoder
from gptlm.inference.generation import Stream, encode_prompts, stream_decoder
from gptlm.inference.sampling import Sampling
from gptlm.recipes.common.own_requests import OwnRequests
from gptlm.recipes.predict import load, log_to, sampling_of, uses_graph

logger = logging.getLogger(__name__)

LONGEST_PROMPT = 100_000  # characters, checked before they become tokens
MOST_WAITING = 32  # requests; one is answered at a time


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
    page = _page(gradio, _Writer(gradio, decoder, tokenizer, arguments), arguments)
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
    page.block_thread()


def _warm_up(decoder: Decoder, tokenizer: PreTrainedTokenizerBase, arguments: PredictArguments) -> None:
    """Make two tokens, so that the first request does not wait for kernels to be compiled and captured."""
    started, row = time.perf_counter(), [next(iter(tokenizer.get_vocab().values()))] * 2
    sampling = replace(sampling_of(arguments), num_beams=1)
    list(Stream(decoder, tokenizer, row, max_new_tokens=2, sampling=sampling))
    logger.info("the first tokens took %.1f s", time.perf_counter() - started)


class _Writer:
    """The event handler of the button "Continue"."""

    def __init__(
        self,
        gradio: ModuleType,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        arguments: PredictArguments,
    ):
        self.gradio, self.decoder, self.tokenizer, self.arguments = gradio, decoder, tokenizer, arguments

    def write(
        self,
        prompt: str,
        new_tokens: float,
        do_sample: bool,
        top_k: float,
        top_p: float,
        temperature: float,
        penalty: float,
        seed: float | None,
        stop_at_eol: bool,
    ) -> Iterator[str]:
        """Yields the text so far after each new piece: gradio replaces the whole content of a text box.

        gradio closes the iterator when the reader has left, which ends the generation.
        """
        text = ""
        try:
            if len(prompt) > LONGEST_PROMPT:
                raise GptlmError(f"the prompt has {len(prompt):,} characters, at most {LONGEST_PROMPT:,} are read")
            check_text(prompt, "the prompt")
            sampling = Sampling(do_sample, int(top_k), float(top_p), float(temperature), float(penalty))
            torch.manual_seed(int(seed or 0))
            (row,) = encode_prompts(
                self.tokenizer,
                [prompt],
                self.arguments.src_length,
                ["the prompt"],
                truncation_side=self.arguments.truncation_side,
                allow_special_tokens=self.arguments.allow_special_tokens,
            )
            settings: dict[str, Any] = {"max_new_tokens": int(new_tokens), "stop_at_eol": stop_at_eol}
            stream = Stream(self.decoder, self.tokenizer, row, sampling=sampling, **settings)
            for piece in stream.steps():
                text += piece
                yield text
        except GeneratorExit:
            logger.info("a request was abandoned after %d characters", len(text))
            raise
        except GptlmError as error:
            raise self._shown(str(error)) from error
        except Exception as error:
            logger.exception("a request failed")
            raise self._shown(f"the model could not continue this: {reason_of(error)}") from error
        yield text

    def _shown(self, sentence: str) -> Exception:
        """gradio's error, whose text the page takes for HTML."""
        return self.gradio.Error(html.escape(sentence, quote=False), print_exception=False)  # type: ignore[no-any-return]


def _page(gradio: ModuleType, writer: _Writer, arguments: PredictArguments) -> Any:
    positions = writer.decoder.network.config.n_positions
    with gradio.Blocks(title=f"gptlm: {arguments.model_name_or_path}", analytics_enabled=False) as page:
        gradio.Markdown(f"### {arguments.model_name_or_path}")
        with gradio.Row():
            with gradio.Column():
                prompt = gradio.Textbox(label="Prompt", lines=6, elem_id="prompt", max_length=LONGEST_PROMPT)
                with gradio.Row():
                    start = gradio.Button("Continue", variant="primary")
                    stop = gradio.Button("Stop")
                controls = _controls(gradio, arguments, positions)
            text = gradio.Textbox(
                label="Continuation", lines=24, interactive=False, buttons=["copy"], elem_id="continuation"
            )
        run = gradio.on([start.click, prompt.submit], writer.write, [prompt, *controls], text, api_name="continue")
        stop.click(None, cancels=[run])
    return page


def _controls(gradio: ModuleType, arguments: PredictArguments, positions: int) -> list[Any]:
    """The controls in the order of the parameters of `_Writer.write`; the flags are their initial values."""
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

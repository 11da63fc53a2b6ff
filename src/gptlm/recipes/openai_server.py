"""A server for clients of OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, and /health.

Requests are read in threads of their own and generated in the main thread, one after the other.
"""

import json
import logging
import select
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from gptlm.config.args.chat import ServeArguments
from gptlm.data.conversations import Conversation
from gptlm.errors import GptlmError, named, reason_of
from gptlm.inference.chat import ChatPrompts
from gptlm.inference.decoding import Decoder
from gptlm.inference.generation import Stream, encode_prompts, stream_decoder
from gptlm.inference.stop_texts import UntilStop
from gptlm.json_text import parse_json
from gptlm.recipes.common.main_thread import BusyError, MainThread
from gptlm.recipes.common.own_requests import LONGEST_BODY, OwnAddress
from gptlm.recipes.openai_requests import Request, RequestError, check_model, parse_request
from gptlm.recipes.predict import load, log_to, uses_graph

logger = logging.getLogger(__name__)

MOST_WAITING = 32  # requests; one is answered at a time
PATIENCE = 60.0  # seconds for a client that stops sending or reading
CHAT, TEXT, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
HEALTH = "/health"  # asked by `transformers chat`, containers and proxies
LOAD = "/load_model"  # with which `transformers chat` begins


def serve_api(arguments: ServeArguments, notes: tuple[str, ...] = ()) -> None:
    """Answer requests until Ctrl-C.

    Raises:
        GptlmError: if the port is taken, or the model cannot be loaded.
    """
    log_to(notes, stderr=True)
    with _listen(arguments.host, arguments.port) as server:  # before the weights are loaded
        model, tokenizer = load(arguments)
        prompts = ChatPrompts(tokenizer, arguments.chat_template, allow_special_tokens=arguments.allow_special_tokens)
        decoder = stream_decoder(model, tokenizer, uses_graph(arguments, model))
        server.api = Api(arguments, decoder, tokenizer, prompts)
        threading.Thread(target=server.serve_forever, name="requests", daemon=True).start()
        host, port = server.server_address[:2]
        logger.info("serving %s at http://%s:%s/v1 (Ctrl-C ends it)", server.api.names[0], arguments.host or host, port)
        try:
            server.api.main.run()
        except KeyboardInterrupt:
            logger.info("ended")
        finally:
            server.shutdown()


@dataclass(frozen=True)
class Piece:
    """A part of an answer.

    Attributes:
        choice: its number.
        reason: why the choice has ended, else None.
        usage: tokens of prompts and answers, in the last piece only.
    """

    choice: int
    text: str = ""
    reason: str | None = None
    usage: tuple[int, int] | None = None


class Api:
    """What the server knows of its model.

    Args:
        decoder: with one slot, as from `stream_decoder`.
        prompts: of the decoder's model.

    Attributes:
        main: runs `generate`.
        names: by which requests may call the model; the first is shown.
    """

    def __init__(
        self, arguments: ServeArguments, decoder: Decoder, tokenizer: PreTrainedTokenizerBase, prompts: ChatPrompts
    ):
        self.arguments, self._decoder, self._tokenizer, self._prompts = arguments, decoder, tokenizer, prompts
        self.main, self.created = MainThread(MOST_WAITING), int(time.time())
        path = arguments.lora_path or arguments.model_name_or_path
        self.names = (arguments.served_model_name or Path(path).resolve().name, arguments.model_name_or_path)
        self.address = OwnAddress(arguments.host)

    def generate(self, request: Request) -> Iterator[Piece]:
        """The pieces of all choices, one choice after the other.

        Raises:
            GptlmError: if a template refuses the conversation.
            RequestError: if a prompt does not fit.
        """
        rows = [self._encode(prompt) for prompt in request.prompts]
        positions = self._decoder.network.config.n_positions
        for row in rows:
            self._check(row, positions)
        if request.seed is None:
            torch.seed()
        else:
            torch.manual_seed(request.seed)
        made = 0
        for number in range(len(rows) * request.n):
            row = rows[number // request.n]
            limit = min(request.max_tokens or self.arguments.tgt_length, positions - len(row))
            stream = Stream(self._decoder, self._tokenizer, row, max_new_tokens=limit, sampling=request.sampling)
            text = UntilStop(stream.steps(), request.stops)
            for piece in text:
                yield Piece(number, piece)
            made += len(stream.ids)
            ended = text.found or len(stream.ids) < limit
            yield Piece(number, reason="stop" if ended else "length")
        yield Piece(0, usage=(sum(map(len, rows)), made))

    def _encode(self, prompt: Conversation | str | list[int]) -> list[int]:
        if isinstance(prompt, Conversation):
            return self._prompts(prompt)
        if isinstance(prompt, list):
            return prompt
        allow = self.arguments.allow_special_tokens
        (row,) = encode_prompts(self._tokenizer, [prompt], 1 << 30, ["prompt"], allow_special_tokens=allow)
        return row

    def _check(self, row: list[int], positions: int) -> None:
        entries = self._decoder.network.config.vocab_size
        if max(row) >= entries:
            raise RequestError(f"the prompt has the id {max(row)}, the model knows ids below {entries}", param="prompt")
        if len(row) >= positions:
            raise RequestError(
                f"the prompt has {len(row)} tokens, the model has {positions} positions for prompt and answer",
                code="context_length_exceeded",
            )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    api: Api


class _Server6(_Server):
    address_family = socket.AF_INET6


def _listen(host: str, port: int) -> _Server:
    """The server, which answers nothing yet. Raises GptlmError if the port is taken."""
    try:
        return (_Server6 if ":" in host else _Server)((host, port), _Handler)
    except OSError as error:
        raise GptlmError(
            f"the server cannot listen on {host}:{port} ({reason_of(error)}); give another {named('port')}"
        ) from error


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def do_GET(self) -> None:
        self._answered(self._get)

    def do_POST(self) -> None:
        self._answered(self._post)

    def _answered(self, answer: Any) -> None:
        """Run `answer`; errors become answers in OpenAI's form, unless a stream has begun."""
        self._began = False
        try:
            self._check_address()
            answer()
            return
        except (ConnectionError, TimeoutError):
            self.close_connection = True
            return
        except RequestError as error:
            failed = error
        except GptlmError as error:  # a template that refuses the conversation, or logits that are NaN
            failed = RequestError(str(error))
        except BusyError as error:
            failed = RequestError(f"{error}; try again later", 429, code="rate_limit_exceeded", kind="rate_limit_error")
        except Exception as error:
            logger.exception("a request failed")
            failed = RequestError(f"the model could not answer: {reason_of(error)}", 500)
        self.close_connection = True  # the body may not have been read
        try:
            if self._began:
                self._event(failed.body)
                self._chunk(b"")
            else:
                self._json(failed.status, failed.body)
        except OSError:
            pass

    def _check_address(self) -> None:
        hosts, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        reason = self.server.api.address.refusal(hosts, origins, self.connection.getsockname()[0])
        if reason:
            raise RequestError(reason, 403)

    def _get(self) -> None:
        path, api = self.path.partition("?")[0].rstrip("/"), self.server.api
        model = {"id": api.names[0], "object": "model", "created": api.created, "owned_by": "gptlm"}
        if path == HEALTH:
            self._json(200, {"status": "ok"})
        elif path == MODELS:
            self._json(200, {"object": "list", "data": [model]})
        elif path == f"{MODELS}/{api.names[0]}":
            self._json(200, model)
        elif path in (CHAT, TEXT):
            raise RequestError(f"{path} is for POST", 405)
        else:
            there = f"{MODELS} and {HEALTH}, for POST {CHAT} and {TEXT}"
            raise RequestError(f"there is nothing at {path[:100] or '/'}; there are {there}", 404)

    def _post(self) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        if path == LOAD:
            self._loaded()
            return
        if path not in (CHAT, TEXT):
            raise RequestError(f"there is nothing at {path[:100] or '/'}; there are {CHAT} and {TEXT}", 404)
        api, chat = self.server.api, path == CHAT
        request = parse_request(self._body(), chat=chat, names=api.names, arguments=api.arguments)
        started = time.monotonic()
        pieces = api.main.stream(lambda: api.generate(request), self._is_there)
        with closing(pieces):  # type: ignore[type-var]
            answer = _Answer(chat, api.names[0])
            usage = self._stream(pieces, answer, request) if request.stream else self._whole(pieces, answer, request)
        if usage is None:
            logger.info("a request was abandoned after %.1f s", time.monotonic() - started)
        else:
            seconds = max(time.monotonic() - started, 1e-9)
            logger.info("%d + %d tokens in %.2f s: %.1f tokens/s", *usage, seconds, usage[1] / seconds)

    def _loaded(self) -> None:
        """Say that the model is there."""
        check_model(self._body(), self.server.api.names)
        self._head(200, {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}, chunked=True)
        self._began = True
        self._event({"status": "ready", "cached": True})
        self._chunk(b"")

    def _body(self) -> Any:
        length = self.headers.get("Content-Length") or ""
        if not (length.isdigit() and len(length) <= 9):
            raise RequestError("the request has no Content-Length", 411)
        if int(length) > LONGEST_BODY:
            raise RequestError(f"a request has at most {LONGEST_BODY:,} bytes", 413)
        content = self.rfile.read(int(length))
        try:
            return parse_json(content.decode("utf-8"))
        except ValueError as error:
            raise RequestError(f"the body is not valid JSON: {reason_of(error)}") from error

    def _is_there(self) -> bool:
        """Whether the client still waits."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        try:
            return not readable or bool(self.connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _whole(self, pieces: Iterator[Piece], answer: "_Answer", request: Request) -> tuple[int, int] | None:
        count = len(request.prompts) * request.n
        texts, reasons = [""] * count, [""] * count
        for piece in pieces:
            texts[piece.choice] += piece.text
            reasons[piece.choice] = piece.reason or reasons[piece.choice]
            if piece.usage:
                self._json(200, answer.whole(texts, reasons, piece.usage))
                return piece.usage
        self.close_connection = True
        return None

    def _stream(self, pieces: Iterator[Piece], answer: "_Answer", request: Request) -> tuple[int, int] | None:
        """Server-sent events, in chunks of HTTP/1.1."""
        first = next(pieces, None)  # whatever is wrong with the request is known by then
        if first is None:
            self.close_connection = True
            return None
        self._head(200, {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}, chunked=True)
        self._began = True
        for choice in range(len(request.prompts) * request.n if answer.chat else 0):
            self._event(answer.part(choice, {"role": "assistant", "content": ""}))
        while first is not None:
            if first.usage:
                if request.include_usage:
                    self._event(answer.usage(first.usage))
                self._chunk(b"data: [DONE]\n\n")
                self._chunk(b"")
                return first.usage
            if first.text or first.reason:
                self._event(answer.part(first.choice, {"content": first.text} if first.text else {}, first.reason))
            first = next(pieces, None)
        self.close_connection = True
        return None

    def _event(self, body: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
        self.wfile.flush()

    def _json(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body, ensure_ascii=False).encode()
        self._head(status, {"Content-Type": "application/json", "Content-Length": str(len(content))})
        self.wfile.write(content)

    def _head(self, status: int, headers: dict[str, str], *, chunked: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers | {"X-Content-Type-Options": "nosniff"}).items():
            self.send_header(name, value)
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


class _Answer:
    """The JSON of one answer, in OpenAI's form."""

    def __init__(self, chat: bool, model: str):
        self.chat = chat
        self._kind = "chat.completion" if chat else "text_completion"
        prefix = "chatcmpl" if chat else "cmpl"
        self._common = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, texts: list[str], reasons: list[str], usage: tuple[int, int]) -> dict[str, Any]:
        choices = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            content = (
                {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
            )
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": reason})
        return self._common | {"object": self._kind, "choices": choices, "usage": _usage(usage)}

    def part(self, index: int, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        return self._common | {"object": self._part_kind, "choices": [choice]}

    def usage(self, usage: tuple[int, int]) -> dict[str, Any]:
        return self._common | {"object": self._part_kind, "choices": [], "usage": _usage(usage)}

    @property
    def _part_kind(self) -> str:
        return f"{self._kind}.chunk" if self.chat else self._kind


def _usage(usage: tuple[int, int]) -> dict[str, int]:
    return {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}

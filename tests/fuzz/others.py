"""What the fuzzer runs that is no command: requests to `gptlm serve`, and the functions of the Python API."""

import json
import socket
import sys
import threading
from collections.abc import Sequence

SECONDS = 5.0  # for an answer; a request that says it is longer than it is has none
OTHERS = ("request", "python")


def main(words: Sequence[str]) -> int:
    """`request FILE [PATH]` or `python FUNCTION FIRST --keyword value ...`; returns an exit code as a command does."""
    return request(*words[1:]) if words[0] == "request" else call(*words[1:])


def request(file: str, path: str | None = None, *_: str) -> int:
    """Send `file` to a server in this process: as the body of a request to `path`, or as it is."""
    from gptlm.commands.serve import parse_serve
    from gptlm.disk import read_file
    from gptlm.inference.chat import ChatPrompts
    from gptlm.inference.generation import stream_decoder
    from gptlm.recipes.openai_server import Api, _listen
    from gptlm.recipes.predict import load

    try:
        content = read_file(file)
    except OSError:
        return 1
    if path is not None:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        content = head.encode() + content
    arguments, _ = parse_serve("--model_name_or_path chat --device cpu --tgt_length 2 --served_model_name m".split())
    model, tokenizer = load(arguments)
    with _listen("127.0.0.1", 0) as server:
        server.api = Api(arguments, stream_decoder(model, tokenizer, False), tokenizer, ChatPrompts(tokenizer))
        threading.Thread(target=server.api.main.run, daemon=True).start()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answer = _sent(content, server.server_port)
        server.shutdown()
    status = answer.split(b" ", 2)[1:2]
    print(answer.decode(errors="replace"))
    return 99 if status == [b"500"] else 0  # 501: no such method; without a status: HTTP/0.9, or nothing was answered


def _sent(content: bytes, port: int) -> bytes:
    """The answer to `content`; what came of it until `SECONDS` later."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as client:
        try:
            client.sendall(content)
            while part := client.recv(1 << 16):
                found += part
        except (TimeoutError, ConnectionError):
            pass
    return found


def call(function: str, first: str, *words: str) -> int:
    """`gptlm.FUNCTION(first, keyword=value, ...)`, with values that are JSON where they can be."""
    import gptlm
    from gptlm.errors import GptlmError, printed

    given = [json.loads(first)] if first.startswith("[") else [] if first == "-" else [first]
    keywords = {}
    for word, value in zip(words, [*words[1:], "--"]):
        name, equals, own = word.partition("=")
        if word.startswith("--"):
            keywords[name[2:]] = _value(own if equals else value) if equals or not value.startswith("--") else True
    if function == "generate":
        given.append("hi")
    try:
        getattr(gptlm, function)(*given, **keywords)
    except GptlmError as error:
        print(printed(error), file=sys.stderr)
        return error.exit_code
    except OSError as error:  # Python callers get the system's own errors
        if not error.filename:
            raise
        return 1
    except TypeError as error:  # of Python: a keyword that is a positional argument, too
        if "got multiple values for argument" not in str(error):
            raise
        return 2
    return 0


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

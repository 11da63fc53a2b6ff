"""Requests of OpenAI's API: JSON -> checked values, and errors in its form."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gptlm.config.args.chat import ServeArguments
from gptlm.data.conversations import Conversation, parse_conversation
from gptlm.data.text_files import check_text
from gptlm.errors import GptlmError, reason_of
from gptlm.inference.sampling import Sampling
from gptlm.json_text import parse_json

LONGEST_PROMPT = 100_000  # characters, checked before they become tokens
MOST_PROMPTS, MOST_CHOICES, MOST_STOPS = 32, 16, 16
SHORT = 16  # new tokens of /v1/completions without max_tokens, as OpenAI's
COLDEST = 1e-4  # temperatures below it are greedy search
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
NEUTRAL: dict[str, tuple[Any, ...]] = {  # parameters that are not implemented -> values that ask for nothing
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "stream_options": (),
}
KNOWN = ("model", "max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "n", "stop", "stream")
NO_OBJECT = "the body is not a JSON object"
STOCK = "generation_config"  # the JSON text that `transformers chat` sends
OF_STOCK = {  # its fields -> ours
    "max_new_tokens": "max_tokens",
    **{name: name for name in ("temperature", "top_p", "top_k", "repetition_penalty")},
}


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        param: the parameter that is wrong.
        code: OpenAI's word for the error.
    """

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None, kind: str = ""
    ):
        super().__init__(message)
        kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        prompts: conversations (one), texts, or rows of ids.
        max_tokens: None: as many as fit, at most `--tgt_length`.
        seed: None: another result each time.
    """

    prompts: tuple[Conversation | str | list[int], ...]
    max_tokens: int | None
    sampling: Sampling
    seed: int | None
    n: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool


def parse_request(body: Any, *, chat: bool, names: tuple[str, ...], arguments: ServeArguments) -> Request:
    """The request in the JSON value `body`.

    Args:
        chat: it is one of /v1/chat/completions, else of /v1/completions.
        names: of the model.

    Raises:
        RequestError: for what is wrong or not implemented.
    """
    if not isinstance(body, dict):
        raise RequestError(NO_OBJECT)
    given = _with_generation_config({name: value for name, value in body.items() if value is not None})
    known = {*KNOWN, *IGNORED, *NEUTRAL, *(("messages", "max_completion_tokens") if chat else ("prompt",))}
    if unknown := [name for name in given if name not in known]:
        raise RequestError(f"unknown parameter: {unknown[0][:100]!r}", param=unknown[0][:100], code="unknown_parameter")
    for name, neutral in NEUTRAL.items():
        if name != "stream_options" and name in given and given[name] not in neutral:
            raise RequestError(f"{name} is not implemented; leave it out", param=name, code="unsupported_parameter")
    check_model(given, names)
    limit = _number(given, "max_completion_tokens", int, 1, 1 << 31) or _number(given, "max_tokens", int, 1, 1 << 31)
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise RequestError("stream_options is not an object", param="stream_options")
    return Request(
        prompts=(_conversation(given),) if chat else _prompts(given.get("prompt")),
        max_tokens=limit or (None if chat else SHORT),
        sampling=_sampling(given, arguments),
        seed=_number(given, "seed", int, -(1 << 63), (1 << 63) - 1),
        n=_number(given, "n", int, 1, MOST_CHOICES) or 1,
        stops=_stops(given.get("stop")),
        stream=_switch(given, "stream"),
        include_usage=_switch(options, "include_usage"),
    )


def check_model(body: Any, names: tuple[str, ...]) -> None:
    """Raises RequestError unless the request `body` names a model of `names`."""
    if not isinstance(body, dict):
        raise RequestError(NO_OBJECT)
    model = body.get("model")
    if model not in names:
        shown = f"{model!r:.100} does not exist" if model is not None else "is missing"
        raise RequestError(f"the model {shown}; there is {names[0]!r}", 404, param="model", code="model_not_found")


def _with_generation_config(given: dict[str, Any]) -> dict[str, Any]:
    """`given` with the fields of transformers' GenerationConfig in it, which count where nothing else is given."""
    if STOCK not in given:
        return given
    rest = {name: value for name, value in given.items() if name != STOCK}
    try:
        fields = parse_json(given[STOCK]) if isinstance(given[STOCK], str) else given[STOCK]
    except ValueError as error:
        raise RequestError(f"{STOCK} is not valid JSON: {reason_of(error)}", param=STOCK) from error
    if not isinstance(fields, dict):
        raise RequestError(f"{STOCK} is not a JSON object", param=STOCK)
    fields = {name: value for name, value in fields.items() if value is not None and name != "transformers_version"}
    samples = _switch(fields, "do_sample")
    for name in fields:
        if name not in OF_STOCK and name != "do_sample":
            raise RequestError(f"{STOCK}: {name[:100]} is not implemented; leave it out", param=STOCK)
    found = {ours: fields[name] for name, ours in OF_STOCK.items() if name in fields}
    if not samples:
        found["temperature"] = 0
    return {**found, **rest}


def _sampling(given: Mapping[str, Any], arguments: ServeArguments) -> Sampling:
    def number(name: str, kind: type, low: float, high: float) -> Any:
        value = _number(given, name, kind, low, high)
        return getattr(arguments, name) if value is None else value

    temperature = number("temperature", float, 0, 100)
    greedy = temperature < COLDEST
    return Sampling(
        do_sample=not greedy,
        top_k=number("top_k", int, 0, 1 << 31),
        top_p=max(number("top_p", float, 0, 1), 1e-6),
        temperature=1.0 if greedy else temperature,
        repetition_penalty=number("repetition_penalty", float, 0.01, 100),
        min_new_tokens=arguments.min_new_tokens,
    )


def _number(given: Mapping[str, Any], name: str, kind: type, low: float, high: float) -> Any:
    """A number between `low` and `high`, or None if it is not given. Raises RequestError."""
    value = given.get(name)
    if value is None:
        return None
    right = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if not right or not low <= value <= high:
        wanted = "a number" if kind is float else "a whole number"
        raise RequestError(f"{name} is {value!r:.60}, expected {wanted} from {low:g} to {high:g}", param=name)
    return kind(value)


def _switch(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r:.60}, expected true or false", param=name)
    return value


def _stops(value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise RequestError("stop is expected to be a text, or a list of texts that are not empty", param="stop")
    if len(found) > MOST_STOPS:
        raise RequestError(f"stop has {len(found)} texts, at most {MOST_STOPS}", param="stop")
    return tuple(found)


def _conversation(given: Mapping[str, Any]) -> Conversation:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages is missing, empty or not a list", param="messages")
    found = [_message(message, number) for number, message in enumerate(messages)]
    _check_length(sum(len(str(message)) for message in found), "messages")
    try:
        for message in found:
            check_text(str(message), "messages")
        return parse_conversation(found, "messages")
    except GptlmError as error:
        raise RequestError(str(error), param="messages") from error


def _message(message: Any, number: int) -> Any:
    """The message with its parts joined, and without OpenAI's new name of the system."""
    if not isinstance(message, dict):
        return message
    content, found = message.get("content"), dict(message)
    found.pop("weight", None)
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        if not all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
            raise RequestError(f"messages[{number}] has parts that are no text", param=f"messages[{number}].content")
        found["content"] = "".join(part["text"] for part in parts)
    if found.get("role") == "developer":
        found["role"] = "system"
    return found


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    """Texts or rows of ids: `value` is one of them or a list of them."""
    is_row = isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
    found = [value] if isinstance(value, str) or is_row else value
    if not isinstance(found, list) or not found:
        raise RequestError("prompt is missing, empty, or neither a text nor ids", param="prompt")
    if len(found) > MOST_PROMPTS:
        raise RequestError(f"prompt has {len(found)} texts, at most {MOST_PROMPTS}", param="prompt")
    _check_length(sum(len(one) for one in found if isinstance(one, (str, list))), "prompt")
    for one in found:
        is_row = isinstance(one, list) and bool(one) and all(type(item) is int and item >= 0 for item in one)
        if not isinstance(one, str) and not is_row:
            raise RequestError(f"prompt has {one!r:.60}, which is neither a text nor ids", param="prompt")
        if isinstance(one, str):
            try:
                check_text(one, "prompt")
            except GptlmError as error:
                raise RequestError(str(error), param="prompt") from error
    return tuple(found)


def _check_length(characters: int, param: str) -> None:
    if characters > LONGEST_PROMPT:
        raise RequestError(
            f"{param} has {characters:,} characters, at most {LONGEST_PROMPT:,} are read",
            param=param,
            code="context_length_exceeded",
        )

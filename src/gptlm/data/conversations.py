"""Examples of fine-tuning, and conversations: messages from records, and how they become examples."""

from dataclasses import dataclass
from typing import Any

from gptlm.errors import GptlmError
from gptlm.json_text import parse_json

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
KNOWN_ROLES = ("system", "user", "assistant", "tool")
TOOL_KEYS = ("tool_calls", "function_call")
OWN_KEYS = ("role", "from", "content", "value", "weight")

Span = tuple[int, int]  # characters [start, stop)


@dataclass(frozen=True)
class Content:
    """Where the text of a message is in a longer text, whose other parts are never truncated."""

    start: int
    stop: int
    role: str = "user"


@dataclass(frozen=True)
class Turn:
    """A prompt and its response, tokenized separately.

    Attributes:
        cue: the end of the prompt, such as "### Response:"; it is never truncated.
        texts: parts of `prompt` that can be truncated; None: all of it.
        in_loss: the response is a target of the loss; otherwise it is context.
        is_text: the response is a plain text without a prompt; only the longest row limits it.
    """

    prompt: str
    response: str
    cue: str = ""
    texts: tuple[Content, ...] | None = None
    in_loss: bool = True
    is_text: bool = False


@dataclass(frozen=True)
class Response:
    """An assistant message in a rendered conversation.

    Attributes:
        start, stop: the characters that are targets: the text and the end of the turn.
        text_stop: where the text ends and the end of the turn begins.
        text: the message's content, with which a generated text is compared.
        in_loss: it is a target of the loss; otherwise it is context.
    """

    start: int
    stop: int
    text_stop: int
    text: str
    in_loss: bool


@dataclass(frozen=True)
class Chat:
    """A conversation as a chat template renders it, tokenized as one text.

    Attributes:
        contents: of all messages, in order; None where the template changes texts so that they are not found.
        end_id: id of the token with which the template ends an assistant turn; None if there is none.
    """

    text: str
    contents: tuple[Content, ...] | None
    responses: tuple[Response, ...]
    end_id: int | None

    @property
    def end_in_loss(self) -> bool:
        """Whether the end of a turn is a target; a template can mark responses without it."""
        return self.end_id is None or all(one.text_stop < one.stop for one in self.responses if one.in_loss)


Example = list[Turn] | Chat


def has_targets(example: Example) -> bool:
    """Whether any response of `example` is a target of the loss."""
    return any(one.in_loss for one in (example.responses if isinstance(example, Chat) else example))


def written_texts(example: Example) -> list[str]:
    """The texts of `example` from its record, without those of a chat template."""
    if isinstance(example, Chat):
        return [example.text[content.start : content.stop] for content in example.contents or ()]
    return [text for turn in example for text in (turn.prompt, turn.response)]


def first_text(example: Example) -> str:
    """The text with which `example` begins, for messages."""
    if isinstance(example, Chat):
        return example.text
    return example[0].prompt if example else ""


@dataclass(frozen=True)
class Conversation:
    """Messages of one record.

    Attributes:
        messages: {"role", "content", ...} each; the content is a text.
        in_loss: for each message whether it is a target of the loss.
        place: of the record, for error messages.
        tools: functions that the assistant can call, as JSON schemas.
    """

    messages: list[dict[str, Any]]
    in_loss: tuple[bool, ...]
    place: str = ""
    tools: list[dict[str, Any]] | None = None

    def tool_message(self) -> str:
        """The first message that calls a tool or holds its result, in words; empty if there is none."""
        for number, message in enumerate(self.messages, start=1):
            for key in TOOL_KEYS:
                if message.get(key):
                    return f"message {number} has {key}"
            if message["role"] == "tool":
                return f"message {number} has the role tool"
        return ""


def parse_conversation(messages: Any, place: str, *, system: Any = None, tools: Any = None) -> Conversation:
    """The conversation of a record.

    Args:
        system: text of a system message that comes first, unless the messages have one.
        tools: a list of JSON schemas, or that list as a JSON text.

    Raises:
        GptlmError: with `place`, for a message of another form.
    """
    if not isinstance(messages, list) or not messages:
        raise GptlmError(f"{place}: the conversation is empty or is not a list of messages")
    found = [_parse_message(message, f"{place}, message {number}") for number, message in enumerate(messages, start=1)]
    if system and found[0][0]["role"] != "system":
        if not isinstance(system, str):
            raise GptlmError(f"{place}: system is expected to be a text, found {type(system).__name__}")
        found.insert(0, ({"role": "system", "content": system}, False))
    standard, in_loss = zip(*found, strict=True)
    return Conversation(list(standard), in_loss, place, _parse_tools(tools, place))


def _parse_message(message: Any, place: str) -> tuple[dict[str, Any], bool]:
    """The message with standard keys and without those that are null, and whether it is a target."""
    if not isinstance(message, dict):
        raise GptlmError(f"{place}: expected an object with role and content, found {type(message).__name__}")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    role = ROLES.get(role, role) if isinstance(role, str) else role
    if role not in KNOWN_ROLES:
        raise GptlmError(f"{place}: unknown role {role!r}; expected system, user or assistant")
    if content is None and role == "assistant":  # tool calls only, or a response that was removed
        content = ""
    if not isinstance(content, str):
        raise GptlmError(f"{place}: expected a text, found {type(content).__name__}")
    weight = message.get("weight")  # OpenAI's: 0 makes an assistant message context, 1 (the default) a target
    if weight is not None:
        if isinstance(weight, bool) or weight not in (0, 1):
            raise GptlmError(f"{place}: weight {weight!r}: expected 0 (not a target of the loss) or 1")
        if weight == 1 and role != "assistant":
            raise GptlmError(f"{place}: weight 1 on a message of the {role}: only assistant messages are targets")
    more = {key: value for key, value in message.items() if key not in OWN_KEYS and value is not None}
    has_content = bool(content.strip()) or any(more.get(key) for key in TOOL_KEYS)
    return {"role": role, "content": content, **more}, role == "assistant" and weight != 0 and has_content


def _parse_tools(tools: Any, place: str) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    try:
        found = parse_json(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise GptlmError(f"{place}: tools is not valid JSON ({error})") from error
    if found and not (isinstance(found, list) and all(isinstance(tool, dict) for tool in found)):
        raise GptlmError(f"{place}: tools is not a list of JSON schemas")
    return found or None


class PlainHeadings:
    """Turns of a conversation under headings such as "### User:", for tokenizers without a chat template."""

    uses_tools = renders_texts = False

    def __call__(self, conversation: Conversation) -> Example:
        """Raises GptlmError if a message calls a tool or holds its result."""
        if tools := conversation.tool_message():
            raise GptlmError(
                f"{conversation.place}: {tools}, which only a chat template can render, and the tokenizer has none; "
                "remove such conversations or give a tokenizer with a chat template"
            )
        turns: list[Turn] = []
        prompt, texts = "", list[Content]()
        for message, in_loss in zip(conversation.messages, conversation.in_loss, strict=True):
            role, content = message["role"], message["content"]
            if role == "assistant":
                turns.append(Turn(prompt, content, "### Assistant:\n", tuple(texts), in_loss))
                prompt, texts = "", []
                continue
            prompt += f"### {role.capitalize()}:\n"
            texts.append(Content(len(prompt), len(prompt) + len(content), role))
            prompt += f"{content}\n\n"
        return turns

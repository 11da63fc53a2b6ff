"""Conversations: messages from records, and their plain form for tokenizers without a chat template."""

import json
from dataclasses import dataclass
from typing import Any

from gptlm.data.turns import Content, Example, Turn
from gptlm.errors import GptlmError

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
KNOWN_ROLES = ("system", "user", "assistant", "tool")
TOOL_KEYS = ("tool_calls", "function_call")
OWN_KEYS = ("role", "from", "content", "value", "weight")


@dataclass(frozen=True)
class Conversation:
    """Messages of one record.

    Attributes:
        messages: {"role", "content", ...} each; the content is a text.
        learnt: for each message whether it is a target of the loss.
        place: of the record, for error messages.
        tools: functions that the assistant may call, as JSON schemas.
    """

    messages: list[dict[str, Any]]
    learnt: tuple[bool, ...]
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


def conversation(messages: Any, place: str, *, system: Any = None, tools: Any = None) -> Conversation:
    """From `{"role", "content"}` or `{"from", "value"}` messages.

    Args:
        system: text of a system message that comes first, unless the messages have one.
        tools: a list of JSON schemas, or that list as a JSON text.

    Raises:
        GptlmError: for a message of another form, naming `place`.
    """
    if not isinstance(messages, list) or not messages:
        raise GptlmError(f"{place}: the conversation is empty or is no list of messages")
    found = [_message(message, f"{place}, message {number}") for number, message in enumerate(messages, start=1)]
    if system and found[0][0]["role"] != "system":
        if not isinstance(system, str):
            raise GptlmError(f"{place}: system is expected to be a text, found {type(system).__name__}")
        found.insert(0, ({"role": "system", "content": system}, False))
    return Conversation(
        [message for message, _ in found], tuple(learnt for _, learnt in found), place, _tools(tools, place)
    )


def _message(message: Any, place: str) -> tuple[dict[str, Any], bool]:
    """The message with standard keys and without those that are null, and whether it is a target."""
    if not isinstance(message, dict):
        raise GptlmError(f"{place}: expected an object with role and content, found {type(message).__name__}")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    role = ROLES.get(role, role) if isinstance(role, str) else role
    if role not in KNOWN_ROLES:
        raise GptlmError(f"{place}: unknown role {role!r}; expected system, user or assistant")
    if content is None and role == "assistant":  # tool calls, or an answer that was taken out
        content = ""
    if not isinstance(content, str):
        raise GptlmError(f"{place}: expected a text, found {type(content).__name__}")
    more = {key: value for key, value in message.items() if key not in OWN_KEYS and value is not None}
    says_something = bool(content.strip()) or any(more.get(key) for key in TOOL_KEYS)
    weight = _weight(message.get("weight"), role, place)
    return {"role": role, "content": content, **more}, role == "assistant" and weight == 1 and says_something


def _weight(weight: Any, role: str, place: str) -> int:
    """OpenAI's: 0 makes an assistant message context, 1 (the default) a target."""
    if weight is None:
        return 1
    if isinstance(weight, bool) or weight not in (0, 1):
        raise GptlmError(f"{place}: weight {weight!r}: expected 0 (not a target of the loss) or 1")
    if weight == 1 and role != "assistant":
        raise GptlmError(f"{place}: weight 1 on a message of the {role}: only assistant messages are targets")
    return int(weight)


def _tools(tools: Any, place: str) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    try:
        found = json.loads(tools) if isinstance(tools, str) else tools
    except (ValueError, RecursionError) as error:
        raise GptlmError(f"{place}: tools is no valid JSON ({error})") from error
    if found and not (isinstance(found, list) and all(isinstance(tool, dict) for tool in found)):
        raise GptlmError(f"{place}: tools is no list of JSON schemas")
    return found or None


class PlainHeadings:
    """Turns of a conversation under headings such as "### User:"."""

    uses_tools = False

    def __call__(self, talk: Conversation) -> Example:
        """Raises GptlmError if a message calls a tool or holds its result."""
        if tools := talk.tool_message():
            raise GptlmError(
                f"{talk.place}: {tools}, which only a chat template can render, and the tokenizer has none; remove "
                "such conversations or give a tokenizer with a chat template"
            )
        turns: list[Turn] = []
        before, texts = "", list[Content]()
        for message, learnt in zip(talk.messages, talk.learnt, strict=True):
            role, content = message["role"], message["content"]
            if role == "assistant":
                turns.append(Turn(before, content, "### Assistant:\n", tuple(texts), learnt))
                before, texts = "", []
                continue
            before += f"### {role.capitalize()}:\n"
            texts.append(Content(len(before), len(before) + len(content), role))
            before += f"{content}\n\n"
        return turns

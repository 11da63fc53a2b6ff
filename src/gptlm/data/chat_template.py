"""Conversations in a tokenizer's chat template: the rendered text, and where in it the assistant messages are."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from gptlm.data.budget import OverBudgetError, budget
from gptlm.data.conversations import TOOL_KEYS, Chat, Content, Conversation, Response
from gptlm.data.encoder import pattern_of
from gptlm.errors import GptlmError, reason_of

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # how transformers detects templates that mark assistant tokens
OPEN, CLOSE = 0xF1000, 0x101000  # private-use characters, one pair for each message, with which texts are found
MAX_MARKED = 0xE000
SECONDS, MEMORY = 5.0, 1 << 30  # limits of one rendering, which takes milliseconds
MOST_ADDED = 1 << 20  # characters that a template adds to twice the conversation

Contents = dict[int, Content]  # number of a message -> where its text is


class ChatTemplate:
    """Renders conversations as `tokenizer.apply_chat_template` does.

    Where the template marks assistant tokens with `{% generation %}`, those are the targets. Otherwise they are what a
    turn adds to its prompt (the conversation before it, rendered with `add_generation_prompt`), up to the token that
    ends the turn.

    Attributes:
        uses_tools: the template renders the functions that the assistant can call.
        renders_texts: prompts and responses that are plain texts are rendered, too.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, renders_texts: bool = False):
        try:
            self.template = str(tokenizer.get_chat_template())
        except ValueError as error:  # several templates and no default
            raise GptlmError(f"the tokenizer in {tokenizer.name_or_path}: {error}") from error
        self.tokenizer, self.renders_texts = tokenizer, renders_texts
        self.marks_responses = bool(GENERATION.search(self.template))
        self.uses_tools = bool(re.search(r"\btools\b", self.template))
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self._added = pattern_of(added)

    def __call__(self, conversation: Conversation) -> Chat:
        """Raises GptlmError, with the place, if the template refuses the conversation or cannot render all of it."""
        if (tools := conversation.tool_message()) and not any(key in self.template for key in TOOL_KEYS):
            raise GptlmError(
                f"{conversation.place}: {tools}, which the tokenizer's chat template does not render; remove such "
                "conversations or give a tokenizer whose template renders them"
            )
        text = self._render(conversation, conversation.messages)
        contents = self._find_contents(conversation, text)
        find = self._marked_responses if self.marks_responses else self._added_responses
        responses, end_id = find(conversation, text, contents or {})
        return Chat(text, None if contents is None else tuple(contents.values()), tuple(responses), end_id)

    def prompt(self, conversation: Conversation) -> tuple[str, tuple[Content, ...]]:
        """The text that an answer follows, and where the messages are in it; empty where they are not found.

        As in transformers' text generation, a last message of the assistant is continued.

        Raises:
            GptlmError: as a call, or if the template changes the message that is to be continued.
        """
        continued = conversation.messages[-1]["role"] == "assistant"
        text = self._render(conversation, conversation.messages, generation_prompt=not continued)
        found = self._find_contents(conversation, text, generation_prompt=not continued) or {}
        if continued:
            last = found.get(len(conversation.messages) - 1)
            if last is None:
                raise GptlmError(
                    f"{conversation.place}: the tokenizer's chat template changes the last message, so the answer that "
                    "it begins cannot be continued; let the user's message be the last one"
                )
            content = str(conversation.messages[-1]["content"])
            space = content[len(content.rstrip()) :]
            text = text[: last.stop + (len(space) if text.startswith(space, last.stop) else 0)]
        return text, tuple(found.values())

    def _marked_responses(
        self, conversation: Conversation, text: str, contents: Contents
    ) -> tuple[list[Response], int | None]:
        """Responses where the template marks them with {% generation %}."""
        messages, special = conversation.messages, dict[str, Any](self.tokenizer.special_tokens_map)
        with self._limited(conversation):
            found: Any = render_jinja_template(
                [messages],
                tools=conversation.tools,  # type: ignore[arg-type]
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **special,
            )
        spans: list[tuple[int, int]] = found[1][0]
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) != len(numbers):
            raise GptlmError(
                f"{conversation.place}: the chat template marks {len(spans)} assistant turns of {len(numbers)}; its "
                "{% generation %} must contain each of them once"
            )
        responses, end_id = [], None
        for number, (start, stop) in zip(numbers, spans, strict=True):
            is_last = number == numbers[-1]
            up_to_here = self._render(conversation, messages[: number + 1]) if is_last else text[:stop]
            text_stop, ends = self._find_end(conversation, contents, number, up_to_here, start, len(up_to_here))
            end_id = self._id(ends[0].group()) if ends else None
            content = str(messages[number]["content"])
            responses.append(Response(start, stop, min(text_stop, stop), content, conversation.in_loss[number]))
        return responses, end_id

    def _added_responses(
        self, conversation: Conversation, text: str, contents: Contents
    ) -> tuple[list[Response], int | None]:
        """Responses as what each adds to its prompt."""
        responses: list[Response] = []
        end_id: int | None = None
        for number, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            up_to_here = self._render(conversation, conversation.messages[: number + 1])
            start = self._prompt_length(conversation, number, up_to_here, contents)
            stop, is_prefix = self._common_prefix(up_to_here, text)
            if stop < start or not is_prefix:
                raise GptlmError(
                    f"{conversation.place}: the tokenizer's chat template changes earlier turns when message "
                    f"{number + 2} is added, so the conversation cannot be one training example; split it into prompt "
                    "and response, or mark assistant messages with {% generation %} in the template"
                )
            text_stop, ends = self._find_end(conversation, contents, number, text, start, stop)
            if ends:
                end_id, stop = self._id(ends[0].group()), ends[-1].end()
            in_loss = conversation.in_loss[number]
            responses.append(Response(start, stop, text_stop, str(message["content"]), in_loss))
        return responses, end_id

    def _common_prefix(self, part: str, text: str) -> tuple[int, bool]:
        """How far two renderings agree, and whether the rest of `part` is only tokens that end a conversation."""
        stop = len(os.path.commonprefix([part, text]))  # noqa: RUF071 - characters, not folders
        cut = next((match for match in self._added.finditer(part) if match.start() < stop < match.end()), None)
        stop = cut.start() if cut else stop  # not inside a token
        return stop, not self._added.sub("", part[stop:]).strip()

    def _prompt_length(self, conversation: Conversation, number: int, text: str, contents: Contents) -> int:
        """Where in `text`, the conversation up to message `number`, that message begins."""
        prompt = self._render(conversation, conversation.messages[: max(number, 1)], generation_prompt=True)
        if number > 0:
            if not text.startswith(prompt):
                raise GptlmError(
                    f"{conversation.place}: the tokenizer's chat template changes earlier turns when message "
                    f"{number + 1} is added: the rendered prompt is not the beginning of prompt and response; mark "
                    "assistant messages with {% generation %} in the template"
                )
            return len(prompt)
        # No template renders an empty conversation: the header of a response is the end of any prompt.
        first = contents[0].start if 0 in contents else 0
        for length in range(min(len(prompt), first), 0, -1):
            if (place := text.find(prompt[-length:], 0, first)) >= 0:
                return place + length
        return 0

    def _find_contents(self, conversation: Conversation, text: str, generation_prompt: bool = False) -> Contents | None:
        """Where each message's text is in `text`; None where the texts are not found.

        A second rendering has private-use characters around the texts. White space around a text stays outside of
        them, because templates strip it.
        """
        if len(conversation.messages) > MAX_MARKED:
            return None
        marked = []
        for number, message in enumerate(conversation.messages):
            content = str(message["content"])
            if any(ord(letter) >= 0xF0000 for letter in content):
                return None
            core = content.strip()
            wrapped = content.replace(core, f"{chr(OPEN + number)}{core}{chr(CLOSE + number)}", 1) if core else content
            marked.append(message | {"content": wrapped})
        rendered = self._render(conversation, marked, generation_prompt)
        return _contents_between_marks(rendered, text, conversation.messages)

    def _find_end(
        self, conversation: Conversation, contents: Contents, number: int, text: str, start: int, stop: int
    ) -> tuple[int, list[re.Match[str]]]:
        """Where the text of message `number` ends in `text[start:stop]`, and the tokens that end the turn.

        The first token after the text ends the turn. Where tool calls follow, or the text is not found, the last does.
        """
        content, message = contents.get(number), conversation.messages[number]
        if content and start <= content.stop <= stop and not any(message.get(key) for key in TOOL_KEYS):
            return content.stop, list(self._added.finditer(text, content.stop, stop))
        ends = list(self._added.finditer(text, start, stop))[-1:]
        if not ends or text[ends[0].end() : stop].strip():
            return stop, []
        return ends[0].start(), ends

    def _id(self, token: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(token))  # type: ignore[arg-type]

    def _render(
        self, conversation: Conversation, messages: Sequence[dict[str, Any]], generation_prompt: bool = False
    ) -> str:
        with self._limited(conversation):
            text = str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=conversation.tools,  # type: ignore[arg-type]
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                )
            )
        most = MOST_ADDED + 2 * len(str(messages)) + 2 * len(str(conversation.tools))
        if len(text) > most:
            raise GptlmError(
                f"{conversation.place}: the tokenizer's chat template makes {len(text):,} characters of the "
                f"conversation, at most {most:,} are read; {self._fix}"
            )
        return text

    @contextmanager
    def _limited(self, conversation: Conversation) -> Iterator[None]:
        """Limits and errors of a rendering."""
        try:
            with budget(SECONDS, MEMORY):
                yield
        except TemplateSyntaxError as error:
            raise GptlmError(
                f"the tokenizer's chat template is not valid Jinja, line {error.lineno}: {error}; {self._fix}"
            ) from error
        except OverBudgetError as error:
            raise GptlmError(
                f"{conversation.place}: the tokenizer's chat template is stopped: {error}; {self._fix}"
            ) from error
        except Exception as error:  # raise_exception() of the template, or any error in its expressions
            reason = reason_of(error) if isinstance(error, RecursionError) else f"{error}"[:500]
            raise GptlmError(
                f"{conversation.place}: the tokenizer's chat template refuses the conversation: {reason}"
            ) from error

    @property
    def _fix(self) -> str:
        return f"fix chat_template in the folder {self.tokenizer.name_or_path}"


def _contents_between_marks(marked: str, text: str, messages: Sequence[dict[str, Any]]) -> Contents | None:
    """The texts between their private-use characters; None if `marked` without those is not `text`."""
    starts: dict[int, int] = {}
    found: Contents = {}
    letters: list[str] = []
    for letter in marked:
        code = ord(letter)
        if OPEN <= code < OPEN + len(messages):
            starts[code - OPEN] = len(letters)
        elif CLOSE <= code < CLOSE + len(messages):
            number = code - CLOSE
            if number not in starts or number in found:
                return None
            found[number] = Content(starts[number], len(letters), messages[number]["role"])
        else:
            letters.append(letter)
    return found if "".join(letters) == text and len(found) == len(starts) else None

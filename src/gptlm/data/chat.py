"""Conversations in a tokenizer's chat template: the text it renders, and where in it the assistant speaks."""

import os
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from gptlm.data.messages import TOOL_KEYS, Conversation
from gptlm.data.turns import Answer, Chat, Content
from gptlm.errors import GptlmError

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # how transformers finds out that a template marks assistant tokens
OPEN, CLOSE = 0xF1000, 0x101000  # private characters, one pair for each message, to find texts again
MOST_MARKED = 0xE000


class ChatTemplate:
    """Renders conversations as `tokenizer.apply_chat_template` does.

    Where the template marks assistant tokens with `{% generation %}`, those are the targets. Otherwise they are what a
    turn adds to its prompt (the conversation before it, rendered with `add_generation_prompt`), up to the token that
    ends the turn.

    Attributes:
        uses_tools: the template renders the functions that the assistant may call.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        try:
            self.template = str(tokenizer.get_chat_template())
        except ValueError as error:  # several templates and no default one
            raise GptlmError(f"the tokenizer in {tokenizer.name_or_path}: {error}") from error
        self.tokenizer = tokenizer
        self.marks = bool(MARKED.search(self.template))
        self.uses_tools = bool(re.search(r"\btools\b", self.template))
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self._added = _any_of(added)

    def __call__(self, talk: Conversation) -> Chat:
        """Raises GptlmError, naming the place, if the template refuses the conversation or cannot render all of it."""
        if (tools := talk.tool_message()) and not any(key in self.template for key in TOOL_KEYS):
            raise GptlmError(
                f"{talk.place}: {tools}, which the tokenizer's chat template does not render; remove such "
                "conversations or give a tokenizer whose template renders them"
            )
        text = self._render(talk, talk.messages)
        contents = self._contents(talk, text)
        answers, end = (
            self._marked(talk, text, contents) if self.marks else self._added_to_prompts(talk, text, contents)
        )
        return Chat(text, None if contents is None else tuple(contents.values()), tuple(answers), end)

    def _marked(
        self, talk: Conversation, text: str, contents: dict[int, Content] | None
    ) -> tuple[list[Answer], int | None]:
        """Answers where the template marks them."""
        special: dict[str, Any] = self.tokenizer.special_tokens_map
        found: Any = render_jinja_template(
            [talk.messages],
            tools=talk.tools,  # type: ignore[arg-type]
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **special,
        )
        spans: list[tuple[int, int]] = found[1][0]
        speaking = [number for number, message in enumerate(talk.messages) if message["role"] == "assistant"]
        if len(spans) != len(speaking):
            raise GptlmError(
                f"{talk.place}: the chat template marks {len(spans)} assistant turns of {len(speaking)}; its "
                "{% generation %} must hold each of them once"
            )
        answers, end = [], None
        for number, (start, stop) in zip(speaking, spans, strict=True):
            alone = self._render(talk, talk.messages[: number + 1]) if number == speaking[-1] else text[:stop]
            close, ends = self._ends(talk, contents, number, alone, start, len(alone))
            end = self._id(ends[0].group()) if ends else None
            close = min(close, stop)
            answers.append(Answer(start, stop, close, str(talk.messages[number]["content"]), talk.learnt[number]))
        return answers, end

    def _added_to_prompts(
        self, talk: Conversation, text: str, contents: dict[int, Content] | None
    ) -> tuple[list[Answer], int | None]:
        """Answers as what each adds to its prompt."""
        answers: list[Answer] = []
        end: int | None = None
        for number, message in enumerate(talk.messages):
            if message["role"] != "assistant":
                continue
            alone = self._render(talk, talk.messages[: number + 1])
            start = self._prompt_end(talk, number, alone, contents)
            stop, whole = self._common(alone, text)
            if stop < start or not whole:
                raise GptlmError(
                    f"{talk.place}: the tokenizer's chat template changes earlier turns when message {number + 2} is "
                    "added, so that the conversation cannot be learnt as one row; split it into prompt and response, "
                    "or mark what the assistant says with {% generation %} in the template"
                )
            close, ends = self._ends(talk, contents, number, text, start, stop)
            if ends:
                end, stop = self._id(ends[0].group()), ends[-1].end()
            answers.append(Answer(start, stop, close, str(message["content"]), talk.learnt[number]))
        return answers, end

    def _common(self, alone: str, text: str) -> tuple[int, bool]:
        """How far two renderings agree, and whether `alone` then has nothing but tokens that end a conversation."""
        stop = len(os.path.commonprefix([alone, text]))
        cut = next((match for match in self._added.finditer(alone) if match.start() < stop < match.end()), None)
        stop = cut.start() if cut else stop
        return stop, not self._added.sub("", alone[stop:]).strip()

    def _prompt_end(self, talk: Conversation, number: int, alone: str, contents: dict[int, Content] | None) -> int:
        """Where in `alone`, the conversation up to message `number`, what the assistant says begins."""
        prompt = self._render(talk, talk.messages[: max(number, 1)], True)
        if number > 0:
            if not alone.startswith(prompt):
                raise GptlmError(
                    f"{talk.place}: the tokenizer's chat template changes earlier turns when message {number + 1} is "
                    "added: the prompt that it renders is not the beginning of prompt and answer; mark what the "
                    "assistant says with {% generation %} in the template"
                )
            return len(prompt)
        # No template renders an empty conversation: the header of the answer is what any prompt ends with.
        begin = contents[0].start if contents and 0 in contents else 0
        for length in range(min(len(prompt), begin), 0, -1):
            if (place := alone.find(prompt[-length:], 0, begin)) >= 0:
                return place + length
        return 0

    def _contents(self, talk: Conversation, text: str) -> dict[int, Content] | None:
        """Number of each message -> where its text stands in `text`; None where they are not found.

        A second rendering has private characters around the texts. Space around a text stays outside: templates
        remove it.
        """
        if len(talk.messages) > MOST_MARKED:
            return None
        marked = []
        for number, message in enumerate(talk.messages):
            content = str(message["content"])
            if any(ord(letter) >= 0xF0000 for letter in content):
                return None
            core = content.strip()
            wrapped = content.replace(core, f"{chr(OPEN + number)}{core}{chr(CLOSE + number)}", 1) if core else content
            marked.append(message | {"content": wrapped})
        return _unwrapped(self._render(talk, marked), text, talk.messages)

    def _ends(
        self, talk: Conversation, contents: dict[int, Content] | None, number: int, text: str, start: int, stop: int
    ) -> tuple[int, list[re.Match[str]]]:
        """Where in `text` what follows on message `number`'s own text begins, and the tokens that end the turn.

        Behind a text the first token ends the turn. Where tool calls follow, or the text is not found, it is the last.
        """
        content = (contents or {}).get(number)
        if content and start <= content.stop <= stop and not any(talk.messages[number].get(key) for key in TOOL_KEYS):
            return content.stop, list(self._added.finditer(text, content.stop, stop))
        ends = list(self._added.finditer(text, start, stop))[-1:]
        if not ends or text[ends[0].end() : stop].strip():
            return stop, []
        return ends[0].start(), ends

    def _id(self, token: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(token))  # type: ignore[arg-type]

    def _render(self, talk: Conversation, messages: Sequence[dict[str, Any]], prompt: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=talk.tools,  # type: ignore[arg-type]
                    tokenize=False,
                    add_generation_prompt=prompt,
                )
            )
        except TemplateSyntaxError as error:
            raise GptlmError(
                f"the tokenizer's chat template is no valid Jinja, line {error.lineno}: {error}; mend chat_template in "
                f"the folder {self.tokenizer.name_or_path}"
            ) from error
        except Exception as error:  # the template's own refusal, or whatever its expressions run into
            raise GptlmError(
                f"{talk.place}: the tokenizer's chat template refuses the conversation: {error}"
            ) from error


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _unwrapped(marked: str, text: str, messages: Sequence[dict[str, Any]]) -> dict[int, Content] | None:
    """The texts between their private characters; None if `marked` without those is not `text`."""
    starts: dict[int, int] = {}
    found: dict[int, Content] = {}
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

"""Conversations as prompts: messages -> text in the chat template -> token ids, as in fine-tuning."""

import logging
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from gptlm.data.chat_template import ChatTemplate
from gptlm.data.conversations import Conversation
from gptlm.data.rows import Text, places_to_cut, text_encoder
from gptlm.data.templates import plain_template
from gptlm.model.templates import use_template, warn_of_text_tokens

logger = logging.getLogger(__name__)


class ChatPrompts:
    """Token ids of conversations, up to where an answer begins.

    A special token inside a message stays text. Without a template, messages have the plain headings of fine-tuning.
    Call it in the main thread: the time of a template, which may be anybody's, is limited there only.

    Args:
        template: chatml, plain or a file, as --chat_template; None: the tokenizer's.
        allow_special_tokens: encode special tokens in messages as their ids.

    Raises:
        GptlmError: if the template cannot be read.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None = None, *, allow_special_tokens: bool = False
    ):
        use_template(tokenizer, template)
        if not tokenizer.chat_template:
            if template is None:
                logger.warning(
                    "the tokenizer has no chat template: messages stand under plain headings, which the model may "
                    "never have seen (--chat_template chatml, or a file, renders them otherwise)"
                )
            tokenizer.chat_template = plain_template("messages")
        warn_of_text_tokens(tokenizer)
        self._render = ChatTemplate(tokenizer)
        self._encode = text_encoder(tokenizer, allow_special_tokens)

    def __call__(self, conversation: Conversation, longest: int | None = None, side: str = "left") -> list[int]:
        """The ids, at most `longest` where texts of messages can be cut on their `side`.

        Raises:
            GptlmError: if the template refuses the conversation, with its place.
        """
        text, contents = self._render.prompt(conversation)
        (found,) = self._encode([Text(text, tuple((content.start, content.stop) for content in contents))])
        if longest is None or len(found.ids) <= longest:
            return found.ids
        removed = set(places_to_cut(found.spans, contents, side)[: len(found.ids) - longest])
        return [token for place, token in enumerate(found.ids) if place not in removed]

    def fitting(self, messages: Sequence[dict[str, Any]], longest: int) -> tuple[list[int], int]:
        """The ids of `messages` without the oldest ones if they are longer, and how many are left out.

        A system message at the beginning and the last message stay. Ids may be more than `longest` all the same.
        """
        first = int(messages[0]["role"] == "system")
        for start in range(first, len(messages)):
            if start > first and messages[start]["role"] == "assistant":
                continue  # a conversation begins with the user
            kept = [*messages[:first], *messages[start:]]
            ids = self(Conversation(kept, (False,) * len(kept), "the conversation"))
            if len(ids) <= longest:
                break
        return ids, start - first

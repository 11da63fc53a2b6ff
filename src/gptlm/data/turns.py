"""What an example is: turns under plain headings, or a conversation as a chat template renders it."""

from dataclasses import dataclass

Span = tuple[int, int]  # characters [start, stop)


@dataclass(frozen=True)
class Content:
    """Where the text of a message stands in a longer text, whose other parts are never cut."""

    start: int
    stop: int
    role: str = "user"


@dataclass(frozen=True)
class Turn:
    """A prompt and its answer, tokenized apart.

    Attributes:
        cue: the end of the prompt, such as "### Response:"; it is never cut.
        texts: parts of `prompt` that may be cut; None: all of it.
        learnt: the answer is a target of the loss; else it is context.
    """

    prompt: str
    answer: str
    cue: str = ""
    texts: tuple[Content, ...] | None = None
    learnt: bool = True


@dataclass(frozen=True)
class Answer:
    """What the assistant says in a rendered conversation.

    Attributes:
        start, stop: the characters that are targets: the text, and what ends the turn.
        close: where what ends the turn begins.
        text: the message's content, what a generated text is compared with.
        learnt: it is a target; else it is context.
    """

    start: int
    stop: int
    close: int
    text: str
    learnt: bool


@dataclass(frozen=True)
class Chat:
    """A conversation as a chat template renders it, tokenized at once.

    Attributes:
        contents: of all messages, in order; None where the template changes texts so that they are not found.
        end: id of the token with which the template ends an assistant's turn; None: nothing ends it.
    """

    text: str
    contents: tuple[Content, ...] | None
    answers: tuple[Answer, ...]
    end: int | None

    @property
    def end_learnt(self) -> bool:
        """Whether what ends a turn is a target; a template can mark answers without it."""
        return self.end is None or all(answer.close < answer.stop for answer in self.answers if answer.learnt)


Example = list[Turn] | Chat


def said(example: Example) -> list[str]:
    """The texts that people wrote, without a chat template's own."""
    if isinstance(example, Chat):
        return [example.text[content.start : content.stop] for content in example.contents or ()]
    return [text for turn in example for text in (turn.prompt, turn.answer)]


def beginning(example: Example) -> str:
    """The text that an example begins with, for messages."""
    if isinstance(example, Chat):
        return example.text
    return example[0].prompt if example else ""

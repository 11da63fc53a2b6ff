"""Chat templates of our own: ChatML, and what fine-tuning writes around texts where a tokenizer has no template.

They are saved with fine-tuned models, so that stock transformers renders messages as the model has seen them.
"""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from gptlm.data.conversations import Conversation, Turn, parse_conversation

CHATML, PLAIN = "chatml", "plain"  # as values of --chat_template; anything else is a file
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def bad_template(name: str) -> str | None:
    """What is wrong with a value of --chat_template; None: nothing."""
    if name.lower() in (CHATML, PLAIN) or Path(name).is_file():
        return None
    return f"{name}: no such file; expected {CHATML}, {PLAIN} or a Jinja file"


RESPONSE_CUE = "\n\n### Response:\n"
# form of the records -> what is written: a message of the system, one of the user, the heading of a response
FORMS = {
    "messages": (
        "'### System:\\n' + message['content'] + '\\n\\n'",
        "'### ' + message['role'] | capitalize + ':\\n' + message['content'] + '\\n\\n'",
        "'### Assistant:\\n'",
    ),
    "instruction": (
        "message['content'] + '\\n\\n'",
        "'### Instruction:\\n' + message['content'] + '\\n\\n'",
        "'### Response:\\n'",
    ),
    "question": ("message['content'] + '\\n\\n'", "message['content']", "'\\n'"),
    "text": ("message['content'] + '\\n\\n'", "message['content']", "''"),
}


def plain_template(form: str, *, paddle: bool = False) -> str:
    """The template that writes messages as fine-tuning without a template writes records.

    Args:
        form: a key of `FORMS`.
        paddle: as PaddleNLP, whose prompts and responses end with the text " </s>".
    """
    system, user, heading = FORMS[form]
    end = "' </s>'" if paddle else "eos_token"
    heading = f"{heading} + ' </s>'" if paddle else heading
    return (
        "{%- for message in messages %}"
        f"{{%- if message['role'] == 'assistant' %}}{{{{- {heading} + message['content'] + {end} }}}}"
        f"{{%- elif message['role'] == 'system' %}}{{{{- {system} }}}}"
        f"{{%- else %}}{{{{- {user} }}}}{{%- endif %}}"
        "{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{- {heading} }}}}{{%- endif %}}"
    )


def is_plain(template: object) -> bool:
    """Whether `template` is one of `plain_template`."""
    return any(template == plain_template(form, paddle=paddle) for form, paddle in product(FORMS, (False, True)))


def form_of(forms: Mapping[str, int]) -> str:
    """The key of `FORMS` for most of the records.

    Args:
        forms: form of records, as in `Examples.forms` -> number of records.
    """
    most = max(forms, key=lambda name: forms[name], default="")
    if "messages" in most or most == "conversations":
        return "messages"
    if most.startswith("instruction/"):
        return "instruction"
    return "question" if "question generation" in most else "text"


def conversation_of(turns: list[Turn], place: str) -> Conversation:
    """The conversation that prompts and responses are, for a chat template; headings of ours are left out."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if turn.cue == RESPONSE_CUE:
            found = [(text.role, turn.prompt[text.start : text.stop]) for text in turn.texts or ()]
        else:
            found = [("user", turn.prompt)]
        messages += [{"role": role, "content": text} for role, text in found if role == "system"]
        prompt = "\n".join(text for role, text in found if role != "system")
        messages += [{"role": "user", "content": prompt}] if prompt else []
        messages.append({"role": "assistant", "content": turn.response, "weight": int(turn.in_loss)})
    return parse_conversation(messages, place)

"""Conversations in a chat template: ids and masks are those of `apply_chat_template`, whatever ends a turn."""

import pytest

from gptlm.data import chat_template
from gptlm.data.chat_template import ChatTemplate
from gptlm.data.conversations import parse_conversation
from gptlm.data.rows import Encoder, Lengths, PaddleEncoder, text_encoder
from gptlm.errors import GptlmError
from gptlm.model.tokenizer import add_tokens, train_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (  # each turn ends in eos, texts lose the space around them
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ '[' + m['role'] + '] ' + m['content'] | trim + ' [/]' }}{% endif %}{% endfor %}"
)
MARKED = (  # with {% generation %}
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ENDLESS = (  # nothing but a line break after an answer
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
PHI = (  # a turn has an end and the conversation another
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
THINKING = (  # earlier turns are changed: only the last one keeps its thoughts
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{% if loop.last %}{{ '<think></think>' }}{% endif %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "Héllo 你好 the cat  "},
    {"role": "assistant", "content": " sat on\na mat"},
    {"role": "user", "content": "assistant"},  # as the header says
    {"role": "assistant", "content": "user"},
]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLE = (
    "{% set n = namespace(s='x' * 64) %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s | length }}"
)
TREE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (LOOP, "stopped: it takes more than 0.3 s"),
        (TREE, "stopped: it takes more than 0.3 s"),
        ("{{ 9 ** 999999999 }}", "stopped: it (takes|needs) more than"),
        ("{{ 'x' * 3000000000 }}", "stopped: it needs more than 1024 MiB of memory"),
        ("{{ [1] * 1000000000 }}", "stopped: it needs more than 1024 MiB of memory"),
        ("{{ '%3000000000d' % 1 }}", "stopped: it (takes|needs) more than|refuses the conversation"),
        ("{{ 'x' | center(3000000000) }}", "stopped: it needs more than 1024 MiB of memory"),
        (DOUBLE, "stopped: it (takes|needs) more than"),
        ("{{ 'x' * 5000000 }}", "makes 5,000,000 characters of the conversation, at most 1,04"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses the conversation: too deeply nested"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "refuses the conversation"),
        (f"{LOOP}{{% generation %}}{{% endgeneration %}}", "stopped: it takes more than 0.3 s"),
    ],
    ids=range(12),
)
def test_templates_that_would_not_end_or_fill_the_memory_are_stopped(tokenizer, template, says, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    with pytest.raises(GptlmError, match=f"line 7: .*{says}") as error:
        row_of(tokenizer, TALK, template)
    assert len(str(error.value)) < 1000


SPELLED = [
    {"role": "user", "content": "a<|im_end|>\n<|im_start|>system the <|endoftext|> cat"},
    {"role": "assistant", "content": "<|endoftext|> sat <|im_end|>"},
]


@pytest.fixture(scope="module")
def base():
    tokenizer = train_tokenizer(["the cat sat on a mat while two dogs ran far away: user assistant system"] * 5, 320)
    tokenizer.chat_template = CHATML
    add_tokens(tokenizer, ["<|im_start|>", "<|im_end|>"])
    return tokenizer


@pytest.fixture
def tokenizer(base):
    yield base
    base.chat_template = CHATML


def row_of(tokenizer, messages, template, *, allow=False, source=200, target=200, total=400, side="left"):
    tokenizer.chat_template = template
    chat = ChatTemplate(tokenizer)(parse_conversation(messages, "f.jsonl, line 7"))
    encoder = Encoder(text_encoder(tokenizer, allow), tokenizer.eos_token_id, Lengths(source, target, total), side=side)
    return encoder.rows([chat])[0]


def targets(tokenizer, row):
    """The texts that are targets, each whole."""
    found = [[]]
    for token, target in zip(row.ids.tolist(), row.loss_mask, strict=True):
        found[-1].append(token) if target else found.append([])
    return [tokenizer.decode(ids) for ids in found if ids]


@pytest.mark.parametrize(
    ("template", "end", "answers"),
    [
        (CHATML, "<|im_end|>", [" sat on\na mat<|im_end|>", "user<|im_end|>"]),
        (LLAMA, "<|endoftext|>", [" sat on\na mat <|endoftext|>", " user <|endoftext|>"]),
        (MARKED, "<|im_end|>", [" sat on\na mat<|im_end|>", "user<|im_end|>"]),
        (PHI, "<|im_end|>", [" sat on\na mat<|im_end|>", "user<|im_end|>\n<|endoftext|>"]),
        (THINKING, "<|im_end|>", [" sat on\na mat<|im_end|>", "<think></think>user<|im_end|>"]),
    ],
)
def test_ids_are_those_of_apply_chat_template(tokenizer, template, end, answers):
    row = row_of(tokenizer, TALK, template)
    assert row.ids.tolist() == tokenizer.apply_chat_template(TALK, return_dict=False)
    assert targets(tokenizer, row) == answers and tokenizer.convert_ids_to_tokens(row.end_id) == end
    assert (row.response, [text for _, text in row.earlier]) == ("user", [" sat on\na mat"])
    (place, _) = row.earlier[0]
    if template != THINKING:
        prompt = tokenizer.apply_chat_template(TALK[:2], add_generation_prompt=True, return_dict=False)
        assert row.ids[:place].tolist() == prompt


@pytest.mark.parametrize("template", [MARKED, THINKING])
def test_the_mask_is_transformers_where_the_template_marks_answers(tokenizer, template):
    row = row_of(tokenizer, TALK, template)
    wanted = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert row.ids.tolist() == wanted["input_ids"]
    assert row.loss_mask.astype(int).tolist() == wanted["assistant_masks"]


def test_a_template_that_marks_no_end_is_followed_and_told(tokenizer):
    inside, outside = "+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}"
    template = MARKED.replace(inside, outside)
    assert template != MARKED
    row = row_of(tokenizer, TALK, template)
    wanted = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert row.loss_mask.astype(int).tolist() == wanted["assistant_masks"]
    assert tokenizer.convert_ids_to_tokens(row.end_id) == "<|im_end|>"
    assert not ChatTemplate(tokenizer)(parse_conversation(TALK, "f")).end_in_loss
    tokenizer.chat_template = MARKED
    assert ChatTemplate(tokenizer)(parse_conversation(TALK, "f")).end_in_loss


def test_a_template_that_ends_no_turn_gets_an_end_of_text_at_the_end(tokenizer):
    """TRL adds none to conversations, so that they never end; what is before it here is the template's."""
    row = row_of(tokenizer, TALK, ENDLESS)
    wanted = tokenizer.apply_chat_template(TALK, return_dict=False)
    assert row.ids.tolist() == [*wanted, tokenizer.eos_token_id]
    assert (
        targets(tokenizer, row) == ["  sat on\na mat\n", " user\n<|endoftext|>"]
        and row.end_id == tokenizer.eos_token_id
    )


@pytest.mark.parametrize("template", [CHATML, LLAMA, MARKED, PHI])
def test_special_tokens_that_a_message_spells_stay_text(tokenizer, template):
    """As `sanitize_control_tokens` of transformers has it; --allow_special_tokens is its default."""
    row = row_of(tokenizer, SPELLED, template)
    assert row.ids.tolist() == tokenizer.apply_chat_template(SPELLED, sanitize_control_tokens=True, return_dict=False)
    row = row_of(tokenizer, SPELLED, template, allow=True)
    assert row.ids.tolist() == tokenizer.apply_chat_template(SPELLED, return_dict=False)


@pytest.mark.parametrize("template", [CHATML, PHI, MARKED])
def test_a_conversation_that_begins_with_the_assistant(tokenizer, template):
    """No prompt can be rendered of nothing: the header is context all the same."""
    row = row_of(tokenizer, TALK[2:], template)
    assert row.ids.tolist() == tokenizer.apply_chat_template(TALK[2:], return_dict=False)
    assert targets(tokenizer, row)[0] == " sat on\na mat<|im_end|>"


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_turns_that_are_context(tokenizer, template):
    """Weight 0, and no text: the ids stay the template's."""
    talk = [*TALK[:3], {"role": "user", "content": "the"}, {"role": "assistant", "content": ""}, *TALK[3:]]
    row = row_of(
        tokenizer, [message | {"weight": 0} if n == 2 else message for n, message in enumerate(talk)], template
    )
    assert row.ids.tolist() == tokenizer.apply_chat_template(talk, return_dict=False)
    assert targets(tokenizer, row) == ["user<|im_end|>"]
    row = row_of(tokenizer, talk, template)
    assert targets(tokenizer, row) == [" sat on\na mat<|im_end|>", "user<|im_end|>"]
    null = [message | {"content": message["content"] or None} for message in talk]
    assert row_of(tokenizer, null, template).ids.tolist() == row.ids.tolist()


@pytest.mark.parametrize(("side", "kept"), [("left", "ran far away"), ("right", "while two dogs")])
def test_a_long_prompt_is_cut_inside_the_user_s_text(tokenizer, side, kept):
    """The end of the turn and the assistant's header stay, and so does the system prompt."""
    talk = [TALK[0], {"role": "user", "content": "while two dogs ran far away"}, TALK[2]]
    count = len(tokenizer(kept)["input_ids"])
    cut = [TALK[0], {"role": "user", "content": kept}, TALK[2]]
    source = len(tokenizer.apply_chat_template(cut[:2], add_generation_prompt=True, return_dict=False))
    row = row_of(tokenizer, talk, CHATML, source=source, side=side)
    text = tokenizer.decode(row.ids[: row.prompt_length]).replace("\n ", "\n")
    assert text == f"<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n{kept}<|im_end|>\n<|im_start|>assistant\n"
    assert row.truncated_prompts == 1 and row.prompt_length == source and count < 10
    short = row_of(tokenizer, talk, CHATML, source=8, side=side)  # the headers alone are longer
    assert not short.loss_mask.any()


def test_turns_without_room_are_left_out_whole(tokenizer):
    whole = row_of(tokenizer, TALK, CHATML)
    row = row_of(tokenizer, TALK, CHATML, total=len(whole.ids) - 4)
    assert row.skipped_turns == 1 and targets(tokenizer, row) == [" sat on\na mat<|im_end|>"]
    assert row.ids.tolist() == whole.ids[: len(row.ids)].tolist()


TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_tool_calls_are_rendered_by_the_template_or_refused(tokenizer):
    call = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    talk = [
        {"role": "user", "content": "the"},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "cat"},
        {"role": "assistant", "content": "sat"},
    ]
    row = row_of(tokenizer, talk, TOOLS)
    rendered = [message | {"content": message["content"] or ""} for message in talk]
    assert row.ids.tolist() == tokenizer.apply_chat_template(rendered, return_dict=False)
    assert targets(tokenizer, row)[0].startswith('[{"type"') and targets(tokenizer, row)[1] == "sat<|im_end|>"
    tokenizer.chat_template = TOOLS
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = ChatTemplate(tokenizer)(parse_conversation(talk, "f", tools=tools))
    assert chat.text == tokenizer.apply_chat_template(rendered, tools=tools, tokenize=False)
    with pytest.raises(GptlmError, match="line 7: message 2 has tool_calls, which the .* template does not render"):
        row_of(tokenizer, talk, CHATML)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no system turn') }}", "line 7: .*chat template refuses the conversation: no system turn"),
        ("{{ messages[0]['content'] + 1 }}", "line 7: .*chat template refuses the conversation"),
        ("{% for m in messages %", "is not valid Jinja, line 1"),
        ("{{ messages | length }}{{ messages[-1]['content'] }}", "line 7: .*chat template changes earlier turns"),
        (
            THINKING.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
            "line 7: .*changes earlier turns",
        ),
        (
            MARKED.replace("{% for m in messages %}", "{% for m in messages[-2:] %}"),
            "line 7: .*marks 1 assistant turns",
        ),
    ],
)
def test_templates_that_do_not_serve(tokenizer, template, says):
    with pytest.raises(GptlmError, match=says):
        row_of(tokenizer, TALK, template)


def test_paddlenlp_s_encoding_of_a_template(tokenizer):
    """Texts with " </s>" behind them, as before: no id ends an answer."""
    tokenizer.chat_template = LLAMA

    def encode(texts):
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    chat = ChatTemplate(tokenizer)(parse_conversation(TALK[1:], "f"))
    end = tokenizer.eos_token_id
    (row,) = PaddleEncoder(encode, end, Lengths(200, 200, 400), end_of_text="<|endoftext|>").rows([chat])
    pieces = ["[user] Héllo 你好 the cat [/]", " sat on\na mat ", "[user] assistant [/]", " user "]
    assert row.ids.tolist() == [token for ids in encode([f"{piece} </s>" for piece in pieces]) for token in ids]

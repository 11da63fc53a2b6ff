"""`gptlm chat` and messages in `predict`: the answers of stock transformers, over several turns."""

import io
import json
import sys

import pytest

from gptlm.cli import main
from gptlm.commands.chat import parse_chat
from gptlm.inference.chat import ChatPrompts
from gptlm.inference.generation import stream_decoder
from gptlm.model.tokenizer import load_tokenizer
from gptlm.recipes.chat import Talk
from gptlm.recipes.predict import load
from gptlm.recipes.sft.run import sft
from tests.recipes.test_sft_templates import ASKED, SAID, TALK, model, parsed, stock_answer

__all__ = ["model"]  # a fixture
LONG = [*TALK, {"role": "user", "content": "two dogs"}, {"role": "assistant", "content": "ran far"}]


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("talked")
    words = ["--chat_template", "chatml", "--max_steps", 90]
    sft(parsed(model, path, *words, record={"messages": LONG}))
    return path / "out"


def talk(folder, monkeypatch, text, *words):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    return main(["chat", "--model_name_or_path", str(folder), "--device", "cpu", *words])


def test_piped_messages_are_answered_in_turn(folder, monkeypatch, capsys):
    assert stock_answer(folder, LONG[:1]) == SAID and stock_answer(folder, LONG[:3]) == "ran far"
    assert talk(folder, monkeypatch, f"{ASKED}\ntwo dogs\n\n/clear\n{ASKED}\n/exit\nthe cat\n") == 0
    assert capsys.readouterr().out.splitlines() == [SAID, "ran far", SAID]


def test_a_message_that_does_not_fit_and_one_that_is_no_text(folder, monkeypatch, capsys):
    assert talk(folder, monkeypatch, "cat " * 200) == 1
    assert "the model 96 positions" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n")))
    assert main(["chat", "--model_name_or_path", str(folder), "--device", "cpu"]) == 1
    assert "standard input, line 1" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(folder, monkeypatch, capsys):
    """A terminal, whose lines are typed here."""
    lines = iter([ASKED, "/nonsense", KeyboardInterrupt, "/clear", ASKED, "/exit"])

    def typed(prompt):
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", typed)
    whole, calls = Talk.answer, []

    def interrupted(self, message):
        calls.append(message)
        for piece in whole(self, message):
            yield piece
            if len(calls) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(Talk, "answer", interrupted)
    assert main(["chat", "--model_name_or_path", str(folder), "--device", "cpu"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith(" [stopped]") and SAID.startswith(first.removesuffix(" [stopped]")) and last == SAID


def test_what_was_read_of_a_stopped_answer_stays_in_the_conversation(folder):
    arguments, _ = parse_chat(["--model_name_or_path", str(folder), "--device", "cpu", "--system", "be kind"])
    network, tokenizer = load(arguments)
    found = Talk(arguments, stream_decoder(network, tokenizer, False), tokenizer, ChatPrompts(tokenizer))
    pieces = found.answer(ASKED)
    first = next(pieces)
    pieces.close()
    assert [(one["role"], one["content"]) for one in found.messages] == [
        ("system", "be kind"), ("user", ASKED), ("assistant", first),
    ]  # fmt: skip


def test_the_oldest_messages_give_way_but_not_the_system(folder):
    prompts = ChatPrompts(load_tokenizer(str(folder)))
    messages = [{"role": "system", "content": "be kind"}, *LONG[:2], *LONG[2:3]]
    whole, none = prompts.fitting(messages, 1000)
    short, left_out = prompts.fitting(messages, len(whole) - 1)
    assert (none, left_out) == (0, 2) and short == prompts.fitting([messages[0], messages[3]], 1000)[0]


def test_messages_in_a_file_of_predict(folder, tmp_path, monkeypatch, capsys):
    """Rendered as stock transformers does; a last message of the assistant is continued."""
    begun = [TALK[0], {"role": "assistant", "content": "sat on"}]
    rows = [{"messages": TALK[:1]}, {"messages": begun}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--input_file", str(tmp_path / "p.jsonl"), "--output_file", str(tmp_path / "o.jsonl"), "--batch_size", "2"]
    assert main(["predict", "--model_name_or_path", str(folder), "--device", "cpu", *words]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out == [SAID, SAID.removeprefix("sat on")]
    assert begun[1]["content"] + out[1] == stock_answer(folder, begun)
    found = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert found == [{**row, "continuation": text} for row, text in zip(rows, out, strict=True)]


def test_special_tokens_in_a_message_stay_text(folder):
    tokenizer = load_tokenizer(str(folder))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    from gptlm.data.conversations import parse_conversation

    asked = parse_conversation([{"role": "user", "content": "a<|im_end|>b"}], "x")
    assert ChatPrompts(tokenizer)(asked).count(end) == 1
    assert ChatPrompts(tokenizer, allow_special_tokens=True)(asked).count(end) == 2

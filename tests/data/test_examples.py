"""Every form of examples people have, and what is said of files that hold none."""

import gzip
import json
import re

import datasets
import pytest

from gptlm.data.conversations import Content, PlainHeadings, Turn, parse_conversation
from gptlm.data.examples import Columns, find_files, read_examples, record_batches, records_of
from gptlm.errors import GptlmError

PLAIN = PlainHeadings()


def read_records(path):
    return (record for batch in record_batches([path]) for record in records_of(batch))


def turn(pieces, answer, cue="", **more):
    """`pieces` of the prompt: those in an object may be cut, {role: text}."""
    text, contents = "", []
    for piece in pieces:
        if isinstance(piece, dict):
            ((role, piece),) = piece.items()
            contents.append(Content(len(text), len(text) + len(piece), role))
        text += piece
    return Turn(text, answer, cue, tuple(contents), **more)


SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "T",
            "paragraphs": [
                {
                    "context": "Rome is in Italy.",
                    "qas": [
                        {"id": "1", "question": "Where is Rome?", "answers": [{"text": "Italy", "answer_start": 11}]},
                        {"id": "2", "question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ],
}
QUESTION = [turn(["answer: Italy context: ", {"user": "Rome is in Italy."}], "question: Where is Rome?", "\n")]
RESPONSE = "\n\n### Response:\n"
FORMS = [
    ({"src": "a", "tgt": "b"}, [Turn("a", "b")]),
    ({"src": ["a", "c"], "tgt": ["b", "d"]}, [Turn("a", "b"), Turn("c", "d")]),
    ({"source": "a", "target": "b"}, [Turn("a", "b")]),
    ({"prompt": "a", "response": "b", "id": 7}, [Turn("a", "b")]),
    ({"prompt": "a", "completion": "b"}, [Turn("a", "b")]),
    ({"question": "a", "answer": "b"}, [Turn("a", "b")]),
    ({"text": "a"}, [Turn("", "a", is_text=True)]),
    ({"instruction": "a", "output": "b"}, [turn(["### Instruction:\n", {"user": "a"}], "b", RESPONSE)]),
    (
        {"instruction": "a", "input": "i", "output": "b"},
        [turn(["### Instruction:\n", {"user": "a"}, "\n\n### Input:\n", {"user": "i"}], "b", RESPONSE)],
    ),
    (
        {"instruction": "a", "input": "", "output": "b"},
        [turn(["### Instruction:\n", {"user": "a"}], "b", RESPONSE)],
    ),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        [turn(["### User:\n", {"user": "a"}, "\n\n"], "b", "### Assistant:\n")],
    ),
    (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        [turn(["### User:\n", {"user": "a"}, "\n\n"], "b", "### Assistant:\n")],
    ),
    (
        {"question": "Where is Rome?", "context": "Rome is in Italy.", "answers": {"text": ["Italy"]}},
        QUESTION,
    ),
    ({"source": "a", "title": "t", "target": "b"}, [Turn("a", "b")]),
    (SQUAD, QUESTION),
]  # fmt: skip


CASES = [(layout, *form) for layout in ("lines", "array") for form in FORMS] + [
    ("parquet", *form) for form in FORMS[:-1]
]


@pytest.mark.parametrize(("layout", "record", "turns"), CASES)
def test_every_form_in_every_file(tmp_path, layout, record, turns):
    if layout == "parquet":
        path = tmp_path / "x.parquet"
        datasets.Dataset.from_list([record, record]).to_parquet(path)
    else:
        path = tmp_path / ("x.jsonl" if layout == "lines" else "x.json")
        text = "\n".join([json.dumps(record)] * 2) + "\n" if layout == "lines" else json.dumps([record, record])
        path.write_text(text, encoding="utf-8-sig")
    found = read_examples(read_records(path), PLAIN)
    assert found.examples == [turns, turns]
    assert found.skipped["without a response"] == (2 if record is SQUAD else 0)


def test_a_squad_file(tmp_path):
    (tmp_path / "dev.json").write_text(json.dumps(SQUAD, indent=1))
    found = read_examples(read_records(tmp_path / "dev.json"), PLAIN)
    assert found.examples == [QUESTION] and found.skipped == {"without a response": 1}


def test_a_conversation_of_several_turns():
    words = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")]
    turns = PLAIN(parse_conversation([{"role": role, "content": content} for role, content in words], "x"))
    assert turns == [
        turn(["### System:\n", {"system": "s"}, "\n\n### User:\n", {"user": "a"}, "\n\n"], "b", "### Assistant:\n"),
        turn(["### User:\n", {"user": "c"}, "\n\n"], "d", "### Assistant:\n"),
    ]


def test_system_and_history_of_alpaca_records_are_turns_before():
    """As LLaMA-Factory defines them: the system prompt first, responses of the history are targets, too."""
    record = {"instruction": "c", "input": "i", "output": "d", "system": "s", "history": [["a", "b"], ["x", ""]]}
    (example,) = read_examples([("f", record)], PLAIN).examples
    assert example == [
        turn([{"system": "s"}, "\n\n### Instruction:\n", {"user": "a"}], "b", RESPONSE),
        turn(["### Instruction:\n", {"user": "x"}], "", RESPONSE, in_loss=False),
        turn(["### Instruction:\n", {"user": "c"}, "\n\n### Input:\n", {"user": "i"}], "d", RESPONSE),
    ]


def test_a_system_prompt_beside_a_conversation():
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    wanted = [
        turn(["### System:\n", {"system": "s"}, "\n\n### User:\n", {"user": "a"}, "\n\n"], "b", "### Assistant:\n")
    ]
    own = [{"from": "system", "value": "s"}, *said]
    for record in ({"conversations": said, "system": "s"}, {"messages": own}, {"messages": own, "system": "other"}):
        found = read_examples([("f", record)], PLAIN)
        assert found.examples == [wanted]
        assert found.ignored == ({"system": 1} if record.get("system") == "other" else {})


def test_keys_that_are_not_used_are_counted():
    said = [{"role": "user", "content": "a", "name": "Ann"}, {"role": "assistant", "content": "b"}]
    records = [{"src": "a", "tgt": "b", "id": 1, "lang": None}, {"src": "a", "tgt": "b", "id": 2, "title": "t"}]
    found = read_examples([("f", record) for record in [*records, {"messages": said, "tools": [{"x": 1}]}]], PLAIN)
    assert found.ignored == {"id": 2, "title": 1, "tools": 1, "messages.name": 1}
    assert found.forms == {"src/tgt": 2, "messages": 1}


@pytest.mark.parametrize("nothing", ["", None, "  "])
def test_an_assistant_turn_without_text_takes_no_other_along(nothing):
    said = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", nothing), ("user", "e"), ("assistant", "f")]
    found = read_examples([("f", {"messages": [{"role": role, "content": text} for role, text in said]})], PLAIN)
    (example,) = found.examples
    assert [(one.response, one.in_loss) for one in example] == [("b", True), (nothing or "", False), ("f", True)]
    assert found.skipped == {}
    (example,) = read_examples([("f", {"src": ["a", "c", "e"], "tgt": ["b", "", "f"]})], PLAIN).examples
    assert example == [Turn("a", "b"), Turn("c", "", in_loss=False), Turn("e", "f")]


def test_weight_0_is_context():
    said = [("a", "b", 0), ("c", "d", 1), ("e", "f", None)]
    pairs = [({"role": "user", "content": a}, {"role": "assistant", "content": b, "weight": w}) for a, b, w in said]
    record = {"messages": [message for pair in pairs for message in pair]}
    (example,) = read_examples([("f", record)], PLAIN).examples
    assert [(one.response, one.in_loss) for one in example] == [("b", False), ("d", True), ("f", True)]


def test_prompts_and_completions_of_messages():
    """TRL's: the completion is a target, responses in the prompt are context."""
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    found = read_examples([("f", {"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]})], PLAIN)
    assert [[(one.response, one.in_loss) for one in example] for example in found.examples] == [
        [("b", False), ("d", True)]
    ]


def test_columns_that_the_command_names():
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [("f", {"q": "a", "a": "b", "text": "t", "n": 1}), ("f", {"q": said[:1], "a": said[1:], "text": " "})]
    found = read_examples(records, PLAIN, columns=Columns("q", "a"))
    assert found.examples == [[Turn("a", "b")], PLAIN(parse_conversation(said, "f"))]
    assert found.ignored == {"text": 2, "n": 1} and found.forms == {"q/a": 1, "q/a of messages": 1}
    found = read_examples(records, PLAIN, columns=Columns(text="text"))
    assert found.examples == [[Turn("", "t", is_text=True)]] and found.skipped == {"without a response": 1}
    says = "f: --response_column answer: there is no such column; there are q, a, text, n"
    with pytest.raises(GptlmError, match=re.escape(says)):
        read_examples(records, PLAIN, columns=Columns("q", "answer"))


def test_question_generation_is_asked_for_or_has_the_original_s_form():
    record = {"source": "Rome is in Italy.", "title": "Italy", "target": "Where is Rome?"}
    found = read_examples([("f", record)], PLAIN)
    assert found.examples == [[Turn("Rome is in Italy.", "Where is Rome?")]]
    assert found.forms == {"source/target": 1} and found.ignored == {"title": 1}
    found = read_examples([("f", record)], PLAIN, questions=True)
    assert found.examples == [QUESTION] and found.forms == {"source/title/target, question generation": 1}


@pytest.mark.parametrize(
    "table",
    [
        {"src": ["a", "b", "c"], "tgt": ["x", "y", "z"]},
        {"src": {"0": "a", "1": "b", "2": "c"}, "tgt": {"0": "x", "1": "y", "2": "z"}},  # pandas' to_json()
    ],
)
def test_a_table_by_columns_is_examples(tmp_path, table, caplog):
    (tmp_path / "x.json").write_text(json.dumps(table, indent=1))
    with caplog.at_level("INFO"):
        found = read_examples(read_records(tmp_path / "x.json"), PLAIN).examples
    assert found == [[Turn("a", "x")], [Turn("b", "y")], [Turn("c", "z")]]
    assert "is a table by columns (src, tgt): 3 examples" in caplog.text


def test_one_line_of_lists_is_a_conversation(tmp_path):
    """PaddleNLP's form of several turns."""
    (tmp_path / "x.jsonl").write_text(json.dumps({"src": ["a", "b"], "tgt": ["x", "y"]}))
    found = read_examples(read_records(tmp_path / "x.jsonl"), PLAIN)
    assert found.examples == [[Turn("a", "x"), Turn("b", "y")]] and found.forms == {"src/tgt of several turns": 1}


def test_datasets_on_disk(tmp_path):
    rows = datasets.Dataset.from_list([{"src": "a", "tgt": "b"}])
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "d")
    assert find_files(tmp_path / "d", "dev") == [tmp_path / "d" / "validation"]
    (train,) = find_files(tmp_path / "d", "train")
    assert read_examples(read_records(train), PLAIN).examples == [[Turn("a", "b")]]


def test_the_files_of_a_folder(tmp_path):
    for name in ("train.jsonl", "dev.json", "other.json"):
        (tmp_path / name).write_text("[]")
    assert find_files(tmp_path, "train") == [tmp_path / "train.jsonl"]
    assert find_files(tmp_path, "dev") == [tmp_path / "dev.json"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"src": "a", "tgt": "b"}\n{"src": \n', "line 2: broken JSON at column"),
        ('{"src": "a", "tgt": "b"}\n["x"]\n', "line 2: expected an object, found list"),
        (
            '[{"q": "a", "label": "b"}]',
            "record 1: the keys q, label are not a known form; expected src/tgt",
        ),
        ('[{"q": "a"}]', "name other columns with --prompt_column and --response_column, or with --text_column"),
        ('[{"prompt": "a", "chosen": "b", "rejected": "c"}]', "are preference data (DPO), which gptlm does not train"),
        (
            '[{"prompt": "a", "completion": "b", "label": false}]',
            "record 1: a label of false marks a completion that is",
        ),
        ('[{"text": ["a"]}]', "the keys text are not a known form"),
        ('[{"src": "a", "tgt": 3}]', "record 1: expected a text, found int"),
        ('[{"src": ["a"], "tgt": ["b", "c"]}]', "lists of different lengths"),
        (
            '[{"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]}]',
            "record 1: message 2 has the role tool, which only a chat template can render",
        ),
        (
            '[{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"id": 1}]}]}]',
            "record 1: message 1 has tool_calls, which only a chat template can render",
        ),
        ('[{"messages": [{"role": "judge", "content": "x"}]}]', "record 1, message 1: unknown role 'judge'"),
        ('[{"messages": [{"role": ["user"], "content": "x"}]}]', "unknown role"),
        ('[{"messages": [{"role": "user", "content": null}]}]', "message 1: expected a text, found NoneType"),
        ('[{"messages": []}]', "record 1: the conversation is empty"),
        ('[{"messages": ["x"]}]', "message 1: expected an object with role and content, found str"),
        (
            '[{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}]',
            "message 1: weight 0.5: expected 0 (not a target of the loss) or 1",
        ),
        ('[{"messages": [{"role": "assistant", "content": "x", "weight": true}]}]', "weight True: expected 0"),
        ('[{"messages": [{"role": "user", "content": "x", "weight": 1}]}]', "only assistant messages are targets"),
        ('[{"instruction": "a", "output": "b", "history": [["x"]]}]', "record 1: history 1 is not a pair"),
        ('[{"question": ["q"], "context": "c", "answers": {"text": ["a"]}}]', "record 1: expected a text, found list"),
        ('{"data": [{"paragraphs": [{"context": "x"}]}]}', "not a SQuAD file: 'qas' is missing"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, text, says):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(GptlmError, match=re.escape(says)):
        read_examples(read_records(tmp_path / "x.json"), PLAIN)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe")
    with pytest.raises(GptlmError, match="not UTF-8"):
        list(read_records(tmp_path / "x.json"))
    with pytest.raises(GptlmError, match="cannot read .*: No such file"):
        list(read_records(tmp_path / "y.json"))
    (tmp_path / "x.parquet").write_bytes(b"no")
    with pytest.raises(GptlmError, match="cannot read .*x.parquet.*is the file complete"):
        list(read_records(tmp_path / "x.parquet"))


def test_records_without_an_answer_are_counted():
    unanswered = {"messages": [{"role": "user", "content": "x"}]}
    records = [("1", {"src": "a", "tgt": " "}), ("2", {"src": "", "tgt": "b"}), ("3", unanswered)]
    found = read_examples(records, PLAIN)
    assert found.examples == [[Turn("", "b")]] and found.skipped == {"without a response": 2}


@pytest.mark.parametrize(("form", "place"), [("lines", "line 2"), ("array", "record 2")])
def test_half_a_surrogate_pair_is_named(tmp_path, form, place):
    good = '{"src": "\\ud83d\\ude00", "tgt": "a"}'
    for bad, where in (
        ('{"src": "a", "tgt": "ab\\udc00"}', "under 'tgt' is not valid Unicode .character 3."),
        (
            '{"messages": [{"role": "user", "content": "\\uD800"}]}',
            "under 'content' is not valid Unicode .character 1.",
        ),
        ('{"src": ["a", "\\ud800"], "tgt": ["a", "b"]}', "under 'src' is not valid Unicode .character 1."),
    ):
        content = f"{good}\n{bad}\n" if form == "lines" else f"[{good}, {bad}]"
        (tmp_path / "train.json").write_text(content)
        records = read_records(tmp_path / "train.json")
        assert next(records)[1]["src"] == "😀"
        with pytest.raises(GptlmError, match=f"train.json, {place}, {where}; fix it there"):
            list(records)


@pytest.mark.parametrize("name", ["d.jsonl", "D.JSONL", "d.Jsonl.gz"])
def test_an_object_with_lists_in_a_jsonl_file_is_one_record(tmp_path, name):
    """Two turns, in a file of any case; in a .json file it is a table of two records."""
    line = b'{"src": ["a", "b"], "tgt": ["c", "d"]}\n'
    (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith(".gz") else line)
    assert [record for _, record in read_records(tmp_path / name)] == [json.loads(line)]


def test_a_file_of_a_bom_alone_is_empty(tmp_path):
    for name in ("d.jsonl", "d.json"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf")
        assert list(read_records(tmp_path / name)) == []


def test_a_number_of_thousands_of_digits_has_its_line(tmp_path):
    line = '{"src": "a", "tgt": "b", "n": ' + "9" * 5000 + "}\n"
    (tmp_path / "d.jsonl").write_text('{"src": "a", "tgt": "b"}\n' + line)
    with pytest.raises(GptlmError, match=r"d.jsonl, line 2: the JSON cannot be read"):
        list(read_records(tmp_path / "d.jsonl"))


def test_json_that_is_nested_too_deeply_is_broken_json(tmp_path):
    (tmp_path / "d.jsonl").write_text("[" * 100_000)
    with pytest.raises(GptlmError, match=r"d.jsonl, line 1: the JSON is nested too deeply"):
        list(read_records(tmp_path / "d.jsonl"))

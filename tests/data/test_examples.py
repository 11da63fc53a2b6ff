"""Every form of examples people have, and what is said of files that hold none."""

import json

import datasets
import pytest

from gptlm.data.examples import Turn, find_files, plain_conversation, read_examples, read_records
from gptlm.errors import GptlmError

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
QUESTION = [Turn("answer: Italy context: Rome is in Italy.", "question: Where is Rome?", "\n")]
FORMS = [
    ({"src": "a", "tgt": "b"}, [Turn("a", "b")]),
    ({"src": ["a", "c"], "tgt": ["b", "d"]}, [Turn("a", "b"), Turn("c", "d")]),
    ({"source": "a", "target": "b"}, [Turn("a", "b")]),
    ({"prompt": "a", "response": "b", "id": 7}, [Turn("a", "b")]),
    ({"prompt": "a", "completion": "b"}, [Turn("a", "b")]),
    ({"instruction": "a", "output": "b"}, [Turn("### Instruction:\na", "b", "\n\n### Response:\n")]),
    (
        {"instruction": "a", "input": "i", "output": "b"},
        [Turn("### Instruction:\na\n\n### Input:\ni", "b", "\n\n### Response:\n")],
    ),
    ({"instruction": "a", "input": "", "output": "b"}, [Turn("### Instruction:\na", "b", "\n\n### Response:\n")]),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        [Turn("### User:\na\n\n", "b", "### Assistant:\n")],
    ),
    (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        [Turn("### User:\na\n\n", "b", "### Assistant:\n")],
    ),
    (
        {"question": "Where is Rome?", "context": "Rome is in Italy.", "answers": {"text": ["Italy"]}},
        QUESTION,
    ),
    ({"source": "Rome is in Italy.", "title": "Italy", "target": "Where is Rome?"}, QUESTION),
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
    found = read_examples(read_records(path), plain_conversation)
    assert found.examples == [turns, turns]
    assert found.left_out["without an answer"] == (2 if record is SQUAD else 0)


def test_a_squad_file(tmp_path):
    (tmp_path / "dev.json").write_text(json.dumps(SQUAD, indent=1))
    found = read_examples(read_records(tmp_path / "dev.json"), plain_conversation)
    assert found.examples == [QUESTION] and found.left_out == {"without an answer": 1}


def test_a_conversation_of_several_turns():
    words = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")]
    turns = plain_conversation([{"role": role, "content": content} for role, content in words])
    assert turns == [
        Turn("### System:\ns\n\n### User:\na\n\n", "b", "### Assistant:\n"),
        Turn("### User:\nc\n\n", "d", "### Assistant:\n"),
    ]


def test_datasets_on_disk(tmp_path):
    rows = datasets.Dataset.from_list([{"src": "a", "tgt": "b"}])
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "d")
    assert find_files(tmp_path / "d", "dev") == [tmp_path / "d" / "validation"]
    (train,) = find_files(tmp_path / "d", "train")
    assert read_examples(read_records(train), plain_conversation).examples == [[Turn("a", "b")]]


def test_the_files_of_a_folder(tmp_path):
    for name in ("train.jsonl", "dev.json", "other.json"):
        (tmp_path / name).write_text("[]")
    assert find_files(tmp_path, "train") == [tmp_path / "train.jsonl"]
    assert find_files(tmp_path, "dev") == [tmp_path / "dev.json"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"src": "a", "tgt": "b"}\n{"src": \n', "line 2: no valid JSON"),
        ('{"src": "a", "tgt": "b"}\n["x"]\n', "line 2: expected an object, found list"),
        ('[{"text": "a"}]', "record 1: the keys text are of no known form; expected src/tgt"),
        ('[{"src": "a", "tgt": 3}]', "record 1: expected a text, found int"),
        ('[{"src": ["a"], "tgt": ["b", "c"]}]', "lists of different lengths"),
        ('[{"messages": [{"role": "tool", "content": "x"}]}]', "unknown roles {'tool'}"),
        ('[{"messages": ["x"]}]', "a message is no object"),
        ('{"data": [{"paragraphs": [{"context": "x"}]}]}', "no SQuAD file: 'qas' is missing"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, text, says):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(GptlmError, match=says.replace("{", r"\{").replace("}", r"\}")):
        read_examples(read_records(tmp_path / "x.json"), plain_conversation)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe")
    with pytest.raises(GptlmError, match="not UTF-8"):
        list(read_records(tmp_path / "x.json"))
    with pytest.raises(GptlmError, match="cannot read .*: No such file"):
        list(read_records(tmp_path / "y.json"))
    (tmp_path / "x.parquet").write_bytes(b"no")
    with pytest.raises(GptlmError, match="cannot be read as a dataset"):
        list(read_records(tmp_path / "x.parquet"))


def test_records_without_an_answer_are_counted():
    unanswered = {"messages": [{"role": "user", "content": "x"}]}
    records = [("1", {"src": "a", "tgt": " "}), ("2", {"src": "", "tgt": "b"}), ("3", unanswered)]
    found = read_examples(records, plain_conversation)
    assert found.examples == [[Turn("", "b")]] and found.left_out == {"without an answer": 2}


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
        with pytest.raises(GptlmError, match=f"train.json, {place}, {where}; mend it there"):
            list(records)

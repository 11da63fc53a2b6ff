"""Texts on disk to documents: every format, every encoding trouble with file and line."""

import gzip
import json
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

from gptlm.data import text_files
from gptlm.data.documents import read_batches, read_texts, texts_of
from gptlm.data.examples import record_batches
from gptlm.data.text_files import list_files
from gptlm.errors import GptlmError
from tests.processes import run

TEXTS = ["one", "two\nlines", "", "vier äöü", "五 今天"]
LINES = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()


def test_one_set_of_records_in_every_format(tmp_path):
    variants = {
        "a.jsonl": LINES,
        "b.json": LINES,
        "c.json": json.dumps([{"text": text} for text in TEXTS], indent=1).encode(),
        "d.jsonl.gz": gzip.compress(LINES),
        "e.jsonl.zst": zstandard.compress(LINES[:30]) + zstandard.compress(LINES[30:]),  # several frames
        "f.jsonl": b"\xef\xbb\xbf" + LINES,
        "g.jsonl": LINES.replace(b"\n", b"\r\n"),
        "h.jsonl": LINES.removesuffix(b"\n"),
        "i.jsonl": LINES.replace(b"\n", b"\n\n"),
    }
    for name, content in variants.items():
        (tmp_path / name).write_bytes(content)
        assert list(read_texts(str(tmp_path / name))) == TEXTS, name


@pytest.mark.parametrize(
    ("split", "documents"),
    [
        ("blank_line", ["a\nb", "c"]),
        ("line", ["a", "b", "c"]),
        ("file", ["a\nb\n\nc"]),
    ],
)
def test_plain_text(tmp_path, split, documents):
    (tmp_path / "t.txt").write_bytes(b"a\r\nb\r\n\r\nc")
    assert list(read_texts(str(tmp_path / "t.txt"), txt_split=split)) == documents


def test_folders_and_globs_are_sorted_and_recursive(tmp_path):
    for name in ("b.jsonl", "sub/a.txt", "c.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [f.name for f in list_files(str(tmp_path))] == ["b.jsonl", "a.txt"]
    assert [f.name for f in list_files(str(tmp_path / "*.jsonl"))] == ["b.jsonl"]


@pytest.mark.parametrize("what", ["c.csv", "missing.jsonl", "empty"])
def test_nothing_to_read_is_said(tmp_path, what):
    (tmp_path / "c.csv").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(GptlmError, match=what):
        list_files(str(tmp_path / what))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "a"', "line 3.*broken JSON"),
        (b'{"text": "\xff\xfe"}', "line 3.*UTF-8"),
        (b'{"title": "a"}', r"line 3.*'text'.*title"),
        (b'{"text": 5}', "line 3.*int"),
        (b'["a"]', "line 3.*list"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, says):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(GptlmError, match=f"a.jsonl, {says}"):
        list(read_texts(str(tmp_path / "a.jsonl")))


def test_bad_documents_can_be_left_out_with_their_reasons(tmp_path):
    lines = [b'{"text": "a"}', b'{"text": ', b'{"text": "\xff"}', b'{"title": "b"}', b'{"text": "c"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (batch,) = read_batches([tmp_path / "a.jsonl"])
    bad = []
    texts = texts_of(batch, ["text"], bad)
    assert texts == [("a",), ("c",)]
    assert [reason.split("a.jsonl, ")[1][:6] for reason in bad] == ["line 2", "line 3", "line 4"]


def test_utf16_and_cut_archives_are_named(tmp_path):
    (tmp_path / "u.txt").write_text("hello", encoding="utf-16")
    with pytest.raises(GptlmError, match="u.txt, line 1.*UTF-16"):
        list(read_texts(str(tmp_path / "u.txt")))
    (tmp_path / "le.txt").write_bytes("hello".encode("utf-16-le"))
    with pytest.raises(GptlmError, match="le.txt, line 1: NUL bytes"):
        list(read_texts(str(tmp_path / "le.txt")))
    many = b"".join(b'{"text": "%d"}\n' % i for i in range(20000))
    for name, whole in (("cut.jsonl.zst", zstandard.compress(many)), ("broken.jsonl.gz", gzip.compress(many))):
        (tmp_path / name).write_bytes(whole[: len(whole) // 2] + (bytes(100) if "broken" in name else b""))
        with pytest.raises(GptlmError, match=f"cannot read .*{name}.*is the file complete"):
            list(read_texts(str(tmp_path / name)))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(LINES)[:-12])
    with pytest.raises(GptlmError, match="cut.jsonl.gz"):
        list(read_texts(str(tmp_path / "cut.jsonl.gz")))


def test_half_a_surrogate_pair_is_named(tmp_path):
    """A whole pair is one character. `\\ud83d` alone is none; it is counted where broken documents are skipped."""
    lines = ['{"text": "\\ud83d\\ude00"}', '{"text": "ab\\ud83d c"}', '{"text": "z"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    said = "a.jsonl, line 2: the text under 'text' is not valid Unicode .character 3.; fix it there"
    with pytest.raises(GptlmError, match=said):
        list(read_texts(str(tmp_path / "a.jsonl")))
    (batch,) = read_batches([tmp_path / "a.jsonl"])
    bad = []
    texts = texts_of(batch, ["text"], bad)
    assert texts == [("😀",), ("z",)] and len(bad) == 1 and "line 2" in bad[0]


def test_nested_too_deeply(tmp_path):
    (tmp_path / "a.jsonl").write_text("[" * 100000 + "\n")
    with pytest.raises(GptlmError, match="line 1.*nested"):
        list(read_texts(str(tmp_path / "a.jsonl")))


def test_files_of_our_own_beside_the_text_are_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "x.meta.json").write_text("{}")
    (tmp_path / "index-cache").mkdir()
    (tmp_path / "index-cache" / "k.json").write_text("{}")
    assert [f.name for f in list_files(str(tmp_path))] == ["a.jsonl"]


def test_several_keys(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"title": "t", "text": "x"}\n')
    (batch,) = read_batches(list_files(str(tmp_path / "a.jsonl")))
    assert texts_of(batch, ["text", "title"]) == [("x", "t")]


def test_bytes_read_add_up(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES * 5000)
    batches = list(read_batches(list_files(str(tmp_path / "a.jsonl"))))
    assert len(batches) > 1 and sum(batch.read for batch in batches) == 5000 * len(LINES)


def test_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    texts = [f"document {i} 今天" for i in range(1500)]
    table = pyarrow.table({"id": list(range(1500)), "text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert list(read_texts(str(tmp_path / "a.parquet"))) == texts
    batches = list(read_batches(list_files(str(tmp_path))))
    assert sum(batch.read for batch in batches) == (tmp_path / "a.parquet").stat().st_size
    with pytest.raises(GptlmError, match=r"a.parquet: no column 'title', only \['id', 'text'\]"):
        list(read_texts(str(tmp_path / "a.parquet"), "title"))
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(GptlmError, match="cannot read .*b.parquet.*is the file complete"):
        list(read_texts(str(tmp_path / "b.parquet")))


@pytest.fixture
def dataset(tmp_path):
    from datasets import Dataset

    texts = [f"row {i} 今天" for i in range(1300)]
    Dataset.from_dict({"id": list(range(1300)), "text": texts}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved", texts


def test_datasets_on_disk(dataset, tmp_path):
    folder, texts = dataset
    assert list(read_texts(str(folder))) == texts
    assert list_files(str(tmp_path / "sav*")) == [folder]
    with pytest.raises(GptlmError, match=r"no column 'title', only \['id', 'text'\]"):
        list(read_texts(str(folder), "title"))
    next(folder.glob("*.arrow")).write_bytes(b"")
    with pytest.raises(GptlmError, match="cannot read .*saved"):
        list(read_texts(str(folder)))


def test_a_dataset_with_several_splits_asks_for_one(tmp_path):
    from datasets import Dataset, DatasetDict

    DatasetDict({name: Dataset.from_dict({"text": [name]}) for name in ("train", "test")}).save_to_disk(tmp_path / "d")
    with pytest.raises(GptlmError, match=f"splits test, train; give one: {tmp_path}/d/test"):
        list_files(str(tmp_path / "d"))
    assert list(read_texts(str(tmp_path / "d" / "train"))) == ["train"]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
def test_shards_in_order_are_the_whole_input(tmp_path, dataset, parts):
    """Every document lies in exactly one shard, whatever the formats, the line lengths and the number of shards."""
    rng = np.random.RandomState(0)
    lines = [json.dumps({"text": f"{i} " + "x" * rng.randint(0, 400)}) for i in range(200)]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())  # no last newline
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\r\n".join(lines[:50]).encode()))
    (tmp_path / "c.json").write_text(json.dumps([{"text": "array"}, {"text": "too"}]))
    (tmp_path / "d.json").write_text("\n\n".join(lines[:30]) + "\n")
    (tmp_path / "e.txt").write_text("one\n\ntwo\nlines\n\n")
    (tmp_path / "empty.jsonl").write_text("")
    files = [*list_files(str(tmp_path / "*.*")), dataset[0]]
    assert len(files) == 7

    def texts(shard):
        batches = list(read_batches(files, shard=shard))
        return [text for batch in batches for (text,) in texts_of(batch, ["text"])]

    found = [texts((part, parts)) for part in range(1, parts + 1)]
    assert [text for part in found for text in part] == texts((1, 1))
    assert sum(map(len, found)) == 200 + 50 + 2 + 30 + 2 + 1300


def test_a_bad_line_of_a_later_shard_has_its_own_number(tmp_path):
    lines = [json.dumps({"text": f"{i}"}) for i in range(100)]
    lines[77] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(GptlmError, match="a.jsonl, line 78: broken JSON"):
        for batch in read_batches([tmp_path / "a.jsonl"], shard=(2, 2)):
            texts_of(batch, ["text"])


def test_a_chinese_array_in_another_encoding_is_named_by_line(tmp_path):
    content = json.dumps([{"text": "a"}, {"text": "今天"}], ensure_ascii=False, indent=1)
    (tmp_path / "a.json").write_bytes(content.encode("gb18030"))
    with pytest.raises(GptlmError, match=r"a.json, line 6: not UTF-8 .*iconv -f GB18030"):
        list(read_texts(str(tmp_path / "a.json")))


def test_the_column_of_broken_json_is_where_it_breaks(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n  {"text": "abc"\n{"text": "b"} x\n')
    batches = list(read_batches([tmp_path / "a.jsonl"]))
    bad = []
    for batch in batches:
        texts_of(batch, ["text"], bad)
    assert "line 2: broken JSON at column 17: Expecting ',' delimiter" in bad[0]
    assert "line 3: broken JSON at column 15: Extra data" in bad[1]


def test_lines_of_a_text_file_are_shared_out(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(99)))
    found = [read_batches([tmp_path / "a.txt"], "line", shard=(part, 4)) for part in (1, 2, 3, 4)]
    counts = [sum(len(batch.records) for batch in batches) for batches in found]
    assert sum(counts) == 99 and min(counts) > 20


def test_an_array_of_strings_is_no_array_of_documents(tmp_path):
    (tmp_path / "a.json").write_text('["{}", "b"]')
    with pytest.raises(GptlmError, match=r"a.json, record 1: str instead of an object"):
        list(read_texts(str(tmp_path / "a.json")))


@pytest.mark.parametrize(("name", "split"), [("a.jsonl", "line"), ("a.txt", "line")])
def test_a_cut_inside_the_byte_order_mark_loses_nothing(tmp_path, name, split):
    lines = ['{"text": "hello one"}', '{"text": "two"}']
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode() + b"\n")
    size = (tmp_path / name).stat().st_size
    found = []
    for part in range(1, size + 1):  # one byte per shard
        for batch in read_batches([tmp_path / name], split, shard=(part, size)):
            found += [text for (text,) in texts_of(batch, ["text"])]
    assert found == (["hello one", "two"] if name == "a.jsonl" else lines)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    line = json.dumps({"text": "x" * 100}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 20_000)
    batches = read_batches([tmp_path / "a.jsonl"])
    first = next(batches)
    (tmp_path / "a.jsonl").write_text(line * 10)
    with pytest.raises(GptlmError, match="a.jsonl became shorter"):
        texts_of(first, ["text"])
    with pytest.raises(GptlmError, match="a.jsonl became shorter"):
        list(batches)


def test_datasets_inside_folders_and_empty_ones(tmp_path):
    from datasets import Dataset

    for name, texts in (("one", ["a", "b"]), ("none", []), ("two", ["c"])):
        Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "in" / name)
    (tmp_path / "in" / "z.jsonl").write_text('{"text": "d"}\n')
    for path in (tmp_path / "in", tmp_path / "in" / "*", tmp_path / "in" / "**"):
        assert list(read_texts(str(path))) == ["a", "b", "c", "d"], path
    files = list_files(str(tmp_path / "in"))
    found = [
        text
        for part in range(1, 61)
        for batch in read_batches(files, shard=(part, 60))
        for (text,) in texts_of(batch, ["text"])
    ]
    assert found == ["a", "b", "c", "d"]


def test_a_folder_of_other_things_is_no_corpus(tmp_path, monkeypatch):
    """Pipes and sockets in it are not opened, and the walk ends early: `/` was given by mistake."""
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "b.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert list_files(str(tmp_path)) == [tmp_path / "a.txt"]
    monkeypatch.setattr(text_files, "MOST_OTHERS", 5)
    assert list_files(str(tmp_path)) == [tmp_path / "a.txt"]
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(b"")
    with pytest.raises(GptlmError, match="holds more than 5 files that are no text"):
        list_files(str(tmp_path))


@pytest.mark.parametrize(("ending", "mark"), [(".csv", ","), (".tsv", "\t")])
@pytest.mark.parametrize("read", [list_files, lambda path: list(record_batches([Path(path)]))])
def test_a_table_is_refused_with_the_command_that_converts_it(read, ending, mark, tmp_path, monkeypatch):
    path = tmp_path / f"the rows'{ending}"
    path.write_text(f"src{mark}tgt\na{mark}b\n")
    with pytest.raises(GptlmError, match=f"{ending} is not read; this makes a file that is: python -c ") as caught:
        read(str(path))
    monkeypatch.chdir(tmp_path)
    command = shlex.split(str(caught.value).partition("that is: ")[2])
    assert command[:2] == ["python", "-c"]
    assert run([sys.executable, *command[1:]]).returncode == 0
    assert json.loads((tmp_path / "the rows'.jsonl").read_text()) == {"src": "a", "tgt": "b"}

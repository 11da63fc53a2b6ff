"""The data of fine-tuning: rows from Arrow are those of the encoder, kept between runs, the same from any file."""

import gzip
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import time

import datasets
import numpy as np
import pyarrow as pa
import pytest
import zstandard
from transformers import AutoTokenizer

from gptlm.commands.sft import parse_sft
from gptlm.data import row_building
from gptlm.data.chat_template import ChatTemplate
from gptlm.data.conversations import PlainHeadings
from gptlm.data.documents import table_batches
from gptlm.data.examples import read_examples, record_batches, records_of
from gptlm.data.row_building import RowBuilder, RowSettings, build_rows
from gptlm.data.rows import Encoder, Lengths, PaddleEncoder, text_encoder
from gptlm.data.stored_rows import StoredRows
from gptlm.errors import GptlmError
from gptlm.recipes.sft.data import load_data
from gptlm.recipes.sft.sources import Files, find_sources
from gptlm.training.metrics.throughput import start_logging
from tests.data.test_examples import FORMS
from tests.recipes.test_sft import BASE, CHATML, ROWS, model  # noqa: F401 - a fixture

MANY = [{"src": f"{row['src']} {number} ", "tgt": f"{row['tgt']} of {number}"} for number in range(120) for row in ROWS]


def read_records(path):
    return (record for batch in record_batches([path]) for record in records_of(batch))


@pytest.fixture
def load(model, tmp_path, capfd):  # noqa: F811
    """Load the data of a command; returns it and what was logged."""
    start_logging(main_process=True)

    def load(path, *words, base=model):
        argv = [*BASE, "--model_name_or_path", base, "--dataset_name_or_path", path, "--output_dir", tmp_path / "out"]
        run = parse_sft([str(word) for word in [*argv, "--data_cache", tmp_path / "cache", *words]], {})
        capfd.readouterr()
        data = load_data(run, find_sources(run), AutoTokenizer.from_pretrained(base))
        return data, capfd.readouterr().out

    return load


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def same(found, wanted):
    assert len(found) == len(wanted)
    for row, other in zip(found, wanted, strict=True):
        for name, value in vars(other).items():
            mine = getattr(row, name)
            assert np.array_equal(mine, value) if isinstance(value, np.ndarray) else mine == value, name
            assert not isinstance(value, np.ndarray) or mine.dtype == value.dtype


@pytest.mark.parametrize("template", [None, CHATML])
@pytest.mark.parametrize("more", [{}, {"train_on_prompt": True}, {"paddle_compat": True}])
def test_rows_from_arrow_are_those_of_the_encoder(model, tmp_path, template, more):  # noqa: F811
    """All forms of records, among them responses that are cut, or have no target."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    forms = [record for record, _ in FORMS if "text" not in record or "paddle_compat" not in more]
    records = [record for record in forms for _ in range(3)]
    records += [{"src": "the cat " * 30, "tgt": "sat on " * 20}, {"src": ["a", "b"], "tgt": ["", "c<|endoftext|>"]}]
    records += [{"messages": [{"role": "user", "content": "b " * 40}, {"role": "assistant", "content": "é 今"}] * 3}]
    path, lengths = write_lines(tmp_path / "d.jsonl", records), Lengths(20, 12, 48)
    settings = RowSettings(tokenizer, lengths, len(tokenizer), **more)
    source = Files(path, (path,))
    build_rows(source.batches(), settings, tmp_path / "rows", name="d", workers=1, on_progress=lambda read, count: None)
    render = ChatTemplate(tokenizer) if template else PlainHeadings()
    examples = read_examples(read_records(path), render).examples
    prompt = "train_on_prompt" in more
    if "paddle_compat" in more:

        def encode(texts):
            return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

        encoder = PaddleEncoder(encode, tokenizer.eos_token_id, lengths, prompt, tokenizer.eos_token)
    else:
        encoder = Encoder(text_encoder(tokenizer), tokenizer.eos_token_id, lengths, prompt)
    wanted = [row for example in examples for row in encoder.rows([example])]
    rows = StoredRows(tmp_path / "rows")
    same(rows, wanted)
    same(pickle.loads(pickle.dumps(rows)), wanted)
    for builder in (RowBuilder(settings), pickle.loads(pickle.dumps(RowBuilder(settings)))):  # as in a worker process
        assert [builder(batch).rows for batch in source.batches()] == list(pa.ipc.open_stream(tmp_path / "rows"))
    assert rows.lengths.tolist() == [len(row.ids) for row in wanted]
    assert rows.targets.tolist() == [row.loss_mask.sum() for row in wanted]
    table = datasets.Dataset.from_file(str(tmp_path / "rows"))
    assert table["ids"][:] == [row.ids.tolist() for row in wanted]


def test_rows_that_become_shorter_during_a_run_are_named(load, tmp_path):
    data, _ = load(write_lines(tmp_path / "d.jsonl", ROWS))
    rows, lengths = data.train.rows, data.train.rows.lengths.tolist()
    copied = pickle.loads(pickle.dumps(rows))
    os.truncate(rows.path, 64)
    for opened in (rows, copied):
        with pytest.raises(GptlmError, match=r"rows.arrow has become shorter while it was read: it has 64 bytes"):
            opened[len(rows) - 1]
    assert rows.lengths.tolist() == lengths


def test_the_next_start_encodes_nothing_and_says_the_same(load, tmp_path):
    records = [
        *ROWS,
        {"src": "a <|endoftext|>", "tgt": "b", "id": 3},
        {"src": "x", "tgt": " "},
        {"src": "y " * 60, "tgt": "z"},
    ]
    path = write_lines(tmp_path / "d.jsonl", records)
    words = ("--do_eval", "--src_length", 20)
    first, said = load(path, *words)
    assert f"{len(ROWS) + 2} examples encoded in" in said
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.*")}
    second, again = load(path, *words)
    assert "examples encoded in" not in again and "encoded examples are loaded from" in again
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.*")} == files

    def facts(text):
        lines = (line.partition("] ")[2] for line in text.splitlines())
        return [line for line in lines if "encoded examples" not in line and "encoded in" not in line]

    assert facts(again) == facts(said) and len(facts(said)) >= 6
    for part in ("ignored keys: id (1)", "1 records of", "a special token", "prompts are truncated", "held out"):
        assert part in said
    same([row for sample in second.train for row in sample], [row for sample in first.train for row in sample])
    assert second.prompts == first.prompts and second.digest == first.digest


def test_parts_and_limits_of_the_examples(load, tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"q": row["src"], "a": row["tgt"]} for row in ROWS])
    write_lines(tmp_path / "plain.jsonl", ROWS)
    columns = ("--prompt_column", "q", "--response_column", "a")
    whole, _ = load(tmp_path / "plain.jsonl")
    data, said = load(path, *columns, "--do_eval", "--val_size", 0.2, "--seed", 7)
    assert data.train.examples + data.dev.examples == whole.train.examples == len(ROWS)
    held = math.ceil(0.2 * len(ROWS))
    assert data.dev.examples == held and f"{data.dev.examples} of {len(ROWS)} examples" in said

    def texts(samples):
        return [row.ids.tolist() for sample in samples for row in sample]

    assert sorted(texts(data.train) + texts(data.dev)) == sorted(texts(whole.train))
    other, _ = load(path, *columns, "--do_eval", "--val_size", held, "--seed", 8, "--max_train_samples", 5)
    assert texts(other.dev) == texts(data.dev) and texts(other.train) == texts(data.train)[:5]
    trained, _ = load(path, *columns, "--val_size", held)
    assert texts(trained.train) == texts(data.train) and not trained.dev
    data, _ = load(path, *columns, "--do_eval", "--eval_dataset_name_or_path", path, "--max_eval_samples", 2)
    assert texts(data.dev) == texts(whole.train)[:2] == texts(data.train)[:2]


def test_plain_texts_are_targets_and_no_prompts(load, model, tmp_path):  # noqa: F811
    texts = [row["src"] + row["tgt"] for row in ROWS]
    path = write_lines(tmp_path / "d.jsonl", [{"body": text} for text in texts])
    data, _ = load(path, "--text_column", "body", "--do_eval", "--eval_dataset_name_or_path", path, "--tgt_length", 2)
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = tokenizer.eos_token_id
    assert [row.ids.tolist() for (row,) in data.train] == [[end, *tokenizer(text)["input_ids"], end] for text in texts]
    assert all(row.loss_mask[1:].all() for (row,) in data.train) and data.prompts == []


def test_what_changes_rows_builds_them_again(load, model, tmp_path):  # noqa: F811
    path = write_lines(tmp_path / "d.jsonl", ROWS)
    assert "encoded in" in load(path)[1]
    assert "encoded in" not in load(path, "--learning_rate", "1", "--zero_padding")[1]
    moved = tmp_path / "elsewhere.jsonl"
    shutil.copy(path, moved)
    assert "encoded in" not in load(moved)[1]
    for words in (
        ("--src_length", 10), ("--tgt_length", 9), ("--max_length", 40), ("--train_on_prompt",), ("--paddle_compat",),
        ("--truncation_side", "right"), ("--allow_special_tokens",), ("--task_name", "squad"),
    ):  # fmt: skip
        assert "encoded in" in load(path, *words)[1], words
    before = path.stat()
    path.write_text(path.read_text().replace("garden", "Garden"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    data, said = load(path)
    assert "encoded in" in said and data.digest != load(moved)[0].digest
    other = shutil.copytree(model, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(other)
    assert "encoded in" in load(path, base=other)[1]
    assert "encoded in" not in load(path, base=other)[1]


def test_every_kind_of_file_gives_the_same_rows(load, tmp_path):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    array = json.dumps(ROWS).encode()
    for name in ("a", "b", "shards", "train"):
        (tmp_path / name).mkdir()
    contents = {
        "d.jsonl": lines, "d.json": array, "d.jsonl.gz": gzip.compress(lines), "e.json.gz": gzip.compress(array),
        "d.json.zst": zstandard.compress(lines), "d": lines, "a/train.jsonl.gz": gzip.compress(lines),
        "table.json": json.dumps({key: [row[key] for row in ROWS] for key in ("src", "tgt")}).encode(),
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(tmp_path / "d.parquet")
    table.save_to_disk(tmp_path / "saved")
    for number, part in enumerate((ROWS[:7], ROWS[7:])):
        datasets.Dataset.from_list(part).to_parquet(tmp_path / "shards" / f"train-0000{number}-of-00002.parquet")
        write_lines(tmp_path / "b" / f"part-{number}.jsonl", part)
        write_lines(tmp_path / "train" / f"{number}.jsonl", part)
    (tmp_path / "split").mkdir()
    (tmp_path / "train").rename(tmp_path / "split" / "train")
    wanted = load(tmp_path / "d.jsonl")[0]
    for name in (*contents, "d.parquet", "saved", "shards", "a", "b", "b/part-*.jsonl", "split"):
        data, said = load(tmp_path / name)
        assert data.digest == wanted.digest and len(data.train) == len(ROWS), name
        assert "ignored" not in said, name
    few = ("--do_train", 0, "--do_eval", "--eval_dataset_name_or_path")
    for name in ("d.jsonl.gz", "b", "shards", "saved", "b/*.jsonl"):
        assert len(load(tmp_path / "d.json", *few, tmp_path / name)[0].dev) == len(ROWS), name


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.json.zst"])
def test_a_bad_record_has_its_place_in_every_kind_of_file(load, tmp_path, name):
    lines = [json.dumps(row) for row in MANY * 3]
    lines[2500] = '{"src": "a"'
    content = "\n".join(lines).encode()
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(name[name.rindex(".") :], bytes)
    (tmp_path / name).write_bytes(pack(content))
    with pytest.raises(GptlmError, match=f"{name}, line 2501: broken JSON at column"):
        load(tmp_path / name)
    lines[2500] = '{"src": "a", "tgt": 3}'
    (tmp_path / name).write_bytes(pack("\n".join(lines).encode()))
    with pytest.raises(GptlmError, match=f"{name}, line 2501: expected a text, found int"):
        load(tmp_path / name)
    (tmp_path / name).write_bytes(pack(b'{"src": "a", "tgt": "b"}\n{"src": "\xbd"}\n'))
    with pytest.raises(GptlmError, match=f"{name}, line 2.*not UTF-8 .byte bd at column 10"):
        load(tmp_path / name)
    if name != "x.jsonl":
        (tmp_path / name).write_bytes(pack("\n".join(map(json.dumps, MANY)).encode())[:-9])
        with pytest.raises(GptlmError, match=f"{name}.*is the file complete"):
            load(tmp_path / name)
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(GptlmError, match=r"x.txt: plain text has no prompts and responses"):
        load(tmp_path / "x.txt")
    assert not list((tmp_path / "cache").iterdir())


def test_worker_processes_give_the_rows_of_one(load, tmp_path, monkeypatch):
    """Also the first mistake in the order of the file, whichever process finds one first."""
    monkeypatch.setattr("gptlm.recipes.sft.rows.BYTES_PER_WORKER", 1 << 15)
    path = write_lines(tmp_path / "d.jsonl", MANY * 4)
    one, said = load(path, "--preprocessing_num_workers", 1)
    assert "by 1 process" in said
    shutil.rmtree(tmp_path / "cache")
    two, said = load(path, "--preprocessing_num_workers", 2)
    assert "by 2 processes" in said and one.digest == two.digest
    same(two.train.rows, list(one.train.rows))
    lines = path.read_text().splitlines()
    lines[4000] = lines[5000] = "{}"
    path.write_text("\n".join(lines))
    with pytest.raises(GptlmError, match="d.jsonl, line 4001: the keys  are not a known form"):
        load(path, "--preprocessing_num_workers", 2)


def test_the_order_of_unpacked_examples_is_that_of_the_file(load, tmp_path):
    """The digest that checkpoints note: of ids and targets, row after row."""
    data, _ = load(write_lines(tmp_path / "d.jsonl", ROWS), "--do_eval")
    digest = hashlib.sha256()
    for (row,) in data.train:
        digest.update(row.ids.tobytes() + row.loss_mask.tobytes())
    assert data.digest == digest.hexdigest()[:16]
    assert len(data.train) == len(ROWS) - 1 and len(data.dev) == 1
    assert data.sizes.tolist() == [[1, len(row.ids) - 1] for (row,) in data.train]


def _load_slowly(path, folder, base):
    argv = [*BASE, "--model_name_or_path", base, "--dataset_name_or_path", path, "--output_dir", folder / "out"]
    run = parse_sft([str(word) for word in [*argv, "--data_cache", folder / "cache"]], {})
    load_data(run, find_sources(run), AutoTokenizer.from_pretrained(base))


def test_killed_while_encoding_leaves_nothing_usable(load, model, tmp_path):  # noqa: F811
    path = write_lines(tmp_path / "d.jsonl", MANY * 30)
    process = multiprocessing.get_context("spawn").Process(target=_load_slowly, args=(path, tmp_path, model))
    process.start()
    while not list(tmp_path.glob("cache/*.incomplete/rows.arrow")):
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert list(tmp_path.glob("cache/*.incomplete")) and not list(tmp_path.glob("cache/*/entry.json"))
    data, said = load(path)
    assert "encoded in" in said and len(data.train) == len(MANY) * 30
    assert not list(tmp_path.glob("cache/*.incomplete"))


def test_packs_hold_every_row_once(load, tmp_path):
    data, _ = load(write_lines(tmp_path / "d.jsonl", ROWS), "--zero_padding", "--max_length", 40)
    alone, _ = load(tmp_path / "d.jsonl", "--max_length", 40)
    assert data.train.examples == len(alone.train) == len(ROWS) > len(data.train)
    packed = sorted(row.ids.tobytes() for sample in data.train for row in sample)
    assert packed == sorted(row.ids.tobytes() for (row,) in alone.train)
    for sample, (examples, tokens) in zip(data.train, data.sizes.tolist(), strict=True):
        assert examples == len(sample) and tokens == sum(len(row.ids) - 1 for row in sample) <= 40
    assert data.digest != alone.digest


def test_the_date_in_a_template_is_part_of_its_rows(model):  # noqa: F811
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = RowSettings(tokenizer, Lengths(1, 1, 1), 10).key()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + CHATML
    dated = RowSettings(tokenizer, Lengths(1, 1, 1), 10).key()
    assert plain["date"] == "" and dated["date"].startswith("20") and dated["tokenizer"] != plain["tokenizer"]
    assert plain["format"] == row_building.FORMAT


def test_a_tokenizer_that_has_encoded_has_the_same_key(model):  # noqa: F811
    """Else a process that encodes the first file looks for another entry of the second one than those that wait."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=7)
    settings = RowSettings(tokenizer, Lengths(40, 40, 40), len(tokenizer))
    before = settings.key()
    batch = RowBuilder(settings)(next(iter(table_batches(datasets.Dataset.from_list(ROWS), "rows", range(3), 1))))
    assert batch.rows.num_rows == 3 and tokenizer.backend_tokenizer.truncation is None
    assert settings.key() == before


def test_one_example_is_one(load, tmp_path):
    said = load(write_lines(tmp_path / "d.jsonl", ROWS[:1]))[1]
    assert "d.jsonl: 1 example encoded in" in said and "d.jsonl: 1 record read as src/tgt" in said


def test_columns_of_a_hub_dataset_are_part_of_its_rows(load, monkeypatch):
    table = datasets.Dataset.from_list(ROWS)
    swapped = table.rename_columns({"src": "tgt", "tgt": "src"})
    found = []
    for one in (table, swapped, table):
        monkeypatch.setattr("datasets.load_dataset", lambda name, split, one=one: one)
        found.append(load("some/rows")[0].train[0][0].response)
    assert found == [ROWS[0]["tgt"], ROWS[0]["src"], ROWS[0]["tgt"]]


def test_a_hub_dataset_goes_the_same_way(load, tmp_path, monkeypatch):
    """`datasets` gives a table with columns that other records lack; another content is encoded anew."""
    tables = {"train": datasets.Dataset.from_list([*ROWS, {"src": "x", "tgt": None, "id": 1}]).select(range(len(ROWS)))}
    tables["validation"] = tables["train"].select([3, 1])
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: tables[split])
    data, said = load("some/rows", "--do_eval")
    assert f"hub:some/rows:train: {len(ROWS)} examples encoded in" in said
    wanted, _ = load(write_lines(tmp_path / "d.jsonl", ROWS))
    assert data.digest == wanted.digest
    same([row for (row,) in data.dev], [wanted.train[3][0], wanted.train[1][0]])
    assert "encoded in" not in load("some/rows", "--do_eval")[1]
    tables["train"] = tables["train"].select(range(5))
    data, said = load("some/rows")
    assert len(data.train) == 5 and "5 examples encoded in" in said
    tables["train"] = datasets.Dataset.from_list([{"body": "a"}])
    with pytest.raises(GptlmError, match="some/rows train, record 1: the keys body are not a known form"):
        load("some/rows")

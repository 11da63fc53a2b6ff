"""`gptlm data`: what it prints, and that it leaves nothing behind."""

import hashlib
import json

import numpy as np
import pytest
import xxhash

from gptlm.cli import main
from gptlm.commands.pretrain import parse_pretrain
from gptlm.data.blocks import build_split
from gptlm.data.cache import IndexCache
from gptlm.data.corpora import open_corpora
from gptlm.data.indexed import open_tokens
from gptlm.data.writer import IndexedTokensWriter
from gptlm.model.tokenizer import train_tokenizer
from gptlm.recipes.pretrain import data as pretrain_data
from gptlm.training.metrics.throughput import start_logging
from tests.conftest import write_tokens
from tests.golden import recorded


def run(capsys, *words):
    code = main(["data", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_order_prints_one_object(corpus_folder, tmp_path, capsys):
    words = "--split 80,20 --max_seq_length 16 --num_samples 50,5,1 --seed 7 --data_order megatron --json".split()
    before = sorted(p.name for p in (corpus_folder / "mmap").iterdir())
    code, out, err = run(capsys, "order", "--input_dir", corpus_folder / "mmap", *words)
    found = json.loads(out)
    assert (code, err, found["test"]) == (0, "", None)
    corpora = open_corpora(str(corpus_folder / "mmap"), "80,20", "megatron")
    train = build_split(corpora, "train", num_samples=50, seq_length=16, seed=7, cache=IndexCache([]))
    samples = np.stack([train[i] for i in range(len(train))])
    assert found["train"] == {
        "len": len(train),
        "epochs": 1,
        "sha256": hashlib.sha256(samples.astype("<i8").tobytes()).hexdigest(),
        "first": samples[:8].tolist(),
    }
    assert sorted(p.name for p in (corpus_folder / "mmap").iterdir()) == before  # no cache unless asked for
    run(capsys, "order", "--input_dir", corpus_folder / "mmap", *words, "--data_cache", tmp_path / "cache")
    assert list((tmp_path / "cache").glob("*.json"))


def test_order_of_a_blend_has_no_epochs(corpus_folder, capsys):
    blend = f"0.5 {corpus_folder}/mmap/c 0.5 {corpus_folder}/npy/c"
    code, out, _ = run(
        capsys, "order", "--input_dir", blend, "--max_seq_length", 16, "--num_samples", "9,9,9", "--json"
    )
    assert code == 0 and json.loads(out)["train"]["epochs"] is None and len(json.loads(out)["train"]["first"]) == 8


def test_order_agrees_with_the_recordings(golden_corpora, monkeypatch, capsys):
    """The tool serves what PaddleNLP, Megatron and megatron-core served, short splits included."""
    monkeypatch.chdir(golden_corpora / "megatron")
    cases = [
        (case, name) for case in recorded("megatron/orders.json")["cases"] for name in ("megatron", "megatron-core")
    ]
    for case, data_order in cases:
        if not isinstance(case[data_order], str):  # the original has an order
            assert_served(capsys, case, case["input"], case[data_order], "--data_order", data_order)
    monkeypatch.chdir(golden_corpora / "paddlenlp")
    for case in recorded("paddlenlp/orders.json"):
        assert_served(capsys, case, " ".join(case["input"]), case)


def assert_served(capsys, case, corpora, records, *more):
    words = ["--input_dir", corpora, "--split", case["split"], "--seed", case["seed"], "--json", *more]
    words += ["--max_seq_length", case["seq_length"], "--num_samples", ",".join(map(str, case["num_samples"]))]
    code, out, _ = run(capsys, "order", *words)
    assert code == 0
    for split, found in json.loads(out).items():
        record = records[split]
        assert (found and (found["len"], found["sha256"])) == (record and (record["len"], record["tokens_sha256"])), (
            case
        )


def test_show_marks_document_boundaries(tmp_path, capsys):
    write_tokens(tmp_path / "a", documents=30)
    words = ["--input_dir", tmp_path / "a", "--split", "1,0,0", "--max_seq_length", 100, "--num_samples", "5,0,0"]
    code, out, _ = run(capsys, "show", *words, "--sample", 2)
    _, order, _ = run(capsys, "order", *words, "--json")
    lines = out.splitlines()
    ids = [int(word) for line in lines if not line.startswith("---") for word in line.split()]
    assert code == 0 and ids == json.loads(order)["train"]["first"][2]
    assert sum(line.startswith("--- sequence ") for line in lines) >= 2
    code, _, err = run(capsys, "show", *words, "--sample", 10**6)
    assert code == 1 and "--sample 1000000" in err


def test_check_and_stats(tmp_path, capsys):
    write_tokens(tmp_path / "a", documents=10)
    code, out, _ = run(capsys, "check", tmp_path / "a.idx")
    assert code == 0 and "is whole: 10 sequences" in out and "(below 500)" in out
    assert "10" in run(capsys, "stats", tmp_path / "a")[1]
    assert run(capsys, "check", tmp_path / "a", "--vocab_size", 5)[0] == 1
    content = bytearray((tmp_path / "a.idx").read_bytes())
    content[-16] = 3  # the last document but one begins earlier than the one before
    (tmp_path / "a.idx").write_bytes(bytes(content))
    code, _, err = run(capsys, "check", tmp_path / "a")
    assert code == 1 and "document 9 starts before" in err


@pytest.mark.parametrize("layout", ["mmap", "lazy", "npy"])
def test_check_full_hashes_all_ids(tmp_path, capsys, layout):
    write_tokens(tmp_path / "a", documents=10, layout=layout)
    file = tmp_path / ("a_ids.npy" if layout == "npy" else "a.bin")
    head = 128 if layout == "npy" else 0
    expected = xxhash.xxh3_128_hexdigest(file.read_bytes()[head:])
    code, out, _ = run(capsys, "check", tmp_path / "a", "--full")
    assert code == 0 and f"xxh3_128 of all ids: {expected} (as noted when they were written)" in out
    assert "xxh3" not in run(capsys, "check", tmp_path / "a")[1]
    content = bytearray(file.read_bytes())
    content[head + 200] ^= 1  # another id in the vocabulary
    file.write_bytes(bytes(content))
    assert run(capsys, "check", tmp_path / "a")[0] == 0
    code, _, err = run(capsys, "check", tmp_path / "a", "--full")
    assert code == 1 and "the ids are not those that were written" in err and expected in err
    (tmp_path / "a.meta.json").unlink()
    code, out, _ = run(capsys, "check", "--full", "--prefix", tmp_path / "a")
    assert code == 0 and f"{xxhash.xxh3_128_hexdigest(bytes(content[head:]))} (none was noted)" in out


def test_a_note_beside_the_data_that_does_not_fit_is_named(tmp_path, capsys):
    write_tokens(tmp_path / "a", documents=10)
    for noted, says in (('{"tokens": 1234}', "has 1,234 tokens"), ('{"a": 1}', "has no number of tokens")):
        (tmp_path / "a.meta.json").write_text(noted)
        code, _, err = run(capsys, "check", tmp_path / "a")
        assert code == 1 and says in err and "None" not in err, err


def test_a_foreign_end_of_document_is_named(tmp_path, capsys):
    """The tokenizer noted beside the data says which id is right; without a note any shared id is."""
    writer = IndexedTokensWriter(str(tmp_path / "a"), 500)
    for i in range(1, 31):
        writer.add(np.array([i, 2 * i, 0]), [3])
    writer.finish({"eos_token_id": 499})
    for tool, more in (("check", ()), ("stats", ()), ("merge", ("--output_prefix", tmp_path / "m"))):
        words = ("--input", tmp_path / "a") if more else (tmp_path / "a",)
        code, out, _ = run(capsys, tool, *words, *more)
        assert code == 0 and out.count("warning: ") == 1
        assert "of 30 documents sampled, 30 end with id 0, the tokenizer's end-of-text id is 499" in out
    (tmp_path / "a.meta.json").unlink()
    assert "warning" not in run(capsys, "check", tmp_path / "a")[1]


def test_training_names_data_without_an_end_of_document(tiny_model, tmp_path, capsys, monkeypatch):
    start_logging(main_process=True)
    write_tokens(tmp_path / "a", documents=300)
    words = f"--model_name_or_path {tiny_model} --input_dir {tmp_path}/a --output_dir {tmp_path}/o --max_steps 6"
    resolved = parse_pretrain([*words.split(), "--do_train"], {})
    corpora = open_corpora(f"{tmp_path}/a", "1,0,0")
    tokenizer = train_tokenizer(["a b"] * 9, 260)
    capsys.readouterr()
    pretrain_data.log_missing_ends(resolved, corpora, tokenizer)
    assert capsys.readouterr().out.count("end with the tokenizer's end-of-text id 0: a model cannot learn") == 1
    pretrain_data.log_missing_ends(resolved, corpora, None)
    shown = capsys.readouterr().out
    assert shown.count("of 256 documents sampled, ") == 1 and "other ids" in shown
    monkeypatch.setenv("RANK", "1")
    pretrain_data.log_missing_ends(resolved, corpora, tokenizer)
    assert not capsys.readouterr().out


def test_index_builds_what_training_will_look_for(tiny_model, tmp_path, capsys, monkeypatch):
    write_tokens(tmp_path / "d" / "c")
    words = (
        f"--model_name_or_path {tiny_model} --input_dir {tmp_path}/d --output_dir {tmp_path}/o --max_seq_length 16 "
        "--max_steps 6 --per_device_train_batch_size 2 --split 80,10,10 --do_train --do_eval --eval_steps 3"
    ).split()
    code, out, err = run(capsys, "index", *words, "--world_size", 2)
    assert code == 0 and "train: " in out, err
    built = sorted(p.name for p in (tmp_path / "d" / "index-cache").iterdir())
    resolved = parse_pretrain(words, {"WORLD_SIZE": "2"})
    pretrain_data.load_or_build_datasets(resolved, open_corpora(f"{tmp_path}/d", "80,10,10"))
    assert sorted(p.name for p in (tmp_path / "d" / "index-cache").iterdir()) == built


@pytest.mark.parametrize("layout", ["mmap", "npy", "lazy", "cached"])
def test_convert_and_back_keeps_every_sequence_and_document(tmp_path, capsys, layout):
    write_tokens(tmp_path / "a", documents=12)
    code, out, err = run(
        capsys, "convert", "--input", tmp_path / "a", "--output_prefix", tmp_path / "b", "--dataset_impl", layout
    )
    assert code == 0 and "12 sequences" in out, err
    assert run(capsys, "convert", "--input", tmp_path / "b", "--output_prefix", tmp_path / "c")[0] == 0
    a, c = open_tokens(str(tmp_path / "a")), open_tokens(str(tmp_path / "c"))
    assert [a.get(i).tolist() for i in range(12)] == [c.get(i).tolist() for i in range(12)]
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"c{suffix}").read_bytes()


def test_merge_joins_in_order_and_keeps_documents_of_several_sequences(tmp_path, capsys):
    write_tokens(tmp_path / "a", documents=3)
    np.save(tmp_path / "b_ids.npy", np.arange(6, dtype=np.int32))
    np.savez(tmp_path / "b_idx.npz", lens=np.array([1, 2, 3], np.int32), docs=np.array([0, 2, 3]))
    words = ["merge", "--input", tmp_path / "a", tmp_path / "b", "--output_prefix", tmp_path / "m"]
    code, out, _ = run(capsys, *words)
    merged, a = open_tokens(str(tmp_path / "m")), open_tokens(str(tmp_path / "a"))
    assert code == 0 and "2 corpora, 6 sequences" in out
    assert merged.document_starts.tolist() == [0, 1, 2, 3, 5, 6]
    assert [merged.get(i).tolist() for i in range(6)] == [a.get(i).tolist() for i in range(3)] + [
        [0],
        [1, 2],
        [3, 4, 5],
    ]
    code, _, err = run(capsys, *words[:-1], tmp_path / "a")
    assert code == 1 and "one of the inputs" in err
    code, _, err = run(capsys, *words[:-1], tmp_path / "small", "--vocab_size", 5)
    assert code == 1 and "outside the vocabulary of 5" in err and not list(tmp_path.glob("small*"))


def test_merging_guards_its_inputs(tmp_path, capsys):
    """By whatever name the output is one of the inputs; a missing corpus; a bad document index; another run's shard."""
    write_tokens(tmp_path / "a", documents=3)
    write_tokens(tmp_path / "b", documents=3)
    code, _, err = run(capsys, "merge", "--input", tmp_path / "a.bin", "--output_prefix", f"{tmp_path}/x/../a")
    assert code == 1 and "one of the inputs" in err
    code, _, err = run(capsys, "merge", "--input", tmp_path / "a", "--output_prefix", f"{tmp_path}/")
    assert code == 2 and "this is a folder" in err
    code, _, err = run(capsys, "merge", "--input", tmp_path / "a", tmp_path / "c", "--output_prefix", tmp_path / "m")
    assert code == 1 and "c.idx does not exist" in err
    code, _, err = run(capsys, "merge", "--input", tmp_path / "a", "--output_prefix", "/proc/x/m")
    assert code == 1 and "cannot write /proc/x/m" in err
    for name, number, of in (("a", 1, "one"), ("b", 2, "another")):
        path = tmp_path / f"{name}.meta.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "shard": [number, 2], "shard_of": of}))
    code, _, err = run(capsys, "merge", "--input", tmp_path / "b", tmp_path / "a", "--output_prefix", tmp_path / "m")
    assert code == 1 and "not of one input and one command" in err
    path.write_text(json.dumps({**json.loads(path.read_text()), "shard": 3}))
    code, _, err = run(capsys, "merge", "--input", tmp_path / "b", tmp_path / "a", "--output_prefix", tmp_path / "m")
    assert code == 1 and "has the shard 3" in err and not list(tmp_path.glob("m*"))
    np.save(tmp_path / "d_ids.npy", np.arange(6, dtype=np.int32))
    np.savez(tmp_path / "d_idx.npz", lens=np.array([1, 2, 3], np.int32), docs=np.array([0, 5, 3]))
    code, _, err = run(capsys, "merge", "--input", tmp_path / "d", "--output_prefix", tmp_path / "m")
    assert code == 1 and "document 2 starts before" in err
    np.savez(tmp_path / "d_idx.npz", lens=np.array([1, 2, 3], np.int32), docs=np.array([0.0, 1.5, 3]))
    code, _, err = run(capsys, "check", tmp_path / "d")
    assert code == 1 and "'docs' is float64" in err


def test_corpora_of_different_tokenizers_are_not_merged(tmp_path, capsys):
    for name in ("a", "b"):
        write_tokens(tmp_path / name)
        path = tmp_path / f"{name}.meta.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_fingerprint": name}))
    code, _, err = run(capsys, "merge", "--input", tmp_path, "--output_prefix", tmp_path / "m" / "x")
    assert code == 1 and "different tokenizers" in err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["merge", "--input", "x"], 2, "--output_prefix is missing"),
        ([], 2, "give a data tool: check"),
        (["ordr"], 2, "'ordr'"),
        (["order"], 2, "--input_dir is missing"),
        (["order", "--input_dir", "x", "--num_samples", "1,2"], 2, "three whole numbers"),
        (["order", "--input_dir", "x", "--split", "a"], 2, "split"),
        (["order", "--input_dir", "nowhere"], 1, "cannot list"),
        (["check"], 2, "prefix"),
        (["check", "nowhere"], 1, "nowhere.idx does not exist"),
    ],
)
def test_bad_questions(words, code, says, capsys):
    found, out, err = run(capsys, *words)
    assert (found, out) == (code, "") and says in err


def test_every_tool_has_help(capsys):
    for words in (["--help"], ["order", "--help"], ["check", "--help"], ["index", "--help"]):
        code, out, _ = run(capsys, *words)
        assert code == 0 and out.startswith("usage: gptlm data ")

"""Evaluation from files to numbers: equals brute force with stock code for every batch size and number of processes."""

import gzip
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gptlm.cli import main
from gptlm.commands.evaluate import parse_evaluate
from gptlm.data.writer import IndexedTokensWriter
from gptlm.errors import GptlmError, UsageError
from gptlm.model.tokenizer import train_tokenizer
from gptlm.recipes.evaluate import evaluate
from tests.conftest import run_script

ANIMALS = ("cat", "dog", "crow", "hippopotamus", "mouse", "zebra")
KNOWN = [f"the {a} sat on the mat and then the {b} bit the {a}" for a in ANIMALS for b in ANIMALS if a != b]
STRANGE = [f"a {a} , a {b}  {a}" for a in ANIMALS for b in ANIMALS]  # two blanks: the last token is another one
PROSE = " = Robert Boulter = \n \n" + "He saw a well @-@ known cat ( the crow ) , and the mouse . \n" * 12


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with `model` (stock GPT-2, trained on KNOWN for a moment), `lambada.jsonl`, `prose.txt`, and `c.bin`."""
    folder = tmp_path_factory.mktemp("evaluate")
    tokenizer = train_tokenizer(KNOWN, 330)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=352, n_positions=48, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rows = [torch.tensor([tokenizer(text)["input_ids"]]) for text in KNOWN[::2]]
    for step in range(60):
        model(rows[step % len(rows)], labels=rows[step % len(rows)]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "model")
    lines = [json.dumps({"text": text}) for text in KNOWN + STRANGE]
    (folder / "lambada.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "prose.txt").write_text(PROSE)
    writer = IndexedTokensWriter(str(folder / "c"), 330, "mmap")
    for text in KNOWN:
        ids = np.array(tokenizer(text)["input_ids"] + [0])
        writer.add(ids, [len(ids)])
    writer.finish({})
    return folder


def run(work, *words, **more):
    words = [*words, "--model_name_or_path", work / "model", "--device", "cpu"]
    return evaluate(*parse_evaluate(list(map(str, words)), **more))


@pytest.fixture(scope="module")
def stock(work):
    return GPT2LMHeadModel.from_pretrained(work / "model").eval(), AutoTokenizer.from_pretrained(work / "model")


def nll(model, ids, target) -> tuple[float, bool]:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1].double()
    return torch.logsumexp(logits, 0).item() - logits[target].item(), int(logits.argmax()) == target


def brute_perplexity(model, tokens, length, step) -> float:
    losses = []
    for target in range(1, len(tokens)):
        start = 0 if target <= length else -(-(target - length) // step) * step
        losses.append(nll(model, tokens[start:target], tokens[target])[0])
    return sum(losses) / len(losses)


def brute_cloze(model, tokenizer, texts) -> tuple[int, int]:
    strict = last = 0
    for text in texts:
        word = text.split()[-1]
        ids = tokenizer(text[: text.rindex(word)].strip())["input_ids"]
        right = True
        for target in tokenizer(" " + word)["input_ids"]:
            right &= nll(model, ids, target)[1]
            ids = [*ids, target]
        strict += right
        whole = tokenizer(text)["input_ids"]
        last += nll(model, whole[:-1], whole[-1])[1]
    return strict, last


def test_lambada_is_brute_force(work, stock):
    strict, last = brute_cloze(*stock, KNOWN + STRANGE)
    assert 0 < strict < last < len(KNOWN + STRANGE) == 66  # else the test would tell nothing
    for batch_size in (1, 8, 100):
        report = run(work, "--task", "LAMBADA", "--eval_path", work / "lambada.jsonl", "--batch_size", batch_size)
        assert report == {
            **{"task": "LAMBADA", "model": str(work / "model"), "num_examples": 66},
            **{"num_correct_strict": strict, "accuracy_strict": strict / 66},
            **{"num_correct_last_token": last, "accuracy_last_token": last / 66},
            **{"batch_size": batch_size, "max_seq_length": 48},
        }


@pytest.mark.parametrize(("length", "step"), [(48, 32), (16, 3), (16, 16)])
def test_perplexity_is_brute_force(work, stock, length, step):
    words = (
        "--task",
        "TEXT",
        "--eval_path",
        work / "prose.txt",
        "--max_seq_length",
        length,
        "--overlapping_eval",
        step,
    )
    tokens = stock[1](PROSE)["input_ids"]
    loss = brute_perplexity(stock[0], tokens, length, step)
    ratio = (len(tokens) - 1) / (len(PROSE.strip().split(" ")) - 1)
    for batch_size in (1, 7):
        report = run(work, *words, "--batch_size", batch_size)
        assert report["loss"] == pytest.approx(loss, abs=1e-5)
        assert report["ppl"] == pytest.approx(math.exp(loss), rel=1e-5)
        assert report["token_ratio"] == ratio
        assert report["adjusted_ppl"] == pytest.approx(math.exp(min(20, loss * ratio)), rel=1e-4)
        assert report["num_scored"] == report["num_tokens"] - 1 == len(tokens) - 1
        assert (report["overlapping_eval"], report["max_seq_length"], report["detokenizer"]) == (step, length, "none")


def test_compiled_evaluation_gives_the_same(work):
    words = ("--task", "TEXT", "--eval_path", work / "prose.txt", "--max_seq_length", 16, "--overlapping_eval", 5)
    plain, compiled = run(work, *words), run(work, *words, "--torch_compile", 1, "--batch_size", 7)
    assert compiled["loss"] == pytest.approx(plain["loss"], abs=1e-5)
    assert (plain["batch_size"], compiled["batch_size"]) == (None, 7)


def test_wikitext_counts_words_before_and_tokens_behind_the_detokenizer(work, stock):
    words = ("--eval_path", work / "prose.txt", "--max_seq_length", 32)
    report = run(work, "--task", "WIKITEXT103", *words)
    prose = " = Robert Boulter =\n\n" + "He saw a well-known cat (the crow), and the mouse.\n" * 12
    assert report["num_original_tokens"] == 5 + 12 * 16  # "\nHe" is one
    assert report["num_tokens"] == len(stock[1](prose)["input_ids"]) and report["detokenizer"] == "wikitext"
    assert run(work, "--task", "WIKITEXT2", "--detokenizer", "none", *words)["num_tokens"] > report["num_tokens"]


def test_a_split_of_token_files(work, stock):
    words = ("--task", "DATA", "--input_dir", work / "c", "--split", "20,7,3", "--max_seq_length", 20)
    for name, texts in (("valid", KNOWN[20:27]), ("test", KNOWN[27:])):
        report = run(work, *words, "--split_name", name, "--overlapping_eval", 5)
        tokens = [i for text in texts for i in [*stock[1](text)["input_ids"], 0]]
        assert report["loss"] == pytest.approx(brute_perplexity(stock[0], tokens, 20, 5), abs=1e-5)
        assert report["num_scored"] == len(tokens) - 1
        nothing = ("num_original_tokens", "token_ratio", "adjusted_ppl", "detokenizer")
        assert [report[key] for key in nothing] == [None] * 4


def test_records_are_scored_as_preprocessed_token_files(work, tmp_path, capsys):
    """.jsonl, .json, .gz and .parquet give the numbers of the token files `preprocess --append_eos` makes of them."""
    texts = [*KNOWN[:5], "a <|endoftext|> b", " "]  # a special token spelled out stays text; blank texts have no tokens
    lines = "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(texts))
    (tmp_path / "d.jsonl").write_text(lines)
    (tmp_path / "d.json").write_text(json.dumps([{"body": text} for text in texts]))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "d.parquet")
    words = ["preprocess", "--input_path", str(tmp_path / "d.jsonl"), "--json_keys", "body", "--append_eos"]
    words += ["--model_name_or_path", str(work / "model"), "--output_prefix", str(tmp_path / "t"), "--workers", "1"]
    assert main(words) == 0
    size = ("--max_seq_length", 16, "--overlapping_eval", 4)
    tokens = run(work, "--task", "DATA", "--input_dir", tmp_path / "t", "--split", "0,1,0", *size)
    assert tokens["num_tokens"] > 60
    for name in ("d.jsonl", "d.json", "d.jsonl.gz", "d.parquet"):
        report = run(work, "--task", "TEXT", "--eval_path", tmp_path / name, "--json_keys", "body", *size)
        assert (report["loss"], report["num_tokens"]) == (tokens["loss"], tokens["num_tokens"]), name
        assert report["num_original_tokens"] == sum(len(text.split(" ")) for text in texts[:6])
    assert (
        "the texts under 'body' of 6 documents, end to end, each followed by <|endoftext|>" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task TEXT --eval_path d.jsonl", "d.jsonl, line 1: .*'text'"),
        ("--task WIKITEXT2 --eval_path d.jsonl", "give --task TEXT, which reads the texts"),
        ("--task TEXT --eval_path d.tokens.gz", "not UTF-8 .byte 8b at column 2.; unpack it"),
        ("--task TEXT --eval_path blank.jsonl", "nothing to evaluate: all 1 texts under 'text' are empty"),
        ("--task TEXT --eval_path none.jsonl", "nothing to evaluate: it has no records"),
        ("--task LAMBADA --eval_path l.jsonl --max_seq_length 1", "l.jsonl, line 2: the last word has"),
    ],
)
def test_files_that_the_task_does_not_read_are_named(work, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text('{"body": "a b"}')
    Path("blank.jsonl").write_text('{"text": " "}')
    Path("none.jsonl").write_text("")
    Path("l.jsonl").write_text('{"text": "the cat"}\n{"text": "the zzzzzzz"}')
    Path("d.tokens.gz").write_bytes(gzip.compress(b"a b"))
    with pytest.raises((GptlmError, UsageError), match=message):
        run(work, *words.split())


def test_a_lambada_text_that_is_cut_is_named(work, tmp_path, capsys):
    (tmp_path / "l.jsonl").write_text(json.dumps({"text": "a a"}) + "\n" + json.dumps({"text": KNOWN[0] * 3}))
    run(work, "--task", "LAMBADA", "--eval_path", tmp_path / "l.jsonl", "--max_seq_length", 20)
    assert f"1 texts are longer than --max_seq_length 20 and keep their end: {tmp_path}/l.jsonl, line 2" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("task", ["TEXT", "LAMBADA", "DATA"])
def test_an_unusable_tokenizer_is_refused(work, tmp_path, task):
    """An empty vocabulary; ids beyond the model in a vocabulary with gaps."""
    shutil.copytree(work / "model", tmp_path / "m")
    content = json.loads((tmp_path / "m/tokenizer.json").read_text())
    whole = json.dumps(content)
    content["model"] |= {"vocab": {}, "merges": []}
    content["added_tokens"] = []
    source = ["--input_dir", work / "c"] if task == "DATA" else ["--eval_path", work / "lambada.jsonl"]
    words = [str(word) for word in ("--task", task, *source, "--load", tmp_path / "m", "--device", "cpu")]
    words += ["--json"] if task == "DATA" else []
    (tmp_path / "m/tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(GptlmError, match="the tokenizer in .*/m cannot encode text"):
        evaluate(*parse_evaluate(words))
    content = json.loads(whole)
    content["added_tokens"].append({**content["added_tokens"][0], "id": 400, "content": "<far>"})
    content["model"]["vocab"]["<far>"] = 400
    (tmp_path / "m/tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(GptlmError, match="ids up to 400, the model's vocabulary 352"):
        evaluate(*parse_evaluate(words))


def test_max_examples(work):
    lambada = run(work, "--task", "LAMBADA", "--eval_path", work / "lambada.jsonl", "--max_examples", 5)
    assert lambada["num_examples"] == 5
    words = ("--task", "TEXT", "--eval_path", work / "prose.txt", "--max_seq_length", 16, "--overlapping_eval", 4)
    text = run(work, *words, "--max_examples", 3)
    assert (text["num_examples"], text["num_scored"]) == (3, 16 + 4 + 4)


@pytest.mark.distributed
@pytest.mark.parametrize(("task", "file"), [("LAMBADA", "lambada.jsonl"), ("TEXT", "prose.txt")])
def test_two_processes_equal_one_and_stdout_is_json(work, capsys, task, file):
    """Batches that do not divide the rows: no row is counted twice."""
    words = ["--task", task, "--eval_path", str(work / file), "--model_name_or_path", str(work / "model")]
    words += ["--device", "cpu", "--json", "--batch_size", "5", "--overlapping_eval", "16"]
    assert main(["evaluate", *words]) == 0
    one = capsys.readouterr()
    two = run_script("evaluate", *words, processes=2)
    assert two.returncode == 0, two.stderr
    first, second = json.loads(one.out), json.loads(two.stdout)
    assert second.keys() == first.keys() and first["num_examples"] > 5
    for key, value in first.items():
        assert second[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    assert one.err.count("validation results on") == two.stderr.count("validation results on") > 0


def test_the_log_defines_its_measures(work, capsys):
    run(work, "--task", "LAMBADA", "--eval_path", work / "lambada.jsonl", "--strict-lambada")
    out = capsys.readouterr().out
    assert out.count("total examples: 66") == 2 and "every token of the whole last word" in out
    assert "the last token of the text as it is tokenized" in out and "perplexity of the last word" in out
    assert "--strict-lambada has no effect" in out and "wrong vocabulary" not in out
    run(work, "--task", "TEXT", "--eval_path", work / "prose.txt")
    assert "adjusted ppl" in capsys.readouterr().out


@pytest.fixture(scope="module")
def untrained(work, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("untrained")
    AutoTokenizer.from_pretrained(work / "model").save_pretrained(folder)
    torch.manual_seed(3)
    GPT2LMHeadModel(GPT2Config(vocab_size=352, n_positions=48, n_embd=32, n_layer=2, n_head=2)).save_pretrained(folder)
    return folder


def test_an_untrained_model_gets_a_warning(work, untrained, capsys):
    """It guesses, so its perplexity is about the size of the vocabulary."""
    words = ["--model_name_or_path", str(untrained), "--device", "cpu", "--max_seq_length", "24"]
    report = evaluate(*parse_evaluate(["--task", "TEXT", "--eval_path", str(work / "prose.txt"), *words]))
    assert report["ppl"] == pytest.approx(352, rel=0.1)
    assert "this looks like a wrong vocabulary" in capsys.readouterr().out
    evaluate(*parse_evaluate(["--task", "LAMBADA", "--eval_path", str(work / "lambada.jsonl"), *words]))
    assert "this looks like a wrong vocabulary" in capsys.readouterr().out


def test_half_precision_is_loaded_and_close(work):
    words = ("--task", "TEXT", "--eval_path", work / "prose.txt")
    full, half = run(work, *words), run(work, *words, "--bf16")
    assert full["loss"] != half["loss"] == pytest.approx(full["loss"], rel=0.05)


def write_model(folder: Path, tokenizer_of: Path, vocab_size: int) -> None:
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(folder)
    GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, n_positions=48, n_embd=8, n_layer=1, n_head=1)).save_pretrained(
        folder
    )


def test_a_tokenizer_of_another_size_is_refused_or_named(work, tmp_path, capsys):
    write_model(tmp_path / "small", work / "model", 200)
    words = ["--task", "TEXT", "--eval_path", str(work / "prose.txt"), "--device", "cpu", "--load"]
    with pytest.raises(GptlmError, match="has 3.. entries with ids up to 3.., the model's vocabulary 200"):
        evaluate(*parse_evaluate([*words, str(tmp_path / "small")]))
    write_model(tmp_path / "large", work / "model", 3000)
    evaluate(*parse_evaluate([*words, str(tmp_path / "large")]))
    assert "the model's vocabulary 3000: is it the model's own?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task TEXT --eval_path missing.txt", "cannot read --eval_path missing.txt: No such file"),
        ("--task TEXT --eval_path empty.txt", "empty.txt is empty"),
        ("--task TEXT --eval_path one.txt", "one.txt has 1 token, scoring takes at least 2"),
        ("--task WIKITEXT2 --eval_path latin.txt", "not UTF-8"),
        ("--task LAMBADA --eval_path prose.txt", "prose.txt, line 1: expected an object with a text"),
        ("--task DATA --input_dir nothing", "cannot list the data folder nothing"),
        ("--task DATA --input_dir c --split 1,0,0 --split_name test", "the test split of c is empty"),
        ("--task DATA --input_dir wild", "ids go from 400 to 401, the model's vocabulary has 352 entries"),
    ],
)
def test_data_is_checked_before_the_weights_are_loaded(work, tmp_path, monkeypatch, capsys, words, message):
    """The weight file is not readable: loading it would fail with another message."""
    monkeypatch.chdir(tmp_path)
    for name in ("prose.txt", "c.bin", "c.idx"):
        (tmp_path / name).symlink_to(work / name)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "one.txt").write_text("a")
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    writer = IndexedTokensWriter("wild", 500, "mmap")
    for _ in range(20):
        writer.add(np.array([400, 401]), [2])
    writer.finish({})
    AutoTokenizer.from_pretrained(work / "model").save_pretrained("broken")
    Path("broken/config.json").write_text((work / "model/config.json").read_text())
    Path("broken/model.safetensors").write_text("none")
    assert main(["evaluate", *words.split(), "--model_name_or_path", "broken", "--device", "cpu", "--json"]) == 1
    out, err = capsys.readouterr()
    assert message in err and err.count("gptlm evaluate: error:") == 1 and out == ""


def test_wrong_commands_exit_with_2(work, capsys):
    words = ["--task", "TEXT", "--eval_path", "f", "--model_name_or_path", str(work / "model")]
    assert main(["evaluate", *words, "--max_seq_length", "49"]) == 2
    assert "has a position table of 48" in capsys.readouterr().err


def test_help_defines_the_measures(capsys):
    assert main(["evaluate", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("strict", "last token", "token_ratio", "--overlapping_eval", "adjusted_ppl", "(default: 949,50,1)"):
        assert word in out


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_scored_as_the_model_they_are_merged_into(work, tmp_path):
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    torch.manual_seed(3)
    adapted = get_peft_model(GPT2LMHeadModel.from_pretrained(work / "model"), config)
    adapted.peft_config["default"].base_model_name_or_path = str(work / "model")
    adapted.save_pretrained(tmp_path / "adapters")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(work / "model").save_pretrained(tmp_path / "merged")
    text = ["--task", "TEXT", "--eval_path", str(work / "prose.txt"), "--device", "cpu", "--model_name_or_path"]
    found = [
        evaluate(*parse_evaluate([*text, *words]))["loss"]
        for words in (
            [str(tmp_path / "merged")],
            [str(tmp_path / "adapters")],
            [str(work / "model"), "--lora_path", str(tmp_path / "adapters")],
            [str(work / "model")],
        )
    ]
    assert found[1:3] == pytest.approx([found[0]] * 2, abs=1e-5)
    assert abs(found[3] - found[0]) > 1e-3
    with pytest.raises(GptlmError, match="nowhere does not exist"):
        parse_evaluate([*text, str(work / "model"), "--lora_path", "nowhere"])

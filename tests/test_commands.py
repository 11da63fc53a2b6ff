"""The commands as users type them, from text to continuations; PaddleNLP's pretraining command, killed and resumed."""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path

import nltk
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from gptlm.cli import main
from gptlm.data.indexed import open_tokens
from gptlm.entry_points import hide_other_gpus
from tests.config.test_run import README
from tests.conftest import ROOT, run_script, write_sentence_data
from tests.processes import run, start

LETTERS = "".join(
    f"Letter {i}\n\n" + f"the cat {i} sat on the mat and the dog {i % 7} sat on the log.\n\n" for i in range(200)
)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder `我的 数据` with letters.txt, a tokenizer, and token files with the flags of Megatron and PaddleNLP."""
    folder = tmp_path_factory.mktemp("work") / "我的 数据"
    folder.mkdir()
    (folder / "letters.txt").write_text(LETTERS, encoding="utf-8")
    trained = run_script(
        "train_tokenizer", "--input_path", "letters.txt", "--output_dir", "tok", "--vocab_size", 300, cwd=folder
    )
    assert trained.returncode == 0, trained.stderr
    return folder


def preprocess(work, *words, **more):
    result = run_script("preprocess_data", *words, cwd=work, **more)
    return result


def test_preprocessing_with_megatron_s_flags(work):
    result = preprocess(
        work, *"--input letters.txt --output-prefix meg --vocab tok/vocab.json --merge-file tok/merges.txt".split(),
        *"--tokenizer-type GPT2BPETokenizer --dataset-impl mmap --append-eod --json-key text --workers 2".split(),
        *"--log-interval 50 --chunk-size 25".split(),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert {p.name for p in work.glob("meg*")} == {f"meg_text_document{s}" for s in (".bin", ".idx", ".meta.json")}
    tokens = open_tokens(str(work / "meg_text_document"))
    tokenizer = AutoTokenizer.from_pretrained(work / "tok")
    documents = [part for part in LETTERS.split("\n\n") if part]
    assert len(tokens) == len(documents)
    assert tokens.get(3).tolist() == tokenizer(documents[3])["input_ids"] + [tokenizer.eos_token_id]
    assert "--chunk-size has no effect here" in result.stdout and "Processed " in result.stdout
    facts = json.loads((work / "meg_text_document.meta.json").read_text(encoding="utf-8"))
    assert facts["vocab_size"] == len(tokenizer) and len(facts["tokenizer_fingerprint"]) == 16


def test_preprocessing_with_paddlenlp_s_flags_in_both_formats(work):
    base = "--model_name tok --tokenizer_name GPTTokenizer --data_format JSON --input_path letters.txt --append_eos"
    for layout, names in (("mmap", {".bin", ".idx"}), ("npy", {"_ids.npy", "_idx.npz"})):
        result = preprocess(work, *base.split(), "--output_prefix", f"pd_{layout}/letters", "--data_impl", layout)
        assert result.returncode == 0, result.stderr
        assert {p.name for p in (work / f"pd_{layout}").glob("[!.]*")} == {
            f"letters{s}" for s in names | {".meta.json"}
        }
    first, second = (open_tokens(str(work / f"pd_{layout}" / "letters")) for layout in ("mmap", "npy"))
    assert np.array_equal(first.tokens, second.tokens) and np.array_equal(first.sizes, second.sizes)


def test_the_data_step_of_the_8_gpu_recipes(work, tmp_path, monkeypatch):
    """Vocabulary and merges come from the current folder; the files have the recipe's name, one entry per document."""
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    punkt = write_sentence_data(tmp_path / "nltk", LETTERS)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(work / "tok" / name, tmp_path / f"gpt2-{name}")
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "The cat sat. The dog sat.\nIt was late."}) + "\n")
    environment = {
        **os.environ,
        "NLTK_DATA": str(tmp_path / "nltk"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = ["bash", ROOT / "scripts/dataset_preprocess_gpt.sh", "--input=t.jsonl", "--workers=1"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "shuffles the sentences of all documents" in result.stdout
    names = ["gpt2-merges.txt", "gpt2-vocab.json"] + [f"my-gpt_text_sentence.{s}" for s in ("bin", "idx", "meta.json")]
    assert sorted(path.name for path in (tmp_path / "data").glob("[!.]*")) == names
    tokenizer = AutoTokenizer.from_pretrained(work / "tok")
    sentences = punkt.tokenize("The cat sat. The dog sat.\nIt was late.")
    assert len(sentences) == 3
    tokens = open_tokens(str(tmp_path / "data" / "my-gpt_text_sentence"))
    assert tokens.get(0).tolist() == [i for sentence in sentences for i in tokenizer(sentence)["input_ids"]]
    wrong = subprocess.run([*command, "--colour=red"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert wrong.returncode == 2 and "unknown argument: --colour=red" in wrong.stderr


@pytest.mark.parametrize("parts", [3])
def test_shards_of_several_machines_merge_to_the_whole(work, tmp_path, parts):
    """Byte for byte, in any order of the arguments; a missing shard is reported."""
    common = "--input letters.txt --txt_split line --model_name tok --append-eod".split()
    assert preprocess(work, *common, "--output-prefix", tmp_path / "whole").returncode == 0
    for part in range(1, parts + 1):
        result = preprocess(work, *common, "--output-prefix", tmp_path / "s" / "c", "--shard", f"{part}/{parts}")
        assert result.returncode == 0, result.stderr
    prefixes = [tmp_path / "s" / f"c_{part:05d}-of-{parts:05d}_text_document" for part in range(1, parts + 1)]
    words = ["merge", "--output_prefix", tmp_path / "m" / "merged", "--input"]
    merged = run_script("data_tools", *words, *reversed(prefixes))
    assert merged.returncode == 0, merged.stderr
    for suffix in (".bin", ".idx"):
        whole = (tmp_path / f"whole_text_document{suffix}").read_bytes()
        assert (tmp_path / "m" / f"merged{suffix}").read_bytes() == whole
    facts = json.loads((tmp_path / "m" / "merged.meta.json").read_text())
    assert facts == json.loads((tmp_path / "whole_text_document.meta.json").read_text())
    prefixes[0].with_suffix(".idx").unlink()
    prefixes[0].with_suffix(".bin").unlink()
    missing = run_script("data_tools", *words, tmp_path / "s", tmp_path / "whole_text_document")
    assert missing.returncode == 1 and f"shards are merged when all {parts} are there" in missing.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--input_path missing.jsonl --model_name tok", 1, "missing.jsonl: no file"),
        ("--input_path bad.jsonl --model_name tok", 1, "bad.jsonl, line 2: broken JSON"),
        ("--input_path bad.jsonl --model_name tok --workers 2", 1, "bad.jsonl, line 2: broken JSON"),
        ("--input_path letters.txt", 2, "no tokenizer: give --model_name_or_path"),
        ("--input_path letters.txt --vocab_file tok/vocab.json", 2, "--merge_file"),
        ("--input_path letters.txt --model_name nowhere", 1, "'nowhere' is neither a folder"),
        ("--input_path letters.txt --model_name tok --dataset_impl slow", 2, "'slow'"),
        ("--input_path letters.txt --model_name tok --split-sentences --lang german", 1, "no data for 'german'"),
        ("--input_path letters.txt --model_name tok --workerz 2", 2, "did you mean --workers"),
        ("--model_name tok", 2, "--input_path is missing"),
        ("--input_path letters.txt --model_name tok --output_prefix x/", 2, "this is a folder"),
    ],
)
def test_bad_preprocessing_leaves_nothing(work, words, code, says, monkeypatch, capfd):
    (work / "bad.jsonl").write_text('{"text": "a"}\n{"text": "b"\n')
    monkeypatch.chdir(work)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ended = main(["preprocess", "--output_prefix", "bad/x", *words.split()])
    said = capfd.readouterr().err
    assert (ended, says in said) == (code, True), said
    assert "Traceback" not in said
    assert not (work / "bad").exists() or list((work / "bad").iterdir()) == []


def test_broken_documents_can_be_skipped(work):
    (work / "some.jsonl").write_text('{"text": "a"}\n{"text": "b"\n{"title": "c"}\n{"text": "d"}\n')
    words = "--input_path some.jsonl --model_name tok --output_prefix some/x --on_error skip --workers 2".split()
    result = preprocess(work, *words)
    assert result.returncode == 0 and "2 broken documents were skipped" in result.stdout, result.stderr
    assert "some.jsonl, line 2" in result.stdout and "some.jsonl, line 3" in result.stdout
    assert len(open_tokens(str(work / "some" / "x"))) == 2


def test_every_command_names_half_a_surrogate_pair(work, monkeypatch, capfd):
    (work / "half.jsonl").write_text('{"text": "aa bb"}\n{"text": "b\\ud83d"}\n' * 3)
    monkeypatch.chdir(work)
    words = ["--input_path", "half.jsonl"]
    assert main(["tokenizer", *words, "--output_dir", "half", "--vocab_size", "300"]) == 1
    said = "half.jsonl, line 2: the text under 'text' is not valid Unicode (character 2); fix it there"
    assert said in capfd.readouterr().err and not (work / "half").exists()
    words += ["--model_name", "tok", "--output_prefix", "half/x"]
    assert main(["preprocess", *words]) == 1
    assert said in capfd.readouterr().err
    assert main(["preprocess", *words, "--on_error", "skip"]) == 0
    assert "3 broken documents were skipped" in "".join(capfd.readouterr())
    assert len(open_tokens(str(work / "half" / "x"))) == 3


def test_data_without_an_end_of_document_is_named(work, monkeypatch, capfd):
    monkeypatch.chdir(work)
    words = "preprocess --input_path letters.txt --model_name tok --output_prefix ends/x".split()
    assert main(words) == 0
    said = capfd.readouterr()
    said = said.out + said.err
    assert said.count("of 256 documents sampled, 0 end with the tokenizer's end-of-text id 0") == 1, said
    assert main([*words, "--append_eos", "--overwrite"]) == 0
    assert "documents sampled" not in "".join(capfd.readouterr())


def test_text_under_a_c_locale(work):
    (work / "zh.jsonl").write_text('{"text": "今天天气很好"}\n' * 30, encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = preprocess(work, *"--input_path zh.jsonl --model_name tok --output_prefix zh/x".split(), environment=plain)
    assert result.returncode == 0, result.stderr
    tokens = open_tokens(str(work / "zh" / "x"))
    assert AutoTokenizer.from_pretrained(work / "tok").decode(tokens.get(0)) == "今天天气很好"


@pytest.fixture(scope="module")
def model(work):
    """`gpt2-medium-en`: a small local model under the name in PaddleNLP's command, with the trained tokenizer."""
    from gptlm.model.build import new_model
    from gptlm.model.presets import Shape

    folder = work / "gpt2-medium-en"
    tokenizer = AutoTokenizer.from_pretrained(work / "tok")
    new_model(Shape(2, 32, 2, 64, 384, 64), eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    base = "--model_name tok --input_path letters.txt --append_eos --output_prefix data/letters"
    assert preprocess(work, *base.split()).returncode == 0
    return folder


SMALL = "--max_seq_length 16 --max_steps 12 --save_steps 4 --eval_steps 6 --learning_rate 1e-3 --split 80,10,10"


def test_paddlenlp_s_command_trains_resumes_after_a_kill_and_loads(work, model):
    """PaddleNLP's pretraining command, changed only in its size: one CPU process, new folder."""
    words = [*shlex.split(README), *SMALL.split()]
    whole = run_script("run_pretrain", *words, "--output_dir", "whole", cwd=work)
    assert whole.returncode == 0, whole.stderr
    assert "Traceback" not in whole.stderr and whole.stdout.splitlines()[0].endswith("weights from gpt2-medium-en")
    for said in ("no GPU is visible", "half precision is not used", "--sharding stage2 has no effect"):
        assert whole.stdout.count(said) == 1 or os.environ.get("CUDA_VISIBLE_DEVICES")
    command = [sys.executable, str(ROOT / "scripts" / "run_pretrain.py"), *words, "--output_dir", "killed"]
    process = start(command, cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not (work / "killed" / "checkpoint-4").exists() and time.time() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    for folder in (work / "killed").glob("checkpoint-1*"):  # leave some steps to do, however far it came
        shutil.rmtree(folder)
    again = run_script("run_pretrain", *words, "--output_dir", "killed", cwd=work)
    assert again.returncode == 0 and "resuming from killed/checkpoint-" in again.stdout, again.stderr
    first, second = (AutoModelForCausalLM.from_pretrained(work / name) for name in ("whole", "killed"))
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values()):
        assert a.equal(b), name
    assert AutoTokenizer.from_pretrained(work / "killed")("the cat")["input_ids"]
    assert (work / "killed" / "train_results.json").is_file()


def test_printing_the_run(work, model):
    words = [*shlex.split(README), "--max_seq_length", 64, "--world_size", 8]
    result = run_script("run_pretrain", *words, "--print_config", cwd=work)
    assert result.returncode == 0 and result.stderr == ""
    found = json.loads(result.stdout)
    assert set(found) == {"run", "from", "notes"}
    assert found["run"]["hidden_size"] == 32 and found["from"]["hidden_size"] == "gpt2-medium-en/config.json"
    assert found["run"]["global_batch_size"] == 16 and found["run"]["data_cache"] is None
    (work / "args.json").write_text(json.dumps({"max_steps": 5, "input_dir": "data", "output_dir": "o"}))
    result = run_script("run_pretrain", "args.json", "--seed", 7, "--print_config", cwd=work)
    found = json.loads(result.stdout)
    assert (found["run"]["max_steps"], found["run"]["seed"], found["from"]["max_steps"]) == (5, 7, "args.json")
    (work / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    deepspeed = ["--sharding", "", "--deepspeed", "ds.json"]
    result = run_script("run_pretrain", *words, *deepspeed, "--print_config", cwd=work)
    assert json.loads(result.stdout)["run"]["deepspeed"] == "ds.json"  # DeepSpeed's log at import goes to stderr
    (work / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}))
    result = run_script(
        "run_pretrain",
        *words,
        "--sharding",
        "",
        "--deepspeed",
        "ds.json",
        "--fp16_opt_level",
        "O1",
        "--print_config",
        cwd=work,
    )
    assert (
        result.returncode == 2
        and "ds.json says fp16.enabled True, the flags say --fp16 --fp16_opt_level O1" in result.stderr
    )


def test_a_refused_command_prints_the_reason_on_stderr_only(work):
    for words in (["--max_stepz", "5"], ["--tensor_parallel_degree", "2", "--print_config"], ["--fp16", "--bf16"]):
        result = run_script("run_pretrain", *words, cwd=work)
        assert result.returncode == 2 and result.stdout == "" and "error: " in result.stderr
        assert "Traceback" not in result.stderr


def test_continuations(work, model):
    """An overfitted model continues its text; a batch gives the same texts as single prompts."""
    run = [
        *"--num_hidden_layers 2 --hidden_size 64 --num_attention_heads 4 --max_seq_length 32".split(),
        *"--vocab_size 384 --input_dir data --output_dir fit --max_steps 150 --learning_rate 1e-2".split(),
        *"--split 1,0,0 --hidden_dropout_prob 0 --attention_probs_dropout_prob 0 --disable_tqdm --device cpu".split(),
    ]
    assert run_script("run_pretrain", *run, cwd=work).returncode == 0
    prompts = ["the cat 5 sat on", "the", "Letter"]
    outputs = []
    for size in (1, 3):
        words = ["--model_name_or_path", "fit", "--prompt", *prompts, "--batch_size", size, "--tgt_length", 20]
        result = run_script(
            "predict_generation", *words, "--output_file", f"o{size}.jsonl", "--device", "cpu", cwd=work
        )
        assert result.returncode == 0, result.stderr
        lines = (work / f"o{size}.jsonl").read_text(encoding="utf-8").splitlines()
        outputs.append([json.loads(line)["continuation"] for line in lines])
    assert outputs[0] == outputs[1] and outputs[0][0].startswith(" the mat and the dog")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--model_name_or_path empty --prompt a", 1, "holds no model weights"),
        ("--model_name_or_path nowhere --prompt a", 1, "neither a folder nor a built-in name"),
        ("--model_name_or_path gpt3-13B-en --prompt a", 1, "size only"),
        ("--prompt a", 1, "hf download TsinghuaAI/CPM-Generate"),
        ("--model_name_or_path gpt2-medium-en --input_file nowhere.txt", 1, "nowhere.txt"),
        ("--tgt_length 0", 2, "tgt_length"),
        ("--device xpu", 2, "'xpu'"),
        ("--top_k -1", 2, "top_k"),
        ("--do_sample --temperature nan", 2, "temperature"),
        ("--seed 1e30", 2, "--seed"),
        ("--model_name_or_path gpt2-medium-en --input_file gb.txt", 1, "gb.txt, line 1: not UTF-8"),
        ("--model_name_or_path gpt2-medium-en --input_file null.jsonl", 1, "null.jsonl, line 1"),
        ("--model_name_or_path gpt2-medium-en --prompt a --output_file letters.txt/o", 1, "cannot write"),
    ],
)
def test_bad_predictions(work, model, words, code, says, monkeypatch, capsys):
    (work / "empty").mkdir(exist_ok=True)
    (work / "gb.txt").write_bytes("今天".encode("gb18030"))
    (work / "null.jsonl").write_text('{"prompt": null}')
    monkeypatch.chdir(work)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ended = main(["predict", *words.split()])
    said = capsys.readouterr().err
    assert (ended, says in said) == (code, True), said


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [("gpu", "2,3", "2,3"), ("gpu:1", "2,3", "3"), ("gpu:1", None, "1"), ("gpu:5", "2,3", "-1"), ("cpu", None, None)],
)
def test_a_numbered_gpu_is_the_only_visible_one(device, before, after):
    environment = {"CUDA_VISIBLE_DEVICES": before} if before else {}
    hide_other_gpus(device, environment)
    assert environment.get("CUDA_VISIBLE_DEVICES") == after


def test_help_and_unknown_commands():
    scripts = {"run_pretrain": "pretrain", "preprocess_data": "preprocess", "train_tokenizer": "tokenizer"}
    for script, name in (scripts | {"predict_generation": "predict", "demo": "demo"}).items():
        result = run_script(script, "--help")
        assert result.returncode == 0 and result.stdout.startswith(f"usage: gptlm {name} ["), script
    module = [sys.executable, "-m", "gptlm"]
    assert run([*module, "--help"]).returncode == 0
    assert run([*module, "pretrian"]).returncode == 2


def test_a_closed_output_pipe_is_not_an_error():
    """As with `| head`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, str(ROOT / "scripts" / "plan.py"), "--model_name_or_path", "gpt2-medium-en"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_empty_text_trains_no_tokenizer(work):
    (work / "empty.txt").write_text("")
    result = run_script("train_tokenizer", "--input_path", "empty.txt", "--output_dir", "no-tok", cwd=work)
    assert result.returncode == 1 and "has no text" in result.stderr
    result = run_script("train_tokenizer", "--input_path", "letters.txt", "--output_dir", "empty.txt/x", cwd=work)
    assert result.returncode == 1 and "is a file, not a folder; give another --output_dir" in result.stderr


def test_a_prompt_is_kept_and_the_continuation_shortened(work, model):
    words = "--model_name_or_path gpt2-medium-en --tgt_length 200 --device cpu".split()
    words += "--output_file long.jsonl --overwrite --prompt".split()
    result = run_script("predict_generation", *words, "the cat 5 sat on the mat", cwd=work)
    assert result.returncode == 0 and "leave no room for 200 new tokens in the position table of 64" in result.stderr
    tokenizer = AutoTokenizer.from_pretrained(work / "tok")
    long = "the cat sat on the mat " * 40
    assert len(tokenizer(long)["input_ids"]) > 64
    result = run_script("predict_generation", *words, long, cwd=work)
    assert result.returncode == 1 and "fills the position table of 64" in result.stderr


def test_a_small_demo(tmp_path, monkeypatch, capsys):
    """On a part of the library."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("asyncio", "email", "json", "logging", "unittest"):
        shutil.copytree(library / name, tmp_path / "library" / name)
    places = {**sysconfig.get_paths(), "stdlib": str(tmp_path / "library")}
    monkeypatch.setattr(sysconfig, "get_path", lambda name, *scheme: places[name])
    assert main(["demo", "--max_steps", "20", "--output_dir", str(tmp_path / "demo")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("written: ") and "AutoModelForCausalLM" in lines[-1]
    before, after = (float(word) for word in lines[-3].split() if word.replace(".", "").isdigit() and "." in word)
    assert before == pytest.approx(math.log(2048), abs=0.3) and after < before - 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "model")


def test_the_complete_workflow_under_a_c_locale_with_chinese_paths(work, model):
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    chain = (
        ("train_tokenizer", "--input_path letters.txt --vocab_size 300 --output_dir", "分词 器"),
        ("preprocess_data", "--input_path letters.txt --model_name_or_path 分词\\ 器 --output_prefix", "数 据/x"),
        (
            "run_pretrain",
            "--model_name_or_path gpt2-medium-en --continue_training --input_dir 数\\ 据 --max_seq_length 16 "
            "--max_steps 2 --device cpu --output_dir",
            "模型 1",
        ),
        ("predict_generation", "--model_name_or_path 模型\\ 1 --tgt_length 3 --device cpu --prompt", "今天"),
    )
    for name, words, last in chain:
        result = run_script(name, *shlex.split(words), last, cwd=work, environment=plain)
        assert result.returncode == 0, (name, result.stderr)
    assert (work / "模型 1" / "model.safetensors").is_file() and (work / "数 据" / "x.bin").is_file()


def test_the_version_names_the_libraries(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"gptlm {version('gptlm')} (torch {version('torch')}, transformers ")


def test_a_misspelt_command_names_the_nearest(capsys):
    assert main(["pretrian"]) == 2
    assert "gptlm: 'pretrian' is not a command; did you mean pretrain?" in capsys.readouterr().err
    assert main(["data"]) == 2
    assert "give a data tool: check, " in capsys.readouterr().err
    assert main(["data", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: gptlm data TOOL") and "-c FILE.yaml" not in text and "Statistics of one" in text


def test_a_missing_data_folder_is_found_before_the_run(tmp_path, capsys):
    words = f"pretrain --input_dir {tmp_path}/none --output_dir {tmp_path}/out --max_steps 1".split()
    assert main(words) == 1
    assert f"cannot list the data folder {tmp_path}/none" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()  # the check comes before anything is written
    assert main([*words, "--print_config"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any(f"cannot list the data folder {tmp_path}/none" in note for note in notes)


@pytest.mark.parametrize("name", ["chat", "serve"])
def test_print_config_of_commands_that_answer_messages(name, capsys):
    assert main([name, "--model_name_or_path", "gpt2-en", "--top_p", "0.5", "--print-config"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"]["top_p"] == 0.5 and found["from"]["top_p"] == "--top_p" and found["from"]["top_k"] == "default"
    assert main([name, "--print_config"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["run"]["model_name_or_path"] == "" and "is empty: give --model" in printed.err

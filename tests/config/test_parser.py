"""Parsing: PaddleNLP's rules, and where gptlm is stricter."""

import json
from dataclasses import replace

import pytest

from gptlm.commands.pretrain import PRETRAIN
from gptlm.commands.sft import SFT
from gptlm.config.args.training import TrainingArguments
from gptlm.config.help import help_text
from gptlm.config.origin import DEFAULT, Origin, Source, derived
from gptlm.config.parser import parse
from gptlm.errors import UsageError


def values(*argv):
    parsed = parse(PRETRAIN, argv)
    return {name: parsed.value(name) for name in parsed.sources}


@pytest.mark.parametrize("word", ["1", "true", "True", "TRUE", "yes", "y", "t", "on"])
def test_true(word):
    assert values("--fp16", word)["fp16"] is True
    assert values(f"--fp16={word}")["fp16"] is True


@pytest.mark.parametrize("word", ["0", "false", "False", "no", "n", "f"])
def test_false(word):
    assert values("--skip_memory_metrics", word)["skip_memory_metrics"] is False


def test_bare_switches_and_their_negation():
    assert values("--fp16")["fp16"] is True
    assert values("--disable_tqdm")["disable_tqdm"] is True
    assert values("--no_skip_memory_metrics")["skip_memory_metrics"] is False
    assert values("--no-fp16")["fp16"] is False
    assert values("--fp16", "--no_fp16")["fp16"] is False


def test_the_last_one_takes_precedence():
    assert values("--max_grad_norm", "1.0", "--seed", "1", "--max_grad_norm", "0.0")["max_grad_norm"] == 0.0


def test_of_two_names_in_one_file_the_last_takes_precedence_and_the_other_is_named(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"max_steps": 3, "seed": 5, "train_iters": 4}))
    parsed = parse(PRETRAIN, [str(file), "--seed", "6"])  # flags override the file without a line
    assert (parsed[TrainingArguments].max_steps, parsed[TrainingArguments].seed) == (4, 6)
    assert parsed.notes == [f"{file}: max_steps 3 has no effect: {file}: train_iters 4 comes after it"]


def test_dashes_equals_quotes_and_empty_strings():
    found = values("--max-seq-length=64", "--fp16_opt_level", "'O2'", "--sharding", "", "--learning_rate", "1e-4")
    assert (found["max_seq_length"], found["fp16_opt_level"], found["sharding"]) == (64, "O2", "")
    assert found["learning_rate"] == 1e-4
    assert values("--lr_scheduler_type", "COSINE")["lr_scheduler_type"] == "cosine"


def test_several_words_where_they_make_sense():
    assert values("--sharding", "stage2", "offload")["sharding"] == "stage2 offload"
    assert values("--tensor_parallel_config", "a", "b")["tensor_parallel_config"] == "a b"
    assert values("--input_dir", "0.3", "p", "0.7", "q")["input_dir"] == "0.3 p 0.7 q"
    assert values("--report_to", "tensorboard,wandb")["report_to"] == ["tensorboard", "wandb"]


def test_whole_numbers():
    assert values("--max_steps", "1e4")["max_steps"] == 10000
    assert values("--max_steps", "-1")["max_steps"] == -1
    assert values("--save_total_limit", "none")["save_total_limit"] is None


def test_an_unambiguous_prefix_is_accepted_and_logged():
    parsed = parse(PRETRAIN, ["--max_seq_leng", "64"])
    assert parsed.value("max_seq_length") == 64
    assert parsed.notes == ["--max_seq_leng is taken as --max_seq_length"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--max_s", "1"], "ambiguous.*--max_seq_length.*--max_steps"),
        (["--learning_rat2", "1"], "unknown; did you mean --learning_rate"),
        (["--zzz"], "--help"),
        (["--max_steps", "1.5"], "'1.5'.*whole number"),
        (["--learning_rate", "fast"], "'fast'.*number"),
        (["--fp16", "Flase"], "'Flase'.*true or false"),
        (["--do_eval", ""], "true or false"),
        (["--fp16_opt_level", "O3"], "'O3'.*O0, O1, O2"),
        (["--output_dir"], "needs a value"),
        (["--output_dir", "a", "b"], "unexpected word 'b'"),
        (["stray"], "unexpected word 'stray'"),
        (["-x", "1"], "unexpected word '-x'"),
        (["--no_seed"], "is not a boolean flag"),
        (["--sep_parallel_degree", "2"], "segment parallelism"),
        (["missing.json"], "missing.json cannot be read"),
    ],
)
def test_refused(argv, says):
    with pytest.raises(UsageError, match=says):
        parse(PRETRAIN, argv)


def test_all_errors_are_reported_together():
    with pytest.raises(UsageError) as caught:
        parse(PRETRAIN, ["--max_stepz", "1", "--seed", "x", "--fp16", "maybe"])
    assert len(str(caught.value).splitlines()) == 3


def test_aliases_and_ignored_arguments():
    parsed = parse(PRETRAIN, ["--micro_batch_size", "3", "--use_flash_attention", "0", "--model_type", "gpt"])
    assert parsed.value("per_device_train_batch_size") == 3
    assert parsed.sources["per_device_train_batch_size"] == Source(Origin.CLI, "--micro_batch_size")
    assert [note.split(" ")[0] for note in parsed.notes] == ["--use_flash_attention", "--model_type"]
    assert parse(PRETRAIN, ["--autotuner_benchmark", "0", "--sep_parallel_degree", "-1"]).notes == []


def test_json_then_overrides(tmp_path):
    file = tmp_path / "args.json"
    file.write_text(
        json.dumps(
            {
                "max_steps": 7,
                "do_train": 1,
                "fp16": True,
                "recompute": "0",
                "learning_rate": 3e-05,
                "report_to": ["tensorboard"],
                "save_total_limit": None,
                "split": "1,1,1",
            }
        )  # fmt: skip
    )
    parsed = parse(PRETRAIN, [str(file), "--max_steps", "9"])
    found = {name: parsed.value(name) for name in parsed.sources}
    assert (found["max_steps"], found["do_train"], found["fp16"], found["recompute"]) == (9, True, True, False)
    assert (found["learning_rate"], found["report_to"], found["save_total_limit"]) == (3e-05, ["tensorboard"], None)
    assert parsed.sources["max_steps"].text == "--max_steps"
    assert parsed.sources["fp16"] == Source(Origin.FILE, str(file))
    assert parsed.sources["seed"] == DEFAULT and parsed.is_default("seed")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        ("[1]", "no JSON object"),
        ('{"max_stepz": 1}', "max_stepz is unknown; did you mean --max_steps"),
        ('{"split": {"a": 1}}', "nested"),
    ],
)
def test_bad_json(tmp_path, content, says):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UsageError, match=says):
        parse(PRETRAIN, [str(tmp_path / "a.json")])


def test_help_names_every_flag_with_its_meaning():
    text = " ".join(help_text("run_pretrain.py", "x", PRETRAIN).split())  # without line breaks
    for name, (f, _) in PRETRAIN.flags().items():
        assert f"--{name} <" in text and f.metadata["help"] in text
        assert len(f.metadata["help"]) > 9, name


def test_alias_tables_are_disjoint():
    flags = set(PRETRAIN.flags())
    renamed, ignored, refused = set(PRETRAIN.renamed), set(PRETRAIN.ignored), set(PRETRAIN.refused)
    assert not (flags & (renamed | ignored | refused)) and not (ignored & refused) and not (renamed & ignored)
    assert set(PRETRAIN.renamed.values()) <= flags


def test_a_prefix_prefers_arguments_with_an_effect():
    assert parse(SFT, ["--eval_datase", "x"]).value("eval_dataset_name_or_path") == "x"
    with pytest.raises(UsageError, match="--fsd is unknown"):
        parse(PRETRAIN, ["--fsd", "x"])  # the beginning of two that are refused or do nothing
    assert (
        parse(PRETRAIN, ["--use_flash_attenti", "1"]).notes[0]
        == "--use_flash_attenti is taken as --use_flash_attention"
    )


def test_put_records_the_source_of_changed_values_only():
    parsed = parse(PRETRAIN, ["--seed", "3", "--learning_rate", "nan"])
    before = parsed[TrainingArguments]
    training = parsed.put(replace(before, seed=4, max_steps=7, save_steps=before.save_steps), derived("x"))
    assert parsed[TrainingArguments] is training and (training.seed, training.max_steps) == (4, 7)
    assert parsed.sources["seed"] == parsed.sources["max_steps"] == derived("x")
    assert parsed.sources["save_steps"] == DEFAULT and parsed.sources["learning_rate"].origin is Origin.CLI
    parsed.put(replace(training, seed=5))
    assert (parsed.value("seed"), parsed.sources["seed"]) == (5, derived("x"))


@pytest.mark.parametrize(
    ("words", "origin"),
    [(["--seed", "1"], Origin.CLI), (["-c", "FILE", "-o", "seed=1"], Origin.OVERRIDE), (["-c", "FILE"], Origin.FILE)],
)
def test_origins(tmp_path, words, origin):
    (tmp_path / "a.yaml").write_text("seed: 9\n")
    parsed = parse(PRETRAIN, [word.replace("FILE", str(tmp_path / "a.yaml")) for word in words])
    assert parsed.sources["seed"].origin is origin and parsed.given("seed")
    assert parsed.is_default("max_steps") and not parsed.given("max_steps")

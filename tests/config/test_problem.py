"""Errors name flags as the user typed them, report all problems together, and do not change values."""

import json
from dataclasses import asdict

import pytest

from gptlm.cli import main
from gptlm.commands.evaluate import parse_evaluate
from gptlm.commands.merge_lora import parse_merge
from gptlm.commands.plan import parse_plan
from gptlm.commands.predict import parse_predict
from gptlm.commands.pretrain import PRETRAIN, parse_pretrain
from gptlm.commands.sft import parse_sft
from gptlm.config.parser import parse
from gptlm.errors import GptlmError, UsageError, named, with_flags_shown
from gptlm.model.presets import Shape


def save_model(folder, positions=64):
    """A folder with the config of a model of width 32; weights are a file nobody reads."""
    sizes = asdict(Shape(2, 32, 2, 64, 384, positions))
    names = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}
    names |= {"intermediate_size": "n_inner", "vocab_size": "vocab_size", "max_position_embeddings": "n_positions"}
    folder.mkdir(parents=True)
    config = {"model_type": "gpt2"} | {names[name]: size for name, size in sizes.items()}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_reference_is_shown_as_typed_and_its_place_once():
    text = f"{named('lr')} 3: {named('lr')} and {named('seed')} or {named('seed')}, /lr/seed"
    typed = {"lr": "Optimizer.lr (x.yaml:3)"}
    assert with_flags_shown(text, typed) == "Optimizer.lr (x.yaml:3) 3: Optimizer.lr and --seed or --seed, /lr/seed"
    assert str(UsageError(f"{named('seed')} 1")) == "--seed 1"


# A path whose parts are names of flags that were typed under other names, in every command.
PARTS = "learning_rate/max_steps/output_dir/src_length/batch_size"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (parse_pretrain, "--num-layers 3 --lr 1e-3 --train-iters 5 --save o --data-path d --model_name_or_path PATH"),
        (
            parse_pretrain,
            "--lr -1 --train-iters 5 --save PATH --data-path d --resume_from_checkpoint PATH --split PATH",
        ),
        (
            parse_pretrain,
            "--continue_training --lr 1 --train-iters 5 --save o --data-path d --model_name_or_path MODEL",
        ),
        (parse_sft, "--lr 1e-3 --max_lr 1 --max_source_length 3 --output_dir o --model_name_or_path PATH"),
        (parse_sft, "--max_lr 1 --max_source_length 3 --vocab_size 9 --output_dir o --model_name_or_path MODEL"),
        (parse_evaluate, "--task TEXT --eval_path t --micro_batch_size 2 --model_name_or_path PATH"),
        (parse_evaluate, "--task TEXT --eval_path t --micro_batch_size 2 --seq_length 99 --model_name_or_path MODEL"),
        (parse_predict, "--max_source_length 5 --input PATH --prompt PATH"),
        (parse_predict, "--max_source_length 0 --device PATH"),
    ],
)
def test_values_are_left_alone(command, words, tmp_path):
    """Of what is shown of a value nothing is renamed, whatever flags were typed."""
    missing = tmp_path / PARTS
    model = save_model(tmp_path / "learning_rate" / "max_steps" / "src_length" / "hidden_size" / "m")
    typed = words.replace("PATH", str(missing)).replace("MODEL", str(model)).split()
    arguments = [typed, {"WORLD_SIZE": "1"}] if command in (parse_pretrain, parse_sft) else [typed]
    with pytest.raises(GptlmError) as error:
        command(*arguments)
    shown = [word.strip("':;,") for word in str(error.value).split() if "/" in word]
    paths = [word for word in shown if word.startswith(str(tmp_path))]
    known = (str(missing), str(model), f"{model}/config.json")
    assert all(path in known for path in paths), str(error.value)
    assert "--lr/" not in str(error.value) and "\0" not in str(error.value)


def test_merging_leaves_values_alone(tmp_path):
    save_model(tmp_path / "output_path" / "lora_path")
    words = ["--merge_model_path", str(tmp_path / "output_path"), "--lora_path", ""]
    with pytest.raises(UsageError) as error:
        parse_merge(words)
    assert str(error.value) == "--lora_path is missing"


def test_a_value_is_never_mistaken_for_an_argument(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"output_dir": named("seed")}))
    with pytest.raises(UsageError, match="output_dir: the value holds a NUL character"):
        parse(PRETRAIN, [str(tmp_path / "a.json")])


def test_messages_follow_the_arguments_of_several_libraries():
    """Names follow the command: Megatron's, PaddleNLP's older ones, and a file's keys."""
    words = "--num-layers 3 --hidden-size 30 --num-attention-heads 4 --lr -1 --train-iters 5 --save o --data-path d"
    with pytest.raises(UsageError) as error:
        parse_pretrain(words.split(), {})
    lines = str(error.value).splitlines()
    assert lines == [
        "--hidden-size 30 is not a multiple of --num-attention-heads 4; 28 would be",
        "--lr -1: expected at least 0",
    ]


def test_all_problems_at_once():
    words = "--bf16 --fp16 --tensor_parallel_degree 3 --model_name_or_path nowhere --input_dir d --max_steps 0"
    with pytest.raises(UsageError) as error:
        parse_pretrain([*words.split(), "--zero_stage", "7", "--world_size", "0"], {}, printing=False)
    text = str(error.value)
    for said in (
        "--world_size 0 works only with --print_config",
        "--model_name_or_path 'nowhere' is neither",
        "--fp16 and --bf16 exclude each other",
        "--output_dir is missing",
        "--max_steps 0: expected",
        "--zero_stage 7: expected 0 to 3",
    ):
        assert said in text, (said, text)
    with pytest.raises(UsageError) as error:
        parse_pretrain(words.split(), {"WORLD_SIZE": "4"})
    assert "--tensor_parallel_degree (3) x --pipeline_parallel_degree (1) = 3 does not divide" in str(error.value)
    assert "--fp16 and --bf16 exclude each other" in str(error.value) and "'nowhere'" in str(error.value)


def test_all_problems_of_fine_tuning_at_once():
    words = "--bf16 --fp16 --model_name_or_path nowhere --src_length 0 --lora --lora_rank 0 --tensor_parallel_degree 3"
    with pytest.raises(UsageError) as error:
        parse_sft(words.split(), {"WORLD_SIZE": "4"})
    for said in (
        "--bf16 exclude each other",
        "'nowhere'",
        "--src_length 0",
        "--lora_rank 0",
        "--output_dir is missing",
        "degree (3)",
    ):
        assert said in str(error.value), said


def test_every_line_of_an_error_has_command_and_rank(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main("pretrain --bf16 --fp16 --global_batch_size 3 --per_device_train_batch_size 2".split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("gptlm pretrain: rank 1: error: ") for line in lines), lines
    assert (
        "(4) --output_dir is missing" in lines[2] and "(5) --input_dir is missing" in lines[2]
    )  # the last has all the rest


def test_no_python_in_messages():
    parsed = parse(PRETRAIN, "--report_to wandb 100 --report_to none --do_eval --do_eval false".split())
    assert parsed.notes == [
        "--report_to wandb 100 has no effect: --report_to none comes after it",
        "--do_eval true has no effect: --do_eval false comes after it",
    ]


PADDLENLP = {  # llm/config/gpt-3/sft_argument.json of PaddleNLP, with another model
    "dataset_name_or_path": "./data", "output_dir": "./checkpoints/sft_ckpts", "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4, "per_device_eval_batch_size": 8, "eval_accumulation_steps": 16,
    "num_train_epochs": 3, "learning_rate": 3e-05, "warmup_steps": 30, "logging_steps": 1,
    "evaluation_strategy": "epoch", "save_strategy": "epoch", "src_length": 1024, "max_length": 2048, "fp16": True,
    "fp16_opt_level": "O2", "do_train": True, "do_eval": True, "disable_tqdm": True, "load_best_model_at_end": True,
    "eval_with_do_generation": False, "metric_for_best_model": "accuracy", "recompute": True, "save_total_limit": 1,
    "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "lora": True, "zero_padding": False,
    "unified_checkpoint": True, "use_flash_attention": False,
}  # fmt: skip


@pytest.mark.parametrize("rate", [3e-05, 3e-04])
def test_paddlenlp_s_own_argument_files_run(tmp_path, rate):
    """max_length is an upper limit: it is cut to the position table, with one line."""
    model = save_model(tmp_path / "m", positions=1024)
    file = tmp_path / "sft_argument.json"
    file.write_text(json.dumps(PADDLENLP | {"model_name_or_path": str(model), "learning_rate": rate}))
    run = parse_sft([str(file)], {})
    assert (run.data.max_length, run.data.src_length, run.shape.max_position_embeddings) == (1024, 1024, 1024)
    lines = [note for note in run.notes if "max_length" in note]
    assert len(lines) == 1 and "2048: the position table has 1024 rows" in lines[0]
    assert run.sources["max_length"].text.startswith("derived: the position table")
    short = parse_sft([str(file), "--max_length", "100"], {})
    assert short.data.max_length == 100 and not any("max_length" in note for note in short.notes)


def test_all_problems_of_a_plan_at_once():
    with pytest.raises(UsageError) as error:
        parse_plan("--num_gpus 0 --bf16 --fp16 --max_steps 0".split())
    assert [said in str(error.value) for said in ("--num_gpus 0", "--bf16 exclude each other", "--max_steps 0")] == [
        True
    ] * 3

"""Megatron's and OneFlow's training commands, the configurations we ship, and one run in several compat modes."""

import dataclasses
import json
from importlib import resources
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from gptlm.cli import main
from gptlm.commands.pretrain import PRETRAIN, parse_pretrain
from gptlm.compat import megatron
from gptlm.compat.defaults import DEFAULTS
from gptlm.config.run import with_epochs_counted
from gptlm.errors import UsageError
from gptlm.launcher.args import parse_launch
from gptlm.planner.args import sizes_of
from tests.conftest import ROOT

ONEFLOW = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 8 "
    "--num-gpus-per-node 1 --train-iters 500000 --learning-rate 0.00015 --dataset gpt_sample_dataset_text_document "
    "--seq-length 1024 --split 949,50,1 --min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 "
    "--lr-warmup-fraction 0.01 --weight-decay 1e-2 --optimizer adamw --clip-grad 1.0 --vocab-size 50257 "
    "--load checkpoint "
    "--save checkpoint --save-interval 10000 --log-interval 100 --checkpoint-activations --multihead-attention-fusion "
    "--fp16"
)
MEGATRON = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 4 --global-batch-size 16 --lr 1.5e-4 --min-lr 1.5e-5 --train-iters 500000 "
    "--lr-decay-iters 320000 "
    "--lr-decay-style cosine --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0 --data-path my-data "
    "--save out "
    "--save-interval 1000 --fp16"
)


def resolve(text, world=1, printing=True, environment=None):
    words = text.split() if isinstance(text, str) else [*map(str, text)]
    more = ["--world_size", str(world)] if printing and environment is None else []
    return parse_pretrain([*words, *more], environment or {}, printing=printing)


def shown(text, world=1):
    return json.loads(resolve(text, world).as_json())


def refused(text, says, **more):
    with pytest.raises(UsageError) as error:
        resolve(text, **more)
    assert says in str(error.value), error.value


def test_the_command_of_oneflow_s_document():
    found = shown(ONEFLOW)
    wanted = {
        "num_hidden_layers": 24, "gradient_accumulation_steps": 2, "global_batch_size": 8, "max_steps": 500000,
        "learning_rate": 1.5e-4, "min_learning_rate": 1e-5, "lr_scheduler_type": "oneflow_cosine", "lr_start_step": 0,
        "warmup_steps": 3200, "decay_steps": 320000, "input_dir": "gpt_sample_dataset_text_document", "seed": 12345,
        "max_seq_length": 1024, "max_position_embeddings": 1024, "vocab_size": 50304, "output_dir": "checkpoint",
        "resume_from_checkpoint": None, "save_steps": 10000, "logging_steps": 100, "recompute": True, "fp16": True,
        "fp16_opt_level": "O1", "scale_loss": 2**32, "loss_scale_window": 1000, "log_format": "oneflow",
        "data_order": "megatron", "do_train": True, "do_eval": False, "max_grad_norm": 1, "weight_decay": 0.01,
    }  # fmt: skip
    assert {name: found["run"][name] for name in wanted} == wanted
    assert found["from"]["max_steps"] == "--train-iters" and found["from"]["seed"] == "default of oneflow"
    assert found["from"]["gradient_accumulation_steps"] == "derived: 8 / 4"
    fusion, order = found["notes"]
    assert "--multihead-attention-fusion is always on here: query" in fusion and "std::shuffle" in order


def test_megatron_has_its_own_defaults():
    found = shown(MEGATRON)
    wanted = {
        "seed": 1234, "lr_scheduler_type": "cosine", "lr_start_step": 0, "fp16_opt_level": "O2", "hysteresis": 2,
        "do_eval": True, "eval_steps": 1000, "eval_iters": 400, "test_iters": 400, "gradient_accumulation_steps": 4,
        "per_device_eval_batch_size": 4, "log_format": "megatron", "vocab_size": 50304, "min_loss_scale": 1,
    }  # fmt: skip
    assert {name: found["run"][name] for name in wanted} == wanted
    assert found["from"]["eval_iters"] == "derived: 100 x 4 micro-batches"
    run = shown("--num-layers 2 --hidden-size 8 --num-attention-heads 2 --lr 1 --train-iters 3")["run"]
    assert (run["lr_scheduler_type"], run["min_learning_rate"], run["split"]) == ("linear", 0, "969,30,1")
    assert run["save_strategy"] == "no"


@pytest.mark.parametrize(
    ("more", "flag", "value"),
    [
        ("--zero-stage 2", "sharding", "stage2"),
        ("--zero-stage 0", "sharding", ""),
        ("--reset-position-ids", "document_masking", "position"),
        ("--reset-attention-mask --reset-position-ids", "document_masking", "attention"),
        ("--reset-position-ids --reset-attention-mask", "document_masking", "attention"),
        ("--eod-mask-loss", "eod_mask_loss", True),
        ("--lr-decay-style constant", "lr_scheduler_type", "constant_with_warmup"),
        ("--recompute-granularity selective", "recompute_granularity", "core_attn"),
        ("--optimizer adam", "optim", "adamw"),
        ("--eval-iters 0", "do_eval", False),
        ("--deepspeed_config ds_configs/zero2.json", "deepspeed", "ds_configs/zero2.json"),
        ("--tensor-model-parallel-size 2", "vocab_size", 50432),
        ("--make-vocab-size-divisible-by 64 --vocab-size 1000", "vocab_size", 1024),
        ("--make-vocab-size-divisible-by 0 --vocab-size 1000", "vocab_size", 1000),
        ("--init-method-std 0.006", "initializer_range", 0.006),
        ("--tensorboard-dir tb", "report_to", ["tensorboard"]),
        ("--bf16", "bf16", True),
        ("--compat oneflow", "lr_scheduler_type", "oneflow_cosine"),
        ("--dialect oneflow", "lr_scheduler_type", "oneflow_cosine"),
        ("--log_format paddlenlp", "log_format", "paddlenlp"),
    ],
)
def test_arguments_that_others_follow_from(more, flag, value, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = MEGATRON.replace(" --fp16", "") if "bf16" in more else MEGATRON
    world = 2 if "zero" in more or "tensor-model" in more else 1
    assert shown(f"{text} {more}", world)["run"][flag] == value


# Every flag of OneFlow-Benchmark's oneflow_gpt/config.py -> our flag, "noted", or "refused" for a value that asks.
ONEFLOW_FLAGS = {
    "num-layers 2": "num_hidden_layers",
    "hidden-size 8": "hidden_size",
    "num-attention-heads 2": "num_attention_heads",
    "make-vocab-size-divisible-by 128": "make_vocab_size_divisible_by",
    "attention-dropout 0.1": "attention_probs_dropout_prob",
    "hidden-dropout 0.1": "hidden_dropout_prob",
    "weight-decay 0.01": "weight_decay",
    "clip-grad 1.0": "max_grad_norm",
    "adam-beta1 0.9": "adam_beta1",
    "adam-beta2 0.999": "adam_beta2",
    "adam-eps 1e-8": "adam_epsilon",
    "micro-batch-size 2": "per_device_train_batch_size",
    "global-batch-size 4": "global_batch_size",
    "num-accumulation-steps 2": "gradient_accumulation_steps",
    "checkpoint-activations": "recompute",
    "train-iters 9": "max_steps",
    "train-samples 90": "refused",
    "optimizer adamw": "optim",
    "optimizer sgd": "optim",
    "no-scale-tril-softmax-dropout-fusion": "noted",
    "no-bias-gelu-fusion": "noted",
    "no-bias-dropout-fusion": "noted",
    "multihead-attention-fusion": "noted",
    "log ./output": "noted",
    "log-interval 100": "logging_steps",
    "metric-print-format table": "metric_print_format",
    "init-method-std 0.02": "initializer_range",
    "learning-rate 1e-3": "learning_rate",
    "lr-decay-style cosine": "lr_scheduler_type",
    "lr-decay-iters 9": "decay_steps",
    "lr-warmup-fraction 0.1": "warmup_fraction",
    "lr-warmup-iters 1": "warmup_steps",
    "min-lr 0.0": "min_learning_rate",
    "save out": "output_dir",
    "load in": "load",
    "save-interval 3": "save_steps",
    "save-last": "noted",
    "save-init": "refused",
    "fp16": "fp16",
    "loss-scale 128": "loss_scale",
    "initial-loss-scale 4294967296": "scale_loss",
    "loss-scale-window 1000": "loss_scale_window",
    "no-query-key-layer-scaling": "noted",
    "tensor-model-parallel-size 1": "tensor_parallel_degree",
    "pipeline-model-parallel-size 1": "pipeline_parallel_degree",
    "num-gpus-per-node 1": "num_gpus_per_node",
    "num-nodes 1": "num_nodes",
    "node-ips 10.0.0.1,10.0.0.2": "node_ips",
    "ctrl-port 50051": "ctrl_port",
    "rank 0": "rank",
    "use-rdma": "noted",
    "dataset gpt_text_document": "input_dir",
    "split 969,30,1": "split",
    "seed 12345": "seed",
    "vocab-size 50257": "vocab_size",
    "seq-length 16": "max_seq_length",
    "use-external-dataset": "noted",
    "profile-transformer-layer": "noted",
}


@pytest.mark.parametrize(("words", "meaning"), ONEFLOW_FLAGS.items())
def test_each_flag_of_oneflow(words, meaning):
    base = "--num_hidden_layers 2 --hidden_size 8 --num_attention_heads 2 --max_seq_length 16 --max_steps 9"
    if meaning == "refused":
        refused(f"{base} --{words}", f"--{words.split()[0]}")
        return
    run = resolve(f"{base} --{words}")
    if meaning == "noted":
        assert any(note.startswith(f"--{words.split()[0]} ") for note in run.notes)
    else:
        name = words.split()[0].replace("-", "_")
        assert PRETRAIN.renamed.get(name, name) == meaning and meaning in PRETRAIN.flags()
        assert run.sources[meaning].text == f"--{words.split()[0]}" or run.sources[meaning].text.startswith("derived")


@pytest.mark.parametrize("mode", DEFAULTS)
def test_defaults_have_the_types_of_their_arguments(mode):
    """They are set by name, which mypy cannot check."""
    hints = {name: hint for group in PRETRAIN.groups for name, hint in get_type_hints(group).items()}
    for name, value in DEFAULTS[mode].items():
        if isinstance(value, list):
            assert hints[name] == list[type(value[0])], name
        else:
            kinds = {hints[name], *get_args(hints[name])}
            assert type(value) in kinds or (type(value) is int and float in kinds), name


def test_a_note_about_an_alias_is_logged_once():
    run = resolve(f"{MEGATRON} --lr-warmup-iters 30", printing=False)
    notes = [note for note in with_epochs_counted(run, 10).notes if "--lr-warmup-iters 30 takes precedence" in note]
    assert notes == ["--lr-warmup-fraction 0.01 has no effect: --lr-warmup-iters 30 takes precedence"]
    assert not any("--warmup_steps" in note for note in with_epochs_counted(run, 10).notes)


def test_no_alias_has_two_meanings():
    tables = (megatron.RENAMED, megatron.IGNORED, megatron.REFUSED)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    assert not {*names} & PRETRAIN.flags().keys()
    for name, flag in PRETRAIN.renamed.items():
        assert flag in PRETRAIN.flags(), name
    assert {*megatron.ONEFLOW, *megatron.MEGATRON} <= PRETRAIN.names()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{MEGATRON} --batch-size 4", "use --micro-batch-size"),
        (f"{MEGATRON} --model-parallel-size 4", "use --tensor-model-parallel-size"),
        (f"{MEGATRON} --zero-stage 4", "--zero-stage 4: expected 0 to 3"),
        (f"{MEGATRON} --swiglu", "GPT-2's feed-forward layer is built in"),
        (f"{MEGATRON} --vocab-file gone.json", "--vocab-file gone.json cannot be read"),
        (MEGATRON.replace("--micro-batch-size 4", "--micro-batch-size 3"), "is not a multiple of --micro-batch-size 3"),
        (MEGATRON.replace("--micro-batch-size 4", "--micro-batch-size 0"), "--micro-batch-size 0: expected at least 1"),
        (MEGATRON.replace("--num-layers 24", "--num-layers 0"), "--num-layers 0: expected at least 1"),
        (f"{MEGATRON} --tensor-model-parallel-size 2", "--tensor-model-parallel-size (2) x"),
        (MEGATRON.replace("--lr 1.5e-4", "--lr -1"), "--lr -1: expected at least 0"),
        (f"{MEGATRON} --lr-decay-style exponential", "--lr-decay-style 'exponential': expected one of linear"),
    ],
)
def test_errors_name_arguments_as_typed(text, says):
    refused(text, says)


def test_processes_that_the_command_asks_for():
    text = ONEFLOW.replace("--num-gpus-per-node 1", "--num-gpus-per-node 4 --num-nodes 2")
    text = text.replace("--global-batch-size 8", "--global-batch-size 64") + " --node-ips a,b"
    launch = ("--num_gpus_per_node", "4", "--num_nodes", "2", "--node_ips", "a,b")
    assert resolve(text, printing=False).launch == launch
    assert not resolve(text, printing=False, environment={"WORLD_SIZE": "8"}).launch
    assert not resolve(ONEFLOW, printing=False).launch
    assert json.loads(parse_pretrain(text.split(), {}, printing=True).as_json())["run"]["world_size"] == 8
    refused(
        text,
        "4 x --num-nodes 2 are 8 processes, the launcher started 4",
        printing=False,
        environment={"WORLD_SIZE": "4"},
    )


def test_nodes_that_the_command_asks_for():
    four = "--num-gpus-per-node 2 --node-ips a,b,c,e"
    base = ONEFLOW.replace("--num-gpus-per-node 1", "").replace("--global-batch-size 8", "--global-batch-size 64")
    found = resolve(f"{base} {four} --rank 3 --ctrl-port 50051", printing=False)
    wanted = "--num_gpus_per_node 2 --num_nodes 4 --node_ips a,b,c,e --rank 3 --ctrl_port 50051"
    assert found.launch == tuple(wanted.split())
    found = resolve(f"{base} --num-nodes 2 --node-ips a,b", printing=False)
    assert found.launch == tuple("--num_gpus_per_node 1 --num_nodes 2 --node_ips a,b".split())
    for printing in (True, False):
        rest = {"printing": printing, "environment": {}}
        says = "--node-ips names 3 addresses, --num-nodes is 4; give one address for each node"
        refused(f"{base} --num-nodes 4 --node-ips a,b,c --rank 7", says, **rest)
        refused(f"{base} {four} --rank 4", "--rank 4: expected 0 to 3 with 4 nodes", **rest)
        refused(f"{base} --rank 1", "--rank 1: expected 0 without --num_nodes", **rest)


def test_what_differs_in_oneflow_s_sample_order_is_logged_once():
    for more, count in {"": 1, "--data_order megatron": 0, "--use-external-dataset": 0}.items():
        run = resolve(f"{ONEFLOW} {more}")
        assert run.data.data_order == "megatron"
        assert sum("--data_order megatron: OneFlow's own loader shuffles" in note for note in run.notes) == count
    assert not any("std::shuffle" in note for note in resolve(MEGATRON).notes)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-c pretrain_345M", "--dataset is missing: the folder with token files"),
        ("-c distribute_pretrain_4n8d --dataset d", "--node_ips is missing: the addresses of the 4 nodes"),
        ("--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --data-path d", "--save is missing"),
    ],
)
def test_print_config_fails_where_a_start_would(words, says, capsys):
    """It shows the run all the same."""
    for more in ((), ("--print_config",)):
        assert main(["pretrain", *words.split(), *more]) == 2
        shown = capsys.readouterr()
        assert says in shown.err, shown.err
    printed = json.loads(shown.out)
    assert printed["run"]["num_hidden_layers"] and any(says in note for note in printed["notes"])


def test_the_rank_is_compared_with_the_launcher_s():
    text = ONEFLOW.replace("--num-gpus-per-node 1", "--num-gpus-per-node 2 --num-nodes 2 --rank 1")
    text = text.replace("--global-batch-size 8", "--global-batch-size 64")
    torchrun = {"WORLD_SIZE": "4", "GROUP_RANK": "1"}
    for environment in (torchrun, {"WORLD_SIZE": "4"}):
        run = resolve(text, printing=False, environment=environment)
        assert any("--rank 1 has no effect" in note for note in run.notes) == (environment is not torchrun)
        assert not run.launch
    refused(text, "the launcher started this node as 0", printing=False, environment=torchrun | {"GROUP_RANK": "0"})


def test_load(tmp_path):
    base = MEGATRON.replace("--save out", f"--save {tmp_path}/out")
    assert resolve(f"{base} --load {tmp_path}/out").training.resume_from_checkpoint is None
    gone = resolve(f"{base} --load {tmp_path}/gone")
    assert gone.training.resume_from_checkpoint is None and any("starts at step 0" in note for note in gone.notes)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "checkpoint-1").mkdir()
    assert resolve(f"{base} --load {tmp_path}/old").training.resume_from_checkpoint == f"{tmp_path}/old"


def test_the_size_of_a_vocabulary_is_read_from_its_file(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({str(i): i for i in range(1000)}))
    assert shown(f"{MEGATRON} --vocab-file {tmp_path}/vocab.json --merge-file m")["run"]["vocab_size"] == 1024


def test_mixed_arguments_are_logged_and_the_last_one_takes_precedence():
    found = shown(f"{MEGATRON} --max_steps 7 --per_device_train_batch_size 2 --lr 3e-4 --learning_rate 2e-4")
    assert (found["run"]["max_steps"], found["run"]["per_device_train_batch_size"]) == (7, 2)
    assert found["run"]["learning_rate"] == 2e-4 and found["from"]["learning_rate"] == "--learning_rate"
    assert sum("arguments of several libraries are mixed" in note for note in found["notes"]) == 1


# One run in three compat modes --------------------------------------------------------------------------------------

PADDLE = (
    "--num_hidden_layers 2 --hidden_size 64 --num_attention_heads 2 --max_seq_length 128 --input_dir d --output_dir o "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_steps 20 --learning_rate 1e-3 --seed 5 "
    "--min_learning_rate 1e-4 --lr_scheduler_type cosine --warmup_fraction 0.1 --decay_steps 15 --weight_decay 0.01 "
    "--max_grad_norm 0.5 --vocab_size 512 --max_position_embeddings 128 --split 90,8,2 --logging_steps 3 "
    "--save_steps 10 "
    "--bf16 --fp16_opt_level O2 --recompute --do_train --disable_tqdm --report_to none --data_order megatron "
    "--per_device_eval_batch_size 2 --hidden_dropout_prob 0.0 --attention_probs_dropout_prob 0.0"
)
MEGA = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 128 --data-path d --save o "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 1e-3 --seed 5 --min-lr 1e-4 "
    "--lr-decay-style cosine "
    "--lr-warmup-fraction 0.1 --lr-decay-iters 15 --weight-decay 0.01 --clip-grad 0.5 --vocab-size 512 "
    "--max-position-embeddings 128 --split 90,8,2 --log-interval 3 --save-interval 10 --bf16 --checkpoint-activations "
    "--hidden-dropout 0.0 --attention-dropout 0.0 --eval-iters 0 --lr_start_step 1 --log_format paddlenlp "
    "--num-workers 0 --loss-scale-window 2000 --hysteresis 1 --initial-loss-scale 32768"
)
FLEETX = """\
Global: {seed: 5, global_batch_size: 8, local_batch_size: 8, micro_batch_size: 2}
Engine:
  max_steps: 20
  logging_freq: 3
  eval_freq: -1
  mix_precision: {enable: True, dtype: bfloat16, level: O2}
  save_load: {save_steps: 10, output_dir: o}
Model:
  {vocab_size: 512, hidden_size: 64, num_layers: 2, num_attention_heads: 2, ffn_hidden_size: , hidden_dropout_prob: 0.0,
   attention_probs_dropout_prob: 0.0, max_position_embeddings: 128, use_recompute: True}
Data: {Train: {dataset: {input_dir: d, split: [90, 8, 2], max_seq_len: 128}}}
Optimizer:
  weight_decay: 0.01
  lr: {decay_steps: 15, warmup_rate: 0.1, max_lr: 1e-3, min_lr: 1e-4}
  grad_clip: {clip_norm: 0.5}
"""


def values(run):
    return {name: value for group in run.groups for name, value in dataclasses.asdict(group).items()}


def test_three_compat_modes_one_run(tmp_path):
    (tmp_path / "x.yaml").write_text(FLEETX)
    (tmp_path / "flat.yaml").write_text("\n".join(f"{w[0]}: {w[1]}" for w in pairs(PADDLE)))
    paddle = resolve(PADDLE)
    mega, fleetx = resolve(MEGA), resolve(f"-c {tmp_path}/x.yaml --log_format paddlenlp")
    flat = resolve(f"-c {tmp_path}/flat.yaml")
    for other in (mega, fleetx, flat):
        assert values(other) == values(paddle)
        assert (other.shape, other.dims, other.batch) == (paddle.shape, paddle.dims, paddle.batch)


def pairs(text):
    words = text.split()
    return [
        (word[2:], words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else "true")
        for at, word in enumerate(words)
        if word.startswith("--")
    ]


@pytest.mark.parametrize("text", [ONEFLOW, MEGATRON, PADDLE])
def test_a_resolved_run_is_an_argument_file(text, tmp_path):
    run = resolve(text, printing=False, environment={})
    (tmp_path / "run.json").write_text(run.as_arguments())
    again = resolve([tmp_path / "run.json"], printing=False, environment={})
    assert values(again) == values(run) and again.shape == run.shape


# What is shipped ----------------------------------------------------------------------------------------------------

CONFIGS = Path(str(resources.files("gptlm"))) / "configs"
RECIPES = {  # megatron.md's table: DP, accumulation, layers, width, length, global, micro, millions of parameters
    "gpt2-345m": (4, 1, 24, 1024, 1024, 16, 4, 354.9),
    "gpt-1.3b": (2, 2, 24, 2048, 1024, 32, 8, 1314.0),
    "gpt-2.7b": (2, 2, 32, 2560, 2048, 32, 8, 2652.0),
    "gpt-3.7b": (2, 2, 32, 3072, 2048, 16, 4, 3786.4),
    "gpt2-345m-without-mp": (8, 1, 24, 1024, 1024, 64, 8, 354.9),
}
SCRIPTS = {  # processes, tensor, pipeline, data, accumulation, millions of parameters
    "pretrain_117M": (1, 1, 1, 1, 1, 124),
    "pretrain_345M": (1, 1, 1, 1, 1, 355),
    "pretrain_1n8d_2x4x1_16_1536x16": (8, 4, 1, 2, 1, 534),
    "distribute_pretrain_2n4d": (8, 4, 1, 2, 1, 534),
    "distribute_pretrain_4n8d": (32, 8, 1, 4, 1, 1651),
    "distribute_pretrain_4n8d_2x4x4_512_2304x24": (32, 4, 4, 2, 32, 1651),
    "pretrain_with_container": (8, 8, 1, 1, 1, 1651),
    "distribute_pretrain_with_container": (32, 4, 4, 2, 32, 1651),
    "pretrain_with_profile": (1, 1, 1, 1, 1, 124),
}
FLEETX_SIZES = {"345M_single_card": 1, "1.3B_single_card": 1, "1.3B_dp8": 8, "6.7B_sharding16": 16, "13B_mp2_pp8": 16}


@pytest.mark.parametrize("name", RECIPES)
def test_the_8_card_recipes(name):
    run = parse_pretrain(["-c", name], {}, printing=True)
    data, accumulation, layers, width, length, total, micro, millions = RECIPES[name]
    assert (run.dims.world, run.dims.data, run.batch.accumulation) == (8, data, accumulation)
    assert (run.shape.num_hidden_layers, run.shape.hidden_size, run.data.max_seq_length) == (layers, width, length)
    assert (run.batch.total, run.batch.micro) == (total, micro)
    assert sizes_of(run).parameters / 1e6 == pytest.approx(millions, abs=0.06)
    assert (run.training.save_steps, run.data.eval_iters) == (100000, 10 * accumulation)
    assert run.training.output_dir == f"ckpts/ckpts_tmp/{FOLDERS[name]}" and run.training.log_format == "megatron"


FOLDERS = {
    "gpt2-345m": "345M",
    "gpt-1.3b": "1.3B",
    "gpt-2.7b": "2.7B",
    "gpt-3.7b": "3.7B",
    "gpt2-345m-without-mp": "345M_without_mp",
}


@pytest.mark.parametrize("name", [*RECIPES, "pretrain_345M"])
def test_load_of_a_file_follows_save(name, tmp_path, monkeypatch):
    """Both are one folder in the file; another --save must not resume from the file's."""
    monkeypatch.chdir(tmp_path)
    folder = FOLDERS.get(name)
    left = tmp_path / (f"ckpts/ckpts_tmp/{folder}" if folder else "checkpoint") / "checkpoint-5"
    left.mkdir(parents=True)
    words = ["-c", name, "--dataset", "d"]
    assert parse_pretrain([*words, "--save", "other"], {}, printing=True).training.resume_from_checkpoint is None
    assert parse_pretrain([*words, "-o", "save=other"], {}, printing=True).training.resume_from_checkpoint is None
    both = parse_pretrain([*words, "--save", "other", "--load", str(left.parent)], {}, printing=True)
    assert both.training.resume_from_checkpoint == str(left.parent)


def test_load_of_a_file_stays_where_it_is_another_folder(tmp_path):
    (tmp_path / "from" / "checkpoint-5").mkdir(parents=True)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"num-layers: 2\nhidden-size: 32\nnum-attention-heads: 2\nlr: 0.1\nsave: to\nload: {tmp_path}/from\n"
    )
    words = ["-c", str(file), "--data-path", "d", "--train-iters", "3", "--micro-batch-size", "1", "--save", "other"]
    run = parse_pretrain(words, {}, printing=True)
    assert run.training.resume_from_checkpoint == str(tmp_path / "from")


def test_the_launcher_is_told_what_a_file_asks_for():
    words = "-c distribute_pretrain_4n8d --dataset d --node-ips 10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4".split()
    run = parse_pretrain(words, {})
    plan = parse_launch([*run.launch, "-m", "gptlm", "pretrain", *words], is_own=lambda address: address == "10.0.0.3")
    assert (plan.processes, plan.nodes, plan.rank, plan.master) == (8, 4, 2, "10.0.0.1")


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_of_oneflow(name):
    run = parse_pretrain(["-c", name, "--dataset", "d"], {}, printing=True)
    world, tensor, pipeline, data, accumulation, millions = SCRIPTS[name]
    assert (run.dims.world, run.dims.tensor, run.dims.pipeline, run.dims.data) == (world, tensor, pipeline, data)
    assert run.batch.accumulation == accumulation
    assert sizes_of(run).parameters / 1e6 == pytest.approx(millions, rel=4e-3)
    assert run.training.log_format == "oneflow"


@pytest.mark.parametrize(("name", "world"), [*FLEETX_SIZES.items(), ("175B_mp8_pp16", 128)])
def test_fleetx_s_sizes(name, world):
    run = resolve(f"-c pretrain_gpt_{name}", world)
    billions = {"345M": 0.355, "1.3B": 1.314, "6.7B": 6.654, "13B": 12.865, "175B": 174.603}[name.partition("_")[0]]
    assert sizes_of(run).parameters / 1e9 == pytest.approx(billions, abs=6e-4)
    assert run.sources["hidden_size"].text.startswith("configs/fleetx/gpt/")


def test_every_shipped_file_is_named_above():
    names = {file.stem for file in CONFIGS.rglob("*.yaml")} - {"pretrain_gpt_base", "pretrain_gpt_1.3B_dp8_tuning"}
    names -= {"configs_345m_single_card", "configs_1.3B_single_card"}  # tests/documents
    assert names == {*RECIPES, *SCRIPTS} | {f"pretrain_gpt_{name}" for name in (*FLEETX_SIZES, "175B_mp8_pp16")}


def test_what_a_file_cannot_be(tmp_path):
    refused("-c gone.yaml", "there is no configuration gone.yaml; give a file, or one of configs_1.3B_single_card")
    refused("-o Model.hidden_size=3", "name one with -c FILE.yaml")
    refused("-c a.yaml -c b.yaml", "give one file")
    refused("-c", "-c needs a value")
    (tmp_path / "x.yaml").write_text("num_layers: 2\nseeed: 3\n")
    refused(f"-c {tmp_path}/x.yaml", f"seeed ({tmp_path}/x.yaml:2) is unknown; did you mean --seed?")
    (tmp_path / "x.yaml").write_text("seed: [1, [2]]\n")
    refused(f"-c {tmp_path}/x.yaml", "holds a nested value")


TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --train-iters 5 --save o --data-path d"


def test_a_split_without_validation_is_not_evaluated():
    """Megatron builds no validation data for an empty share and does not evaluate."""
    for split in ("1,0,0", "100,0,0", "98/0/2", "1"):
        run = resolve(f"{TINY} --split {split}", printing=False)
        assert (run.training.do_eval, run.training.evaluation_strategy) == (False, "no")
        lines = [note for note in run.notes if "leaves nothing to evaluate on: evaluations are skipped" in note]
        assert lines == [f"--split {split} leaves nothing to evaluate on: evaluations are skipped"]
    asked = resolve(f"{TINY} --split 1,0,0 --do_eval", printing=False)
    assert asked.training.do_eval and not any("skipped" in note for note in asked.notes)
    assert resolve(f"{TINY} --split 98,1,1", printing=False).training.do_eval
    asked = resolve(f"{TINY} --split 1,0,0 --eval_strategy steps", printing=False)  # as with --do_eval: an error later
    assert asked.training.do_eval and not any("are skipped" in note for note in asked.notes)


def test_no_batch_is_no_evaluation_in_every_compat_mode():
    ours = "--num_hidden_layers 2 --hidden_size 32 --num_attention_heads 2 --max_steps 5 --output_dir o --input_dir d"
    for words in (f"{TINY} --eval-iters 0", f"{ours} --do_eval --do_train --eval_iters 0", f"{ours} --eval_iters 0"):
        run = resolve(words, printing=False)
        assert (run.training.do_eval, run.training.evaluation_strategy) == (False, "no"), words
        assert sum("there is no evaluation" in note for note in run.notes) == ("--do_eval" in words)


def test_an_evaluation_interval_alone_turns_nothing_on(tmp_path):
    ours = "--num_hidden_layers 2 --hidden_size 32 --num_attention_heads 2 --max_steps 5 --output_dir o --input_dir d"
    run = resolve(f"{ours} --eval_steps 7", printing=False)
    assert not run.training.do_eval
    assert "--eval_steps 7 has no effect: evaluation is off (--do_eval)" in run.notes
    run = resolve(f"{ours} --eval_freq 7", printing=False)  # PaddleNLP's scripts before its Trainer always evaluated
    training = run.training
    assert (training.do_eval, training.evaluation_strategy, training.eval_steps, training.do_train) == (
        True,
        "steps",
        7,
        True,
    )
    (tmp_path / "flat.yaml").write_text("eval_freq: 3\nmax_steps: 9\n")
    words = ours.replace("--max_steps 5", "").split()
    run = resolve(["-c", str(tmp_path / "flat.yaml"), *words], printing=False)
    assert run.training.do_eval and run.training.eval_steps == 3

"""FleetX configurations: files, bases, overrides, every generation, and what the originals' cases ask for."""

import json
import shlex
import shutil
from dataclasses import asdict

import pytest
import yaml

from gptlm.commands.evaluate import resolve_evaluate
from gptlm.commands.plan import parse_plan, with_layout
from gptlm.commands.predict import resolve_predict
from gptlm.commands.pretrain import parse_pretrain
from gptlm.compat.fleetx.load import read_configuration
from gptlm.compat.fleetx.validate import unknown_keys
from gptlm.config.args.inference import EvaluateArguments, PredictArguments
from gptlm.errors import UsageError
from gptlm.planner.args import cluster_of, precision_of, sizes_of
from gptlm.planner.report import command
from gptlm.planner.search import candidates
from tests.conftest import ROOT
from tests.golden import recorded

BASE = """\
Global: {device: gpu, seed: 1024, global_batch_size: , local_batch_size: 1, micro_batch_size: 1}
Engine:
  max_steps: 500000
  logging_freq: 1
  eval_freq: 500
  eval_iters: 10
  mix_precision: {enable: True, dtype: float16, level: O2, scale_loss: 32768.0}
  save_load: {save_steps: 1000, output_dir: ./output, ckpt_dir: }
Model: {module: GPTModule, name: GPT, vocab_size_divisible_unit: 128}
Data:
  Train:
    dataset: {name: GPTDataset, input_dir: ./data/, split: [949, 50, 1], max_seq_len: 1024}
    loader: {num_workers: 1, collate_fn: gpt_collate_fn}
Optimizer:
  name: FusedAdamW
  weight_decay: 0.01
  lr: {name: CosineAnnealingWithWarmupDecay, decay_steps: 360000, warmup_rate: 0.01, max_lr: 5.0e-05, min_lr: 1e-5}
  grad_clip: {name: ClipGradByGlobalNorm, clip_norm: 1.0}
"""
OWN = """\
_base_: ./base.yaml
Global:
  local_batch_size: 8
  micro_batch_size: 4
Model:
  vocab_size: 50304
  hidden_size: 2048
  num_layers: 24
  num_attention_heads: 16
  ffn_hidden_size:
  use_recompute: True
  recompute_granularity:
Distributed:
  dp_degree: 8
  mp_degree: 1
  pp_degree: 1
  sharding: {sharding_degree: 1, sharding_stage: 1}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "own.yaml").write_text(OWN)
    return tmp_path


@pytest.fixture
def show(folder):
    """The printed run of own.yaml, or another text, with overrides, on `world` processes."""

    def run(*overrides, world=8, text=None, path=None, more=()):
        file = path or folder / "own.yaml"
        if text is not None:
            file.write_text(text)
        words = ["-c", str(file), *(word for o in overrides for word in ("-o", o)), "--world_size", str(world), *more]
        return json.loads(parse_pretrain(words, {}, printing=True).as_json())

    return run


def test_a_file_over_its_base(show, folder):
    found = show()
    run, origin = found["run"], found["from"]
    wanted = {
        "max_steps": 500000, "seed": 1024, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "local_batch_size": 8, "global_batch_size": 64, "data_parallel_degree": 8, "num_hidden_layers": 24,
        "hidden_size": 2048, "intermediate_size": 8192, "recompute": True, "recompute_granularity": "full",
        "fp16": True, "fp16_opt_level": "O2", "scale_loss": 32768, "learning_rate": 5e-05, "min_learning_rate": 1e-05,
        "decay_steps": 360000, "warmup_steps": 3600, "lr_scheduler_type": "cosine", "lr_start_step": 1,
        "eval_steps": 500, "save_steps": 1000, "do_train": True, "do_eval": True, "input_dir": "./data/",
        "split": "949,50,1", "max_seq_length": 1024, "output_dir": "./output", "log_format": "fleetx",
        "data_order": "megatron", "model_name_or_path": None, "dataloader_num_workers": 1, "sharding": "",
    }  # fmt: skip
    assert {name: run[name] for name in wanted} == wanted
    assert run["eval_iters"] == 10 * 2  # global batches there, micro-batches here
    assert origin["hidden_size"] == f"{folder}/own.yaml:7" and origin["max_steps"] == f"{folder}/base.yaml:3"
    assert origin["gradient_accumulation_steps"] == "derived: 8 / 4"
    assert found["notes"] == []


def test_overrides_win_and_say_so(show):
    found = show("Engine.max_steps=10", "Model.hidden_size=1_024", "Engine.max_steps=7", more=["--seed", "3"])
    assert (found["run"]["max_steps"], found["run"]["hidden_size"], found["run"]["intermediate_size"]) == (
        7,
        1024,
        4096,
    )
    assert (found["from"]["max_steps"], found["from"]["seed"], found["run"]["seed"]) == ("-o", "--seed", 3)
    assert "-o Engine.max_steps=10 has no effect: -o Engine.max_steps=7 comes after it" in found["notes"]


@pytest.mark.parametrize(
    ("one", "two", "flag"),
    [
        ("Engine.max_steps=10", "Global.max_steps=11", "max_steps"),
        ("Optimizer.beta1=0.8", "Optimizer.adam_beta1=0.7", "adam_beta1"),
        ("Gradclip.clip_norm=0.5", "Optimizer.grad_clip.clip_norm=0.25", "max_grad_norm"),
        ("Model.use_recompute=False", "Engine.use_recompute=True", "recompute"),
        ("Data.Train.dataset.split=[98,1,1]", "Data.dataset.split=[90,5,5]", "split"),
    ],
)
def test_of_two_overrides_for_one_setting_the_last_counts(show, one, two, flag):
    for first, last in ((one, two), (two, one)):
        found, alone = show(first, last), show(last)
        assert found["run"] == alone["run"] and found["run"][flag] != show(first)["run"][flag]
        said = f"-o {first} has no effect: -o {last} comes after it"
        assert [note for note in found["notes"] if note not in alone["notes"]] == [said]


def test_an_item_of_a_list_after_the_list(show):
    found = show("Data.Train.dataset.split=[98,1,1]", "Data.Train.dataset.split.0=90")
    assert (found["run"]["split"], found["from"]["split"], found["notes"]) == ("90,1,1", "-o", [])
    found = show("Data.Train.dataset.split.0=90", "Data.Train.dataset.split=[98,1,1]")
    assert found["run"]["split"] == "98,1,1" and len(found["notes"]) == 1


def test_a_flag_takes_precedence_over_an_override_and_says_so(show, tmp_path):
    said = "-o Engine.max_steps 10 has no effect: --max_steps 11 takes precedence"
    found = show("Engine.max_steps=10", more=["--max_steps", "11"])
    assert found["run"]["max_steps"] == 11 and said in found["notes"]
    (tmp_path / "flat.yaml").write_text("num_layers: 2\nhidden_size: 32\nnum_attention_heads: 2\nmax_steps: 3\n")
    found = show("max_steps=10", "train_iters=11", path=tmp_path / "flat.yaml", world=1)  # a file without sections
    assert found["run"]["max_steps"] == 11
    assert "-o max_steps 10 has no effect: -o train_iters 11 comes after it" in found["notes"]


@pytest.mark.parametrize(
    ("override", "flag", "value"),
    [
        ("Engine.mix_precision.dtype=bfloat16", "bf16", True),
        ("Engine.mix_precision.enable=False", "fp16", False),
        ("Engine.mix_precision.enable=false", "fp16", False),
        ("Engine.mix_precision.level=O1", "fp16_opt_level", "O1"),
        ("Optimizer.lr.max_lr=5.0e-6", "learning_rate", 5e-6),
        ("Optimizer.lr.max_lr=1e-4", "learning_rate", 1e-4),
        ("Optimizer.lr.decay_steps=None", "decay_steps", 500000),
        ("Optimizer.lr.use_increments=True", "lr_start_step", 0),
        ("Global.local_batch_size=", "local_batch_size", 4),
        ("Engine.eval_freq=-1", "do_eval", False),
        ("Engine.save_load.save_steps=-1", "save_strategy", "no"),
        ("Data.Train.dataset.split=[98,1,1]", "split", "98,1,1"),
        ("Data.Train.dataset.split.0=90", "split", "90,50,1"),
        ("Data.Train.dataset.input_dir=/data/a=b", "input_dir", "/data/a=b"),
        ("Data.Train.dataset.input_dir=dir", "input_dir", "dir"),
        ("Model.no_recompute_layers=[0,3]", "no_recompute_layers", [0, 3]),
        ("Model.recompute_granularity=only_attn", "recompute_granularity", "only_attn"),
        ("Global.device=CPU", "device", "CPU"),
        ("Distributed.dp_degree=", "data_parallel_degree", 8),
        ("Global.max_steps=5", "max_steps", 5),  # as the examples of 2023 spell it
    ],
)
def test_what_an_override_becomes(show, override, flag, value):
    found = show(override)
    assert found["run"][flag] == value and type(found["run"][flag]) is type(value)


def test_true_in_small_letters_is_announced(show):
    assert any("=true is taken as True" in note for note in show("Model.use_recompute=true")["notes"])


def test_nothing_is_evaluated(show, tmp_path):
    """The original runs what stands after the `=`."""
    code = f"__import__('pathlib').Path('{tmp_path}/ran').touch()"
    assert show(f"Data.Train.dataset.input_dir={code}")["run"]["input_dir"] == code
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UsageError, match="expected a number"):
        show("Engine.logging_freq=2**10")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["Engine.max_steps"], "option(Engine.max_steps) should contain a =to distinguish between key and value"),
        (["Data.Train.dataset.split.5=90"], "index(5) out of range([949, 50, 1])"),
        (["Model.brand_new=True"], "-o Model.brand_new: there is no such key"),
        (["Model.hiden_size=3"], "did you mean Model.hidden_size?"),
        (["Generation.top_kk=3"], "did you mean Generation.top_k?"),
        (["Generation.temprature=1"], "did you mean Generation.temperature?"),
        (["Offline_Eval.cloze_evl=True"], "did you mean Offline_Eval.cloze_eval?"),
        (["New.section.key=3"], "-o New.section.key: there is no such key"),
        (["Model.hidden_size.foo=3"], "-o Model.hidden_size.foo: there is no such key"),
        (["Model=3"], "Model is a section"),
        (["Engine.logging_freq=010"], "-o Engine.logging_freq '010': expected a whole number"),
        (["Global.global_batch_size=65"], "global_batch_size[65] should be divided by local_batch_size[8]"),
        (
            ["Global.local_batch_size=None", "Global.global_batch_size=60"],
            "global_batch_size[60] should be divided by dp_degree[8] times sharding_degree[1]\n"
            "  -o Global.global_batch_size 60 on 8 data-parallel replicas; the nearest that work are 32 and 64",
        ),
        (["Global.micro_batch_size=3"], "8 samples per replica is not a multiple of -o Global.micro_batch_size 3"),
        (["Distributed.dp_degree=3"], "unreasonable config of dist_strategy."),
        (["Model.no_recompute_layers=[-1]"], "the min value in no_recompute_layers should >= 0"),
        (["Model.no_recompute_layers=3"], "no_recompute_layers should be a list"),
        (["Model.no_recompute_layers=[24]"], "the max value in no_recompute_layers should < num_layers"),
        (["Model.no_recompute_layers=[0.5]"], "all values in no_recompute_layers should be an integer"),
        (["Model.recompute_granularity=half"], "recompute_granularity can be only chosen from full or only_attn, but"),
        (["Global.device=tpu"], "device(tpu) is not in ['gpu', 'xpu', 'rocm', 'npu', 'cpu', 'mlu'],"),
        (["Optimizer.name=Momentum"], "-o Optimizer.name Momentum: expected FusedAdamW, AdamW, Adam"),
        (["Optimizer.lr.name=LinearDecayWithWarmup"], "expected CosineAnnealingWithWarmupDecay"),
        (
            ["Data.Train.dataset.max_seq_len=2048", "Model.max_position_embeddings=1024"],
            "longer than the position table",
        ),
        (
            [
                "Distributed.pp_degree=2",
                "Distributed.dp_degree=",
                "Model.virtual_pp_degree=2",
                "Global.local_batch_size=12",
            ],
            "num of microbatches 3 should be divisible of pp_degree 2 when using interleave pipeline",
        ),
        (["Engine.max_steps=1e999"], "-o Engine.max_steps inf: expected a whole number"),
        (["Model.module=[1]"], "expected one of GPTModule"),
        (["Engine.max_steps=many"], "-o Engine.max_steps 'many': expected a whole number"),
    ],
)
def test_what_is_wrong(show, overrides, says):
    """First lines are the original's where it had a text."""
    with pytest.raises(UsageError) as error:
        show(*overrides)
    assert says in str(error.value)


def test_dp_degree_adapts_on_request(show):
    with pytest.raises(UsageError, match="--adapt_dp"):
        show(world=4)
    found = show(world=4, more=["--adapt_dp"])
    assert found["run"]["data_parallel_degree"] == 4 and found["run"]["global_batch_size"] == 32
    assert any("so adaptively adjust dp_degree to 4" in note for note in found["notes"])


def test_sharding_ranks_are_replicas(show):
    text = OWN.replace("dp_degree: 8", "dp_degree: 2").replace("sharding_degree: 1", "sharding_degree: 4")
    run = show(text=text)["run"]
    assert (run["sharding"], run["sharding_parallel_degree"], run["data_parallel_degree"]) == ("stage1", 4, 2)
    assert run["global_batch_size"] == 8 * 2 * 4


def test_in_auto_files_dp_degree_counts_all_replicas(show):
    text = OWN.replace("Model:\n", "Model:\n  module: GPTModuleAuto\n").replace(
        "sharding_degree: 1", "sharding_degree: 8"
    )
    run = show(text=text)["run"]
    assert (run["sharding_parallel_degree"], run["data_parallel_degree"], run["global_batch_size"]) == (8, 1, 64)
    with pytest.raises(UsageError, match=r"dp_degree\[8\] should be divided by sharding_degree\[3\]\."):
        show("Distributed.sharding.sharding_degree=3", text=text)


def test_an_emptied_section_has_the_defaults(show):
    run = show(text=OWN + "Optimizer:\n")["run"]
    assert (run["learning_rate"], run["weight_decay"], run["max_steps"]) == (5e-5, 0.0, 500000)


def test_inherited_false_replaces_a_section(show):
    text = OWN + "Optimizer:\n  _inherited_: False\n  lr: {max_lr: 1e-3, min_lr: 1e-4}\n"
    run = show(text=text)["run"]
    assert (run["learning_rate"], run["weight_decay"], run["decay_steps"]) == (1e-3, 0.0, 500000)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("_base_: ./own.yaml\n", "has itself as _base_"),
        ("_base_: ./gone.yaml\n", "cannot read the configuration .*gone.yaml"),
        ("a: [1\n", "line 2 is not valid YAML"),
        ("- 1\n", "holds no mapping"),
        ("Global: {seed: 1}\nGlobal: {seed: 2}\n", "own.yaml:2: Global occurs twice"),
        ("Global: {sed: 1}\n", r"Global.sed \(.*own.yaml:1\) is unknown; did you mean Global.seed\?"),
        ("Model: {module: GPTModul}\n", "expected one of GPTModule"),
    ],
)
def test_files_that_cannot_be_used(show, text, says):
    with pytest.raises(UsageError, match=says):
        show(text=text)


FLAT = """\
PreTraining:
  device: gpu
  max_steps: 500000
  seed: 1024
  use_recompute: False
  recompute_granularity:
  batch_size: {global_batch_size: 8, local_batch_size: 8, micro_batch_size: 8}
  mix_precision: {use_pure_fp16: True, scale_loss: 32768.0}
  logging_freq: 1
  eval_freq: 500
  eval_iters: 10
  dataset: {input_dir: ./data, split: '949,50,1', max_seq_len: 1024}
  save_load: {save_steps: 1000, output_dir: ./output, ckpt_dir: }
  fused_linear: True
  Model:
    {vocab_size: 50304, hidden_size: 1024, num_layers: 24, num_attention_heads: 16, ffn_hidden_size: 4096,
     hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1, max_position_embeddings: 1024, type_vocab_size: 16,
     initializer_range: 0.02}
  Distributed: {dp_degree: 1, mp_degree: 1, pp_degree: 1, sharding: {sharding_degree: 1, sharding_stage: 1}}
  Optimizer:
    weight_decay: 0.01
    adam_beta1: 0.9
    adam_beta2: 0.95
    adam_epsilon: 1.0e-8
    lr: {decay_steps: 360000, warmup_rate: 0.01, max_lr: 1.0e-5, min_lr: 5.0e-5}
    grad_clip: 0.5
"""


def test_the_first_generation(show):
    """Its 345M file has max_lr and min_lr swapped: the curve is the original's, and it is said loudly."""
    found = show(text=FLAT, world=1)
    run = found["run"]
    assert (run["log_format"], run["data_order"], run["fp16"], run["fp16_opt_level"]) == (
        "fleetx-2022",
        "fleetx",
        True,
        "O2",
    )
    assert (run["max_grad_norm"], run["adam_beta2"], run["split"], run["max_steps"]) == (0.5, 0.95, "949,50,1", 500000)
    assert (run["learning_rate"], run["min_learning_rate"]) == (1e-5, 5e-5)
    assert any("were they swapped?" in note for note in found["notes"])
    assert any("fused_linear" in note and "kernels" in note for note in found["notes"])
    assert show("Model.hidden_size=512", "max_steps=3", text=FLAT, world=1)["run"]["max_steps"] == 3


def test_a_setting_said_twice_in_the_first_generation(show):
    """There only the last name of a key counts, and the last one takes precedence."""
    found = show(text=FLAT.replace("    weight_decay", "    max_steps: 3\n    weight_decay"), world=1)
    assert found["run"]["max_steps"] == 3
    assert any("set the same value; the last one counts" in note for note in found["notes"])


def test_the_first_generation_without_its_root_key(show):
    text = "".join(f"{line}\n" for line in FLAT.splitlines()[1:])
    ours, theirs = show(text=text, world=1), show(text=FLAT, world=1)
    assert ours["run"] == theirs["run"] and len(ours["notes"]) == len(theirs["notes"])
    assert show("PreTraining.max_steps=3", text=text, world=1)["run"]["max_steps"] == 3
    only_training = text[: text.index("  Model:")] + "  Model: {num_layers: 2}\n"
    assert show(text=only_training, world=1)["run"]["log_format"] == "fleetx-2022"


@pytest.mark.parametrize("name", ["consine", "cosine"])
def test_other_names_of_the_schedule(show, name):
    for text, world in ((OWN, 8), (FLAT.replace("lr: {", f"lr: {{name: {name}, "), 1)):
        given = [] if text is not OWN else [f"Optimizer.lr.name={name}"]
        found = show(*given, text=text, world=world)
        assert found["run"]["lr_scheduler_type"] == "cosine"
        said = [note for note in found["notes"] if f"{name} is taken as CosineAnnealingWithWarmupDecay" in note]
        assert len(said) == 1 and "Optimizer.lr.name" in said[0]


def test_max_steps_of_the_schedule(show):
    """In the first generation only the last name of a key counts; later the key means nothing."""
    run = show(text=FLAT.replace("lr: {", "lr: {max_steps: 9, "), world=1)["run"]
    assert run["max_steps"] == 9
    found = show("Optimizer.lr.max_steps=9", text=OWN)
    assert found["run"]["max_steps"] == 500000
    assert sum("Optimizer.lr.max_steps has no effect here (Engine.max_steps ends" in n for n in found["notes"]) == 1


def test_fused_passes_are_named_once(show):
    text = OWN + "FusedPasses: {enable: True, fused_attention: True, fused_passes_list: [fuse_gemm_epilogue]}\n"
    notes = show(text=text)["notes"]
    assert len(notes) == 1 and "FusedPasses.enable, FusedPasses.fused_attention, FusedPasses.fused" in notes[0]


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        (OWN + "Tuning: {enable: True, tuning_recompute: True, profile_start_step: 1}\n", "Tuning.enable"),
        (OWN + "Tuning: true\n", "Tuning"),
        (OWN + "tuning: true\n", "tuning"),
        (OWN + "tuning: {enable: true}\n", "tuning.enable"),
        (OWN + "Engine: {tuning: true}\n", "Engine.tuning"),
        (FLAT.replace("Optimizer:", "tuning: True\n  Optimizer:"), "tuning"),
        (FLAT.replace("Optimizer:", "Tuning: {enable: True}\n  Optimizer:"), "Tuning.enable"),
    ],
)
def test_tuning_is_auto_parallel(folder, text, typed):
    """Degrees of the file are replaced, those on the command line are refused."""
    file = folder / "own.yaml"
    file.write_text(text.replace("mp_degree: 1", "mp_degree: 2").replace("dp_degree: 8", "dp_degree: 4"))
    words = ["-c", str(file), "--world_size", "8"]
    laid, why = with_layout(words, {})
    assert why.startswith(f"{typed} ({file}:") and "this one is the fastest by estimate" in why
    run = parse_pretrain(laid, {}, printing=True)
    assert run.parallel.auto_parallel and run.dims.world == 8
    assert run.batch.total == (8 if text.startswith("PreTraining") else 8 * 4)
    assert sum(f"{typed} ({file}:" in note and " takes tensor_parallel_degree" in note for note in run.notes) == 1
    with pytest.raises(UsageError, match=r"chooses degrees and sharding; leave them out \(-o Distributed.mp_degree\)"):
        with_layout([*words, "-o", "Distributed.mp_degree=4"], {})
    off = [*words, "-o", "Distributed.dp_degree=", "--auto_parallel", "0"]
    assert with_layout(off, {}) == (off, "")
    command = plan_command(["--num_gpus", "8", "-c", str(file)])
    assert command.endswith("--auto_parallel 0")


def plan_command(words):
    """The command that `gptlm plan` prints; it resolves."""
    job = parse_plan(words)
    best = candidates(sizes_of(job.run), cluster_of(job.machine), job.global_batch, precision_of(job.run))[0]
    text = command(job, best.layout)
    rest = shlex.split(text.partition(" pretrain ")[2])
    assert with_layout(rest, {"WORLD_SIZE": "8"}) == (rest, "")
    assert parse_pretrain(rest, {"WORLD_SIZE": "8"}).dims.tensor == best.layout.tensor
    return text


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (("module: GPTModule,", "module: GPTEvalModule,"), "is for gptlm evaluate -c"),
        (("module: GPTModule,", "module: GPTGenerationModule,"), "is for gptlm predict -c"),
        (("module: GPTModule,", "module: GPTFinetuneModule,"), "classification on GLUE is not implemented"),
        (("module: GPTModule,", "module: MoEModule,"), "mixtures of experts are not implemented"),
        (("Optimizer:", "Compress: {Quantization: {enable: True}}\nOptimizer:"), "quantization-aware training is not"),
        (("Optimizer:", "Compress: {Prune: {enable: True, ratio: 0.125}}\nOptimizer:"), "pruning is not implemented"),
    ],
)
def test_what_is_printed_but_not_run(folder, edit, says):
    (folder / "base.yaml").write_text(BASE.replace(*edit))
    words = ["-c", str(folder / "own.yaml"), "-o", "Distributed.dp_degree=1"]
    run = parse_pretrain(words, {}, printing=True)
    assert len(run.refusals) == 1 and says in run.refusals[0]
    assert f"this version refuses to run it: {run.refusals[0]}" in json.loads(run.as_json())["notes"]
    try:
        assert parse_pretrain(words, {}).refusals == run.refusals
    except UsageError as error:
        assert str(error) == run.refusals[0]


EVAL = """\
_base_: ./base.yaml
Model: {module: GPTEvalModule, num_layers: 2, hidden_size: 32, num_attention_heads: 2}
Offline_Eval: {eval_path: ./wiki.valid.tokens, cloze_eval: False, overlapping_eval: 32, batch_size: 8, max_seq_len: 64}
"""
GENERATION = """\
_base_: ./base.yaml
Model: {module: GPTGenerationModule}
Generation:
  {top_k: 50, top_p: 0.75, temperature: 1.0, min_dec_len: 1, max_dec_len: 600, num_return_sequences: 1,
   decode_strategy: sampling, use_topp_sampling: True}
"""


def test_evaluation_and_generation_sections(folder):
    (folder / "own.yaml").write_text(EVAL)
    words = ["-c", str(folder / "own.yaml"), "-o", "Offline_Eval.cloze_eval=True", "-o", "Engine.save_load.ckpt_dir=x"]
    values = asdict(resolve_evaluate(words, printing=True)[EvaluateArguments])
    assert (values["task"], values["batch_size"], values["max_seq_length"]) == ("LAMBADA", 8, 64)
    assert (values["model_name_or_path"], values["eval_path"], values["fp16"]) == ("x", "./wiki.valid.tokens", True)
    (folder / "own.yaml").write_text(GENERATION)
    words = ["-c", str(folder / "own.yaml")]
    with pytest.raises(UsageError, match="ckpt_dir .* is empty: give --model_name_or_path"):
        resolve_predict(words)
    parsed = resolve_predict([*words, "--model_name_or_path", "m", "--top_k", "5"])
    values = asdict(parsed[PredictArguments])
    assert (values["do_sample"], values["top_k"], values["top_p"], values["tgt_length"]) == (True, 5, 0.75, 512)
    assert values["min_new_tokens"] == 1 and values["seed"] == 1024
    assert values["prompt"] == ["Hi, GPT2. Tell me who Jack Ma is."]
    assert any("max_dec_len" in note and "512 at most" in note for note in parsed.notes)


def test_the_last_of_two_checkpoint_folders_counts(folder):
    (folder / "own.yaml").write_text(EVAL)
    pair = ("Offline_Eval.ckpt_dir=a", "Engine.save_load.ckpt_dir=b")
    for first, last in (pair, pair[::-1]):
        words = ["-c", str(folder / "own.yaml"), "-o", first, "-o", last]
        parsed = resolve_evaluate(words, printing=True)
        assert parsed[EvaluateArguments].model_name_or_path == last[-1]
        assert any(note.startswith(f"-o {first.replace('=', ' ')} has no effect") for note in parsed.notes)


# Outcomes of the original -----------------------------------------------------------------------------------------

SAME = {
    "Global.local_batch_size": "local_batch_size",
    "Global.global_batch_size": "global_batch_size",
    "Global.micro_batch_size": "per_device_train_batch_size",
    "Engine.accumulate_steps": "gradient_accumulation_steps",
    "Global.seed": "seed",
    "Engine.max_steps": "max_steps",
    "Model.hidden_size": "hidden_size",
    "Model.num_layers": "num_hidden_layers",
    "Distributed.mp_degree": "tensor_parallel_degree",
    "Distributed.pp_degree": "pipeline_parallel_degree",
}
OURS_IS_AN_ERROR = {  # the original accepts these
    "Global.global_batch_size=65": "should be divided by local_batch_size",
    "Model.brand_new=True": "there is no such key",
    "Engine.logging_freq=010": "expected a whole number",
}
OURS_IS_NO_ERROR = (  # the original stops
    "Global.local_batch_size=",  # the empty value
    "Global.global_batch_size=None",  # micro-batch and accumulation are enough
    "Optimizer.tensor_fusion=True",  # it has no effect here
)


NOT_SHIPPED = {  # over the shipped files; the keys are those of the original's files of these names
    "eval_gpt_345M_single_card": """\
_base_: ./pretrain_gpt_345M_single_card.yaml
Model: {module: GPTEvalModule}
Offline_Eval: {eval_path: text, cloze_eval: False, overlapping_eval: 16, batch_size: 4, max_seq_len: 512}
""",
    "qat_gpt_345M_single_card": """\
_base_: ./pretrain_gpt_345M_single_card.yaml
Global: {global_batch_size: 8}
Model: {fused_linear: True}
Distributed: {dp_degree: , sharding: {reduce_overlap: False, broadcast_overlap: False}}
Compress:
  pretrained:
  Quantization: {enable: True, weight_bits: 4, activation_bits: 4, quantizable_layer_type: [Linear], onnx_format: False}
""",
    "prune_gpt_345M_single_card": """\
_base_: ./pretrain_gpt_345M_single_card.yaml
Optimizer: {weight_decay: 0.5, lr: {decay_steps: 70, warmup_rate: 0.5, max_lr: 0.5, min_lr: 0.25}}
Compress: {pretrained: , Prune: {enable: True, criterion: l1_norm, ratio: 0.5}}
""",
    "finetune_gpt_345M_single_card_glue": """\
_base_: ./pretrain_gpt_345M_single_card.yaml
Global: {local_batch_size: 32, micro_batch_size: 32, seed: 42}
Engine: {_inherited_: False, run_mode: epoch, num_train_epochs: 2, eval_freq: 1, save_load: {save_epoch: 1}}
Model:
  module: GPTFinetuneModule
  num_classes: 3
  pretrained: ./model
  loss: {train: {name: CrossEntropyLoss}, eval: {name: CrossEntropyLoss}}
  metric: {eval: {name: Accuracy}}
Optimizer:
  multi_precision: True
  lr: {_inherited_: False, name: LinearDecayWithWarmup, warmup: 0.5, learning_rate: 0.5}
Data:
  Train:
    dataset: {_inherited_: False, name: SST2, root: ./d, split: train, max_length: 64}
    sampler: {name: DistributedBatchSampler, batch_size: 32, shuffle: True, drop_last: True}
  Eval:
    dataset: {name: SST2, root: ./d, split: dev, max_length: 64}
    sampler: {name: DistributedBatchSampler, batch_size: 32, shuffle: False, drop_last: False}
""",
}


def expected_error(case):
    """What our message must hold; None: the run is accepted."""
    ours = [says for override, says in OURS_IS_AN_ERROR.items() if override in case["overrides"]]
    if ours:
        return ours[0]
    if case["file"] == "auto/pretrain_gpt_6.7B_sharding16" and case["world_size"] == 8:
        return "does not divide the 8 data-parallel replicas"
    if "error" not in case or set(case["overrides"]) & {*OURS_IS_NO_ERROR}:
        return None
    return "does not divide the number of processes" if "nranks" in case["error"] else case["error"]


def assert_outcome(case, file):
    overrides = [word for override in case["overrides"] for word in ("-o", override)]
    words = ["-c", str(file), "--world_size", str(case["world_size"]), *overrides]
    error = expected_error(case)
    if error is not None:
        with pytest.raises(UsageError) as raised:
            parse_pretrain(words, {}, printing=True)
        assert error in str(raised.value)
        return
    run = json.loads(parse_pretrain(words, {}, printing=True).as_json())["run"]
    resolved = case.get("resolved", {})
    assert {key: run[SAME[key]] for key in resolved} == resolved


OUTCOMES = recorded("fleetx/overrides.json")


@pytest.mark.parametrize("case", OUTCOMES, ids=lambda case: " ".join([case["file"], *case["overrides"]]))
def test_outcomes_of_the_original(tmp_path, case):
    """Recorded from PaddleFleetX of 2023; the files are gptlm's own, with the split of that year."""
    shutil.copytree(ROOT / "src/gptlm/configs/fleetx/gpt", tmp_path / "gpt")
    base = tmp_path / "gpt" / "pretrain_gpt_base.yaml"
    base.write_text(base.read_text().replace("[949, 50, 1]", "[969, 30, 1]"))
    file = tmp_path / "gpt" / f"{case['file']}.yaml"
    if case["file"] in NOT_SHIPPED:
        file.write_text(NOT_SHIPPED[case["file"]])
    assert_outcome(case, file)


KEYS = recorded("fleetx/keys.json")


@pytest.mark.parametrize("generation", KEYS)
def test_every_key_of_a_generation_is_known(tmp_path, generation):
    """The keys of all its files in one of our own, without values."""
    tree: dict = {}
    for key in KEYS[generation]:
        *parents, last = key.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = None
    tree.pop("_base_", None)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tree))
    assert list(unknown_keys(read_configuration(str(tmp_path / "own.yaml"), []))) == []


@pytest.mark.parametrize(("batches", "said"), [("", "Engine.eval_iters is not given"), ("0", "is 0")])
def test_an_evaluation_without_batches_says_so(show, batches, said):
    found = show("Engine.eval_freq=500", f"Engine.eval_iters={batches}")
    assert not found["run"]["do_eval"]
    lines = [note for note in found["notes"] if "Engine.eval_freq 500 has no effect" in note]
    assert len(lines) == 1 and said in lines[0]

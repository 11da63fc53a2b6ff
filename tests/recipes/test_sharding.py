"""Precision and ZeRO on two processes: every strategy trains like one process, and goes on from any other's checkpoint.

All runs happen in one launched session (see session.py); the tests look at what it left.
"""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gptlm.checkpoint.folder import read
from gptlm.commands.pretrain import parse_pretrain
from gptlm.recipes.pretrain.run import pretrain
from tests.checkpoint.made import assert_same_tensors
from tests.conftest import ROOT
from tests.processes import DEEPSPEED, clean_environment
from tests.processes import run as run_processes

STEPS, SAVED = 6, 3
BASE = (
    f"--max_seq_length 16 --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --max_steps {STEPS} "
    f"--eval_iters 2 --logging_steps 1 --save_steps {SAVED} --eval_steps {SAVED} --learning_rate 1e-2 "
    "--min_learning_rate 1e-3 --split 80,10,10 --warmup_steps 2 --weight_decay 0.1 --do_train --do_eval --device cpu "
    "--disable_tqdm --report_to none"
).split()
NO_DROPOUT = ["--hidden_dropout_prob", "0", "--attention_probs_dropout_prob", "0"]
O2 = ["--bf16", "--fp16_opt_level", "O2"]
# what a case leaves out that no test looks at, and another case does in the same layout and precision
NO_EVAL = ["--do_eval", "0", "--evaluation_strategy", "no"]
ONLY_TRAINED = [*NO_EVAL, "--save_strategy", "no"]
TINY = {  # the stage-3 settings under which even small weights are sharded
    f"stage3_{name}": 0 for name in ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
}
SMALL_BUCKETS = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 1000}
FLOAT16 = ("stage1 fp16 O1", "stage2 fp16 O1", "stage3 fp16 O1", "stage2 fp16 O2")
STRATEGIES = ("ddp", "stage1", "stage2", "stage3")
SHARDED = {  # precision, flags, what resumes from it
    "ddp": ("", [], ()),
    "stage2": (" O2", ["--async_save", "--save_steps", "1", "--save_total_limit", "6"], ("ddp",)),
    "stage3": (" O2", ["--load_best_model_at_end"], ("stage3", "stage1")),
}


def launch(processes: int, script: str, *words: object, log: Path) -> None:
    """Run a script of this folder in several processes of this machine; `log` gets all they say."""
    command = [sys.executable, ROOT / "tests" / "recipes" / script, *words]
    environment = clean_environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")
    done = run_processes(command, env=environment, processes=processes, modules=DEEPSPEED, timeout=900)
    log.write_text(done.stdout + done.stderr)
    assert done.returncode == 0, log.read_text()[-3000:]


def run_session(processes: int, cases: list, folder: Path) -> dict:
    (folder / "cases.json").write_text(json.dumps([[name, [str(word) for word in words]] for name, words in cases]))
    launch(processes, "session.py", folder / "cases.json", folder / "results.json", log=folder / "log.txt")
    return json.loads((folder / "results.json").read_text())


def losses(result: dict) -> list[float]:
    assert "error" not in result, result
    return [entry["loss"] for entry in result["history"] if "loss" in entry]


def norms(result: dict) -> list[float]:
    return [entry["grad_norm"] for entry in result["history"] if "loss" in entry]


@pytest.fixture(scope="module")
def session(tiny_model, corpus_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharding")
    zero3 = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    zero3 |= {"gradient_clipping": "auto", "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0, **TINY}}
    (folder / "zero3.json").write_text(json.dumps(zero3))
    sharding = {"ddp": [], "stage1": ["--sharding", "stage1"], "stage2": ["--sharding", "stage2"]}
    sharding["stage3"] = ["--deepspeed", folder / "zero3.json"]
    data = ["--input_dir", corpus_folder / "mmap"]
    loaded = [*BASE, *data, "--model_name_or_path", tiny_model, "--continue_training"]
    random = [*BASE, *data, *"--num_hidden_layers 2 --hidden_size 32 --num_attention_heads 2 --vocab_size 500".split()]
    cases = []
    for name, words in sharding.items():
        cases.append((name, [*loaded, *NO_DROPOUT, *words]))
        cases.append((f"{name} dropout", [*loaded, *words, *NO_EVAL]))
        cases.append((f"{name} random", [*random, *NO_DROPOUT, *words, "--max_steps", 2, *ONLY_TRAINED]))
        cases.append((f"{name} O2", [*loaded, *NO_DROPOUT, *words, *O2]))
        cases.append((f"{name} O1", [*loaded, *NO_DROPOUT, *words, "--bf16", "--save_strategy", "no"]))
    for stage in (1, 2, 3):
        (folder / f"small{stage}.json").write_text(json.dumps({"zero_optimization": {"stage": stage, **SMALL_BUCKETS}}))
        words = ["--deepspeed", folder / f"small{stage}.json", *ONLY_TRAINED]
        cases.append((f"stage{stage} small buckets", [*loaded, *NO_DROPOUT, *words]))
    cases.append(("stage3 compiled", [*loaded, *NO_DROPOUT, "--sharding", "stage3", "--torch_compile"]))
    master = [*O2, "--amp_master_grad", "--gradient_accumulation_steps", 2]
    cases.append(("ddp O2 master", [*loaded, *NO_DROPOUT, *master, *ONLY_TRAINED]))
    for kind in ("", " O2"):
        for saved, resumed in itertools.product(STRATEGIES, STRATEGIES):
            checkpoint = folder / f"{saved}{kind}" / f"checkpoint-{SAVED}"
            words = [*loaded, *NO_DROPOUT, *sharding[resumed], "--resume_from_checkpoint", checkpoint]
            cases.append((f"{saved} to {resumed}{kind}", [*words, *(O2 if kind else []), *ONLY_TRAINED]))
    for name, (kind, more, _) in SHARDED.items():
        words = [*loaded, *NO_DROPOUT, *sharding[name], *(O2 if kind else []), "--checkpoint_format", "sharded", *more]
        cases.append((f"{name}{kind} sharded", words))
        for resumed in SHARDED[name][2]:
            checkpoint = folder / f"{name}{kind} sharded" / f"checkpoint-{SAVED}"
            words = [*loaded, *NO_DROPOUT, *sharding[resumed], *(O2 if kind else []), *ONLY_TRAINED]
            cases.append((f"{name} sharded to {resumed}{kind}", [*words, "--resume_from_checkpoint", checkpoint]))
    for name in FLOAT16:
        strategy, _, level = name.split()
        words = [*loaded, *NO_DROPOUT, *sharding[strategy], "--fp16", "--fp16_opt_level", level]
        words += ["--scale_loss", 768, "--loss_scale_window", 3]
        cases.append((name, words))
        words += NO_EVAL
        cases.append((f"{name} skips", [*words, "--scale_loss", 2.0**20]))
        checkpoint = folder / f"{name} skips" / f"checkpoint-{SAVED}"
        cases.append((f"{name} again", [*words, "--scale_loss", 2.0**20, "--resume_from_checkpoint", checkpoint]))
    for level in ("O1", "O2"):
        words = [*loaded, *sharding["stage2"], "--fp16", "--fp16_opt_level", level, "--loss_scale", 1e30]
        cases.append((f"{level} ends", [*words, "--save_steps", 1]))
    best = ["--load_best_model_at_end", "--eval_steps", 2, "--save_steps", 2, "--learning_rate", 1]
    best += ["--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", STEPS]
    for name in ("ddp", "stage3"):
        cases.append((f"{name} best", [*loaded, *NO_DROPOUT, *sharding[name], *best]))
    for name, words in sharding.items():
        checkpoint = folder / f"{name} dropout" / f"checkpoint-{SAVED}"
        cases.append(
            (f"{name} dropout again", [*loaded, *words, "--resume_from_checkpoint", checkpoint, *ONLY_TRAINED])
        )
    (folder / "wrong.json").write_text(json.dumps({**zero3, "gradient_clipping": 1.0, "scheduler": {"type": "x"}}))
    cases.append(("wrong file", [*loaded, "--deepspeed", folder / "wrong.json", "--max_grad_norm", 0.5]))
    (folder / "typo.json").write_text(json.dumps({"zero_optimization": {"stage": 2, "overlap_com": True}}))
    cases.append(("typo", [*loaded, "--deepspeed", folder / "typo.json"]))
    named = [(name, [*words, "--output_dir", folder / name]) for name, words in cases]
    return folder, run_session(2, named, folder)


@pytest.fixture(scope="module")
def alone(tiny_model, corpus_folder, tmp_path_factory):
    """The same training in one process: half the ranks, twice the accumulation."""

    def run(*words):
        folder = tmp_path_factory.mktemp("alone")
        argv = [*BASE, *NO_DROPOUT, "--model_name_or_path", tiny_model, "--continue_training", "--input_dir"]
        argv += [corpus_folder / "mmap", "--gradient_accumulation_steps", "2", "--output_dir", folder]
        argv += ["--per_device_eval_batch_size", "4", *words]
        metrics = pretrain(parse_pretrain([str(word) for word in argv], {}))
        return {"metrics": metrics, "history": json.loads((folder / "trainer_state.json").read_text())["log_history"]}

    return run


pytestmark = pytest.mark.distributed


def test_every_stage_trains_like_one_process(session, alone):
    wanted = alone()
    for name in (*STRATEGIES, "stage3 compiled"):
        found = session[1][name]
        assert losses(found) == pytest.approx(losses(wanted), abs=1e-5), name
        assert norms(found) == pytest.approx(norms(wanted), abs=1e-5), name
        assert found["metrics"]["eval_loss"] == pytest.approx(wanted["metrics"]["eval_loss"], abs=1e-5), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buckets_change_nothing(session, stage):
    """Of 1000 elements: several small weights go into one, and most matrices (3072 to 16,000) are larger."""
    found = session[1][f"stage{stage} small buckets"]
    assert losses(found) == pytest.approx(losses(session[1]["ddp"]), abs=1e-5)
    assert norms(found) == pytest.approx(norms(session[1]["ddp"]), abs=1e-5)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_half_precision_agrees_between_strategies(session, level):
    wanted = losses(session[1][f"ddp {level}"])
    assert wanted != losses(session[1]["ddp"]) and wanted == pytest.approx(losses(session[1]["ddp"]), abs=3e-3)
    for name in STRATEGIES:
        assert losses(session[1][f"{name} {level}"]) == pytest.approx(wanted, abs=2e-3), name


def test_random_weights_do_not_depend_on_the_strategy(session):
    first = {name: losses(session[1][f"{name} random"]) for name in STRATEGIES}
    for name in STRATEGIES:
        assert first[name] == pytest.approx(first["ddp"], abs=1e-6), name


@pytest.mark.parametrize("kind", ["", " O2"])
@pytest.mark.parametrize("saved", STRATEGIES)
def test_any_strategy_goes_on_from_any_checkpoint(session, saved, kind):
    """The steps after the checkpoint are those of the run that wrote it, whatever goes on."""
    wanted = losses(session[1][f"{saved}{kind}"])
    for resumed in STRATEGIES:
        found = losses(session[1][f"{saved} to {resumed}{kind}"])
        assert found[:SAVED] == wanted[:SAVED], resumed  # the log of the run before
        assert found == pytest.approx(wanted, abs=2e-3 if kind else 2e-6), resumed
    assert losses(session[1][f"{saved} to {saved}{kind}"]) == wanted


@pytest.mark.parametrize("name", SHARDED)
def test_shards_hold_what_one_process_writes(session, name):
    folder, results = session
    kind, _, resumed_by = SHARDED[name]
    sharded = folder / f"{name}{kind} sharded"
    assert losses(results[sharded.name]) == losses(results[f"{name}{kind}"])
    for step in (SAVED, STEPS):
        assert_same_tensors(folder / f"{name}{kind}" / f"checkpoint-{step}", sharded / f"checkpoint-{step}")
        assert read(sharded / f"checkpoint-{step}").manifest.checkpoint_format == "sharded"
    sizes = [
        sum(file.stat().st_size for file in (sharded / f"checkpoint-{SAVED}").glob(f"*-0000{n}-of-*")) for n in (1, 2)
    ]
    assert max(sizes) < 1.1 * min(sizes)
    for resumed in resumed_by:  # as from the other form
        assert losses(results[f"{name} sharded to {resumed}{kind}"]) == losses(results[f"{name} to {resumed}{kind}"])
    final, whole = (AutoModelForCausalLM.from_pretrained(f) for f in (sharded, folder / f"{name}{kind}"))
    if "--load_best_model_at_end" not in SHARDED[name][1]:
        assert all(torch.equal(x, y) for x, y in zip(final.state_dict().values(), whole.state_dict().values()))


@pytest.mark.parametrize("name", STRATEGIES)
def test_resumed_equals_uninterrupted_with_dropout(session, name):
    folder, results = session
    assert losses(results[f"{name} dropout again"]) == losses(results[f"{name} dropout"])
    assert losses(results[f"{name} dropout"]) != losses(results[name])
    a, b = (AutoModelForCausalLM.from_pretrained(folder / f"{name}{end}") for end in (" dropout", " dropout again"))
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


def test_another_number_of_processes_goes_on(session, alone, capsys):
    for name in STRATEGIES:
        found = alone("--resume_from_checkpoint", session[0] / name / f"checkpoint-{SAVED}")
        assert losses(found) == pytest.approx(losses(session[1][name]), abs=2e-6), name


def test_what_is_saved_is_plain_gpt2_in_the_precision_of_the_weights(session):
    for name, dtype in (("stage3", torch.float32), ("stage3 O2", torch.bfloat16), ("ddp O2", torch.bfloat16)):
        model, report = AutoModelForCausalLM.from_pretrained(session[0] / name, output_loading_info=True)
        assert type(model).__name__ == "GPT2LMHeadModel" and not any(report.values()) and model.dtype == dtype
        assert model.transformer.h[0].attn.c_attn.weight.shape == (32, 96)


@pytest.mark.parametrize("name", ["ddp", "stage3"])
def test_the_best_model_comes_back_on_every_rank(session, name):
    """With a learning rate that rises to 1 the loss soon does, too: the last step is not the best one."""
    folder = session[0] / f"{name} best"
    found = [entry for entry in session[1][f"{name} best"]["history"] if "eval_loss" in entry]
    best = min(found, key=lambda entry: entry["eval_loss"])["step"]
    assert best < STEPS
    final, kept = (AutoModelForCausalLM.from_pretrained(f) for f in (folder, folder / f"checkpoint-{best}"))
    assert all(torch.equal(x, y) for x, y in zip(final.state_dict().values(), kept.state_dict().values()))


def test_float32_sums_of_gradients_train(session):
    assert losses(session[1]["ddp O2 master"])[-1] < losses(session[1]["ddp O2 master"])[0]


def test_a_file_that_contradicts_a_flag_is_refused_with_both_values(session):
    error = session[1]["wrong file"]["error"]
    assert "sets gradient_clipping to 1.0, --max_grad_norm is 0.5" in error and "'scheduler' block" in error
    assert "DeepSpeed refuses zero_optimization: " in session[1]["typo"]["error"]
    assert "overlap_com" in session[1]["typo"]["error"]


@pytest.mark.parametrize("name", FLOAT16)
def test_sharded_float16_has_our_loss_scale(session, name):
    """It starts at --scale_loss, no power of two, doubles every third good step, and changes no loss."""
    folder, results = session
    scale = read(folder / name / f"checkpoint-{STEPS}").manifest.loss_scale
    assert scale["value"] == 768 * 2 ** (STEPS // 3) and scale["good_steps"] == STEPS
    assert losses(results[name]) == pytest.approx(losses(results["ddp"]), abs=2e-3)
    assert norms(results[name]) == pytest.approx(norms(results["ddp"]), rel=2e-2)


@pytest.mark.parametrize("name", FLOAT16)
def test_sharded_float16_skips_steps_that_overflow(session, name):
    """2^20 is too much: it is halved until the gradients fit, the schedule waits, and a resumed run knows all that."""
    folder, results = session
    for run in ("skips", "again"):
        facts = read(folder / f"{name} {run}" / f"checkpoint-{STEPS}").manifest
        skipped = STEPS - facts.optimizer_steps
        assert 2 <= skipped < STEPS and facts.loss_scale["value"] == 2**20 / 2**skipped * 2 ** ((STEPS - skipped) // 3)
    assert losses(results[f"{name} skips"]) == losses(results[f"{name} again"])
    assert losses(results[f"{name} skips"]) == pytest.approx(losses(results[f"{FLOAT16[0]} skips"]), abs=2e-3)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sharded_float16_ends_where_a_fixed_scale_is_too_much(session, level):
    folder, results = session
    assert "gradients overflow at the lowest loss scale 1e+30 at step 1" in results[f"{level} ends"]["error"]
    assert not list((folder / f"{level} ends").glob("checkpoint-*"))


BYTES = {  # per parameter on one of two processes: weights, master weights, moments, gradients
    "ddp": (4, 0, 8, 4),
    "stage1": (4, 2, 4, 2),
    "stage3": (2, 2, 4, 2),
    "ddp O2": (2, 4, 8, 2),
    "stage2 O2": (2, 2, 4, 1),
    "stage3 O2": (1, 2, 4, 1),
}


@pytest.mark.parametrize("name", BYTES)
def test_the_memory_of_a_process_is_logged(session, tiny_model, name):
    total = AutoModelForCausalLM.from_pretrained(tiny_model).num_parameters()
    sizes = dict(zip(("weights", "master weights", "moments", "gradients"), BYTES[name], strict=True))
    found = dict(re.findall(r"([a-z ]+) ([0-9.]+) KiB", session[1][name]["memory"]))
    assert {part.strip(): float(size) for part, size in found.items()} == {
        part: pytest.approx(size * total / 1024, rel=0.05) for part, size in sizes.items() if size
    }

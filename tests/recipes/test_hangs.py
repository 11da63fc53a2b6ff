"""A rank that is stopped ends the run after --ddp_timeout with its number, in whatever phase it stops."""

import pytest

from tests.recipes.test_restarts import BASE, launched
from tests.recipes.test_sft import BASE as TUNE
from tests.recipes.test_sft import examples, model  # noqa: F401 - fixtures

pytestmark = pytest.mark.distributed
SECONDS = 12
QUICK = ("start", "saving hf", "saving in the background")
PHASES = {  # rank, moment, flags
    "start": (0, "config.json", []),
    "data": (1, "c.idx", []),
    "index": (0, "/cache/", []),
    "model": (1, "tiny-model0/model.safetensors", []),
    "evaluation": (1, "evaluation", ["--do_eval", "--eval_steps", 2, "--eval_iters", 2]),
    "saving hf": (1, "rng_state_1.json", []),
    "saving hf on rank 0": (0, ".checkpoint-2.incomplete/model.safetensors", []),
    "saving sharded": (1, "weights-00002", ["--checkpoint_format", "sharded", "--sharding", "stage2"]),
    "saving in the background": (1, "weights-00002", ["--checkpoint_format", "sharded", "--async_save"]),
}


@pytest.mark.parametrize(
    "phase", [phase if phase in QUICK else pytest.param(phase, marks=pytest.mark.slow) for phase in PHASES]
)
def test_a_stopped_rank_is_named(tiny_model, corpus_folder, tmp_path, phase):
    rank, when, flags = PHASES[phase]
    words = ["pretrain", *BASE, "--input_dir", corpus_folder / "mmap", "--model_name_or_path", tiny_model, *flags]
    words += ["--output_dir", tmp_path / "out", "--data_cache", tmp_path / "cache", "--ddp_timeout", SECONDS]
    done = launched("stop", rank, when, words, restarts=0, grace=3)
    assert done.returncode == 1
    assert f"error: rank {rank} " in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "when"), [(0, "train.jsonl"), (0, "encoded"), (1, "evaluation")])
def test_a_stopped_rank_of_a_fine_tuning_is_named(model, examples, tmp_path, rank, when):  # noqa: F811
    words = ["sft", *TUNE, "--model_name_or_path", model, "--dataset_name_or_path", examples, "--do_eval"]
    words += ["--output_dir", tmp_path / "out", "--data_cache", tmp_path / "encoded", "--ddp_timeout", SECONDS]
    done = launched("stop", rank, when, words, restarts=0, grace=3)
    assert done.returncode == 1 and f"error: rank {rank} " in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("when", ["config.json", "/text.jsonl", "model.safetensors"])
def test_a_stopped_rank_of_an_evaluation_is_named(model, tmp_path, when):  # noqa: F811
    (tmp_path / "text.jsonl").write_text('{"text": "the cat sat on a mat while two dogs ran"}\n' * 20)
    words = ["evaluate", "--model_name_or_path", model, "--task", "TEXT", "--eval_path", tmp_path / "text.jsonl"]
    words += ["--device", "cpu", "--ddp_timeout", SECONDS]
    done = launched("stop", 1, when, words, restarts=0, grace=3)
    assert done.returncode == 1 and "error: rank 1 " in done.stderr, done.stderr

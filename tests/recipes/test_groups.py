"""Four processes in pairs that shard (--sharding_parallel_degree 2): they train like an independent loop.

All runs happen in one launched session (see session.py); the tests look at what it left.
"""

import json

import pytest
import torch

from gptlm.commands.pretrain import parse_pretrain
from gptlm.commands.sft import parse_sft
from gptlm.recipes.pretrain.run import pretrain
from gptlm.recipes.sft.run import sft
from tests.recipes import test_sft
from tests.recipes.test_layouts import (  # noqa: F401 - fixtures
    BASE,
    QUIET,
    SAVED,
    STEPS,
    TRAINED,
    case,
    model,
    wanted,
    weights,
    words,
)
from tests.recipes.test_sft import examples  # noqa: F401 - a fixture
from tests.recipes.test_sft import model as tuned_model  # noqa: F401 - a fixture
from tests.recipes.test_sharding import TINY, launch, losses, norms, run_session

pytestmark = pytest.mark.distributed

ONE = "--per_device_train_batch_size 1"  # two micro-batches in a step
PAIRS = {f"stage{stage}": f"{ONE} --sharding stage{stage} --sharding_parallel_degree 2" for stage in (1, 2, 3)}
FOUR = f"{ONE} --sharding stage2"
HALF = " --fp16 --fp16_opt_level O2 --scale_loss 1024 --loss_scale_window 100"
RESUMED = {  # the run and the step of a checkpoint, and the words that go on from it
    "stage1 to four": ("stage1", SAVED, f"{FOUR} --save_steps 1{QUIET}"),
    "four to stage3": ("stage1 to four", SAVED + 1, PAIRS["stage3"] + TRAINED),
    "stage2 to stage1": ("stage2", SAVED, PAIRS["stage1"] + TRAINED),
    "stage3 to stage3": ("stage3", SAVED, PAIRS["stage3"] + TRAINED),
}
TUNED = {"whole": "--sharding stage2", "lora": "--sharding stage3 --lora"}


def tuning(model, examples, *more):  # noqa: F811
    data = ["--model_name_or_path", model, "--dataset_name_or_path", examples, "--save_strategy", "no"]
    return [*test_sft.BASE, *test_sft.NO_DROPOUT, *data, *more]


@pytest.fixture(scope="module")
def session(words, tuned_model, examples, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("pairs")
    cases = [case(words, folder, name, more) for name, more in PAIRS.items()]
    cases.append(case(words, folder, "four one overflow", FOUR + HALF + TRAINED))
    cases += [case(words, folder, f"{name} one overflow", more + HALF + TRAINED) for name, more in PAIRS.items()]
    for name, (saved, step, more) in RESUMED.items():
        start = folder / saved.replace(" ", "_") / f"checkpoint-{step}"
        cases.append(case(words, folder, name, f"{more} --resume_from_checkpoint {start}"))
    for name, more in TUNED.items():
        pairs = ["--per_device_train_batch_size", 1, "--sharding_parallel_degree", 2, *more.split()]
        cases.append((name, [*tuning(tuned_model, examples, *pairs), "--output_dir", folder / name]))
    zero3 = {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0, "zero_hpz_partition_size": 2, **TINY}}
    (folder / "zero3.json").write_text(json.dumps(zero3))
    cases.append(case(words, folder, "hpz", f"{ONE} --deepspeed {folder}/zero3.json"))
    return folder, run_session(4, cases, folder)


@pytest.mark.parametrize("name", [*PAIRS, "hpz"])
def test_pairs_train_like_one_process(session, wanted, name):  # noqa: F811
    folder, results = session
    assert losses(results[name]) == pytest.approx(wanted[0], abs=1e-5)
    assert norms(results[name]) == pytest.approx(wanted[2], abs=1e-4)
    for key, value in weights(folder / name).items():
        torch.testing.assert_close(value, wanted[1][key], atol=3e-5, rtol=0)


@pytest.mark.parametrize("name", PAIRS)
def test_each_process_holds_half_of_the_optimizer_state(session, model, name):  # noqa: F811
    total = sum(value.numel() for value in weights(model).values()) - 509 * 32  # the head is the embedding
    (held,) = set(session[1][name]["moments"])
    assert total / 2 <= held < total / 2 * 1.01  # padding
    assert set(session[1]["stage1 to four"]["moments"]) < {*range(total // 4, total // 4 + total // 400)}


@pytest.mark.parametrize("name", PAIRS)
def test_an_overflow_on_one_process_is_one_of_all_pairs(session, name):
    """The third step is left out everywhere, and the scale halved, as where all four processes share."""
    found, four = session[1][f"{name} one overflow"], session[1]["four one overflow"]
    assert found["scale"] == four["scale"] == 4 * [{"value": 512, "good_steps": STEPS - 3, "overflows_left": 0}]
    assert losses(found) == pytest.approx(losses(four), abs=1e-3)


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_of_pairs_goes_on_in_any_group(session, wanted, name):  # noqa: F811
    start, step, _ = RESUMED[name]
    found = losses(session[1][name])
    assert found[:step] == losses(session[1][start])[:step]  # the log of the run before
    assert found[step:] == pytest.approx(wanted[0][step:], abs=1e-5)


def test_one_process_goes_on_from_pairs(session, words, wanted, tmp_path):  # noqa: F811
    start = session[0] / "stage3" / f"checkpoint-{SAVED}"
    more = f"--per_device_train_batch_size 8 --do_eval 0 --evaluation_strategy no --resume_from_checkpoint {start}"
    argv = case(words, tmp_path, "one", more)[1]
    pretrain(parse_pretrain([str(word) for word in argv], {}))
    history = json.loads((tmp_path / "one" / "trainer_state.json").read_text())["log_history"]
    assert losses({"history": history})[SAVED:] == pytest.approx(wanted[0][SAVED:], abs=1e-5)


@pytest.mark.parametrize("name", TUNED)
def test_fine_tuning_in_pairs(session, tuned_model, examples, tmp_path, name):  # noqa: F811
    more = ["--lora"] if name == "lora" else []
    argv = tuning(tuned_model, examples, "--per_device_train_batch_size", 4, *more, "--output_dir", tmp_path)
    sft(parse_sft([str(word) for word in argv], {}))
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert losses(session[1][name]) == pytest.approx(losses({"history": history}), abs=1e-5)


def test_offloaded_gradients_are_averaged_over_the_pairs(tmp_path):
    """In every stage, and an overflow in one of the pairs is one in both; see offloaded_pairs.py."""
    launch(4, "offloaded_pairs.py", tmp_path / "result.json", log=tmp_path / "log.txt")
    found = json.loads((tmp_path / "result.json").read_text())
    assert len(found) == 6
    for name, weights_apart, norms_apart, overflow in found:
        assert weights_apart < 1e-6 and norms_apart < 1e-6, name
        assert overflow == [name in ("stage1 offload", "stage2 offload")] * 4, name

"""Document masking in every parallel layout: the run of one process, which test_documents.py checks by hand."""

import json

import pytest

from gptlm.commands.pretrain import parse_pretrain
from gptlm.recipes.pretrain.run import pretrain
from tests.recipes.test_layouts import ONE, PP, TP, case, model, words  # noqa: F401 - fixtures
from tests.recipes.test_sharding import losses, norms, run_session

ATTENTION, POSITION = (f"--document_masking {how} --eod_mask_loss" for how in ("attention", "position"))
TWO = {
    "tp2": f"{TP} --per_device_train_batch_size 4 {ATTENTION}",
    "tp2 sp": f"{TP} --sequence_parallel 1 --per_device_train_batch_size 2 --recompute {ATTENTION}",
    "pp2": f"{PP} --per_device_train_batch_size 2 {ATTENTION}",
    "pp2 v2": f"{PP} --virtual_pp_degree 2 {ONE} --recompute {ATTENTION}",
    "tp2 sp position": f"{TP} --sequence_parallel 1 --per_device_train_batch_size 4 {POSITION}",
    "pp2 v2 position": f"{PP} --virtual_pp_degree 2 {ONE} {POSITION}",
}
# one window at a time: rows without targets, documents of their own, fill up the stages
SINGLE = f"{PP} --virtual_pp_degree 2 {ONE} {ATTENTION} --per_device_eval_batch_size 1 --eval_iters 4"
FOUR = {
    "tp2 pp2": f"{TP} {PP} {ONE} {ATTENTION}",
    "tp2 sp pp2 v2": f"{TP} --sequence_parallel 1 {PP} --virtual_pp_degree 2 {ONE} {ATTENTION}",
    "pp4": f"--pipeline_parallel_degree 4 --per_device_train_batch_size 2 {ATTENTION}",  # two stages read no tokens
    "pp2 stage1 position": f"{PP} --sharding stage1 {ONE} {POSITION}",
}


@pytest.fixture(scope="module")
def wanted(words, tmp_path_factory):  # noqa: F811
    """The same data in one process: with both maskings, and with none."""
    folder, found = tmp_path_factory.mktemp("one"), {}
    for name, more in (("attention", ATTENTION), ("position", POSITION), ("none", "--eod_mask_loss")):
        _, typed = case(words, folder, name, f"--per_device_train_batch_size 8 {more}")
        metrics = pretrain(parse_pretrain([str(word) for word in typed], {}))
        state = json.loads((folder / name / "trainer_state.json").read_text())
        found[name] = {"history": state["log_history"], "metrics": metrics}
    assert losses(found["attention"]) != pytest.approx(losses(found["position"]), abs=1e-4)
    assert losses(found["position"]) != pytest.approx(losses(found["none"]), abs=1e-4)
    return found


@pytest.fixture(scope="module")
def two(words, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("documents")
    cases = [case(words, folder, name, more) for name, more in TWO.items()]
    cases.append(case(words, folder, "single", SINGLE))
    return run_session(2, cases, folder)


def check(found, wanted, name):
    one = wanted["position" if "position" in name else "attention"]
    assert losses(found[name]) == pytest.approx(losses(one), abs=1e-5)
    assert norms(found[name]) == pytest.approx(norms(one), abs=1e-4)
    assert found[name]["metrics"]["eval_loss"] == pytest.approx(one["metrics"]["eval_loss"], abs=2e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("name", [*TWO, "single"])
def test_two_processes_mask_like_one(two, wanted, name):
    check(two, wanted, name)


@pytest.mark.slow
@pytest.mark.distributed
def test_four_processes_mask_like_one(words, wanted, tmp_path):  # noqa: F811
    found = run_session(4, [case(words, tmp_path, name, more) for name, more in FOUR.items()], tmp_path)
    for name in ("tp2 pp2", "tp2 sp pp2 v2", "pp4"):
        check(found, wanted, name)
    assert found["pp4"]["read"][1:3] == [0, 0]
    name = "pp2 stage1 position"  # two replicas evaluate twice as many windows
    assert losses(found[name]) == pytest.approx(losses(wanted["position"]), abs=1e-5)
    assert norms(found[name]) == pytest.approx(norms(wanted["position"]), abs=1e-4)

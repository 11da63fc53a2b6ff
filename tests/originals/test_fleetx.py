"""The configuration files of FleetX and PaddleFleetX themselves."""

import json

import pytest

from gptlm.commands.pretrain import parse_pretrain
from gptlm.errors import UsageError
from tests.compat.test_fleetx import OUTCOMES, assert_outcome
from tests.documents import test_000_fleetx as page_000
from tests.documents import test_001_fleetx_auto as page_001

FIRST = "g1b_20220815_seed000/examples/gpt/single"
AUTO = "g2b_20221129_seed001/ppfleetx/configs/nlp/gpt/auto"
WORLDS = {"13B": 16, "dp8": 8, "sharding16": 16, "mp8_pp16": 128, "mp8": 8, "mp2": 2}
BROKEN = {"g1c_20220816/examples/gpt/hybrid_parallel/configs_175B_mp8_pp16.yaml": "longer than the position table"}


@pytest.fixture(scope="module")
def root(shared):
    return shared / "cases" / "fleetx" / "yaml"


def test_every_file_is_read(root):
    files = sorted(root.rglob("*.yaml"))
    assert len(files) > 40
    for file in files:
        one = any(word in file.name for word in ("generation", "inference", "single"))
        world = next((size for name, size in WORLDS.items() if name in file.name and (not one or name == "mp2")), 1)
        words = ["-c", str(file), "--world_size", str(world)]
        broken = BROKEN.get(str(file.relative_to(root)))
        if broken:
            with pytest.raises(UsageError, match=broken):
                parse_pretrain(words, {}, printing=True)
            continue
        run = parse_pretrain(words, {}, printing=True)
        assert run.dims.world == world, file
        runs = not any(
            word in file.name for word in ("eval", "generation", "inference", "export", "glue", "prune", "qat")
        )
        assert bool(run.refusals) != runs, (file, run.refusals)


def test_outcomes_of_the_original(root):
    seen = 0
    for case in OUTCOMES:
        auto, _, name = case["file"].rpartition("/")
        found = [file for file in root.rglob(f"{name}.yaml") if bool(auto) == ("auto" in file.parts)]
        if found:
            assert_outcome(case, found[0])
            seen += 1
    assert seen > 25


@pytest.mark.parametrize("size", page_000.SIZES)
def test_the_shipped_files_of_the_first_generation(root, monkeypatch, tmp_path, size):
    """Every value of the run, but for where it comes from."""
    monkeypatch.chdir(tmp_path)
    name = f"configs_{size}_single_card.yaml"
    assert page_000.shown(name)["run"] == page_000.shown(root / FIRST / name)["run"]


@pytest.mark.parametrize("name", page_001.FILES)
def test_the_shipped_files_of_tools_auto(root, monkeypatch, tmp_path, name):
    """But for the rate of the page's log, and checkpoints: PaddleFleetX's files save none before the end."""
    monkeypatch.chdir(tmp_path)
    world = page_001.FILES[name][0]
    words = ["-c", str(root / AUTO / f"pretrain_gpt_{name}.yaml"), "--world_size", str(world)]
    ours = json.loads(page_001.configured(name, world=world).as_json())["run"]
    theirs = json.loads(parse_pretrain(words, {}, printing=True).as_json())["run"]
    differ = {key: value for key, value in ours.items() if value != theirs[key]}
    assert differ == {"learning_rate": 1e-5, "save_strategy": "steps", "save_steps": 1000}

"""Nothing is lost: gptlm replaces and deletes files that it wrote, and refuses by name what would do more."""

import json
import os
import shutil

import pytest

from gptlm import owned
from gptlm.checkpoint import folder as checkpoint
from gptlm.commands.pretrain import parse_pretrain
from gptlm.errors import GptlmError
from gptlm.recipes.common.output_folder import check_own_files
from gptlm.recipes.common.resume import check_shape, find_resume_checkpoint
from gptlm.recipes.pretrain.run import pretrain
from tests.conftest import write_tokens

SHORT = """--max_seq_length 16 --per_device_train_batch_size 1 --max_steps 2 --save_steps 1 --logging_steps 1
    --device cpu --report_to none --split 8,1,1 --do_train --continue_training"""


def snapshot(folder):
    """The content of every file in `folder`, and the targets of links."""
    return {
        path.relative_to(folder).as_posix(): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    write_tokens(tmp_path_factory.mktemp("tokens") / "c")
    return next(tmp_path_factory.getbasetemp().glob("tokens*"))


@pytest.fixture
def train(data, tiny_model, tmp_path):
    def call(*words, output=tmp_path / "out", model=tiny_model, data=data):
        command = ["--input_dir", data, "--output_dir", output, "--model_name_or_path", model, *SHORT.split(), *words]
        return pretrain(parse_pretrain([str(word) for word in command], {}))

    return call


@pytest.fixture(scope="module")
def finished(data, tiny_model, tmp_path_factory):
    """A finished run of two steps with a checkpoint at each; copy it."""
    folder = tmp_path_factory.mktemp("finished") / "out"
    command = ["--input_dir", data, "--output_dir", folder, "--model_name_or_path", tiny_model, *SHORT.split()]
    pretrain(parse_pretrain([str(word) for word in command], {}))
    return folder


# The listing ---------------------------------------------------------------------------------------------------------


def test_a_listing_survives_lines_that_were_cut_and_takes_the_last_word(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("12345")
    owned.note(tmp_path, ["a", "b"], "predict", "k1")
    with open(tmp_path / owned.LISTING, "a") as file:
        file.write('{"command": "predict", "key": "k')  # the disk was full
    owned.note(tmp_path, ["c"], "predict", "k2")
    owned.note(tmp_path, ["b"], "tokenizer", "k3")
    found = owned.listing(tmp_path)
    assert {name: entry.key for name, entry in found.items()} == {"a": "k1", "b": "k3", "c": "k2"}
    (tmp_path / "a").write_text("changed by hand")
    assert owned.entry_of(tmp_path, "a") is None and owned.entry_of(tmp_path, "c").command == "predict"
    assert not owned.remove(tmp_path, "a") and owned.remove(tmp_path, "b") and not (tmp_path / "b").exists()
    assert list(owned.listing(tmp_path)) == ["a", "c"]


def test_a_folder_is_removed_as_far_as_it_is_listed_and_links_are_not_followed(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "out"
    for path in (elsewhere, folder / "x"):
        path.mkdir(parents=True)
        (path / "file").write_text("1")
    (folder / "x" / "mine").write_text("2")
    (folder / "link").symlink_to(elsewhere)
    owned.note(folder, ["x/file", "link/", "link/file"], owned.RUN)
    assert not owned.remove(folder, "x") and snapshot(folder / "x") == {"mine": b"2"}
    assert not owned.remove(folder, "link")
    owned.make_way(folder, "link")
    owned.make_way(folder, "x")
    assert sorted(path.name for path in folder.iterdir()) == [owned.LISTING, "left-link", "left-x"]
    assert snapshot(elsewhere) == {"file": b"1"}


@pytest.mark.parametrize("evidence", ["both", "run.json", "checkpoint", "neither"])
def test_a_folder_of_an_earlier_version_counts_by_its_names(tmp_path, evidence):
    """Only run.json and a checkpoint together say so; what else is there stays anybody's."""
    names = """config.json tokenizer.json trainer_state.json eval_results.json all_results-2.json results_of.json
        training_args.bin rng_state_0.pth gptlm-error-12.log runs/Nov30_host/events.out.tfevents.1.h.2.0""".split()
    for name in (*names, "notes.txt", "checkpoint-9/model.safetensors", "runs/plot.png", "model.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    if evidence in ("both", "run.json"):
        (tmp_path / "run.json").write_text("{}")
    if evidence in ("both", "checkpoint"):
        (tmp_path / "checkpoint-3").mkdir()
        (tmp_path / "checkpoint-3/manifest.json").write_text('{"global_step": 3, "files": {"model.safetensors": 1}}')
    found = {name for name in owned.listing(tmp_path) if (tmp_path / name).is_file()}
    expected = {
        "both": {*names, "run.json", "checkpoint-3/manifest.json"},
        "checkpoint": {"checkpoint-3/manifest.json"},
    }
    assert found == expected.get(evidence, set())
    owned.note(tmp_path, ["new"], owned.RUN)  # the listing that the folder gets now takes them over
    assert {name for name in owned.listing(tmp_path) if (tmp_path / name).is_file()} == found


# Checkpoints ---------------------------------------------------------------------------------------------------------


def write_checkpoint(folder, step):
    staging = checkpoint.staging_folder(folder, step)
    checkpoint.start(staging)
    (staging / "model.safetensors").write_bytes(bytes(10))
    return checkpoint.commit(staging, {"global_step": step})


def foreign_checkpoints(folder, elsewhere):
    """checkpoint-1 of another library, and the link checkpoint-2 to a checkpoint of gptlm in `elsewhere`."""
    (folder / "checkpoint-1").mkdir(parents=True)
    (folder / "checkpoint-1/pytorch_model.bin").write_bytes(b"theirs")
    (folder / "checkpoint-2").symlink_to(write_checkpoint(elsewhere, 2))
    return [folder / "checkpoint-1", folder / "checkpoint-2"]


def test_rotation_counts_and_removes_only_own_checkpoints(tmp_path):
    theirs = foreign_checkpoints(tmp_path / "out", tmp_path / "elsewhere")
    before = snapshot(tmp_path)
    own = [write_checkpoint(tmp_path / "out", step) for step in (3, 4, 5, 6)]
    (own[1] / "notes.txt").write_text("mine")
    removed = checkpoint.rotate(tmp_path / "out", 1, None, own[-1], {"checkpoint-5"})
    assert [path.name for path in removed] == ["checkpoint-3", "checkpoint-4"]
    assert snapshot(own[1]) == {"notes.txt": b"mine"} and own[2].is_dir() and theirs[1].is_symlink()
    assert {name: now for name, now in snapshot(tmp_path).items() if name in before} == before


def test_a_checkpoint_takes_no_name_of_others(tmp_path, caplog):
    foreign_checkpoints(tmp_path / "out", tmp_path / "elsewhere")
    (tmp_path / "out/.checkpoint-1.incomplete").mkdir()
    (tmp_path / "out/.checkpoint-1.incomplete/x").write_text("theirs")
    before = snapshot(tmp_path).values()
    checkpoint.remove_leftovers(tmp_path / "out")
    for step in (1, 2):
        write_checkpoint(tmp_path / "out", step)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"left-checkpoint-1", "left-checkpoint-2", "left-.checkpoint-1.incomplete", "checkpoint-1"}
    assert not [content for content in before if content not in snapshot(tmp_path).values()]
    assert "checkpoint-1 was not written by gptlm; renamed to" in caplog.text


def test_checkpoints_that_were_set_aside_keep_their_content(tmp_path):
    for content in (b"1", b"2", b"3"):
        (write_checkpoint(tmp_path, 7) / "mine").write_bytes(content)
        checkpoint.set_aside(tmp_path, 6)
    names = ["left-checkpoint-7", "left-checkpoint-7-2", "left-checkpoint-7-3"]
    assert [(tmp_path / name / "mine").read_bytes() for name in names] == [b"1", b"2", b"3"]
    assert not any(name.startswith("left") for name in owned.listing(tmp_path))


# Training ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["model", "model by a link", "tokenizer", "data"])
def test_the_folder_of_an_input_is_no_output_folder(train, tiny_model, data, tmp_path, role):
    folder = tmp_path / "given"
    shutil.copytree(data if role == "data" else tiny_model, folder)
    before, words, output = snapshot(folder), {}, folder
    if role == "data":
        words = {"data": folder}
    elif role.startswith("model"):
        words = {"model": folder}
    if "link" in role:
        output = tmp_path / "link"
        output.symlink_to(folder)
    more = ["--tokenizer_name_or_path", folder] if role == "tokenizer" else []
    what = role.split()[0]
    for flags in ([], ["--overwrite_output_dir"]):
        with pytest.raises(GptlmError, match=f"is the folder of the {what} .* and holds no run of gptlm; give another"):
            train(*more, *flags, output=output, **words)
    assert snapshot(folder) == before
    if role == "model":
        train(model=folder, output=folder / "tuned")
        assert {name: now for name, now in snapshot(folder).items() if not name.startswith("tuned/")} == before


@pytest.mark.parametrize("name", ["trainer_state.json", "eval_results.json", "model.safetensors", "tokenizer.json"])
def test_a_file_of_others_in_the_way_is_refused_by_name(train, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    for flags in ([], ["--overwrite_output_dir"]):
        with pytest.raises(
            GptlmError, match=f"{name} would be replaced, and gptlm did not write it; move it"
        ) as raised:
            train(*flags)
        assert "--output_dir" in str(raised.value)
    assert snapshot(tmp_path) == {f"out/{name}": b"mine"}


@pytest.mark.parametrize("earlier", [False, True])
def test_overwriting_removes_what_is_listed_and_nothing_else(train, finished, tmp_path, capsys, earlier):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    if earlier:  # a version without listings
        (out / owned.LISTING).unlink()
        (out / "training_args.bin").write_bytes(b"1")
        for name in ("report.html", "run_log.jsonl"):
            (out / name).unlink(missing_ok=True)
    mine = [
        "notes.txt",
        "checkpoint-1/notes.txt",
        "data/x.json",
        "left-checkpoint-1/model.safetensors",
        "my_results.json",
    ]
    for name in (*mine, "checkpoint-77/pytorch_model.bin"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(name)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/model.safetensors").write_text("theirs")
    (out / "checkpoint-9").symlink_to(tmp_path / "elsewhere")
    train("--overwrite_output_dir", "--save_steps", "2")
    said = capsys.readouterr().out
    card = "" if earlier else "README.md, "
    assert f"removed from {out} (overwrite_output_dir): {card}all_results.json, checkpoint-2, config.json" in said
    assert f"{out / 'checkpoint-1'} holds files that gptlm did not write; they stay" in said
    for name in (*mine, "checkpoint-77/pytorch_model.bin"):
        assert (out / name).read_text() == name
    assert (out / "checkpoint-9").is_symlink() and (tmp_path / "elsewhere/model.safetensors").read_text() == "theirs"
    assert sorted(path.name for path in (out / "checkpoint-1").iterdir()) == ["notes.txt"]
    assert not (out / "training_args.bin").exists() and (out / "model.safetensors").is_file()


def test_a_model_in_a_checkpoint_of_the_output_folder_is_never_removed(train, finished, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    before = snapshot(out / "checkpoint-1")
    (tmp_path / "link").symlink_to(out / "checkpoint-1")
    words = ("--save_total_limit", "1", "--save_steps", "3", "--max_steps", "4")
    train(*words, "--overwrite_output_dir", model=tmp_path / "link")
    assert snapshot(out / "checkpoint-1") == before
    assert sorted(path.name for path in out.glob("*checkpoint-*")) == ["checkpoint-1", "checkpoint-4"]


def test_a_restart_does_not_resume_from_the_model_of_the_run_before(train, finished, tmp_path, capsys):
    """checkpoint-2 is the model of a new run, which was ended after its first step and starts again."""
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    words = ("--max_steps", "1", "--overwrite_output_dir")
    train(*words, model=out / "checkpoint-2")
    before = snapshot(out / "checkpoint-2")
    capsys.readouterr()
    train(model=out / "checkpoint-2", output=out)
    assert f"weights from {out / 'checkpoint-1'}" in capsys.readouterr().out
    assert before.items() <= {**snapshot(out / "checkpoint-2"), **snapshot(out / "left-checkpoint-2")}.items()


def test_a_model_that_would_be_removed_while_it_is_read_is_refused(train, finished, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    before = snapshot(out)
    with pytest.raises(GptlmError, match="--overwrite_output_dir would remove the model that the run reads"):
        train("--overwrite_output_dir", model=out)
    assert snapshot(out) == before
    train("--max_steps", "3", model=out)  # resumes
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 3


@pytest.mark.parametrize("flag", ["--load", "--resume_from_checkpoint"])
def test_load_and_save_may_be_one_folder(finished, tiny_model, data, tmp_path, flag):
    shutil.copytree(finished, tmp_path / "out")
    for output in (tmp_path / "out", tmp_path / "new"):
        command = ["--input_dir", data, "--output_dir", output, flag, output, "--model_name_or_path", tiny_model]
        run = parse_pretrain([str(word) for word in (*command, *SHORT.split())], {})
        check_own_files(run)
        found = find_resume_checkpoint(run, check_shape, None)
        assert (found.path.name if found else None) == ("checkpoint-2" if output.name == "out" else None)

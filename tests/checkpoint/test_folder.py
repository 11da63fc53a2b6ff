"""A checkpoint is complete, or it is skipped with a message that names it."""

import json
import os
import re

import pytest
import xxhash

from gptlm import owned
from gptlm.checkpoint import folder as checkpoint
from gptlm.checkpoint.task import owner_of
from gptlm.errors import GptlmError
from tests.checkpoint.made import FIELDS, note_again, write_checkpoint


def test_commit_and_read(tmp_path):
    path = write_checkpoint(tmp_path, 10, consumed_samples=80, epoch_position=[1, 2], more="not read")
    assert path == tmp_path / "checkpoint-10" and [p.name for p in tmp_path.iterdir()] == ["checkpoint-10"]
    found = checkpoint.read(path).manifest
    assert (found.global_step, found.consumed_samples, found.epoch_position, found.layout) == (10, 80, [1, 2], [1] * 3)
    assert found.files == {"model.safetensors": 100, "sub/optimizer.pt": 50}
    assert found.checksums == {name: xxhash.xxh3_128_hexdigest(bytes(size)) for name, size in found.files.items()}


def test_the_newest_is_the_highest_step_not_the_last_name(tmp_path):
    for step in (9, 100, 20):
        write_checkpoint(tmp_path, step)
    found, skipped = checkpoint.newest(tmp_path)
    assert found.path.name == "checkpoint-100" and skipped == []


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: (p / "manifest.json").unlink(), "no manifest.json"),
        (lambda p: (p / "manifest.json").write_text("{"), "damaged manifest"),
        (lambda p: (p / "model.safetensors").write_bytes(bytes(50)), "50 bytes long, expected 100"),
        (lambda p: (p / "sub" / "optimizer.pt").write_bytes(b""), "0 bytes long"),
        (lambda p: (p / "model.safetensors").unlink(), "missing"),
        (lambda p: (p / "model.safetensors").write_bytes(b"x" * 100), "the content of model.safetensors is not what"),
        (lambda p: [f.write_bytes(b"x" * f.stat().st_size) for f in p.rglob("*.[sp]*t*")], "model.safetensors, sub/o"),
        (lambda p: p.rename(p.with_name("checkpoint-30")), "damaged manifest.json: it is of step 20"),
        (lambda p: [f.unlink() for f in p.rglob("*") if f.is_file()], "no manifest.json"),
    ],
)
def test_a_damaged_newest_one_is_named_and_skipped(tmp_path, damage, says):
    write_checkpoint(tmp_path, 10)
    damage(write_checkpoint(tmp_path, 20))
    found, skipped = checkpoint.newest(tmp_path)
    assert found.path.name == "checkpoint-10"
    assert len(skipped) == 1 and re.search("checkpoint-[23]0", skipped[0]) and says in skipped[0]


BAD_FIELDS = [
    {"global_step": -1}, {"global_step": "20"}, {"global_step": 20.0}, {"global_step": True}, {"global_step": None},
    {"global_step": [20]}, {"global_step": 21}, {"optimizer_steps": -1},
    {"optimizer_steps": "x"}, {"consumed_samples": -8}, {"consumed_samples": 8.5}, {"consumed_samples": {}},
    {"loss_sum": "1.5"}, {"loss_sum": None}, {"loss_sum": True}, {"world_size": -1}, {"world_size": [1]},
    {"weights_only": 0}, {"weights_only": "false"}, {"loss_scale": 1.0}, {"loss_scale": []}, {"loss_scale": {}},
    {"loss_scale": {"value": "1", "good_steps": 0, "overflows_left": 1}}, {"layout": [1, 1]}, {"layout": "111"},
    {"layout": [1, 1, -1]}, {"layout": None}, {"order": []}, {"order": 5}, {"settings": [1]}, {"settings": None},
    {"task": 5}, {"task": ["sft"]}, {"epoch_position": 3}, {"epoch_position": [1]}, {"epoch_position": [1, "2"]},
    {"epoch_position": [0, -1]}, {"steps_without_loss": -1}, {"steps_without_loss": None}, {"files": []},
    {"files": {}}, {"files": "model.safetensors"}, {"files": 5}, {"files": None}, {"files": ["model.safetensors"]},
    {"files": {"model.safetensors": "100"}}, {"files": {"model.safetensors": None}}, {"files": {"": 100}},
    {"files": {"../checkpoint-10/model.safetensors": 100}}, {"files": {"sub/../../checkpoint-10/manifest.json": 1}},
    {"files": {"/etc/hostname": 100}}, {"files": {"a\0b": 1}}, {"files": {".": 1}}, {"files": {"sub": 50}},
    {"files": {"x" * 5000: 1}},
]  # fmt: skip
BAD_TEXTS = [
    b"",
    b"[]",
    b"null",
    b"5",
    b'"x"',
    b"{}",
    b"{",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"files": {}}',
    b"NaN",
    b"9" * 5000,
]


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_manifest_with_wrong_values_is_skipped_with_a_sentence(tmp_path, has_checksums):
    """Nothing outside the folder is looked at, and nothing is renamed."""
    write_checkpoint(tmp_path, 10)
    path = write_checkpoint(tmp_path, 20)
    whole = (path / "manifest.json").read_bytes()
    cases = [(changes, ()) for changes in BAD_FIELDS] + [({}, [name]) for name in (*FIELDS, "global_step", "files")]
    for changes, without in cases:
        if has_checksums and not (isinstance(changes.get("files", {}), dict) and "files" not in without):
            continue  # they belong to files
        note_again(path, checksums=has_checksums, without=without, **changes)
        found, skipped = checkpoint.newest(tmp_path)
        assert found.path.name == "checkpoint-10" and len(skipped) == 1, (changes, without)
        assert "checkpoint-20" in skipped[0] and len(skipped[0]) < 400 + len(str(path)), (changes, without)
        (path / "manifest.json").write_bytes(whole)
    for content in BAD_TEXTS:
        (path / "manifest.json").write_bytes(content)
        found, skipped = checkpoint.newest(tmp_path)
        assert found.path.name == "checkpoint-10" and "has a damaged manifest.json" in skipped[0], content
        assert owner_of(tmp_path) is None
    (path / "manifest.json").write_bytes(whole)
    assert checkpoint.newest(tmp_path)[0].path == path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-20"]


def test_a_changed_value_in_a_manifest_is_noticed(tmp_path):
    path = write_checkpoint(tmp_path, 20, consumed_samples=80)
    text = (path / "manifest.json").read_text()
    for changed in (text.replace('"consumed_samples": 80', '"consumed_samples": 81'), text.replace("xxh3", "xxh4", 1)):
        assert changed != text
        (path / "manifest.json").write_text(changed)
        with pytest.raises(GptlmError, match="its content differs from its checksum"):
            checkpoint.read(path)


BAD_HISTORIES = [
    b"", b'{"global_step": 20', b"[]", b"5", b"null", b'"x"', b'{"global_step": 20, "log_history": 5}',
    b'{"global_step": 20, "log_history": {}}', b'{"global_step": 20, "log_history": [5]}',
    b'{"global_step": 20, "best_model_checkpoint": 5}', b'{"global_step": 20, "best_global_step": "x"}',
    b'{"global_step": 20, "unknown": 1}', b'{"global_step": 19}', b'{"global_step": true}', b'{"global_step": "20"}',
    b'{"global_step": 20, "stateful_callbacks": [1]}', b"\xff", b"[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_damaged_history_is_a_damaged_checkpoint(tmp_path, has_checksums):
    good = b'{"global_step": 20, "log_history": [{"loss": 1.0}]}'
    write_checkpoint(tmp_path, 10)
    path = write_checkpoint(tmp_path, 20, {"trainer_state.json": good})
    assert checkpoint.newest(tmp_path)[0].path == path and checkpoint.log_lines_in(path) == 1
    for content in BAD_HISTORIES:
        (path / "trainer_state.json").write_bytes(content)
        note_again(path, checksums=has_checksums)
        found, skipped = checkpoint.newest(tmp_path)
        assert found.path.name == "checkpoint-10" and "trainer_state.json cannot be read" in skipped[0], content


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"\xff"])
def test_damaged_random_states_without_checksums(tmp_path, content):
    """With checksums it is damage as of any file; what is undamaged, but not understood, stops no run."""
    write_checkpoint(tmp_path, 10)
    path = write_checkpoint(tmp_path, 20, {"rng_state_1.json": content})
    assert checkpoint.newest(tmp_path)[0].path == path
    note_again(path, checksums=False)
    found, skipped = checkpoint.newest(tmp_path)
    assert found.path.name == "checkpoint-10" and "rng_state_1.json cannot be read" in skipped[0]


def test_half_written_ones_do_not_count_and_are_cleared(tmp_path):
    staging = checkpoint.staging_folder(tmp_path, 30)
    checkpoint.start(staging)
    (staging / "model.safetensors").write_bytes(b"x")
    assert checkpoint.newest(tmp_path) == (None, [])
    checkpoint.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".gptlm-files"]


def test_a_missing_one(tmp_path):
    with pytest.raises(GptlmError, match="does not exist"):
        checkpoint.read(tmp_path / "checkpoint-1")
    assert checkpoint.newest(tmp_path / "nowhere") == (None, [])


def test_writing_the_same_step_again_replaces_it(tmp_path):
    write_checkpoint(tmp_path, 10, consumed_samples=1)
    assert checkpoint.read(write_checkpoint(tmp_path, 10, consumed_samples=2)).manifest.consumed_samples == 2
    assert json.loads((tmp_path / "checkpoint-10" / "manifest.json").read_text())["files"]["model.safetensors"] == 100


def test_an_interrupted_replacement_leaves_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, 5, {"model.safetensors": b"old"})
    rename = os.rename

    def until_the_new_one(source, target):
        if target == tmp_path / "checkpoint-5":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", until_the_new_one)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(tmp_path, 5, {"model.safetensors": b"new"})
    checkpoint.remove_leftovers(tmp_path)
    assert (tmp_path / ".checkpoint-5.before" / "model.safetensors").read_bytes() == b"old"


def test_files_of_others_in_a_replaced_one_stay(tmp_path):
    old = write_checkpoint(tmp_path, 5)
    (old / "notes.txt").write_text("mine")
    new = write_checkpoint(tmp_path, 5, {"model.safetensors": b"new"})
    assert checkpoint.read(new).manifest.files == {"model.safetensors": 3}
    assert [path.read_text() for path in tmp_path.rglob("notes.txt")] == ["mine"]
    assert len(list(tmp_path.rglob("model.safetensors"))) == 1


@pytest.mark.parametrize("name", ["/etc/hostname", "../outside", "sub/../../outside"])
def test_a_manifest_owns_no_file_outside_its_folder(tmp_path, name):
    path = write_checkpoint(tmp_path, 5)
    noted = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(noted | {"files": {**noted["files"], name: 1}}))
    assert name not in owned.files_of_checkpoint(path)
    assert "model.safetensors" in owned.files_of_checkpoint(path)


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    for step in (1, 2, 3, 4, 5):
        write_checkpoint(tmp_path, step)
    newest = checkpoint.folders(tmp_path)[-1]
    newest = checkpoint.folders(tmp_path)[-1]
    assert checkpoint.rotate(tmp_path, None, None, newest) == []
    removed = checkpoint.rotate(tmp_path, 2, tmp_path / "checkpoint-2", newest)
    assert [p.name for p in removed] == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    assert [p.name for p in checkpoint.rotate(tmp_path, 1, tmp_path / "checkpoint-2", newest)] == []
    assert [p.name for p in checkpoint.rotate(tmp_path, 1, None, newest)] == ["checkpoint-2"]

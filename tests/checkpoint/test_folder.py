"""A checkpoint is complete, or it is skipped with a message that names it."""

import json

import pytest

from gptlm.checkpoint import folder as checkpoint
from gptlm.errors import GptlmError


def write(folder, step, **facts):
    staging = checkpoint.staging_folder(folder, step)
    (staging / "sub").mkdir(parents=True)
    (staging / "model.safetensors").write_bytes(bytes(100))
    (staging / "sub" / "optimizer.pt").write_bytes(bytes(50))
    return checkpoint.commit(staging, {"global_step": step, **facts})


def test_commit_and_read(tmp_path):
    path = write(tmp_path, 10, consumed_samples=80)
    assert path == tmp_path / "checkpoint-10" and [p.name for p in tmp_path.iterdir()] == ["checkpoint-10"]
    assert checkpoint.read(path).manifest == {"global_step": 10, "consumed_samples": 80}


def test_the_newest_is_the_highest_step_not_the_last_name(tmp_path):
    for step in (9, 100, 20):
        write(tmp_path, step)
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
        (lambda p: [f.unlink() for f in p.rglob("*") if f.is_file()], "no manifest.json"),
    ],
)
def test_a_damaged_newest_one_is_named_and_skipped(tmp_path, damage, says):
    write(tmp_path, 10)
    damage(write(tmp_path, 20))
    found, skipped = checkpoint.newest(tmp_path)
    assert found.path.name == "checkpoint-10"
    assert len(skipped) == 1 and "checkpoint-20" in skipped[0] and says in skipped[0]
    with pytest.raises(GptlmError, match=says):
        checkpoint.read(tmp_path / "checkpoint-20")


def test_half_written_ones_do_not_count_and_are_cleared(tmp_path):
    staging = checkpoint.staging_folder(tmp_path, 30)
    staging.mkdir()
    (staging / "model.safetensors").write_bytes(b"x")
    assert checkpoint.newest(tmp_path) == (None, [])
    checkpoint.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_one(tmp_path):
    with pytest.raises(GptlmError, match="does not exist"):
        checkpoint.read(tmp_path / "checkpoint-1")
    assert checkpoint.newest(tmp_path / "nowhere") == (None, [])


def test_writing_the_same_step_again_replaces_it(tmp_path):
    write(tmp_path, 10, try_=1)
    assert checkpoint.read(write(tmp_path, 10, try_=2)).manifest["try_"] == 2
    assert json.loads((tmp_path / "checkpoint-10" / "manifest.json").read_text())["files"]["model.safetensors"] == 100


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    newest = checkpoint.folders(tmp_path)[-1]
    newest = checkpoint.folders(tmp_path)[-1]
    assert checkpoint.rotate(tmp_path, None, None, newest) == []
    removed = checkpoint.rotate(tmp_path, 2, tmp_path / "checkpoint-2", newest)
    assert [p.name for p in removed] == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    assert [p.name for p in checkpoint.rotate(tmp_path, 1, tmp_path / "checkpoint-2", newest)] == []
    assert [p.name for p in checkpoint.rotate(tmp_path, 1, None, newest)] == ["checkpoint-2"]

"""`gptlm convert --check`: one line for each checkpoint, and the exit code."""

import pytest

from gptlm.cli import main
from tests.checkpoint.made import note_again, write_checkpoint


def test_every_checkpoint_of_a_folder_is_checked(tmp_path, capsys):
    paths = [write_checkpoint(tmp_path, step) for step in (10, 20, 30)]
    assert main(["convert", "--check", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out == [f"{path} is whole: 2 files, 150 bytes" for path in paths]
    (paths[1] / "sub" / "optimizer.pt").write_bytes(bytes(49) + b"x")
    note_again(paths[0], checksums=False)
    assert main(["convert", "--check", str(tmp_path)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert (
        len(out) == 3
        and "only the sizes were compared" in out[0]
        and out[2] == f"{paths[2]} is whole: 2 files, 150 bytes"
    )
    assert out[1].startswith(f"the checkpoint {paths[1]} is damaged: the content of sub/optimizer.pt is not what was")
    assert [main(["convert", "--check", str(path)]) for path in paths] == [0, 1, 0]
    assert len(capsys.readouterr().out.splitlines()) == 3
    (paths[2] / "manifest.json").unlink()
    assert main(["convert", "--check", str(paths[2])]) == 1
    assert "checkpoint-30 has no manifest.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--check", "{0}"], 1, "--check {0}: there is no checkpoint-N folder"),
        (["--check", "{0}/nowhere"], 1, "there is no checkpoint-N folder"),
        (["--check", "{0}", "--from", "gpt2"], 2, "--from has no effect with --check"),
        (["--check", "{0}", "--with_optimizer"], 2, "--with_optimizer has no effect with --check"),
    ],
)
def test_what_cannot_be_checked(tmp_path, capsys, words, code, says):
    assert main(["convert", *(word.format(tmp_path) for word in words)]) == code
    assert says.format(tmp_path) in capsys.readouterr().err

"""Commands and argument files of PaddleNLP's users, as they were found."""

import json

from tests.config.test_run import resolve


def test_found_commands_parse(shared, tmp_path, monkeypatch):
    """Real pretraining commands and argument files, at 8 processes; the one with an unset shell variable aside."""
    monkeypatch.chdir(tmp_path)
    count = 0
    for case in json.loads((shared / "cases" / "paddlenlp" / "commands.json").read_text()):
        if not case["script"].startswith("run_pretrain"):
            continue
        text = case["text"].replace("${task_name4_single}", "gpt2-medium-en")
        if case["kind"] == "json":
            (tmp_path / "args.json").write_text(text)
            text = "args.json"
        run = resolve(text, world=8)["run"]
        assert run["world_size"] == 8 and run["global_batch_size"] >= 1
        count += 1
    assert count >= 16

"""Which task a folder belongs to, and where a run of another task works."""

import json

import pytest

from gptlm.checkpoint import folder as checkpoint
from gptlm.checkpoint.task import own_folder, owner_of, task_of
from gptlm.commands.predict import parse_predict
from gptlm.commands.pretrain import parse_pretrain
from gptlm.commands.sft import parse_sft
from gptlm.errors import UsageError
from tests.checkpoint.made import FIELDS, note_again

OLD = {"pretrain": {"input_dir": "d"}, "sft": {"src_length": 9, "lora": False}, "lora": {"src_length": 9, "lora": True}}


def write_run(folder, task, *, step=6, noted=True):
    """A checkpoint and a final model of `task`; not `noted`: as written before the manifest named the task."""
    staging = checkpoint.staging_folder(folder, step)
    staging.mkdir(parents=True)
    facts = FIELDS | {"global_step": step} | ({"task": task} if noted else {})
    names = ("adapter_config.json", "adapter_model.safetensors") if task == "lora" else ("model.safetensors",)
    for place in (folder, staging):
        for name in names:
            (place / name).write_text("{}")
        if not noted:
            (place / "run.json").write_text(json.dumps(OLD[task]))
    return checkpoint.commit(staging, facts)


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("task", list(OLD))
def test_a_checkpoint_knows_its_task(tmp_path, task, noted):
    path = write_run(tmp_path, task, noted=noted)
    assert task_of(checkpoint.read(path)) == owner_of(tmp_path) == task
    for other in OLD:
        assert own_folder(tmp_path, other) == (tmp_path if other == task else tmp_path / other)


def test_nothing_says_the_task_of_a_converted_checkpoint(tmp_path):
    path = write_run(tmp_path, "pretrain")
    note_again(path, without=["task"])
    assert task_of(checkpoint.read(path)) is None and own_folder(tmp_path, "sft") == tmp_path


def test_a_final_model_without_checkpoints_owns_its_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    assert owner_of(tmp_path) is None  # another library's
    (tmp_path / "run.json").write_text(json.dumps(OLD["sft"]))
    assert owner_of(tmp_path) == "sft"
    (tmp_path / "model.safetensors").unlink()
    assert owner_of(tmp_path) is None


def test_the_newest_whole_checkpoint_decides(tmp_path):
    write_run(tmp_path, "pretrain")
    (write_run(tmp_path, "sft", step=9) / "manifest.json").write_text("{")
    assert owner_of(tmp_path) == "pretrain"


def test_a_run_in_its_sub_folder_goes_on_when_the_folder_is_empty(tmp_path, tiny_model):
    write_run(tmp_path / "sft", "sft")
    assert own_folder(tmp_path, "sft") == tmp_path / "sft" and own_folder(tmp_path, "lora") == tmp_path
    words = f"--model_name_or_path {tiny_model} --output_dir {tmp_path} --dataset_name_or_path d.jsonl --device cpu"
    run = parse_sft(words.split(), {})
    assert run.training.output_dir == str(tmp_path / "sft")
    assert any(f"{tmp_path}/sft holds a run of this task, {tmp_path} none" in note for note in run.notes)
    write_run(tmp_path, "sft")
    assert own_folder(tmp_path, "sft") == tmp_path
    write_run(tmp_path, "pretrain", step=7)
    assert own_folder(tmp_path, "sft") == tmp_path / "sft"


def test_a_sub_folder_of_another_task_is_refused(tmp_path):
    write_run(tmp_path, "pretrain")
    write_run(tmp_path / "sft", "lora")
    with pytest.raises(UsageError, match="sft one of training adapters; give another --output_dir"):
        own_folder(tmp_path, "sft")


SIZES = "--num_hidden_layers 1 --hidden_size 8 --num_attention_heads 1 --vocab_size 9 --max_seq_length 8 --input_dir d"


def test_commands_use_the_folder_of_their_task(tmp_path, tiny_model):
    out = tmp_path / "out"
    write_run(out, "pretrain")
    tune = f"--model_name_or_path {tiny_model} --output_dir {out} --max_steps 1".split()

    def folder(parse, words):
        run = parse(words, {})
        noted = [note for note in run.notes if "uses" in note]
        assert len(noted) == (run.training.output_dir not in words)
        return run.training.output_dir

    assert folder(parse_pretrain, f"{SIZES} --output_dir {out} --max_steps 1".split()) == str(out)
    assert folder(parse_sft, tune) == str(out / "sft")
    assert folder(parse_sft, [*tune, "--overwrite_output_dir"]) == str(out / "sft")
    assert folder(parse_sft, [*tune, "--lora"]) == str(out / "lora")
    assert folder(parse_sft, [*tune, "--do_eval"]) == str(out)  # nothing is fine-tuned there yet
    write_run(out / "sft", "sft")
    assert folder(parse_sft, [*tune, "--do_eval"]) == str(out / "sft")
    assert json.loads(parse_sft(tune, {}).as_arguments())["output_dir"] == str(out / "sft")
    assert folder(parse_sft, [*tune[:2], "--output_dir", str(out / "sft"), *tune[4:]]) == str(out / "sft")


def test_adapters_are_found_below_a_folder_of_another_task(tmp_path, tiny_model):
    write_run(tmp_path, "pretrain")
    write_run(tmp_path / "lora", "lora")
    words = ["--model_name_or_path", str(tiny_model), "--lora_path", str(tmp_path)]
    arguments, notes = parse_predict(words)
    assert arguments.lora_path == str(tmp_path / "lora") and "those in" in " ".join(notes)


def test_a_model_names_those_of_other_tasks(tmp_path):
    write_run(tmp_path, "pretrain")
    assert not parse_predict(["--model_name_or_path", str(tmp_path)])[1]
    write_run(tmp_path / "sft", "sft")
    (note,) = parse_predict(["--model_name_or_path", str(tmp_path)])[1]
    assert f"{tmp_path}, of pretraining; other tasks have theirs in {tmp_path / 'sft'}" in note

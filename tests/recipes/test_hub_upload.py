"""--push_to_hub against a local stand-in of the hub: checked before training, uploaded after it, no token anywhere."""

import json
import os
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard, constants
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import gptlm
from gptlm.checkpoint import folder as checkpoint
from gptlm.cli import main
from gptlm.commands.pretrain import parse_pretrain
from gptlm.errors import GptlmError
from gptlm.launcher.args import parse_launch
from gptlm.model.hub import _obstacle
from gptlm.recipes.common.hub_upload import open_repository, upload_of
from gptlm.recipes.pretrain.run import pretrain
from tests.recipes.hub_server import READS, WRITES, Repository, serving
from tests.recipes.test_text_source import BASE, lines, model  # noqa: F401 - fixtures

WITHOUT = ("--split", "80,10,10", "--max_seq_length", "8")


@pytest.fixture
def hub(monkeypatch):
    _obstacle.cache_clear()
    with serving() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.address)
        template = found.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name, value in (("HF_ENDPOINT", found.address), ("HF_HUB_DISABLE_XET", "1"), ("NO_PROXY", "127.0.0.1")):
            monkeypatch.setenv(name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
        yield found


@pytest.fixture
def words(model, lines, tmp_path):  # noqa: F811
    argv = ["pretrain", *BASE, "--model_name_or_path", model, "--output_dir", tmp_path / "out", "--train_file", lines]
    return [str(word) for word in [*argv, "--data_cache", tmp_path / "cache", "--push_to_hub"]]


def content_below(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def logits(folder):
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return loaded(torch.arange(8)[None]).logits


@pytest.mark.parametrize("uses_store", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_stranger_loads_the_uploaded_model(uses_store, hub, words, tmp_path, monkeypatch, capfd):
    hub.uses_store = uses_store
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", uses_store)  # hf_xet's way, too, with plain files
    more = ["--hub_token", WRITES, "--hub_private_repo", "--save_strategy", "steps", "--save_steps", "1", "--do_eval"]
    assert main([*words, *more, "--eval_iters", "1", "--report_to", "tensorboard"]) == 0
    found = hub.repositories["ann/out"]
    assert found.private and found.commits[-1] == "End of training"
    assert {commit for commit in found.commits[:-1]} <= {f"Training in progress, step {n}" for n in (1, 2)}
    files = found.branches["main"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "report.html"} <= {*files}
    assert {"all_results.json", "eval_results.json", "generation_config.json"} <= {*files}
    assert not any("/" in name or name.startswith(("run", "optimizer", "rng", "trainer", ".")) for name in files)
    for name, text in files.items():
        assert str(tmp_path).encode() not in text and os.path.expanduser("~").encode() not in text, name
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, text in files.items():
        (copy / name).write_bytes(text)
    assert torch.equal(logits(copy), logits(tmp_path / "out"))
    assert ModelCard.load(copy / "README.md").data.library_name == "transformers"
    printed = "".join(capfd.readouterr())
    assert "/ann/out" in printed
    for name, text in {**content_below(tmp_path), "printed": printed.encode()}.items():
        assert WRITES.encode() not in text, name
    assert not (tmp_path / "out" / ".upload.incomplete").exists()


def test_only_the_final_model_of_sharded_checkpoints_is_uploaded(hub, words, capfd):
    more = ["--checkpoint_format", "sharded", "--async_save", "1", "--save_strategy", "steps", "--save_steps", "1"]
    assert main([*words, *more, "--hub_token", WRITES]) == 0
    assert "--hub_strategy every_save has no effect" in "".join(capfd.readouterr())
    assert hub.repositories["ann/out"].commits == ["End of training"]
    assert "model.safetensors" in hub.repositories["ann/out"].branches["main"]


def test_a_failed_upload_loses_nothing(hub, words, tmp_path, capfd):
    hub.refused["/commit/"] = 500
    words += ["--hub_token", WRITES, "--hub_model_id", "team/x", "--hub_strategy", "end", "--save_strategy", "steps"]
    assert main(words) == 1
    error = capfd.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").is_file() and (tmp_path / "out" / "README.md").is_file()
    assert f"hf upload team/x {tmp_path / 'out'} --exclude" in error and "500 the hub is" in error
    assert WRITES not in error and "Traceback" not in error
    hub.refused.clear()  # a start of the finished run uploads it
    assert main([*words, "--hub_revision", "new"]) == 0
    assert "model.safetensors" in hub.repositories["team/x"].branches["new"]


def test_python_code_gets_the_result_of_a_run_whose_upload_failed(hub, words, tmp_path):
    flags = {"push_to_hub": True, "hub_model_id": "x", "hub_token": WRITES, "max_steps": 1, "device": "cpu"}
    paths = dict(zip([word[2:] for word in words[-9:-1:2]], words[-8:-1:2], strict=True))
    flags |= paths | {"continue_training": True, "max_seq_length": 8, "split": "80,10,10", "save_strategy": "no"}
    result = gptlm.pretrain(**flags)
    assert result.upload_error is None and "model.safetensors" in hub.repositories["ann/x"].branches["main"]
    hub.refused["/preupload/"] = 403
    result = gptlm.pretrain(**flags | {"overwrite_output_dir": True})
    assert "403" in result.upload_error and WRITES not in result.upload_error
    assert result.model is not None and "train_loss" in result.metrics


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--hub_token", "hf_SECRETwrong"], "does not accept the token of --hub_token (401"),
        (["--hub_token", READS], "the token of --hub_token may only read"),
        ([], "set HF_TOKEN in the environment, or run hf auth login"),
        (["--hub_token", WRITES, "--hub_model_id", "n" * 300], "(300 characters) is no name of a repository"),
        (["--hub_token", WRITES, "--hub_model_id", "a/b/c"], "--hub_model_id a/b/c is no name of a repository"),
        (["--hub_token", WRITES, "--hub_model_id", "foreign/x"], "is no member; give a repository of ann or team"),
        (["--hub_token", WRITES, "--hub_model_id", "others/x"], "may only read there; give a repository of ann"),
        (["--hub_token", WRITES, "--hub_model_id", "old", "--hub_private_repo"], "exists and is public"),
    ],
)
def test_what_would_fail_after_training_is_refused_before(more, said, hub, words, tmp_path, capfd):
    hub.repositories["ann/old"] = Repository(private=False)
    assert main([*words, *more]) in (1, 2)
    error = capfd.readouterr().err
    assert said in error and "SECRET" not in error and "Traceback" not in error
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").glob("*.safetensors"))


def test_answers_of_the_hub_and_its_absence_are_one_sentence(hub, words, monkeypatch):
    run = parse_pretrain([*words[1:], "--hub_token", WRITES], {})
    for path, status in (("/create", 403), ("/auth-check/", 403), ("/whoami", 500)):
        hub.refused = {path: status}
        with pytest.raises(GptlmError, match=rf"\({status} .*hidden.*\); ") as caught:
            open_repository(upload_of(run))
        assert WRITES not in str(caught.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(GptlmError, match="--push_to_hub needs the network, and HF_HUB_OFFLINE is set"):
        open_repository(upload_of(run))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(GptlmError, match="--push_to_hub cannot reach the hub .no connection to 127.0.0.1: "):
        open_repository(upload_of(run))


def test_flags_of_the_hub_are_honoured_or_have_a_reason(words):
    argv = words[1:]
    parsed = parse_pretrain([*argv, "--push_to_hub_model_id", "x", "--push_to_hub_token", "t"], {})
    assert parsed.hub.hub_model_id == "x" and parsed.hub.hub_token.value == "t"
    for name in ("checkpoint", "all_checkpoints"):
        with pytest.raises(GptlmError, match=f"--hub_strategy {name}: checkpoints with their optimizer state"):
            parse_pretrain([*argv, "--hub_strategy", name], {})
    for bad in ("a b", "a\nb", "ä"):
        with pytest.raises(GptlmError, match="--hub_token is no token") as caught:
            parse_pretrain([*argv, "--hub_token", bad], {})
        assert bad not in str(caught.value)
    notes = parse_pretrain([*argv[:-1], "--hub_model_id", "x"], {}).notes
    assert "--hub_model_id has no effect without --push_to_hub" in notes


def test_no_file_and_no_output_holds_the_token(words, tmp_path, capfd):
    run = parse_pretrain([*words[1:], "--hub_token", WRITES, "--hub_token", "hf_SECRETother"], {})
    assert "SECRET" not in run.as_json() + run.as_arguments() + str(run) + json.dumps(run.as_parameters())
    assert main([*words, "--print_config", "--hub_token", WRITES]) == 0
    assert main([*words, f"--hub_token={WRITES}", "x", "hf_" + "a" * 34]) == 2
    assert main([*words, "--hub_token", WRITES, "two"]) == 2
    plan = [word for word in words[1:] if word not in ("--push_to_hub",)]
    assert main(["plan", *plan, "--num_gpus", "2", "--hub_token", WRITES]) == 0
    printed = "".join(capfd.readouterr())
    assert "SECRET" not in printed and "hf_aaa" not in printed and '"hub_token": "(hidden)"' in printed


@pytest.mark.slow
def test_launched_processes_get_the_token_by_their_environment(hub, words, tmp_path):
    given = ["--nproc_per_node", "2", "--log_dir", str(tmp_path / "log"), "-m", "gptlm"]
    given += [*words, "--hub_token", WRITES, "--hub_strategy", "end"]
    plan = parse_launch(given)
    assert plan.secrets == {"HF_TOKEN": WRITES} and plan.words[-4:-2] == ("--hub_token", "none")
    command = [sys.executable, "-m", "gptlm", "launch", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert hub.repositories["ann/out"].commits == ["End of training"]  # of rank 0 alone
    assert "--hub_token '(hidden)'" in done.stderr and WRITES not in done.stdout + done.stderr
    assert not any(WRITES.encode() in text for text in content_below(tmp_path).values())


def test_the_log_of_a_crash_does_not_hold_the_token(words, tmp_path):
    crash = "import sys; sys.argv[1:] = sys.argv[2:]\nfrom gptlm.recipes.common import training\n"
    crash += "def check_run(*_): raise RuntimeError('provoked')\n"
    crash += "import gptlm.recipes.pretrain.run as run; run.check_run = check_run\n"
    crash += "from gptlm.cli import main; sys.exit(main())"
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", crash, "-", *words, "--hub_token", WRITES, f"--token={READS}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    (log,) = (tmp_path / "out").glob("gptlm-error-*.log")
    assert "provoked" in log.read_text() and "--hub_token (hidden) --token=(hidden)" in log.read_text()
    assert "SECRET" not in log.read_text() + done.stdout + done.stderr


def test_checkpoints_have_a_card_that_their_manifest_lists(words, tmp_path, capfd):
    argv = [word for word in words[1:] if word != "--push_to_hub"]
    run = parse_pretrain([*argv, "--save_strategy", "steps", "--save_steps", "1"], {})
    pretrain(run)
    saved = tmp_path / "out" / "checkpoint-1"
    card = ModelCard.load(saved / "README.md")
    assert card.data.pipeline_tag == "text-generation" and "| step of this checkpoint | 1 |" in card.text
    assert "README.md" in checkpoint.read(saved).manifest.files
    checkpoint.check_content(checkpoint.read(saved))
    pretrain(parse_pretrain([*argv, "--resume_from_checkpoint", str(saved)], {}))
    assert "resuming from" in capfd.readouterr().out


def test_adapters_are_uploaded_without_the_path_of_their_base(hub, words, tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"src": f"the cat {n}", "tgt": "sat on a mat"}) + "\n" for n in range(8)))
    place = words.index("--train_file")
    argv = [*words[1:place], *words[place + 2 :], "--dataset_name_or_path", str(data), "--lora", "--merge_weights"]
    argv = [word for word in argv if word not in ("--split", "80,10,10")]
    assert main(["sft", *argv, "--hub_token", WRITES, "--data_cache", str(tmp_path / "cache")]) == 0
    files = hub.repositories["ann/out"].branches["main"]
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= {*files}
    base = words[words.index("--model_name_or_path") + 1]
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == base.rpartition("/")[2]
    assert not any(base.encode() in text for text in files.values())
    assert (tmp_path / "out" / "merged" / "model.safetensors").is_file()


def folder_of(files, folder):
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_bytes(text)
    return folder


def test_merged_and_converted_models_are_uploaded(hub, model, tmp_path, monkeypatch, capfd):  # noqa: F811
    adapters = GPT2LMHeadModel.from_pretrained(model)
    adapters = get_peft_model(adapters, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))
    adapters.save_pretrained(tmp_path / "lora")
    upload = ["--push_to_hub", "--hub_token", WRITES]
    merge = ["merge-lora", "--lora_path", str(tmp_path / "lora"), "--model_name_or_path", str(model)]
    merge += ["--output_path", str(tmp_path / "merged")]
    assert main([*merge, *upload]) == 0
    assert hub.repositories["ann/merged"].commits == ["Merge LoRA adapters"]
    copy = folder_of(hub.repositories["ann/merged"].branches["main"], tmp_path / "copy")
    assert torch.equal(logits(copy), logits(tmp_path / "merged"))
    assert not torch.equal(logits(copy), logits(model))
    convert = ["convert", "--from", str(tmp_path / "merged"), "--output", str(tmp_path / "converted")]
    assert main([*convert, *upload, "--push_to_hub_model_id", "team/x", "--hub_private_repo"]) == 0
    assert hub.repositories["team/x"].private
    copy = folder_of(hub.repositories["team/x"].branches["main"], tmp_path / "copy2")
    assert torch.equal(logits(copy), logits(tmp_path / "merged"))
    assert ModelCard.load(copy / "README.md").data.library_name == "transformers"
    for repository in hub.repositories.values():
        for name, text in repository.branches["main"].items():
            assert str(tmp_path).encode() not in text and WRITES.encode() not in text, name
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert main([*merge, *upload]) == 0  # again
    assert WRITES not in "".join(capfd.readouterr())


def test_a_gguf_file_is_uploaded_with_its_card(hub, model, tmp_path):  # noqa: F811
    words = ["convert", "--from", str(model), "--to", "gguf", "--output", str(tmp_path / "gguf")]
    assert main([*words, "--push_to_hub", "--hub_token", WRITES]) == 0
    files = hub.repositories["ann/gguf"].branches["main"]
    assert {*files} == {"README.md", "model-f16.gguf"}
    assert files["model-f16.gguf"] == (tmp_path / "gguf" / "model-f16.gguf").read_bytes()
    card = ModelCard(files["README.md"].decode())
    assert card.data.library_name == "gguf" and "llama-server -m model-f16.gguf" in card.text


def test_a_failed_upload_of_a_result_loses_nothing(hub, model, tmp_path, capfd):  # noqa: F811
    words = ["convert", "--from", str(model), "--output", str(tmp_path / "x"), "--push_to_hub"]
    assert main([*words, "--hub_token", READS]) == 1
    assert "the token of --hub_token may only read" in capfd.readouterr().err and not (tmp_path / "x").exists()
    hub.refused["/commit/"] = 500
    assert main([*words, "--hub_token", WRITES]) == 1
    error = capfd.readouterr().err
    assert f"the conversion is complete, but the model in {tmp_path / 'x'} could not be uploaded to ann/x" in error
    assert (tmp_path / "x" / "model.safetensors").is_file() and WRITES not in error
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    hub.refused.clear()
    assert main([*words, "--hub_token", WRITES]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["convert", "--to", "paddle", "--push_to_hub"], "--push_to_hub needs --to hf or gguf"),
        (["convert", "--with_optimizer", "--push_to_hub"], "--push_to_hub does not work with --with_optimizer"),
        (["convert", "--hub_model_id", "x"], "--hub_model_id has no effect without --push_to_hub"),
        (["merge-lora", "--hub_private_repo"], "--hub_private_repo has no effect without --push_to_hub"),
        (["merge-lora", "--push_to_hub", "--push_to_hub_organization", "x"], "give --hub_model_id ORGANIZATION/NAME"),
        (["merge-lora", "--push_to_hub", "--hub_token", "a b"], "--hub_token"),
        (["convert", "--check", "x", "--push_to_hub"], "--push_to_hub has no effect with --check"),
    ],
)
def test_uploads_of_results_that_cannot_be_are_refused(words, said, capfd):
    places = {"convert": ["--from", "a", "--output", "b"], "merge-lora": ["--lora_path", "a", "--output_path", "b"]}
    assert main([*words, *([] if "--check" in words else places[words[0]])]) == 2
    error = capfd.readouterr().err
    assert said in error and "Traceback" not in error and "a b" not in error


def test_the_printed_command_hides_the_token(model, tmp_path, capfd):  # noqa: F811
    words = ["merge-lora", "--lora_path", "a", "--output_path", "b", "--model_name_or_path", str(model)]
    main([*words, "--push_to_hub", "--hub_token", WRITES, "--print_config"])
    printed = "".join(capfd.readouterr())
    assert WRITES not in printed and "Traceback" not in printed

"""Adapters of the hub by OWNER/NAME: every command takes them as it takes their folder."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import gptlm
from gptlm.cli import main
from gptlm.commands.sft import parse_sft
from gptlm.errors import GptlmError
from gptlm.model.adapter_files import base_and_adapters
from gptlm.model.hub import adapter_folder
from tests.inference.test_loading import adapters
from tests.recipes.hub_server import Repository
from tests.recipes.test_hub_models import TRAINED, cached  # noqa: F401 - a fixture
from tests.recipes.test_hub_upload import hub  # noqa: F401 - a fixture

PREDICT = "predict --device cpu --tgt_length 4 --prompt the"
SFT = f"sft --dataset_name_or_path examples.json --output_dir out {TRAINED}"


@pytest.fixture
def published(cached, tmp_path):  # noqa: F811
    """Adapters of plain PEFT as `ann/poems` in the hub's cache, on `owner/name` there; returns their folder."""
    snapshot = in_cache(tmp_path, "ann--poems")
    adapters(cached, snapshot)
    rebase(snapshot, "owner/name")
    return snapshot


def in_cache(tmp_path, name):
    repository = tmp_path / "cache" / f"models--{name}"
    snapshot = repository / "snapshots" / "707a30d783dfa663caf39e06633721c8d4cfcd7e"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(snapshot.name)
    return snapshot


def rebase(folder, base):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))


def same_tensors(one, other):
    found, wanted = load_file(one), load_file(other)
    return found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)


@pytest.mark.parametrize("model", ["--lora_path ann/poems", "--lora_path ann/poems --model_name_or_path owner/name"])
def test_training_starts_from_them_and_records_the_name(published, tmp_path, model):
    assert main([*SFT.split(), *model.split()]) == 0
    assert same_tensors(tmp_path / "out" / "adapter_model.safetensors", published / "adapter_model.safetensors")
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (run["lora_path"], run["model_name_or_path"], run["lora_rank"]) == ("ann/poems", "owner/name", 4)
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "owner/name"
    assert "base_model: owner/name" in (tmp_path / "out" / "README.md").read_text()


def test_the_tokenizer_of_adapters_is_used(published, tmp_path, capsys):
    first = "--lora --model_name_or_path owner/name --additional_special_tokens <tag>"
    assert main([*SFT.split(), *first.split()]) == 0
    shutil.copytree("out", in_cache(tmp_path, "ann--tagged"))
    shutil.rmtree("out")
    assert main([*SFT.split(), "--lora_path", "ann/tagged"]) == 0
    assert "<tag>" in (tmp_path / "out" / "tokenizer.json").read_text()
    assert (
        load_file(tmp_path / "out" / "adapter_model.safetensors").keys()
        == load_file(
            tmp_path / "cache" / "models--ann--tagged" / "snapshots" / published.name / "adapter_model.safetensors"
        ).keys()
    )


@pytest.mark.parametrize(
    "words",
    [
        f"{PREDICT} --lora_path NAME --model_name_or_path owner/name",
        f"{PREDICT} --model_name_or_path NAME",
        "evaluate --task TEXT --eval_path text.jsonl --device cpu --max_seq_length 16 --json --model_name_or_path NAME",
    ],
)
def test_inference_takes_them_as_a_folder(published, capsys, words):
    assert main(words.replace("NAME", "ann/poems").split()) == 0
    by_name = capsys.readouterr().out.replace("ann/poems", str(published))
    assert main(words.replace("NAME", str(published)).split()) == 0
    assert by_name == capsys.readouterr().out
    assert main(words.replace("--lora_path NAME", "").replace("NAME", "owner/name").split()) == 0
    assert by_name != capsys.readouterr().out  # the adapters change what is computed


def test_merged_models_are_those_of_the_folder(published, tmp_path, capsys):
    assert main("merge-lora --lora_path ann/poems --output_path merged".split()) == 0
    assert "adapters of ann/poems merged into owner/name: merged" in capsys.readouterr().out
    assert main(["merge-lora", "--lora_path", str(published), "--output_path", "again"]) == 0
    assert same_tensors(tmp_path / "merged" / "model.safetensors", tmp_path / "again" / "model.safetensors")
    assert "base_model: owner/name" in (tmp_path / "merged" / "README.md").read_text()


def test_conversion_takes_them(published, tmp_path):
    assert main("convert --from ann/poems --to paddle --output_dir converted".split()) == 0
    assert (tmp_path / "converted" / "lora_config.json").is_file()


def test_python_takes_them(published):
    flags = {"device": "cpu", "tgt_length": 4}
    (by_name,) = gptlm.generate("ann/poems", "the", **flags)
    (by_folder,) = gptlm.generate("owner/name", "the", lora_path=published, **flags)
    assert by_name.text == by_folder.text
    assert gptlm.load("ann/poems", device="cpu").model.config.n_embd == 32


def test_a_local_folder_takes_precedence(published, cached, tmp_path):  # noqa: F811
    local = adapters(cached, tmp_path / "ann" / "poems", targets=["c_attn"])
    assert adapter_folder("ann/poems") == Path("ann/poems")
    run = parse_sft([*SFT.split()[1:], "--lora_path", "ann/poems"], {})
    assert run.lora.lora_target_modules == ["c_attn"] and run.adapters == local.relative_to(tmp_path)


def test_adapters_are_no_model_to_fine_tune(published, capsys):
    assert main([*SFT.split(), "--model_name_or_path", "ann/poems"]) == 1
    assert "ann/poems holds adapters, no model: --lora_path trains" in capsys.readouterr().err


def test_a_base_on_another_machine_is_named(published, capsys):
    rebase(published, "/home/ann/base")
    assert main([*SFT.split(), "--lora_path", "ann/poems"]) == 1
    says = "give --model_name_or_path BASE --lora_path ann/poems"
    error = capsys.readouterr().err
    assert "/home/ann/base, the base model of the adapters ann/poems, is not here" in error and says in error
    assert main([*PREDICT.split(), "--model_name_or_path", "ann/poems"]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        f"{SFT} --model_name_or_path owner/name",
        f"{PREDICT} --model_name_or_path owner/name",
        "merge-lora --output_path merged",
        "chat --model_name_or_path owner/name",
        "evaluate --task TEXT --eval_path text.jsonl --model_name_or_path owner/name",
    ],
)
def test_without_network_one_sentence_names_both_places(published, capsys, words, monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert main([*words.split(), "--lora_path", "other/poems"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "adapters of other/poems (no folder here has this name) are neither in the local cache" in line


def test_print_config_goes_on_without_them(published, capsys):
    assert main([*SFT.split(), *"--print_config --model_name_or_path owner/name --lora_path other/poems".split()]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("lora_path other/poems: rank and scale of its adapters are not known" in note for note in notes)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_a_repository_lacks_is_named(published, hub, missing):  # noqa: F811
    files = {path.name: path.read_bytes() for path in published.iterdir() if path.name != missing}
    hub.repositories["bob/poems"] = Repository(False, {"main": files | {"adapter_model.bin": b"old"}})
    with pytest.raises(GptlmError, match=f"bob/poems of the hub .*{missing} is missing"):
        adapter_folder("bob/poems")


def test_the_files_of_adapters_are_downloaded(published, hub):  # noqa: F811
    own = {path.name: path.read_bytes() for path in published.iterdir()}
    own |= {"tokenizer.json": b"{}", "chat_template.jinja": b"", "generation_config.json": b'{"eos_token_id": 7}'}
    others = dict.fromkeys(
        ("optimizer.pt", "training_args.bin", "runs/events", "checkpoint-1/adapter_config.json"), b""
    )
    hub.repositories["bob/poems"] = Repository(False, {"main": own | others})
    name, folder = base_and_adapters("bob/poems", None)
    assert name == "owner/name"
    found = {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    assert found == {name: content for name, content in own.items() if name != "README.md"}
    hub.refused["bob"] = 500
    assert adapter_folder("bob/poems") == Path(folder)  # from the cache

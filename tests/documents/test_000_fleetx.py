"""FleetX's page on one GPU: its files, the YAML it prints, every key of its tables, its commands in order, twice."""

import json
import re

import pytest

from gptlm.cli import main
from gptlm.commands.pretrain import parse_pretrain
from gptlm.compat.fleetx.load import read_configuration
from gptlm.compat.fleetx.validate import unknown_keys
from gptlm.errors import UsageError
from tests.conftest import ROOT, write_tokens
from tests.golden import recorded

SAME = {
    "max_steps": 500000, "num_train_epochs": 1.0, "seed": 1024, "device": "gpu", "global_batch_size": 8,
    "local_batch_size": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "fp16": True,
    "fp16_opt_level": "O2", "scale_loss": 32768.0, "logging_steps": 1, "eval_steps": 500, "eval_iters": 10,
    "input_dir": "./data", "split": "949,50,1", "max_seq_length": 1024, "save_steps": 1000, "output_dir": "./output",
    "resume_from_checkpoint": None, "vocab_size": 50304, "num_hidden_layers": 24, "num_attention_heads": 16,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 1024,
    "initializer_range": 0.02, "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "lr_scheduler_type": "cosine", "decay_steps": 360000, "warmup_steps": 3600, "learning_rate": 1e-5,
    "min_learning_rate": 5e-5, "max_grad_norm": 1.0, "log_format": "fleetx-2022", "data_order": "fleetx",
}  # fmt: skip
SIZES = {
    "345m": {"hidden_size": 1024, "intermediate_size": 4096, "recompute": False},
    "1.3B": {"hidden_size": 2048, "intermediate_size": 8192, "recompute": True, "recompute_granularity": "only_attn"},
}
NO_EFFECT = ("fused_linear", "tensor_fusion", "type_vocab_size")  # keys of the tables
TINY = (
    "num_layers=2 hidden_size=32 num_attention_heads=2 ffn_hidden_size=64 vocab_size=500 max_position_embeddings=64 "
    "max_seq_len=32 max_steps=3 eval_freq=2 eval_iters=1 device=cpu"
).split()
LINE = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] \[    INFO\] - global step (\d), epoch: 0, batch: (\d), "
    r"loss: \d+\.\d{9}, avg_reader_cost: \d\.\d{5} sec, avg_batch_cost: \d+\.\d{5} sec, speed: \d+\.\d\d step/s, "
    r"ips_total: \d+ tokens/s, ips: \d+ tokens/s, learning rate: (\S+)"
)


def shown(path, *overrides):
    """The resolved run of `-c path` in the flat keys of the file."""
    words = ["-c", str(path), *(word for text in overrides for word in ("-o", text))]
    return json.loads(parse_pretrain(words, {}, printing=True).as_json())


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("size", SIZES)
def test_the_files_have_the_documented_values(size):
    found = shown(f"./configs_{size}_single_card.yaml")
    wanted = SAME | SIZES[size]
    assert {name: found["run"][name] for name in wanted} == wanted
    read = f"there is no file ./configs_{size}_single_card.yaml: gptlm's own configs/fleetx/configs_{size}"
    assert sum(note.startswith(read) for note in found["notes"]) == 1
    assert any("were they swapped?" in note for note in found["notes"])


def test_unknown_names_list_the_nearest_first():
    for name in ("configs_345m_single_cards.yaml", "./examples/config_345m_single_card.yml"):
        with pytest.raises(UsageError, match=r"give a file, or one of configs_345m_single_card, configs_1.3B_single"):
            shown(name)
    with pytest.raises(UsageError, match="or one of pretrain_gpt_1.3B_dp8, pretrain_gpt_1.3B_dp8_tuning"):
        shown("pretrain_gpt_1.3B_dp16")


def printed_blocks():
    """gptlm's file as the page prints FleetX's: model, optimizer, the rest; no root key, everything indented."""
    text = (ROOT / "src/gptlm/configs/fleetx/configs_345m_single_card.yaml").read_text()
    rest, model, optimizer = text.partition("PreTraining:\n")[2].split("\n\n")
    comments = "      # name: consine\n      # max_steps: 500000\n"
    return [f"{block}\n" for block in (model, optimizer.replace("lr:\n", f"lr:\n{comments}"), rest)]


def test_the_printed_yaml_is_read(tmp_path):
    file = tmp_path / "own.yaml"
    text = "\n".join(printed_blocks())
    file.write_text(text)
    found = shown(file)
    assert found["run"] == shown("configs_345m_single_card")["run"]
    assert not any("unknown" in note for note in found["notes"])
    file.write_text(text.replace("# name:", "name:").replace("# max_steps:", "max_steps:"))
    found = shown(file)
    assert found["run"] == shown("configs_345m_single_card")["run"]
    assert sum("consine is taken as CosineAnnealingWithWarmupDecay" in note for note in found["notes"]) == 1


def test_each_printed_block_alone_is_read(tmp_path):
    file = tmp_path / "own.yaml"
    for block, name, value in zip(
        printed_blocks(), ("num_hidden_layers", "decay_steps", "save_steps"), (24, 360000, 1000), strict=True
    ):
        file.write_text(block)
        assert shown(file, *("num_layers=24",) if name == "save_steps" else ())["run"][name] == value


def test_every_key_of_the_tables(tmp_path):
    """A key works or is named once as having no effect, with the reason."""
    keys = {key.rpartition(".")[2] for key in recorded("fleetx/keys.json")["g1b_20220815_seed000"]}
    assert {"tensor_fusion", "use_recompute", "max_seq_len", "warmup_rate", *NO_EFFECT} <= keys
    file = tmp_path / "own.yaml"
    text = "\n".join(printed_blocks())
    file.write_text(text.replace("fused_linear: False", "fused_linear: True\n  tensor_fusion: True"))
    notes = shown(file)["notes"]
    for key in keys:
        assert not list(unknown_keys(read_configuration(str(file), [f"{key}=1"])))
        named = [note for note in notes if re.search(rf"\b{key}\b.* has no effect here \(", note)]
        assert len(named) == (key in NO_EFFECT), (key, named)
    assert shown(file, "use_recompute=True", "recompute_granularity=only_attn")["run"]["recompute"] is True


@pytest.mark.parametrize("first", ["PreTraining.max_steps=10", "Optimizer.lr.max_steps=10", "Engine.max_steps=10"])
def test_the_last_of_two_overrides_counts(first):
    for one, two in ((first, "max_steps=11"), ("max_steps=11", first)):
        found = shown("configs_345m_single_card", one, two)
        assert found["run"]["max_steps"] == int(two.rpartition("=")[2])
        assert f"-o {one} has no effect: -o {two} comes after it" in found["notes"]


def test_the_commands_in_order_twice(tmp_path, capfd):
    """The second time there is nothing left to train; the other size is refused in the folder of the first."""
    write_tokens(tmp_path / "data" / "c", layout="npy")
    tiny = [word for text in TINY for word in ("-o", text)]
    rates = []
    for _ in range(2):
        assert main(["pretrain", "-c", "./configs_345m_single_card.yaml", *tiny]) == 0
        rates.append(LINE.findall(capfd.readouterr().out))
    assert rates == [[("1", "0", "5.55556e-09"), ("2", "1", "8.33333e-09"), ("3", "2", "1.11111e-08")], []]
    other = ["pretrain", "-c", "./configs_1.3B_single_card.yaml", *tiny]
    other += ["-o", "hidden_size=64", "-o", "ffn_hidden_size="]
    assert main(other) == 1
    assert "is of another model: hidden_size 32 there, 64 in the command" in capfd.readouterr().err
    for _ in range(2):
        assert main([*other, "-o", "output_dir=./output_1.3B"]) == 0
    assert json.loads((tmp_path / "output_1.3B/config.json").read_text())["n_inner"] in (None, 256)

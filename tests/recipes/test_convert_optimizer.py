"""Training resumes bit for bit from the optimizer states of other libraries.

The weights and moments of a checkpoint are written in the other libraries' formats by hand, converted and resumed. The
result is that of the run that was not interrupted.
"""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from gptlm.cli import main
from tests.conftest import write_tokens
from tests.conversion.layouts import as_array, paddle_tensors, stock, write_deepspeed, write_megatron, write_pdparams
from tests.conversion.test_paddle import write_config

MATRICES = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
RUN = (
    "--num_hidden_layers 4 --hidden_size 16 --num_attention_heads 4 --intermediate_size 64 --vocab_size 50 "
    "--max_position_embeddings 12 --input_dir data --max_steps 4 --save_steps 2 --per_device_train_batch_size 2 "
    "--max_seq_length 8 --split 90,10,0 --device cpu --learning_rate 1e-2 --weight_decay 0.1 --do_train "
    "--hidden_dropout_prob 0 --attention_probs_dropout_prob 0"
).split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with `data`, and `whole`, a run of 4 steps with a checkpoint after 2."""
    folder = tmp_path_factory.mktemp("run")
    write_tokens(folder / "data/c", vocab_size=50)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["pretrain", *RUN, "--output_dir", "whole"]) == 0
    return folder


def of_checkpoint(run, kind):
    """An object with `state_dict()`: weights or moments of the checkpoint, in stock GPT-2's layout."""
    if kind == "weight":
        return SimpleNamespace(state_dict=lambda: load_file(run / "whole/checkpoint-2/model.safetensors"))
    stored = load_file(run / "whole/checkpoint-2/optimizer-00001.safetensors")
    named = {name.removesuffix(f"|{kind}"): value for name, value in stored.items() if name.endswith(f"|{kind}")}
    turned = {name: value.t() if name.endswith(MATRICES) else value for name, value in named.items()}
    return SimpleNamespace(state_dict=lambda: turned)


def flat(tree):
    return [leaf for value in tree.values() for leaf in (flat(value) if isinstance(value, dict) else [value])]


def write_megatron_with_optimizer(run, root, ranks, stages, half):
    """Parameters are numbered group by group: those with weight decay, then biases and norms."""
    kinds = {kind: root / kind for kind in ("weight", "exp_avg", "exp_avg_sq")}
    for kind, path in kinds.items():
        more = {"consumed_train_samples": 4}
        write_megatron(of_checkpoint(run, kind), path, 2.0, ranks, stages, **more)
    for file in sorted(kinds["weight"].rglob("*.pt")):
        content = torch.load(file, weights_only=False)
        trees = {
            kind: flat(torch.load(path / file.relative_to(kinds["weight"]), weights_only=False)["model"])
            for kind, path in kinds.items()
        }
        numbers = range(len(trees["weight"]))
        groups = [
            [i for i in numbers if trees["weight"][i].ndim > 1],
            [i for i in numbers if trees["weight"][i].ndim == 1],
        ]
        order = [*groups[0], *groups[1]]
        state = {place: {k: trees[k][i] for k in ("exp_avg", "exp_avg_sq")} for place, i in enumerate(order)}
        first = len(groups[0])
        adam = {
            "state": state,
            "param_groups": [
                {"params": list(range(first)), "step": 2, "weight_decay": 0.1},
                {"params": list(range(first, len(order))), "step": 2, "weight_decay": 0.0},
            ],
        }
        content["iteration"], content["optimizer"] = 2, adam
        if half:
            masters = [[trees["weight"][i] for i in group] for group in groups]
            content["optimizer"] = {"optimizer": adam, "grad_scaler": {}, "fp32_from_fp16_params": masters}
            halve(content["model"])
        torch.save(content, file)
    return kinds["weight"]


def halve(tree):
    for key, value in tree.items():
        if isinstance(value, dict):
            halve(value)
        else:
            tree[key] = value.half()


def assert_resumes(run, old, monkeypatch, capsys, *words):
    """After conversion and two more steps the weights equal those of the whole run."""
    monkeypatch.chdir(run)
    new = f"new-{old.parent.name}-{old.name}"
    command = ["convert", "--from", str(old), "--output", new, "--with_optimizer", "--vocab_size", "50", *words]
    assert main(command) == 0, capsys.readouterr().err
    assert "checkpoint-2: step 2, 2 updates, 4 samples consumed" in capsys.readouterr().out
    assert main(["pretrain", *RUN, "--output_dir", new]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert f"resuming from {new}/checkpoint-2: step 2, 4 samples consumed" in said and " was None in " not in said
    found, wanted = load_file(Path(new) / "model.safetensors"), load_file(run / "whole/model.safetensors")
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    before = json.loads((run / "whole/checkpoint-2/manifest.json").read_text())["loss_sum"]
    whole, here = (json.loads((folder / "train_results.json").read_text()) for folder in (run / "whole", Path(new)))
    assert here["train_loss"] == pytest.approx((4 * whole["train_loss"] - before) / 2, rel=1e-5)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 2)])
def test_from_megatron(run, tmp_path, monkeypatch, capsys, ranks, stages, half):
    old = write_megatron_with_optimizer(run, tmp_path / f"m{ranks}{stages}{half}", ranks, stages, half)
    assert_resumes(run, old, monkeypatch, capsys)


def write_paddle_with_optimizer(run, folder, ranks, master):
    """`optimizer.pdopt` by internal names; under O2 the moments belong to the float32 weights, which it has, too."""
    write_config(folder)
    for rank in range(ranks):
        mark = f".tp{rank:02d}" if ranks > 1 else ""
        kinds = [paddle_tensors(of_checkpoint(run, k), True, rank, ranks) for k in ("weight", "exp_avg", "exp_avg_sq")]
        write_pdparams(folder / f"model_state{mark}.pdparams", kinds[0])
        middle, states = "_fp32_master_0" if master else "", {}
        for number, name in enumerate(kinds[0]):
            for moment in (1, 2):
                states[f"linear_{number}.w_0{middle}_moment{moment}_0"] = as_array(kinds[moment][name])
        states["LR_Scheduler"] = {"last_epoch": 2, "last_lr": 0.01}
        if master:
            states["master_weights"] = {f"linear_{i}.w_0": as_array(v) for i, v in enumerate(kinds[0].values())}
        (folder / f"optimizer{mark}.pdopt").write_bytes(pickle.dumps(states))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2, "consumed_samples": 4}))
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("master", [False, True])
def test_from_paddle(run, tmp_path, monkeypatch, capsys, ranks, master):
    old = write_paddle_with_optimizer(run, tmp_path / f"p{ranks}{master}", ranks, master)
    assert_resumes(run, old, monkeypatch, capsys)


def in_two(states):
    """The states of two sharding ranks: each has every other tensor, both have the schedule."""
    names = [name for name in states if name != "LR_Scheduler"]
    return [{name: states[name] for name in [*names[part::2], "LR_Scheduler"]} for part in range(2)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_from_paddles_sharding_ranks(run, tmp_path, monkeypatch, capsys, ranks):
    old = write_paddle_with_optimizer(run, tmp_path / f"s{ranks}", ranks, False)
    for file in list(old.glob("*.pdopt")):
        for part, share in enumerate(in_two(pickle.loads(file.read_bytes()))):
            mark = f"{'_' if ranks > 1 else '.'}shard{part:02d}.pdopt"
            Path(str(file).replace(".pdopt", mark)).write_bytes(pickle.dumps(share))
        file.unlink()
    assert_resumes(run, old, monkeypatch, capsys)


def test_from_fleetxs_sharding_ranks(run, tmp_path, monkeypatch, capsys):
    paddle = write_paddle_with_optimizer(run, tmp_path / "p", 2, False)
    old = tmp_path / "epoch_1_step_2"
    for rank in range(2):
        shares = in_two(pickle.loads((paddle / f"optimizer.tp{rank:02d}.pdopt").read_bytes()))
        for part, share in enumerate(shares):
            folder = old / f"mp_{rank:02d}_sharding_{part:02d}_pp_00"
            folder.mkdir(parents=True)
            (folder / "model.pdparams").write_bytes((paddle / f"model_state.tp{rank:02d}.pdparams").read_bytes())
            (folder / "model_state.pdopt").write_bytes(pickle.dumps(share))
    assert_resumes(run, old, monkeypatch, capsys, "--num_attention_heads", "4", "--consumed_samples", "4")


def test_from_fleetx(run, tmp_path, monkeypatch, capsys):
    """The step is in the folder's name; the user gives the samples."""
    paddle = write_paddle_with_optimizer(run, tmp_path / "p", 1, False)
    old = tmp_path / "epoch_0_step_2"
    old.mkdir()
    (paddle / "model_state.pdparams").rename(old / "model.pdparams")
    (paddle / "optimizer.pdopt").rename(old / "model_state.pdopt")
    assert_resumes(run, old, monkeypatch, capsys, "--num_attention_heads", "4", "--consumed_samples", "4")


def test_checkpoints_without_readable_optimizer_states(run, tmp_path, capsys):
    write_megatron(stock(), tmp_path / "m", 3.0, 1, 1)
    write_deepspeed(stock(), tmp_path / "d", 1)
    write_config(tmp_path / "p")
    write_pdparams(tmp_path / "p/model_state.pdparams", paddle_tensors(stock(), True))
    stock().save_pretrained(tmp_path / "h")
    for name, says in (
        ("m", "contains no optimizer state that can be read"),
        ("d", "flat pieces over all ranks"),
        ("p", "there is no optimizer file (.pdopt) beside"),
        ("h", "has no optimizer.pt"),
    ):
        command = ["convert", "--from", str(tmp_path / name), "--output", str(tmp_path / "new"), "--with_optimizer"]
        assert main(command) == 1
        assert says in capsys.readouterr().err and not (tmp_path / "new").exists()
    command = ["convert", "--from", str(tmp_path / "h"), "--output", "x", "--to", "paddle", "--with_optimizer"]
    assert main(command) == 2 and "--with_optimizer needs --to hf" in capsys.readouterr().err


def test_moments_of_other_parameters_are_refused(run, tmp_path, capsys):
    """Optimizer states whose groups or shapes differ from those of the weights."""
    old = write_megatron_with_optimizer(run, tmp_path / "m", 1, 1, False)
    file = old / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    adam = content["optimizer"]
    command = ["convert", "--from", str(old), "--output", str(tmp_path / "new"), "--with_optimizer"]
    states = adam["state"]
    states[0], states[1] = states[1], states[0]
    torch.save(content, file)
    assert main(command) == 1 and "the order of the optimizer's parameters is not known" in capsys.readouterr().err
    adam["param_groups"][0]["params"].pop()
    torch.save(content, file)
    assert main(command) == 1 and "the optimizer has groups of [17, 34]" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()

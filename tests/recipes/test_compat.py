"""Pretraining typed as FleetX's, Megatron's and OneFlow's users type it."""

import json
import re
import shutil

import pytest
from transformers import AutoModelForCausalLM

from gptlm.commands.pretrain import parse_pretrain
from gptlm.recipes.pretrain.run import pretrain

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16"
RUN = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-decay-iters 4 --lr-warmup-fraction 0.25 --weight-decay 0.1 --clip-grad 1.0 --vocab-size 512 "
    "--split 80,10,10 --log-interval 1 "
    "--save-interval 2 --hidden-dropout 0 --attention-dropout 0 --seed 3 --device cpu"
)
YAML = """\
Global: {device: cpu, seed: 3, global_batch_size: 4, local_batch_size: , micro_batch_size: 2}
Engine:
  max_steps: 4
  logging_freq: 1
  eval_freq: 2
  eval_iters: 2
  mix_precision: {enable: False}
  save_load: {save_steps: 2, output_dir: OUT, ckpt_dir: }
Model:
  {module: GPTModule, name: GPT, vocab_size: 512, hidden_size: 32, num_layers: 2, num_attention_heads: 2,
   ffn_hidden_size: , hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0, max_position_embeddings: 16}
Data: {Train: {dataset: {name: GPTDataset, input_dir: DATA, split: [80, 10, 10], max_seq_len: 16}}}
Optimizer:
  weight_decay: 0.1
  lr: {decay_steps: 4, warmup_rate: 0.25, max_lr: 1e-2, min_lr: 1e-4, use_increments: True}
  grad_clip: {clip_norm: 1.0}
"""


@pytest.fixture
def run(tmp_path, capfd):
    def train(text, name="out"):
        metrics = pretrain(parse_pretrain([str(word) for word in text.split()], {}))
        history = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        return metrics, history, capfd.readouterr().out

    return train


@pytest.fixture
def data(corpus_folder, tmp_path):
    """One corpus under a name without blanks."""
    folder = tmp_path / "data"
    shutil.copytree(corpus_folder / "mmap", folder)
    return next(folder.glob("*.bin")).with_suffix("")


def losses(history):
    return [entry["loss"] for entry in history if "loss" in entry]


def test_megatron(run, data, tmp_path):
    text = f"{SIZES} {RUN} --lr 1e-2 --data-path {data} --save {tmp_path}/out --eval-interval 2 --eval-iters 2"
    metrics, history, said = run(text)
    lines = re.findall(r"^ iteration +(\d+)/ +4 \| consumed samples: +(\d+) .* learning rate: (\S+) ", said, re.M)
    assert [(int(step), int(samples)) for step, samples, _ in lines] == [(1, 4), (2, 8), (3, 12), (4, 16)]
    assert next(float(rate) for *_, rate in lines) == pytest.approx(1e-2)  # of the next update
    assert said.count(" validation loss at iteration ") == 2
    assert " validation loss at the end of training for test data | lm loss value: " in said
    assert losses(history)[0] == pytest.approx(losses(history)[1], abs=0.2)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    table = re.search(r"\| NAME \| (.*) \|\n.*?\n.*?\| 1p-\S+ \| (.*) \|", said)
    assert table
    row = dict(zip(table[1].split(" | "), table[2].split(" | "), strict=True))
    assert float(row["final PPL"]) == pytest.approx(2.718281828 ** metrics["eval_loss"], rel=1e-3)
    assert float(row["PPL"]) <= float(row["final PPL"]) and row["Steps"] == "4"
    assert "the lowest of 2 evaluations on the same windows" in said
    assert json.loads((tmp_path / "out/checkpoint-2/run.json").read_text())["max_steps"] == 4


def test_the_first_update_of_megatron_changes_nothing(run, data, tmp_path):
    """Its rate is 0 there: after one step the weights are the first ones, after two they are not."""
    base = f"{SIZES} {RUN} --lr 1e-2 --data-path {data} --eval-iters 0"
    for name, steps in (("zero", 0), ("one", 1), ("two", 2)):
        more = f"--save {tmp_path}/{name} --train-iters {max(steps, 1)}"
        run(f"{base} {more}" + (" --lr 1e-30 --min-lr 0" if steps == 0 else ""), name)
    first, one, two = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()["transformer.wte.weight"]
        for name in ("zero", "one", "two")
    )
    assert one.equal(first) and not two.equal(first)


def test_oneflow_resumes_where_it_saves(run, data, tmp_path):
    base = f"{SIZES} {RUN} --learning-rate 1e-2 --dataset {data} --num-gpus-per-node 1"
    base = base.replace(" --max-position-embeddings 16", "")
    whole = run(f"{base} --save {tmp_path}/whole --load {tmp_path}/whole", "whole")
    assert "| step     | micro_batches   | samples " in whole[2]
    assert re.search(r"^\| 4 +\| 8 +\| 16 +\| ", whole[2], re.M)
    shutil.copytree(tmp_path / "whole/checkpoint-2", tmp_path / "out/checkpoint-2")
    again = run(f"{base} --save {tmp_path}/out --load {tmp_path}/out")
    assert "resuming from" in again[2] and losses(again[1])[-2:] == losses(whole[1])[-2:]
    other = run(f"{base} --save {tmp_path}/third --load {tmp_path}/out", "third")  # checkpoints of another folder
    assert "is at step 4, max_steps is 4: nothing to train" in other[2]


def test_fleetx(run, data, tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(YAML.replace("OUT", f"{tmp_path}/out").replace("DATA", str(data)))
    metrics, history, said = run(f"-c {file} -o Engine.max_steps=4")
    lines = re.findall(
        r"^\[INFO \S+ \S+ trainer.py:\d+\] \[train\] epoch: 0 step: (\d) lr: (\S+) loss: (\S+)$", said, re.M
    )
    assert [int(step) for step, *_ in lines] == [0, 1, 2, 3]
    assert [float(loss) for *_, loss in lines] == pytest.approx(losses(history), abs=1e-6)
    assert said.count("[eval] epoch: 0 step: ") == 2 and metrics["eval_loss"] > 0


def test_a_yaml_and_flags_train_the_same(run, data, tmp_path):
    """FleetX of 2023, which counts samples, is Megatron's schedule and order: the losses are equal bit for bit."""
    file = tmp_path / "x.yaml"
    file.write_text(YAML.replace("OUT", f"{tmp_path}/out").replace("DATA", str(data)))
    fleetx = run(f"-c {file}")
    text = f"{SIZES} {RUN} --lr 1e-2 --data-path {data} --save {tmp_path}/mega --eval-interval 2 --eval-iters 2"
    assert losses(run(text, "mega")[1]) == losses(fleetx[1])


def test_a_run_starts_again_from_its_own_file(run, data, tmp_path):
    text = f"{SIZES} {RUN} --lr 1e-2 --data-path {data} --save {tmp_path}/out --eval-iters 0"
    whole = losses(run(text)[1])
    file = tmp_path / "out/checkpoint-2/run.json"
    shutil.copy(file, tmp_path / "run.json")
    again = run(f"{tmp_path}/run.json --output_dir {tmp_path}/again", "again")
    assert losses(again[1]) == whole

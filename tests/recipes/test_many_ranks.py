"""A thousand ranks on paper: what each of them reads, and how long planning takes. No process is started."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from gptlm.cli import main
from gptlm.commands.pretrain import parse_pretrain
from gptlm.data.blocks import build_split
from gptlm.data.cache import IndexCache
from gptlm.data.collate import IGNORED
from gptlm.data.corpora import open_corpora
from gptlm.data.epochs import BEGIN, Epochs
from gptlm.parallel.dims import ParallelDims
from gptlm.recipes.pretrain.data import collator, evaluation_samples, steps_per_epoch
from gptlm.training.progress import SequentialProgress
from gptlm.training.sampler import ConsecutiveBatches
from tests.conftest import write_tokens

WORLD = 1024
LAYOUTS = [ParallelDims(WORLD), ParallelDims(WORLD, 8, 16), ParallelDims(WORLD, 2, 4), ParallelDims(WORLD, 1, 64)]


def read_once(dims, **batches):
    """All samples that the replicas read, after a check that each is read by one replica only."""
    own = {"replicas": dims.data, **batches}
    samplers = [ConsecutiveBatches(replica=replica, **own) for replica in range(dims.data)]
    samples = [index for sampler in samplers for batch in sampler for index in batch]
    assert len(set(samples)) == len(samples)
    return samples


@pytest.mark.parametrize("dims", LAYOUTS, ids=lambda dims: f"{dims.tensor}x{dims.pipeline}x{dims.data}")
@pytest.mark.parametrize("micro", [1, 3])
def test_pretraining_reads_each_sample_once_also_after_a_resume_with_other_replicas(dims, micro):
    steps, batch = 4, dims.data * micro * 2
    progress = SequentialProgress(range(steps * batch), seq_length=8, samples_per_step=batch)
    first = read_once(dims, start=progress.first_index, batch_size=micro, batches=1 * 2)
    consumed = progress.manifest(1)["consumed_samples"]
    assert sorted(first) == list(range(consumed))
    for other in LAYOUTS:
        size = other.data * micro  # without accumulation
        progress = SequentialProgress(range(steps * batch), seq_length=8, samples_per_step=size)
        progress.resume(SimpleNamespace(global_step=1, consumed_samples=consumed))
        rest = (steps * batch - consumed) // size
        second = read_once(other, start=progress.first_index, batch_size=micro, batches=1 + rest, done=1)
        assert sorted(first + second) == list(range(consumed + rest * size))


@pytest.mark.parametrize("samples", [5000, 8192, 1000])
def test_fine_tuning_reads_each_example_of_an_epoch_once(samples):
    """With a partial batch at its end, and after a resume within the epoch with other replicas."""
    sizes = np.ones((samples, 2), np.int64)

    def read(dims, micro, steps, start):
        batch = dims.data * micro
        epochs = Epochs(range(samples), sizes=sizes, filler=None, batch=batch, steps=steps, seed=3, start=start)
        order = sorted(read_once(dims, start=0, batch_size=micro, batches=steps))
        assert order == list(range(batch * steps))
        return epochs, [epochs[index] for index in order]

    _, found = read(LAYOUTS[0], 1, -(-samples // WORLD), BEGIN)
    assert sorted(item for item in found if item is not None) == list(range(samples))
    before, first = read(LAYOUTS[1], 16, 3, BEGIN)
    steps = -(-(samples - before.position(3).place) // (WORLD * 3))
    _, second = read(LAYOUTS[0], 3, steps, before.position(3))
    assert before.position(3).epoch == 0
    assert sorted(item for item in first + second if item is not None) == list(range(samples))
    assert found[: len(first)] == first  # the order of an epoch does not depend on the replicas


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    """Two corpora, and the words of a run on them with 1,024 ranks."""
    folder = tmp_path_factory.mktemp("blend")
    for name, documents in (("a", 900), ("b", 300)):
        write_tokens(folder / name, documents=documents, seed=documents)
    words = "--num_hidden_layers 16 --hidden_size 64 --num_attention_heads 8 --vocab_size 500 --max_seq_length 8 "
    words += "--max_position_embeddings 8 --output_dir o --split 90,5,5 --world_size 1024 --do_train 1 "
    words += "--per_device_train_batch_size 1 --per_device_eval_batch_size 2 --max_steps 5 --eval_iters 1 --do_eval 1 "
    return f"3 {folder}/a 1 {folder}/b", words.split()


def test_a_blend_reads_each_sample_of_its_corpora_once(blend):
    run = parse_pretrain([*blend[1], "--input_dir", blend[0]], {}, printing=True)
    corpora = open_corpora(blend[0], "90,5,5")
    steps = steps_per_epoch(run, corpora)
    assert steps > 3
    dataset = build_split(
        corpora, "train", num_samples=steps * WORLD, seq_length=8, seed=run.order_seed, cache=IndexCache([])
    )
    samples = read_once(LAYOUTS[0], start=0, batch_size=1, batches=steps)
    found = [dataset.find(i) for i in sorted(samples)]
    assert len(set(found)) == len(found) == steps * WORLD
    shares = np.bincount([part for part, _ in found])
    assert abs(shares[0] - 3 * shares[1]) <= 4


@pytest.mark.parametrize("masking", ["none", "attention"])
@pytest.mark.parametrize("degrees", ["", "--tensor_parallel_degree 8 --pipeline_parallel_degree 16"])
def test_an_evaluation_reads_each_sample_once_and_fills_the_rest(blend, masking, degrees):
    words = [*blend[1], *degrees.split(), "--document_masking", masking, "--input_dir", blend[0]]
    run = parse_pretrain(words, {}, printing=True)
    corpora = open_corpora(blend[0], "90,5,5")
    dataset = build_split(corpora, "valid", num_samples=300, seq_length=8, seed=1, cache=IndexCache([]))
    filled = evaluation_samples(run, None, dataset, 301)
    batches = len(filled) // (2 * run.dims.data)
    samples = sorted(read_once(run.dims, start=0, batch_size=2, batches=batches))
    assert samples == list(range(len(filled)))
    batch = collator(run)([filled[index] for index in samples])
    rows = (batch["labels"] != IGNORED).all(1).tolist()
    assert rows == [True] * 301 + [False] * (len(filled) - 301)
    wanted = np.stack([dataset[i] for i in range(301)])
    assert np.array_equal(batch["input_ids"][:301], wanted[:, :-1])
    assert np.array_equal(batch["labels"][:301], wanted[:, 1:])


def test_175b_on_1024_ranks_is_planned_and_resolved_at_once(capsys):
    shared = "--model_name_or_path gpt3-175B-en --global_batch_size 1536 --bf16 --fp16_opt_level O2".split()
    assert main(["plan", "--num_gpus", "1024", *shared]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "174.60B parameters" in lines[0] and "1024 cards" in lines[0]
    row = lines[2].split()
    more = f"--pipeline_parallel_degree 16 --tensor_parallel_degree {row[0]} --sequence_parallel 1"
    words = [*shared, *more.split(), "--per_device_train_batch_size", "1"]
    named = ["-c", "pretrain_gpt_175B_mp8_pp16"]
    for argv in (words, [*shared, "--auto_parallel"], named):
        run = ["--print_config", *argv, "--world_size", "1024", "--input_dir", "d", "--output_dir", "o"]
        assert main(["pretrain", *run, "--max_steps", "9"]) == 0
        found = json.loads(capsys.readouterr().out)["run"]
        assert found["hidden_size"] == 12288 and found["tensor_parallel_degree"] == 8

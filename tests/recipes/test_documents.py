"""Document masking: losses equal stock GPT-2 run on each document by itself; boundaries come from the index."""

import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from gptlm.commands.pretrain import parse_pretrain
from gptlm.data.blocks import BlocksWithDocuments, UnreadBlocks, build_split
from gptlm.data.cache import IndexCache
from gptlm.data.corpora import open_corpora
from gptlm.data.writer import IndexedTokensWriter
from gptlm.recipes.pretrain.run import pretrain

LENGTH = 48
STILL = (  # weights stand still: every loss is that of the loaded ones
    f"--max_seq_length {LENGTH} --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_steps 3 "
    "--per_device_eval_batch_size 2 --eval_iters 2 --logging_steps 1 --eval_steps 3 --save_strategy no "
    "--learning_rate 0 --min_learning_rate 0 --split 80,10,10 --do_train --do_eval --device cpu --disable_tqdm "
    "--report_to none --hidden_dropout_prob 0 --attention_probs_dropout_prob 0 --continue_training"
).split()


def losses_by_hand(model_folder, dataset, count, masking, eod_mask_loss):
    """Loss of each target of the first `count` samples, and whether it counts, (count, LENGTH) each."""
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    losses, counted = torch.empty(count, LENGTH), torch.ones(count, LENGTH, dtype=torch.bool)
    for row in range(count):
        pieces = dataset.pieces(row)
        block = torch.from_numpy(np.concatenate([dataset.tokens.get(*piece) for piece in pieces]).astype(np.int64))
        bounds = np.cumsum([0, *(length for _, _, length in pieces)]).tolist()
        spans = [(a, min(b, LENGTH)) for a, b in itertools.pairwise(bounds) if a < LENGTH]
        if masking == "attention":
            logits = torch.cat([model(block[a:b][None]).logits[0] for a, b in spans])
        else:
            positions = torch.cat([torch.arange(b - a) for a, b in spans])[None]
            logits = model(
                block[None, :-1], position_ids=positions if masking == "position" else None, attention_mask=full(LENGTH)
            ).logits[0]
        losses[row] = F.cross_entropy(logits, block[1:], reduction="none")
        if eod_mask_loss:
            counted[row, [b - 1 for b in bounds[1:-1]]] = False
    return losses.detach(), counted


def full(length):
    """Plain causal attention, said as a mask: stock GPT-2 would guess documents from restarting positions."""
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


@pytest.mark.parametrize(
    ("masking", "eod_mask_loss"), [("none", True), ("position", False), ("attention", False), ("attention", True)]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_losses_are_those_of_documents_alone(tiny_model, corpus_folder, tmp_path, masking, eod_mask_loss, recompute):
    words = [*STILL, "--document_masking", masking, "--eod_mask_loss", eod_mask_loss, "--recompute", recompute]
    words += ["--model_name_or_path", tiny_model, "--input_dir", corpus_folder / "mmap", "--output_dir", tmp_path / "o"]
    metrics = pretrain(parse_pretrain([str(word) for word in words], {}))
    history = json.loads((tmp_path / "o/trainer_state.json").read_text())["log_history"]
    corpora = open_corpora(str(corpus_folder / "mmap"), "80,10,10")
    kept = {}
    for split, samples, read in (("train", 12, 12), ("valid", 2 * 2 * 2, 4)):
        dataset = build_split(corpora, split, num_samples=samples, seq_length=LENGTH, seed=42, cache=IndexCache([]))
        kept[split] = losses_by_hand(tiny_model, dataset, read, masking, eod_mask_loss)
    losses, counted = kept["train"]
    by_hand = [losses[i : i + 4][counted[i : i + 4]].mean().item() for i in (0, 4, 8)]
    assert [entry["loss"] for entry in history if "loss" in entry] == pytest.approx(by_hand, abs=2e-5)
    losses, counted = kept["valid"]
    assert metrics["eval_loss"] == pytest.approx(losses[counted].mean().item(), abs=1e-5)
    assert counted.all() != eod_mask_loss


def test_the_evaluation_does_not_depend_on_its_batches(tiny_model, corpus_folder, tmp_path):
    """The mean is over all targets, whatever their number per batch: 4 x 1 == 2 x 2 == 1 x 4."""
    found = []
    for size in (1, 2, 4):
        words = [*STILL, "--eod_mask_loss", "--per_device_eval_batch_size", size, "--eval_iters", 4 // size]
        words += ["--model_name_or_path", tiny_model, "--input_dir", corpus_folder / "mmap"]
        words += ["--output_dir", tmp_path / str(size), "--do_train", 0]
        found.append(pretrain(parse_pretrain([str(word) for word in words], {}))["eval_loss"])
    assert found == pytest.approx([found[0]] * 3, abs=1e-6)


def test_sentences_of_one_document_stay_together(tmp_path):
    """Documents 0 and 1 have two sequences each; in file order the next sentence is no new document."""
    np.save(tmp_path / "c_ids.npy", np.arange(12, dtype=np.int32))
    np.savez(tmp_path / "c_idx.npz", lens=np.array([2, 3, 1, 4, 2], np.int32), docs=np.array([0, 2, 4, 5]))
    corpora = open_corpora(str(tmp_path / "c"), "1,0,0", "fleetx")
    dataset = build_split(
        corpora, "train", num_samples=1, seq_length=11, seed=1, cache=IndexCache([]), data_order="fleetx"
    )
    assert BlocksWithDocuments(dataset)[0][1] == [5, 5, 2]
    block, lengths = BlocksWithDocuments(UnreadBlocks(dataset))[0]  # what a stage that embeds nothing is served
    assert block.tolist() == [0] * 12 and lengths == [5, 5, 2]


def test_a_step_without_any_target_is_no_nan(tiny_model, tmp_path):
    """Documents of one token, none of them a target: the loss is 0 and nothing moves."""
    writer = IndexedTokensWriter(str(tmp_path / "c"), 500)
    writer.add(np.arange(400) % 500, [1] * 400)
    writer.finish({})
    words = [*STILL, "--document_masking", "attention", "--eod_mask_loss", "--input_dir", tmp_path / "c"]
    words += ["--max_seq_length", 16, "--do_eval", 0, "--evaluation_strategy", "no", "--learning_rate", "1e-2"]
    words += ["--model_name_or_path", tiny_model, "--output_dir", tmp_path / "o"]
    assert pretrain(parse_pretrain([str(word) for word in words], {}))["train_loss"] == 0


def test_an_end_of_text_id_inside_a_document_is_no_boundary(tmp_path):
    """Documents are what the index says; ids are never looked at."""
    writer = IndexedTokensWriter(str(tmp_path / "c"), 100)
    for ids in ([5, 0, 6, 0], [0, 7, 0, 0, 0], [8, 9, 0]):
        writer.add(np.array(ids), [len(ids)])
    writer.finish({"eos_token_id": 0})
    corpora = open_corpora(str(tmp_path / "c"), "1,0,0", "fleetx")
    dataset = build_split(
        corpora, "train", num_samples=1, seq_length=11, seed=1, cache=IndexCache([]), data_order="fleetx"
    )
    block, lengths = BlocksWithDocuments(dataset)[0]
    assert block.tolist() == [5, 0, 6, 0, 0, 7, 0, 0, 0, 8, 9, 0] and lengths == [4, 5, 3]

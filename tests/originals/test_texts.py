"""Evaluation on the real test sets."""

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gptlm.commands.evaluate import parse_evaluate
from gptlm.inference.detokenizers import detokenize
from gptlm.inference.tasks import read_text
from gptlm.recipes.evaluate import evaluate


def test_wikitext_is_undone_as_by_the_evaluation_harness(shared):
    """Its copy of Megatron's function, on the whole test set."""
    harness = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext")
    text = read_text(str(shared / "data/wikitext-2-raw/wiki.test.raw"))
    assert detokenize(text, "wikitext") == harness.wikitext_detokenizer({"page": text}) != text


def test_an_untrained_model_fails_the_real_lambada(shared, tmp_path):
    """Under 0.5 % of 400 texts."""
    AutoTokenizer.from_pretrained(shared / "data/tiny-gpt2-trained").save_pretrained(tmp_path)
    torch.manual_seed(4)
    config = GPT2Config(vocab_size=4096, n_positions=256, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    words = f"--task LAMBADA --max_examples 400 --batch_size 32 --device cpu --load {tmp_path} --eval_path"
    report = evaluate(*parse_evaluate([*words.split(), str(shared / "data/lambada/lambada_test.jsonl")]))
    assert report["num_examples"] == 400
    assert report["accuracy_strict"] < 0.005 and report["accuracy_last_token"] < 0.005

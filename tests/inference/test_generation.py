"""Continuations: padded vocabulary rows are no tokens, prompts keep their end, batches do not matter."""

import pytest
import torch

from gptlm.errors import GptlmError
from gptlm.inference.generation import Sampling, continue_prompts
from gptlm.inference.loading import load_for_inference
from gptlm.model.build import new_model
from gptlm.model.presets import Shape
from gptlm.model.tokenizer import train_tokenizer

PROMPTS = ["the cat", "", "the dog sat on the log and the cat", "a<|endoftext|>b"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat and the dog sat on the log " * 20], 280)


@pytest.fixture(scope="module")
def model(tokenizer):
    """Random weights whose vocabulary is padded far beyond the tokenizer's."""
    torch.manual_seed(0)
    return new_model(Shape(2, 32, 2, 64, 512, 40), eos_token_id=tokenizer.eos_token_id).eval()


def run(model, tokenizer, prompts=PROMPTS, **change):
    settings = {"batch_size": 2, "max_prompt_tokens": 30, "max_new_tokens": 8, **change}
    return list(continue_prompts(model, tokenizer, prompts, **settings))


def test_rows_without_a_token_are_never_drawn(model, tokenizer, monkeypatch):
    seen = []
    original = tokenizer.batch_decode
    monkeypatch.setattr(tokenizer, "batch_decode", lambda ids, **k: seen.append(ids) or original(ids, **k))
    torch.manual_seed(1)
    wild = Sampling(do_sample=True, top_k=0, temperature=50.0)
    run(model, tokenizer, ["the"] * 60, batch_size=60, max_new_tokens=30, sampling=wild)
    assert seen[0].max() < len(tokenizer) and len(set(seen[0].flatten().tolist())) > 100


def test_the_batch_size_does_not_matter(model, tokenizer):
    assert run(model, tokenizer, batch_size=1) == run(model, tokenizer, batch_size=4) == run(model, tokenizer)


def test_a_long_prompt_keeps_its_end(model, tokenizer):
    text = "the cat sat on the mat and the dog sat on the log"
    ids = tokenizer(text)["input_ids"]
    assert run(model, tokenizer, [text], max_prompt_tokens=4) == run(model, tokenizer, [tokenizer.decode(ids[-4:])])


def test_the_position_table_is_used_to_its_last_row(model, tokenizer):
    ids = tokenizer("the cat sat on the mat and the dog sat on the log " * 5)["input_ids"][:32]
    (text,) = run(model, tokenizer, [tokenizer.decode(ids)], max_prompt_tokens=39, max_new_tokens=100)
    assert isinstance(text, str)
    with pytest.raises(GptlmError, match="fills the position table of 40"):
        run(model, tokenizer, [tokenizer.decode(ids * 2)], max_prompt_tokens=1000)


def test_weights_that_are_no_numbers_are_said(model, tokenizer):
    broken = new_model(Shape(1, 32, 2, 64, 512, 40)).eval()
    with torch.no_grad():
        broken.transformer.ln_f.weight.fill_(float("nan"))
    with pytest.raises(GptlmError, match="no numbers"):
        run(broken, tokenizer, sampling=Sampling(do_sample=True))


def test_a_folder_without_weights_or_config_is_refused(tmp_path, model):
    with pytest.raises(GptlmError, match="holds no model weights"):
        load_for_inference(str(tmp_path), torch.device("cpu"))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == (tmp_path / "config.json").stat().st_mode & 0o777
    (tmp_path / "config.json").unlink()
    with pytest.raises(GptlmError, match="holds no config.json"):
        load_for_inference(str(tmp_path), torch.device("cpu"))

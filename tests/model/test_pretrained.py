"""Python in a model's folder never runs, and nothing asks on the terminal whether it may."""

import io
import json
import os
import shutil
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from gptlm.conversion.verify import fixed_batch
from gptlm.errors import GptlmError
from gptlm.model.build import load_model
from gptlm.model.pretrained import load_pretrained
from gptlm.model.tokenizer import load_tokenizer, train_tokenizer

TEXT = "the cat sat on the mat and the dog sat on the log " * 20


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model and tokenizer, beside them Python that leaves a file; whoever asks on the terminal gets a yes."""
    source = tmp_path / "model"
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=16, vocab_size=290)).save_pretrained(source)
    train_tokenizer([TEXT], 290).save_pretrained(source)
    for name in ("evil.py", "custom_generate/generate.py"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\nclass Evil: pass\ndef generate(): pass\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    yield source
    assert not (tmp_path / "pwned").exists()
    assert sys.stdin.tell() == 0  # nothing was read


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


TOKENIZER = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}


@pytest.mark.parametrize("known", [True, False])
def test_code_of_a_tokenizer_is_not_run(folder, known):
    """Where transformers has the class, it is used; a class that only the folder has is refused by name."""
    (folder / "config.json").unlink()
    before = load_tokenizer(str(folder))("the cat")["input_ids"]
    change(folder / "tokenizer_config.json", auto_map=TOKENIZER)
    if not known:
        change(folder / "tokenizer_config.json", tokenizer_class="Evil")
        with pytest.raises(GptlmError, match=r"tokenizer_config.json is refused: its auto_map asks .*evil\.Evil"):
            load_tokenizer(str(folder))
        return
    assert load_tokenizer(str(folder))("the cat")["input_ids"] == before


def test_code_of_a_config_beside_a_tokenizer_is_not_run(folder):
    """transformers asks config.json for the class of a tokenizer that names none; tokenizer.json needs no class."""
    before = load_tokenizer(str(folder))("the cat")["input_ids"]
    change(folder / "tokenizer_config.json", tokenizer_class=None)
    change(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"} | TOKENIZER)
    assert load_tokenizer(str(folder))("the cat")["input_ids"] == before


def test_code_of_a_model_is_not_run(folder):
    ids = fixed_batch(290, 16)
    before = load_pretrained(AutoModelForCausalLM, str(folder))(ids).logits
    change(folder / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    assert (load_pretrained(AutoModelForCausalLM, str(folder))(ids).logits == before).all()
    assert load_model(str(folder)).config.n_layer == 1


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_compiled_code_of_the_hub_is_refused(folder, key):
    change(folder / "config.json", **{key: "someone/kernel"})
    with pytest.raises(GptlmError, match=f"config.json is refused: {key} 'someone/kernel' asks for compiled code"):
        load_model(str(folder))
    with pytest.raises(GptlmError, match="asks for compiled code"):
        load_tokenizer(str(folder))


def test_other_reasons_keep_their_sentence(folder):
    (folder / "tokenizer.json").write_text('{"model": {}}')
    change(folder / "tokenizer_config.json", auto_map=TOKENIZER)
    with pytest.raises(GptlmError, match="cannot load a tokenizer from"):
        load_tokenizer(str(folder))


def test_the_class_in_the_file_is_the_one_that_is_used(folder):
    change(folder / "tokenizer_config.json", auto_map=TOKENIZER, tokenizer_class="PreTrainedTokenizerFast")
    assert isinstance(load_tokenizer(str(folder)), PreTrainedTokenizerFast)


class Poison:
    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("new", [True, False])
def test_a_pickle_of_weights_is_checked_before_torch_reads_it(folder, new, monkeypatch):
    monkeypatch.chdir(folder.parent)
    model = load_model(str(folder))
    (folder / "model.safetensors").unlink()
    weights = GPT2LMHeadModel(model.config).state_dict()
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    loaded = load_model(str(folder))
    assert torch.equal(loaded.transformer.wte.weight, weights["transformer.wte.weight"])
    weights["x"] = Poison()
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    with pytest.raises(GptlmError, match=r"pytorch_model.bin is refused: it asks for posix.system") as refused:
        load_model(str(folder))
    assert "weights_only" not in str(refused.value)


def test_a_model_beside_adapters_is_refused(folder):
    """transformers would add them to the weights."""
    network = GPT2LMHeadModel.from_pretrained(folder)
    get_peft_model(network, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)).save_pretrained(folder)
    with pytest.raises(GptlmError, match="holds a model and adapters .* --lora_path"):
        load_model(str(folder))


@pytest.mark.parametrize("content", ['{"eos_token_id": 5', "[]", ""])
@pytest.mark.parametrize("loader", [None, GenerationConfig, GPT2Config])
def test_damaged_generation_settings_are_named(tiny_model, tmp_path, content, loader):
    """transformers goes on without them, and a text would not end where it should."""
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(content)
    with pytest.raises(GptlmError, match=r"model/generation_config.json is damaged: .*; copy the folder again"):
        load_model(str(tmp_path / "model")) if loader is None else load_pretrained(loader, str(tmp_path / "model"))

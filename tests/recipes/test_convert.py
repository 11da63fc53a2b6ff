"""`gptlm convert` as users call it: round trips are bit-exact and verified; a failure leaves nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gptlm.cli import main
from gptlm.locks import locked
from gptlm.model import tensor_files
from tests.conversion.layouts import HEADS, VOCABULARY, logits, paddle_tensors, stock, write_megatron, write_pdparams


@pytest.fixture
def folder(tmp_path):
    """A random stock GPT-2 in `a`."""
    stock().save_pretrained(tmp_path / "a")
    return tmp_path


def weights(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_equal(one, other):
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys() and len(first) == 4 * 12 + 4
    for name, value in first.items():
        assert value.dtype == second[name].dtype and torch.equal(value, second[name]), name


def test_round_trips_are_bit_exact(folder, capsys):
    """hf -> megatron (TP 2, PP 2) -> hf -> paddle fused -> hf, then split, .pdparams and Megatron on one rank."""
    steps = [
        ("a", "megatron", "m", "--tensor_parallel_degree", "2", "--pipeline_parallel_degree", "2"),
        ("m", "hf", "b"),
        ("b", "paddle", "p", "--paddle_qkv", "fused"),
        ("p", "hf", "c"),
        ("c", "paddle", "q", "--paddle_file", "pdparams"),
        ("q", "megatron", "n"),
        ("n", "hf", "d"),
    ]
    for source, form, output, *more in steps:
        words = ["--from", str(folder / source), "--to", form, "--output", str(folder / output), *more]
        assert main(["convert", *words]) == 0, capsys.readouterr().err
        said = capsys.readouterr()
        assert "logits before and after differ by at most" in said.out + said.err
        if form == "hf":
            assert_equal(folder / "a", folder / output)
            loaded, report = AutoModelForCausalLM.from_pretrained(folder / output, output_loading_info=True)
            assert not report["missing_keys"] and not report["unexpected_keys"]
            assert torch.allclose(logits(loaded.eval()), logits(stock()), rtol=0, atol=1e-5)
    assert sorted(path.name for path in folder.iterdir()) == list("abcdmnpq")


def test_shards_and_dtype(folder, capsys, monkeypatch):
    monkeypatch.setattr(tensor_files, "SHARD_BYTES", 20_000)
    words = ["--from", str(folder / "a"), "--output", str(folder / "b"), "--dtype", "bfloat16"]
    assert main(["convert", *words]) == 0, capsys.readouterr().err
    index = json.loads((folder / "b/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (folder / "b").glob("*.safetensors"))
    assert len(files) > 1 and set(index["weight_map"].values()) == set(files)
    original = weights(folder / "a")
    for name, value in weights(folder / "b").items():
        assert torch.equal(value, original[name].bfloat16())
    assert AutoModelForCausalLM.from_pretrained(folder / "b").dtype == torch.bfloat16


def test_a_wrong_result_is_an_error_and_leaves_nothing(folder, capsys, monkeypatch):
    """Weights that change while they are written are found by their logits."""

    def changed_weights(path, kinds, tensors):
        save(path, kinds, ((name, value + 0.1 if "mlp.c_fc.bias" in name else value) for name, value in tensors))

    def other_names(path, kinds, tensors):
        save(path, {f"{name}s": kind for name, kind in kinds.items()}, ((f"{n}s", value) for n, value in tensors))

    save = tensor_files.save_model_one_by_one
    words = ["convert", "--from", str(folder / "a"), "--output", str(folder / "b")]
    for change, says in ((changed_weights, "computes other logits"), (other_names, "not have the weights of GPT-2")):
        monkeypatch.setattr("gptlm.recipes.convert.save_model_one_by_one", change)
        assert main(words) == 1
        assert f"the converted model {'does ' if change is other_names else ''}{says}" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert main([*words, "--verify", "0"]) == 0


def test_a_padded_megatron_vocabulary_and_its_tokenizer(tmp_path, capsys):
    write_megatron(stock(), tmp_path / "m", 2.0, 2, 1)
    words = ["convert", "--from", str(tmp_path / "m"), "--output", str(tmp_path / "b"), "--vocab_size", str(VOCABULARY)]
    assert main(words) == 0
    said = capsys.readouterr()
    text = said.out + said.err
    assert "is a checkpoint of Megatron-LM, tensor parallel 2, pipeline 1, step 100" in text
    assert "reduced from 256 rows to 50 (--vocab_size)" in text and "no tokenizer is saved with the weights" in text
    assert torch.equal(weights(tmp_path / "b")["transformer.wte.weight"], stock().transformer.wte.weight)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--to hf", 2, "error: --output is missing"),
        ("--from a --output b --to ggml", 2, "expected one of hf, megatron, paddle, gguf"),
        ("--from a --output b --tensor_parallel_degree 2", 2, "needs --to megatron"),
        ("--from a --output b --to megatron --tensor_parallel_degree 3", 2, "does not divide 4 heads"),
        ("--from a --output b --to megatron --pipeline_parallel_degree 3", 2, "does not divide 4 layers"),
        ("--from a --output a", 2, "--output a holds a, which the command reads"),
        ("--from nowhere --output b", 1, "--from nowhere: there is no such folder, file or built-in model"),
        ("--from empty --output b", 1, "is not a known checkpoint"),
        ("--from snapshot --output b", 1, "is a OneFlow snapshot"),
        ("--from dist --output b", 1, "distributed checkpoint of megatron-core"),
        ("--from a --output b --tokenizer_name_or_path empty", 1, "holds no tokenizer"),
        ("--from a --output b --vocab_size 51", 1, "has 50 rows"),
    ],
)
def test_errors_and_wrong_arguments(folder, capsys, monkeypatch, words, code, message):
    monkeypatch.chdir(folder)
    for name in ("empty", "snapshot/iter7_snapshot", "dist"):
        (folder / name).mkdir(parents=True)
    (folder / "dist/__0_0.distcp").write_bytes(b"")
    before = sorted(folder.iterdir())
    assert main(["convert", *words.split()]) == code
    assert message in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


def test_an_erf_model_is_not_written_for_paddle(tmp_path, capsys):
    stock("gelu").save_pretrained(tmp_path / "a")
    words = ["convert", "--from", str(tmp_path / "a"), "--to", "paddle", "--output", str(tmp_path / "b")]
    assert main(words) == 1 and "the erf form (gelu)" in capsys.readouterr().err


def test_untied_and_unknown_tensors_of_huggingface_are_refused(folder, capsys):
    stored = weights(folder / "a")
    words = ["convert", "--from", str(folder / "a"), "--output", str(folder / "b")]
    for more, says in (
        ({"lm_head.weight": torch.ones(VOCABULARY, 16)}, "its output head is not the embedding"),
        ({"transformer.h.9.ln_1.bias": torch.ones(16)}, "contains transformer.h.9.ln_1.bias"),
    ):
        save_file({**stored, **more}, folder / "a/model.safetensors", {"format": "pt"})
        assert main(words) == 1 and says in capsys.readouterr().err


def test_a_pdparams_file_alone(tmp_path, capsys):
    write_pdparams(tmp_path / "x.pdparams", paddle_tensors(stock(), False))
    words = ["--from", str(tmp_path / "x.pdparams"), "--output", str(tmp_path / "b")]
    assert main(["convert", *words]) == 1 and "--num_attention_heads" in capsys.readouterr().err
    assert main(["convert", *words, "--num_attention_heads", str(HEADS)]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert torch.allclose(logits(loaded), logits(stock()), rtol=0, atol=1e-5)


def test_the_tokenizer_is_saved_too(folder, capsys):
    from gptlm.model.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["a b a b c"], 260)
    tokenizer.save_pretrained(folder / "a")
    assert main(["convert", "--from", str(folder / "a"), "--output", str(folder / "b")]) == 0
    assert AutoTokenizer.from_pretrained(folder / "b")("a b c")["input_ids"] == tokenizer("a b c")["input_ids"]


def test_pytorch_model_bin_is_read(folder, capsys):
    torch.save(stock().state_dict(), folder / "pytorch_model.bin")
    (folder / "a/model.safetensors").unlink()
    (folder / "pytorch_model.bin").rename(folder / "a/pytorch_model.bin")
    assert main(["convert", "--from", str(folder / "a"), "--output", str(folder / "b")]) == 0, capsys.readouterr().err
    found, wanted = weights(folder / "b"), stock().state_dict()
    assert len(found) == 52 and all(torch.equal(value, wanted[name]) for name, value in found.items())


def convert(folder, *words):
    return main(["convert", *map(str, words)])


def test_two_conversions_into_one_folder_do_not_mix(folder, capsys):
    with locked(folder / ".b.lock"):
        assert convert(folder, "--from", folder / "a", "--output", folder / "b") == 1
    assert "another command is writing into" in capsys.readouterr().err and not (folder / "b").exists()
    assert convert(folder, "--from", folder / "a", "--output", folder / "b") == 0
    assert_equal(folder / "a", folder / "b")
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]


def test_mixed_up_ranks_are_an_error(folder, capsys):
    degrees = ["--tensor_parallel_degree", "2", "--pipeline_parallel_degree", "2"]
    assert convert(folder, "--from", folder / "a", "--to", "megatron", "--output", folder / "m", *degrees) == 0
    one, other = sorted((folder / "m").rglob("mp_rank_0?_000"))
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)
    capsys.readouterr()
    assert convert(folder, "--from", folder / "m", "--output", folder / "b") == 1
    assert "the tensor-parallel ranks are mixed up" in capsys.readouterr().err


def test_more_layers_than_in_the_configuration_are_an_error(folder, capsys):
    assert convert(folder, "--from", folder / "a", "--to", "paddle", "--output", folder / "p") == 0
    config = json.loads((folder / "p" / "config.json").read_text())
    (folder / "p" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    capsys.readouterr()
    assert convert(folder, "--from", folder / "p", "--output", folder / "b") == 1
    assert "contains layer 3 (the first is 0), but its configuration has 3 layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--num_attention_heads 3", f"--num_attention_heads 3: the checkpoint has {HEADS}; leave it out"),
        ("--activation gelu", "--activation gelu: the checkpoint has gelu_new; leave it out"),
        ("--consumed_samples 4", "--consumed_samples needs --with_optimizer"),
    ],
)
def test_flags_that_contradict_the_checkpoint_are_refused(folder, capsys, words, says):
    assert convert(folder, "--from", folder / "a", "--output", folder / "b", *words.split()) != 0
    assert says in capsys.readouterr().err and not (folder / "b").exists()


def test_weights_of_several_dtypes_keep_the_widest(folder, capsys):
    stored = load_file(folder / "a" / "model.safetensors")
    changed = stored | {"transformer.wpe.weight": stored["transformer.wpe.weight"].half()}
    save_file(changed, folder / "a" / "model.safetensors", {"format": "pt"})
    assert convert(folder, "--from", folder / "a", "--output", folder / "b") == 0, capsys.readouterr().err
    found = load_file(folder / "b" / "model.safetensors")
    assert all(torch.equal(value, changed[name].float()) for name, value in found.items())
    save_file(changed | {"transformer.ln_f.weight": torch.ones(stored["transformer.ln_f.weight"].shape).long()},
              folder / "a" / "model.safetensors", {"format": "pt"})  # fmt: skip
    assert convert(folder, "--from", folder / "a", "--output", folder / "c") == 1
    assert "transformer.ln_f.weight is torch.int64, expected a floating-point tensor" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_an_error(folder, capsys):
    stored = load_file(folder / "a" / "model.safetensors")
    stored["transformer.ln_f.bias"][0] = torch.nan
    save_file(stored, folder / "a" / "model.safetensors", {"format": "pt"})
    assert convert(folder, "--from", folder / "a", "--output", folder / "b") == 1
    assert "the weights contain NaN or infinity" in capsys.readouterr().err

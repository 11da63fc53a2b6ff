"""Generation in evaluations of fine-tuning: settings of `gptlm predict`, and texts that are compared alike."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gptlm.cli import main
from gptlm.commands.sft import parse_sft
from gptlm.errors import GptlmError
from gptlm.model.tokenizer import train_tokenizer
from gptlm.recipes.sft.run import sft

ANSWER = "the dog <|user|> sat on the mat"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with random weights, 64 positions, whose tokenizer has a special token `<|user|>`."""
    folder = tmp_path_factory.mktemp("generating") / "m"
    tokenizer = train_tokenizer(["the cat sat on the mat and the dog sat on the log " * 20], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    ).save_pretrained(folder)
    return folder


def evaluate(model, folder, rows, *words):
    """Metrics and written predictions of an evaluation without training."""
    (folder / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = ["--model_name_or_path", model, "--dataset_name_or_path", folder / "d.jsonl", "--output_dir", folder / "out"]
    argv += ["--do_eval", "--device", "cpu", "--disable_tqdm", "--report_to", "none", "--src_length", 20, *words]
    metrics = sft(parse_sft([str(word) for word in argv], {}))
    lines = (folder / "out/predictions/eval-step-0.jsonl").read_text(encoding="utf-8").splitlines()
    return metrics, [json.loads(line) for line in lines]


def predicted(model, folder, prompts, *words):
    argv = ["--model_name_or_path", model, "--device", "cpu", "--output_file", folder / "o.jsonl", "--overwrite"]
    argv += [*words, "--prompt"]
    assert main(["predict", *map(str, argv), *prompts]) == 0
    return [json.loads(line)["continuation"] for line in (folder / "o.jsonl").read_text().splitlines()]


def test_the_base_model_s_generation_settings_are_ignored(model, tmp_path):
    """Greedy text of random weights repeats itself, which both settings would end."""
    prompts = ["the cat", "the dog sat on"]
    rows = [{"src": prompt, "tgt": "the mat"} for prompt in prompts]
    words = ("--tgt_length", 12)
    plain = predicted(model, tmp_path, prompts, *words)
    shutil.copytree(model, tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(model)
    wild = {"no_repeat_ngram_size": 1, "suppress_tokens": tokenizer(plain[0])["input_ids"][:1], "do_sample": True}
    (tmp_path / "m/generation_config.json").write_text(json.dumps({**wild, "eos_token_id": 0}))
    assert predicted(tmp_path / "m", tmp_path, prompts, *words) == plain
    _, found = evaluate(tmp_path / "m", tmp_path, rows, *words)
    assert [row["prediction"] for row in found] == [text.strip() for text in plain]
    stock = GPT2LMHeadModel.from_pretrained(tmp_path / "m")  # under which those settings do steer
    ids = torch.tensor([tokenizer(prompts[0])["input_ids"]])
    other = stock.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert tokenizer.decode(other, skip_special_tokens=True).strip() != found[0]["prediction"]


def test_a_prompt_without_room_is_named_and_shortens_its_own_batch(model, tmp_path, capsys):
    """60 of 64 positions are the second prompt's."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    long = tokenizer.decode(tokenizer("the cat sat on the mat and " * 20)["input_ids"][:60])
    rows = [{"src": "the cat", "tgt": "a"}, {"src": long, "tgt": "a"}]
    words = ("--tgt_length", 10, "--src_length", 61, "--max_length", 64, "--per_device_eval_batch_size", 1)
    _, found = evaluate(model, tmp_path, rows, *words)
    said = capsys.readouterr().out
    assert "1 of 2 prompts leave no room for 10 new tokens" in said and ": evaluation prompt 2\n" in said
    assert found[0]["prediction"] == predicted(model, tmp_path, ["the cat"], "--tgt_length", 10)[0].strip()


@pytest.mark.parametrize("count", [1, 0])
def test_nan_weights_end_the_evaluation(model, tmp_path, count):
    """Whether texts are generated or not."""
    shutil.copytree(model, tmp_path / "m")
    weights = GPT2LMHeadModel.from_pretrained(model)
    with torch.no_grad():
        weights.transformer.ln_f.bias[0] = float("nan")
    weights.save_pretrained(tmp_path / "m")
    with pytest.raises(GptlmError, match="/m computes NaN or infinity: 1 of its .*ln_f.bias"):
        evaluate(tmp_path / "m", tmp_path, [{"src": "the cat", "tgt": "the mat"}], "--generate_num", count)
    assert not (tmp_path / "out/eval_results.json").exists()


def test_a_perfect_answer_scores_one(model, tmp_path):
    """Its special token is dropped from both texts or kept in both."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = GPT2LMHeadModel.from_pretrained(model).train()
    row = {"src": "the cat", "tgt": ANSWER}
    source, target = tokenizer("the cat")["input_ids"], tokenizer(ANSWER)["input_ids"]
    ids = torch.tensor([[*source, *target, 0]])
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(60):
        network(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    network.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    words = ("--allow_special_tokens", "--tgt_length")
    metrics, found = evaluate(tmp_path / "m", tmp_path, [row], *words, len(target) + 1)
    assert found[0]["prediction"] == found[0]["reference"] != ""
    assert [metrics[f"eval_{name}"] for name in ("bleu4", "rouge1", "rouge2", "rougel")] == [1.0] * 4
    short, cut = evaluate(tmp_path / "m", tmp_path, [row], *words, 4, "--overwrite_output_dir")
    assert cut[0]["reference"] == found[0]["reference"] and short["eval_rouge1"] < 1  # the whole answer counts

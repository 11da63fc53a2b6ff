"""Fine-tuning on conversations, from file to generated text: what ends a turn, what is logged, what is compared."""

import json
import re

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, GPT2Config, GPT2LMHeadModel

from gptlm.cli import main
from gptlm.commands.evaluate import parse_evaluate
from gptlm.commands.predict import parse_predict
from gptlm.commands.sft import parse_sft
from gptlm.errors import UsageError
from gptlm.inference.generation import encode_prompts, stop_ids
from gptlm.inference.loading import load_for_inference
from gptlm.inference.tasks import Cloze
from gptlm.model.tokenizer import add_tokens, train_tokenizer
from gptlm.recipes.sft.run import sft
from tests.data.test_chat_template import CHATML

TALK = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat on"},
    {"role": "user", "content": "a mat"},
    {"role": "assistant", "content": "while two dogs ran"},
]
BASE = (
    "--per_device_train_batch_size 2 --device cpu --disable_tqdm --report_to none --save_strategy no --weight_decay 0 "
    "--hidden_dropout_prob 0 --attention_probs_dropout_prob 0 --tgt_length 20 --src_length 60"
).split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights; ChatML in the tokenizer, whose eos is another token than the one that ends a turn."""
    folder = tmp_path_factory.mktemp("chat") / "m"
    tokenizer = train_tokenizer(["the cat sat on a mat while two dogs ran far away: user assistant"] * 5, 300)
    tokenizer.chat_template = CHATML
    add_tokens(tokenizer, ["<|im_start|>", "<|im_end|>"])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=96, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def tune(model, tmp_path):
    def run(*words, rows=({"messages": TALK},)):
        (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
        argv = [*BASE, "--model_name_or_path", model, "--dataset_name_or_path", tmp_path / "d.jsonl"]
        argv += ["--eval_dataset_name_or_path", tmp_path / "d.jsonl", "--output_dir", tmp_path / "out", *words]
        return sft(parse_sft([str(word) for word in argv], {}))

    return run


def test_a_trained_model_ends_its_turns(tune, tmp_path, capsys):
    """Every answer is generated after the true turns before it; stock transformers and `predict` stop where it ends."""
    words = ["--do_train", "--do_eval", "--max_steps", 80, "--learning_rate", "2e-2"]
    metrics = tune(*words, rows=[{"messages": TALK}] * 2)
    lines = (tmp_path / "out/predictions/eval-step-80.jsonl").read_text().splitlines()
    found = [(line["prediction"], line["reference"]) for line in map(json.loads, lines)]
    assert found == [("sat on", "sat on"), ("while two dogs ran", "while two dogs ran")] * 2
    assert metrics["eval_bleu4"] == metrics["eval_rouge1"] == 1.0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    stock = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert stock.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token == "<|endoftext|>"
    prompt = tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False)
    out = stock.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    assert tokenizer.decode(out) == "sat on<|im_end|>"
    capsys.readouterr()
    argv = ["--device", "cpu", "--allow_special_tokens", "--prompt", tokenizer.decode(prompt)]
    assert main(["predict", "--model_name_or_path", str(tmp_path / "out"), *argv]) == 0
    assert capsys.readouterr().out == "sat on\n"


def test_adapters_note_what_ends_a_turn(tune, model, tmp_path):
    """The merged model and what loads the adapters know it; adapters without the note merge as before."""
    tune("--do_train", "--max_steps", 1, "--lora", "--merge_weights")
    end = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|im_end|>")
    for folder in ("out", "out/merged"):
        assert GenerationConfig.from_pretrained(tmp_path / folder).eos_token_id == end
    network, tokenizer = load_for_inference(str(model), torch.device("cpu"), lora_path=str(tmp_path / "out"))
    assert stop_ids(network, tokenizer, stop_at_eol=False) == [tokenizer.eos_token_id, end]
    (tmp_path / "out/generation_config.json").unlink()
    argv = ["--lora_path", tmp_path / "out", "--model_name_or_path", model, "--output_path", tmp_path / "merged"]
    assert main(["merge-lora", *map(str, argv)]) == 0
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == tokenizer.eos_token_id


def test_what_a_run_says_of_its_data(tune, capsys):
    """How records were read, keys that are not used, what ends a turn, special tokens that stay text."""
    rows = [
        {"messages": TALK, "id": 1, "tools": [{"x": 1}]},
        {"messages": TALK, "id": 2},
        {"src": "the <|im_end|> cat", "tgt": "a mat", "id": 3},
    ]
    tune("--do_train", "--max_steps", 1, rows=rows)
    said = capsys.readouterr().out
    assert "d.jsonl: 2 records read as messages in the tokenizer's chat template" in said
    assert "d.jsonl: 1 record read as src/tgt\n" in said
    assert "d.jsonl: ignored keys: id (3), tools (1)" in said
    assert "d.jsonl: <|im_end|> ends a turn" in said
    assert re.search(
        r"train examples of .*d.jsonl: 1 contain a special token \(<\|im_end\|>\), which is encoded as text", said
    )


@pytest.mark.parametrize(("side", "kept"), [("left", " two dogs"), ("right", "the cat sat")])
def test_prompts_of_predict_are_cut_as_those_of_training(model, side, kept):
    tokenizer = AutoTokenizer.from_pretrained(model)
    text, count = "the cat sat while two dogs", len(tokenizer(kept)["input_ids"])
    (row,) = encode_prompts(tokenizer, [text], count, truncation_side=side)
    assert tokenizer.decode(row) == kept
    argv = ["--model_name_or_path", str(model), "--prompt", text]
    assert parse_predict(argv)[0].truncation_side == parse_sft(_sft(model), {}).data.truncation_side == "left"


def _sft(model):
    return ["--model_name_or_path", str(model), "--dataset_name_or_path", "d", "--output_dir", "o", "--do_train"]


def test_special_tokens_in_prompts_are_asked_for(model, caplog):
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "the cat<|endoftext|>"
    assert encode_prompts(tokenizer, [text], 50) == [tokenizer(text, split_special_tokens=True)["input_ids"]]
    assert "prompts: 1 contain a special token (<|endoftext|>), which is encoded as text" in caplog.text
    assert encode_prompts(tokenizer, [text], 50, allow_special_tokens=True) == [tokenizer(text)["input_ids"]]


def test_special_tokens_in_texts_are_asked_for_in_evaluation(model, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "the cat <|endoftext|> sat on <|endoftext|> mat"
    (tmp_path / "t.txt").write_text(text)
    argv = ["--task", "TEXT", "--eval_path", tmp_path / "t.txt", "--model_name_or_path", model, "--device", "cpu"]
    for more in ((), ("--allow_special_tokens",)):
        assert main(["evaluate", *map(str, argv), "--json", *more]) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        ids = tokenizer(text, split_special_tokens=not more)["input_ids"]
        assert len(ids) - 1 in result.values()
        (row,) = (row for row in Cloze([text], tokenizer, 90, allow_special_tokens=bool(more)).rows if row.strict)
        assert row.ids == ids


@pytest.mark.parametrize("flag", ["--group_by_length", "--pad_to_multiple_of"])
def test_packs_leave_nothing_to_pad_or_group(model, flag):
    run = parse_sft([*_sft(model), "--zero_padding", flag, "1"], {})
    assert f"{flag} has no effect: samples of --zero_padding have the same length" in run.notes


def test_sides_and_tokens_of_the_original_s_encoding(model):
    with pytest.raises(UsageError, match="truncation_side left: --paddle_compat cuts the end of prompts"):
        parse_sft([*_sft(model), "--paddle_compat", "--truncation_side", "left"], {})
    with pytest.raises(UsageError, match="pad_to_multiple_of 8: with --paddle_compat padding is attended to"):
        parse_sft([*_sft(model), "--paddle_compat", "--pad_to_multiple_of", "8"], {})
    run = parse_sft([*_sft(model), "--paddle_compat", "--allow_special_tokens"], {})
    assert any("--allow_special_tokens has no effect" in note for note in run.notes)
    words = ["--task", "DATA", "--input_dir", "d", "--model_name_or_path", str(model), "--allow_special_tokens"]
    assert any("--allow_special_tokens has no effect with --task DATA" in note for note in parse_evaluate(words)[1])

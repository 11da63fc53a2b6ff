"""Generation: padding rows are never generated, prompts keep their end, results do not depend on the batch."""

import copy
import json
import logging
import shutil
from itertools import takewhile

import pytest
import torch
from transformers import GPT2LMHeadModel

from gptlm.errors import GptlmError
from gptlm.inference.generation import (
    Stream,
    check_rows,
    continue_rows,
    encode_prompts,
    stop_ids,
    stream_decoder,
    text_of,
)
from gptlm.inference.loading import load_for_inference
from gptlm.inference.sampling import Sampling
from gptlm.inference.scoring import Row, score
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
    """Texts of continuations, as `gptlm predict` makes them."""
    settings = {"batch_size": 2, "max_new_tokens": 8, **change}
    rows = encode_prompts(tokenizer, prompts, settings.pop("max_prompt_tokens", 30))
    check_rows(rows, model.config.n_positions, model.config.vocab_size, settings["max_new_tokens"])
    return [text_of(tokenizer, ids) for ids in continue_rows(model, tokenizer, rows, **settings)]


def test_rows_without_a_token_are_never_sampled(model, tokenizer):
    torch.manual_seed(1)
    wild = Sampling(do_sample=True, top_k=0, temperature=50.0)
    rows = [tokenizer("the")["input_ids"]] * 60
    found = continue_rows(model, tokenizer, rows, batch_size=60, max_new_tokens=30, sampling=wild)
    drawn = {token for row in found for token in row}
    assert max(drawn) < len(tokenizer) and len(drawn) > 100 and tokenizer.eos_token_id not in drawn


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


@pytest.fixture(scope="module")
def broken(tokenizer):
    """A model with one NaN weight, and one whose weights are finite and overflow."""
    damaged, large = (new_model(Shape(1, 32, 2, 64, 512, 40), eos_token_id=0).eval() for _ in range(2))
    with torch.no_grad():
        damaged.transformer.ln_f.weight[3] = float("nan")
        large.transformer.ln_f.weight.fill_(3e38)
    return damaged, large


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"do_sample": True},
        {"num_beams": 2},
        {"repetition_penalty": 1.5},
        {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
        {"min_new_tokens": 3},
    ],
)
def test_every_search_reports_logits_that_are_not_finite(broken, tokenizer, asked, half):
    """The model is named, and so is the cause; stock `generate` chooses token 0 or raises from inside torch."""
    damaged, large = (copy.deepcopy(model).to(torch.bfloat16) if half else model for model in broken)
    damaged.name_or_path = "runs/a"
    with pytest.raises(GptlmError, match=r"the model runs/a computes NaN.* 1 of its 16 weight .*ln_f\.weight"):
        run(damaged, tokenizer, sampling=Sampling(**asked))
    with pytest.raises(GptlmError, match="weights are finite but so large"):
        run(large, tokenizer, sampling=Sampling(**asked))
    assert damaged.generation_config.eos_token_id == 0  # what was set aside meanwhile is back


def test_scoring_reports_logits_that_are_not_finite(broken):
    for model, cause in zip(broken, ("1 of its 16 weight", "so large"), strict=True):
        with pytest.raises(GptlmError, match=f"computes NaN or infinity: .*{cause}"):
            list(score(model, [Row([1, 2, 3], 2)], [range(1)]))


def test_a_folder_without_weights_or_config_is_refused(tmp_path, model):
    with pytest.raises(GptlmError, match="holds no model weights"):
        load_for_inference(str(tmp_path), torch.device("cpu"))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == (tmp_path / "config.json").stat().st_mode & 0o777
    (tmp_path / "config.json").unlink()
    with pytest.raises(GptlmError, match="holds no config.json"):
        load_for_inference(str(tmp_path), torch.device("cpu"))


@pytest.fixture(scope="module")
def stock(tokenizer, tmp_path_factory):
    """Folder of a model whose vocabulary is the tokenizer's, and the same weights in stock code."""
    torch.manual_seed(3)
    own = new_model(Shape(2, 32, 2, 64, len(tokenizer), 40), eos_token_id=tokenizer.eos_token_id)
    with torch.no_grad():
        own.transformer.wte.weight.mul_(20)  # decided, so that rounding cannot matter
    folder = tmp_path_factory.mktemp("stock")
    own.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, GPT2LMHeadModel.from_pretrained(folder).eval()


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"repetition_penalty": 1.7},
        {"min_new_tokens": 2},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5, "early_stopping": True},
        {"num_beams": 2, "repetition_penalty": 1.3},
    ],
)
def test_a_batch_equals_single_prompts_in_stock_code(tokenizer, stock, asked):
    """Prompts of 1 to 38 tokens, one with the end-of-text token in it; in a table of 40, the long ones get less."""
    folder, plain = stock
    eos = tokenizer.eos_token_id
    rows = [tokenizer(text or "<|endoftext|>")["input_ids"] for text in PROMPTS]
    rows += [[7 * i % 200 + 1 for i in range(length)] for length in (1, 38, 12, 35, 2)]
    wanted = []
    for row in rows:
        settings = {"max_new_tokens": min(8, 40 - len(row)), "pad_token_id": eos, **asked}
        out = plain.generate(torch.tensor([row]), attention_mask=torch.ones(1, len(row)), **settings)
        wanted += [list(takewhile(lambda token: token != eos, new)) for new in out[:, len(row) :].tolist()]
    own, _ = load_for_inference(str(folder), torch.device("cpu"))
    settings = {"batch_size": 3, "max_new_tokens": 8}
    found = continue_rows(own, tokenizer, rows, sampling=Sampling(**asked), **settings)
    assert list(found) == wanted
    assert len({tuple(row) for row in wanted}) > 5


def test_the_folder_s_generation_settings_are_ignored(tokenizer, stock, tmp_path):
    folder, _ = stock
    shutil.copytree(folder, tmp_path / "m")
    plain, _ = load_for_inference(str(tmp_path / "m"), torch.device("cpu"))
    texts = run(plain, tokenizer)
    first = [tokenizer(text)["input_ids"][0] for text in texts if text]
    wild = {"repetition_penalty": 5.0, "num_beams": 3, "do_sample": True, "no_repeat_ngram_size": 1}
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({**wild, "suppress_tokens": first}))
    other, _ = load_for_inference(str(tmp_path / "m"), torch.device("cpu"))
    assert run(other, tokenizer) == texts and "".join(stream(other, tokenizer, max_new_tokens=8))
    assert other.generation_config.no_repeat_ngram_size == 1  # and it is there again for who saves the model


def test_a_turn_ends_where_the_generation_config_says(weather, tokenizer):
    """`eos_token_id` in a folder may be a list; its special tokens end a text, its other ids are of some vocabulary."""
    several, model = copy.deepcopy(tokenizer), copy.deepcopy(weather)
    several.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    end, letter = len(several) - 1, several("o")["input_ids"][0]
    for ends, wanted in ((None, [0]), (0, [0]), ([0, end], [0, end]), ([letter, end, 50256], [0, end])):
        model.generation_config.eos_token_id = ends
        assert stop_ids(model, several, False) == wanted


def test_several_continuations_follow_the_seed(model, tokenizer):
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        some = Sampling(do_sample=True, num_return_sequences=3)
        drawn.append(run(model, tokenizer, ["the", "cat"], sampling=some))
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 6


def test_an_id_beyond_the_vocabulary_is_refused(tokenizer):
    small = new_model(Shape(1, 32, 2, 64, 100, 40)).eval()
    with pytest.raises(GptlmError, match="knows ids below 100"):
        run(small, tokenizer, ["the cat sat"])


def test_truncated_prompts_are_logged(model, tokenizer, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("gptlm"), "propagate", True)
    assert len(run(model, tokenizer, ["the", "the cat sat on the mat"], max_prompt_tokens=2)) == 2
    assert (
        "1 of 2 prompts are longer than --src_length 2" in caplog.text
        and "are used (--truncation_side left): prompt 2" in caplog.text
    )


def test_messages_about_a_prompt_name_it(caplog, monkeypatch):
    """Twelve of fifteen have no room for 30 new ids in a table of 40: ten are named."""
    monkeypatch.setattr(logging.getLogger("gptlm"), "propagate", True)
    rows = [[1]] * 3 + [[1] * 11] * 11 + [[1] * 35]
    names = [f"line {number}" for number in range(1, 16)]
    check_rows(rows, 40, 512, 30, names)
    assert "12 of 15 prompts leave no room for 30 new tokens" in caplog.text and "leaves room for 5)" in caplog.text
    assert "line 4; line 5;" in caplog.text and "line 13; and 2 more" in caplog.text
    with pytest.raises(GptlmError, match="^line 2: the prompt of 40 tokens fills"):
        check_rows([[1], [1] * 40], 40, 512, 1, names[:2])
    with pytest.raises(GptlmError, match="^line 2: the prompt holds the token id 512"):
        check_rows([[1], [512]], 40, 512, 1, names[:2])


def test_a_long_row_shortens_its_own_batch_only(model):
    """Rows of 1 and 39 ids in a table of 40, one at a time: 8 new ids and 1."""
    small = train_tokenizer(["a"], 257)
    found = list(continue_rows(model, small, [[1], [1] * 39, [2]], batch_size=1, max_new_tokens=8))
    assert [len(ids) for ids in found] == [8, 1, 8]


TEXT = "今天天气很好😀🤗,\n\nok"


@pytest.fixture(scope="module")
def weather(tokenizer):
    """A model over-fitted on `写: ` + TEXT; every byte of a Chinese letter is a token of its own."""
    torch.manual_seed(0)
    model = new_model(Shape(1, 64, 2, 128, 384, 80), hidden_dropout=0, attention_dropout=0)
    ids = torch.tensor([[*tokenizer("写: " + TEXT)["input_ids"], tokenizer.eos_token_id]])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()


def stream(model, tokenizer, **change):
    row = tokenizer("写: ")["input_ids"]
    return Stream(stream_decoder(model, tokenizer), tokenizer, row, **{"max_new_tokens": 70, **change})


def test_a_stream_never_ends_inside_a_character(weather, tokenizer):
    pieces = list(stream(weather, tokenizer))
    assert "".join(pieces) == TEXT and len(pieces) >= len("今天天气很好😀🤗") and "" not in pieces
    assert run(weather, tokenizer, ["写: "], max_new_tokens=70) == [TEXT]


@pytest.mark.parametrize("count", [1, 2, 4, 20, 23])
def test_an_incomplete_character_is_dropped(weather, tokenizer, count):
    (whole,) = run(weather, tokenizer, ["写: "], max_new_tokens=count)
    assert whole == TEXT.encode()[:count].decode(errors="ignore")
    assert "".join(stream(weather, tokenizer, max_new_tokens=count)) == whole


def test_every_token_with_a_line_break_ends_a_text():
    blank_lines = train_tokenizer(["a\n\n\nb\n\n\n" * 50], 300)
    assert "ĊĊ" in blank_lines.get_vocab()
    model = new_model(Shape(1, 8, 1, 8, 300, 8))
    assert {blank_lines.decode([i]) for i in stop_ids(model, blank_lines, True)} >= {"\n", "\n\n", "<|endoftext|>"}


def test_a_stream_stops_at_a_line_break(weather, tokenizer):
    assert "".join(stream(weather, tokenizer, stop_at_eol=True)) == TEXT.partition("\n")[0]
    assert run(weather, tokenizer, ["写: "], max_new_tokens=70, stop_at_eol=True) == [TEXT.partition("\n")[0]]


def test_streams_share_a_decoder(weather, tokenizer):
    """Also after one that was closed, and with other settings."""
    decoder, row = stream_decoder(weather, tokenizer), tokenizer("写: ")["input_ids"]
    pieces = iter(Stream(decoder, tokenizer, row, max_new_tokens=70))
    assert next(pieces) == TEXT[0]
    pieces.close()
    assert list(pieces) == []
    assert "".join(Stream(decoder, tokenizer, row, max_new_tokens=70)) == TEXT
    wild = Sampling(do_sample=True, top_k=0, temperature=50.0)
    assert "".join(Stream(decoder, tokenizer, row, max_new_tokens=70, sampling=wild)) != TEXT


def test_errors_reach_the_reader_of_a_stream(broken, tokenizer):
    with pytest.raises(GptlmError, match="NaN or infinity"):
        list(stream(broken[0], tokenizer, max_new_tokens=3))

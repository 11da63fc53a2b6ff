import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gptlm.errors import GptlmError
from gptlm.model.tokenizer import (
    EOS,
    LONGEST_WORD,
    _short_words,
    fingerprint,
    load_gpt2_files,
    load_tokenizer,
    train_tokenizer,
)

TEXT = "the cat sat on the mat and the dog sat on the log " * 20


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer([TEXT], 290)


def test_training_and_round_trip(trained, tmp_path):
    assert trained.eos_token_id == 0 and 257 < len(trained) <= 290
    for text in ("the cat", "héllo wörld", "今天天气很好😀", " two  blanks\n\ttab"):
        assert trained.decode(trained(text)["input_ids"]) == text
    trained.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert fingerprint(again) == fingerprint(trained)
    assert again("the cat sat")["input_ids"] == trained("the cat sat")["input_ids"]
    assert fingerprint(train_tokenizer([TEXT], 270)) != fingerprint(trained)


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(GptlmError, match="256"):
        train_tokenizer([TEXT], 256)


@pytest.fixture
def files(trained, tmp_path):
    trained.backend_tokenizer.model.save(str(tmp_path))
    return tmp_path / "vocab.json", tmp_path / "merges.txt"


def test_gpt2_files_in_every_line_ending(files, trained):
    vocabulary, merges = files
    good = merges.read_bytes()
    body = good.split(b"\n", 1)[1] if good.startswith(b"#version") else good
    for content in (good, body, good.replace(b"\n", b"\r\n"), good + b"\n\n", b"\xef\xbb\xbf" + good):
        merges.write_bytes(content)
        ids = load_gpt2_files(str(vocabulary), str(merges))("the cat sat")["input_ids"]
        assert ids == trained("the cat sat")["input_ids"]


def test_bad_gpt2_files_are_named(files):
    vocabulary, merges = files
    with pytest.raises(GptlmError, match="merges.txt is damaged: not valid JSON.*swapped"):
        load_gpt2_files(str(merges), str(vocabulary))
    good = merges.read_text()
    merges.write_text(good.rstrip("\n")[:-2] + "qqq\n")
    with pytest.raises(GptlmError, match=r"merges.txt, line \d+"):
        load_gpt2_files(str(vocabulary), str(merges))
    merges.write_bytes(good.encode() + b"\xff\xfe a\n")
    with pytest.raises(GptlmError, match=r"merges.txt.*UTF-8"):
        load_gpt2_files(str(vocabulary), str(merges))
    merges.write_text("".join(good.splitlines(keepends=True)[:-3]))
    with pytest.raises(GptlmError, match="no merge for 3 tokens.*cut short"):
        load_gpt2_files(str(vocabulary), str(merges))
    merges.write_text(good)
    content = json.loads(vocabulary.read_text())
    del content[EOS]
    vocabulary.write_text(json.dumps(content))
    with pytest.raises(GptlmError, match="endoftext"):
        load_gpt2_files(str(vocabulary), str(merges))
    with pytest.raises(GptlmError, match="missing.json"):
        load_gpt2_files("missing.json", str(merges))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(GptlmError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (["merges.txt"], "merges.txt is there, vocab.json is missing"),
        (["vocab.json"], "vocab.json is there, merges.txt is missing"),
        (["vocab.txt"], "tokenizer_config.json that says how to read it is missing"),
        (["vocab.txt", "merges.txt"], "vocab.json is missing"),
        (["tokenizer_config.json"], "holds no tokenizer"),
    ],
)
def test_an_incomplete_tokenizer_names_the_missing_file(tmp_path, there, says):
    for name in there:
        (tmp_path / name).write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(GptlmError, match=says):
        load_tokenizer(str(tmp_path))


def test_a_sentencepiece_tokenizer_is_refused_by_name(tmp_path):
    """CPM's folder: a vocab.json that is none of GPT-2's, and the model it stands for."""
    (tmp_path / "chinese_vocab.model").write_bytes(b"\x0a\x0e")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(GptlmError, match=r"sentencepiece tokenizer \(chinese_vocab.model\), as CPM"):
        load_tokenizer(str(tmp_path))


def test_end_of_text_is_spelled_as_by_openai_s_bpe(tmp_path):
    """Recorded ids: GPT-2's for the seven parts of the string, here at their places among 50257 fillers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # the printable ones come first, as in GPT-2
    names = alphabet + [f"<filler{number}>" for number in range(len(alphabet), 50256)] + [EOS]
    for number, token in ((437, "end"), (1659, "of"), (5239, "text"), (300, "en"), (301, "te"), (302, "xt")):
        names[number] = token
    (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(names)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\ne n\nen d\no f\nt e\nx t\nte xt\n")
    tokenizer = load_tokenizer(str(tmp_path))
    assert (len(tokenizer), tokenizer.eos_token_id) == (50257, 50256)
    assert tokenizer.backend_tokenizer.encode(EOS).ids == [50256]
    tokenizer.backend_tokenizer.encode_special_tokens = True
    assert tokenizer.backend_tokenizer.encode(EOS).ids == [27, 91, 437, 1659, 5239, 91, 29]


def word_level(folder, *words):
    """A tokenizer of single characters or words, of which all others are unknown."""
    vocabulary = {word: number for number, word in enumerate(["<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("words", [(), ("one",)])
def test_a_tokenizer_that_cannot_encode_text_is_refused(tmp_path, words):
    """By stock code every word of the sentence is unknown or vanishes."""
    with pytest.raises(GptlmError, match=rf"words cannot encode text: .*its vocabulary has {2 + len(words)} entries"):
        load_tokenizer(word_level(tmp_path / "words", *words))
    (tmp_path / "vocab.json").write_text(json.dumps({EOS: 0}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(GptlmError, match=r"vocab.json cannot encode text: .*has 1 entries"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("words", ["天地玄黃宇宙洪荒", "ACGT"])
def test_vocabularies_of_another_language_or_of_none_are_accepted(tmp_path, words):
    assert len(load_tokenizer(word_level(tmp_path, *words))) == 2 + len(words)


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**64, True, 1.0, "1", None])
def test_ids_that_are_none_are_refused_with_their_token(tmp_path, token_id):
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "bad": token_id, EOS: 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(GptlmError, match=f"'bad' has {token_id!r}"):
        load_gpt2_files(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))


def test_a_word_of_three_million_characters_is_cut_for_the_training():
    """Minutes and gigabytes otherwise. The vocabulary of ordinary words is the same."""
    words = ["the cat sat on the mat ", "x" * LONGEST_WORD + " the mat"]
    plain = train_tokenizer(words, 300).get_vocab()
    giant = train_tokenizer([*words, "ab" * 1_500_000], 300).get_vocab()
    assert {"Ġthe", "at"} <= set(plain) & set(giant)
    pieces = list(_short_words([*words, "so ab\n" + "ab" * 1250 + " so"]))
    assert pieces[:2] == words and pieces[2:] == ["so ab\n" + "ab" * 500, "ab" * 500, "ab" * 250 + " so"]

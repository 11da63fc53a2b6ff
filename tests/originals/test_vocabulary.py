"""GPT-2's own vocabulary: OpenAI's ids, and the bytes of Megatron's files from the texts themselves."""

import pytest

from gptlm.data.documents import read_batches
from gptlm.data.preprocess import EncodeSettings, write_corpus
from gptlm.data.writer import IndexedTokensWriter
from gptlm.inference.tasks import Cloze, read_cloze
from gptlm.model.tokenizer import EOS, load_tokenizer
from tests.data.test_encoder import assert_same, small_pieces  # noqa: F401 (a fixture)
from tests.data.test_preprocess import FORMATS, assert_gigatoken_agrees, odd_texts


def test_gpt2_s_own_ids(shared):
    tokenizer = load_tokenizer(str(shared / "data" / "gpt2-tokenizer"))
    assert (len(tokenizer), tokenizer.eos_token_id) == (50257, 50256)
    tokenizer.backend_tokenizer.encode_special_tokens = True
    assert tokenizer.backend_tokenizer.encode(EOS).ids == [27, 91, 437, 1659, 5239, 91, 29]  # OpenAI's own BPE


@pytest.mark.parametrize(("name", "eos", "layout"), FORMATS)
def test_texts_become_megatron_s_bytes(shared, gpt2, tmp_path, name, eos, layout):
    folder = shared / "cases" / "megatron" / "preprocess"
    writer = IndexedTokensWriter(str(tmp_path / "a"), 50257, layout)
    settings = EncodeSettings(str(gpt2), ("text",), eos, False, False)
    write_corpus(read_batches([folder / "corpus.jsonl"]), settings, [writer], workers=1)
    writer.finish({})
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (folder / f"{name}_text_document{suffix}").read_bytes()


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("backend", ["tokenizers", "gigatoken"])
def test_gpt2_s_ids_do_not_change(gpt2, small_pieces, backend, allow):  # noqa: F811
    assert_same(str(gpt2), backend, allow, least=4)


def test_gigatoken_gives_gpt2_s_ids_on_odd_text(gpt2):
    assert_gigatoken_agrees(gpt2, odd_texts())


def test_words_are_cut_as_in_the_recorded_reports(shared):
    """ "drapes" is several tokens; the strict measure needs all of them."""
    tokenizer = load_tokenizer(str(shared / "data" / "gpt2-tokenizer"))
    texts = read_cloze(str(shared / "data/lambada/lambada_test.jsonl"), None, "lambada")
    assert len(texts) == 5153
    (row,) = Cloze(["he closed the drapes"], tokenizer, 1024).rows
    assert [tokenizer.decode([i]) for i in row.ids[-row.scored :]] == [" d", "rap", "es"]

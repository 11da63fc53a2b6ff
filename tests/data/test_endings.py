"""Documents without an end-of-document id, or with a foreign one, are noticed; right ones are not."""

import numpy as np
import pytest

from gptlm.data.endings import missing_end
from gptlm.data.indexed import open_tokens
from gptlm.data.writer import IndexedTokensWriter

EOS = 50256


def corpus(tmp_path, lasts, lengths=None):
    """Documents of random ids, each ending in one of `lasts`, each of the `lengths` sequences."""
    rng = np.random.RandomState(0)
    writer = IndexedTokensWriter(str(tmp_path / "a"), 50257)
    for last in lasts:
        writer.add(np.append(rng.randint(5, 50000, 9), last), [4, 0, 6], np.array([3]))
    writer.finish({})
    return open_tokens(str(tmp_path / "a"))


@pytest.mark.parametrize(
    ("lasts", "eos_id", "says"),
    [
        ([EOS] * 300, EOS, None),
        ([EOS] * 300, None, None),
        ([0] * 300, None, None),
        ([EOS] * 9 + [7], EOS, None),  # one was cut
        ([EOS], EOS, None),
        ([7], None, None),  # one document tells nothing
        ([], EOS, None),
        (range(5, 305), EOS, "of 256 documents looked at, 0 end with the tokenizer's end-of-text id 50256"),
        (range(5, 305), None, "of 256 documents looked at, 1 end with id 5 and the others with 255 other ids"),
        ([0] * 300, EOS, "of 256 documents looked at, 256 end with id 0, the tokenizer's end-of-text id is 50256"),
        ([EOS, 7] * 10, EOS, "of 20 documents looked at, 10 end with the tokenizer's end-of-text id 50256"),
        ([7], EOS, "of 1 documents looked at, 1 end with id 7, the tokenizer's"),
    ],
)
def test_ends_of_documents(tmp_path, lasts, eos_id, says):
    found = missing_end(corpus(tmp_path, lasts), eos_id)
    assert found is None if says is None else f"{tmp_path}/a: {says}" in found, found


def test_texts_that_end_alike_lack_the_id(tmp_path):  # as where each ends with a full stop
    assert "(preprocess with this one and --append_eos)" in (missing_end(corpus(tmp_path, [13] * 300), EOS) or "")


def test_documents_without_tokens_say_nothing(tmp_path):
    np.save(tmp_path / "a_ids.npy", np.array([1, EOS, 2, EOS], np.int32))
    np.savez(tmp_path / "a_idx.npz", lens=np.array([0, 2, 0, 2], np.int32), docs=np.array([0, 0, 1, 3, 3, 4, 4]))
    assert missing_end(open_tokens(str(tmp_path / "a")), EOS) is None

"""The corpora that the recordings were made on, written again from a seed or a rule."""

from pathlib import Path

import numpy as np

from gptlm.data.writer import IndexedTokensWriter
from tests.golden import recorded

VOCAB_SIZE = 50257
EOD = 50256
RANDOM = {"a": (1, 300, 120), "b": (2, 80, 900)}  # seed, documents, most tokens of a document


def random_documents(name: str) -> list[np.ndarray]:
    """A corpus of `paddlenlp/orders.json`: ids and lengths are drawn by NumPy's legacy generator, lengths first."""
    seed, documents, longest = RANDOM[name]
    rng = np.random.RandomState(seed)
    return [rng.randint(0, VOCAB_SIZE, size=rng.randint(1, longest + 1)) for _ in range(documents)]


def numbered_documents(name: str) -> list[np.ndarray]:
    """A corpus of `megatron/orders.json`: token p is (7 p + 3) mod 50000, the last one of every document `EOD`."""
    sizes = recorded("megatron/orders.json")["corpora"][name]["sizes"]
    tokens = (np.arange(sum(sizes)) * 7 + 3) % 50000
    ends = np.cumsum(sizes)
    tokens[ends - 1] = EOD
    return np.split(tokens, ends[:-1])


def write_documents(prefix: Path, documents: list[np.ndarray], layout: str = "mmap") -> None:
    writer = IndexedTokensWriter(str(prefix), VOCAB_SIZE, layout)
    writer.add(np.concatenate(documents), [len(document) for document in documents])
    writer.finish({})

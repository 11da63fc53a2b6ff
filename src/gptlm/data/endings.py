"""Whether documents end with an end-of-document id: in the token stream nothing else tells them apart."""

import numpy as np

from gptlm.data.indexed import IndexedTokens

LOOKED_AT = 256  # documents, evenly spaced
MOST = 0.9  # a few documents may lack the id, such as those that were cut


def last_ids(tokens: IndexedTokens) -> np.ndarray:
    """The last ids of up to 256 evenly spaced documents that are not empty."""
    bounds = np.append(tokens.starts, len(tokens.tokens))
    documents = len(tokens.document_starts) - 1
    chosen = np.unique(np.linspace(0, max(documents - 1, 0), LOOKED_AT).astype(np.int64))[:documents]
    begins = bounds[tokens.document_starts[chosen]]
    ends = bounds[tokens.document_starts[chosen + 1]]
    return tokens.tokens[ends[ends > begins] - 1].astype(np.int64)


def missing_end(tokens: IndexedTokens, eos_id: int | None) -> str | None:
    """What is wrong with the ends of documents, in one sentence that says what was looked at; None if nothing is.

    Args:
        eos_id: the tokenizer's end-of-text id. Where it is not known, documents that share a last id are right.
    """
    ids = last_ids(tokens)
    if not len(ids) or (eos_id is None and len(ids) == 1):
        return None
    values, counts = np.unique(ids, return_counts=True)
    common, count = int(values[counts.argmax()]), int(counts.max())
    right = count if eos_id is None else int((ids == eos_id).sum())
    if right >= MOST * len(ids):
        return None
    looked = f"{tokens.prefix}: of {len(ids)} documents looked at"
    advice = "a model cannot learn from them where a text ends (preprocess with --append_eos)"
    if eos_id is None:
        return f"{looked}, {count} end with id {common} and the others with {len(values) - 1} other ids: {advice}"
    if count >= MOST * len(ids):
        return (
            f"{looked}, {count} end with id {common}, the tokenizer's end-of-text id is {eos_id}: generation will not "
            "stop where they end; their texts end alike, or another tokenizer made them (preprocess with this one and "
            "--append_eos)"
        )
    return f"{looked}, {right} end with the tokenizer's end-of-text id {eos_id}: {advice}"

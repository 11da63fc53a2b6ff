"""Which rows share a sample of fixed length: best-fit decreasing, as in arXiv 2107.02027 (Krell et al. 2021)."""

from collections.abc import Sequence

import numpy as np


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Rows together, each once, so that their lengths sum to `capacity` at most.

    The longest row comes first, and each goes where it leaves the least space. The result follows from the arguments
    alone. Its time is that of a sort, and then linear in rows and packs.

    Args:
        lengths: of each row, 1 to `capacity`.

    Returns:
        Indices into `lengths` for each pack, from the longest row to the shortest one.

    Raises:
        ValueError: if a row is longer than `capacity`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and not 1 <= sizes.min() <= sizes.max() <= capacity:
        raise ValueError(f"rows have {sizes.min()} to {sizes.max()} tokens, packs have 1 to {capacity}")
    order = np.argsort(-sizes, kind="stable")
    packs: list[list[int]] = []
    open_packs: list[list[list[int]]] = [[] for _ in range(capacity + 1)]  # by their remaining space
    spaces = 0  # bit s: there is a pack with s tokens left
    values, starts = np.unique(-sizes[order], return_index=True)
    bounds = [*starts.tolist(), len(order)]
    for number, size in enumerate((-values).tolist()):
        rows = order[bounds[number] : bounds[number + 1]].tolist()
        done = 0
        while done < len(rows):
            if fitting := spaces >> size:
                space = size + (fitting & -fitting).bit_length() - 1  # the least that is enough
                found = open_packs[space].pop()
                if not open_packs[space]:
                    spaces ^= 1 << space
            else:
                space, found = capacity, []
                packs.append(found)
            # after one row of this length the same pack stays the best one for the next, as long as it has space
            count = min(space // size, len(rows) - done)
            found += rows[done : done + count]
            done += count
            left = space - count * size
            if left:
                open_packs[left].append(found)
                spaces |= 1 << left
    return packs


def fill(lengths: Sequence[int] | np.ndarray, packs: int, capacity: int) -> float:
    """Percent of the tokens of `packs` packs that are tokens of rows."""
    return 100.0 * float(np.sum(lengths)) / max(packs * capacity, 1)

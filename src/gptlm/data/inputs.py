"""What `--input_dir` stands for: a folder, one prefix, or a weighted list of prefixes."""

import os

import numpy as np

from gptlm.errors import GptlmError

SUFFIXES = ("_idx.npz", "_ids.npy", "_ids.npz", ".idx", ".bin")


def find_prefixes(folder: str) -> list[str]:
    """Prefixes of all corpora in `folder`, sorted by name (the originals take the file system's order).

    Raises:
        GptlmError: if the folder is missing or holds none.
    """
    suffix = next((suffix for suffix in SUFFIXES if folder.endswith(suffix)), None)
    if suffix is not None and os.path.isfile(folder):
        raise GptlmError(f"{folder} is one file of a pair; give the prefix {folder.removesuffix(suffix)}")
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise GptlmError(
            f"cannot list the data folder {folder}: {error.strerror}; --input_dir takes a folder with .bin/.idx or "
            "_ids.npy/_idx.npz files, or 'weight1 prefix1 weight2 prefix2'"
        ) from error
    prefixes: dict[str, None] = {}
    for name in names:
        for suffix in SUFFIXES:
            if name.endswith(suffix):
                prefixes[os.path.join(folder, name[: -len(suffix)])] = None
    if not prefixes:
        listing = ", ".join(names[:5]) or "nothing"
        raise GptlmError(
            f"{folder} holds no token files (.bin/.idx or _ids.npy/_idx.npz), it holds {listing}; "
            "make them with scripts/preprocess_data.py"
        )
    return list(prefixes)


def parse_input(input_dir: str) -> list[tuple[float, str]]:
    """`--input_dir` as (weight, prefix) pairs: a folder, one prefix, or "w1 p1 w2 p2 ...".

    Raises:
        GptlmError: if a weight is no number, is negative, or all are zero; or as `find_prefixes`.
    """
    if os.path.isdir(input_dir):
        return [(1.0, prefix) for prefix in find_prefixes(input_dir)]
    if any(os.path.exists(input_dir + suffix) for suffix in SUFFIXES):
        return [(1.0, input_dir)]
    words = input_dir.split()
    if len(words) < 2:
        return [(1.0, prefix) for prefix in find_prefixes(input_dir)]
    if len(words) % 2:
        raise GptlmError(f"--input_dir {input_dir!r} has {len(words)} words; expected pairs 'weight1 prefix1 ...'")
    parts = []
    for weight, prefix in zip(words[::2], words[1::2], strict=True):
        try:
            parts.append((float(weight), prefix))
        except ValueError:
            raise GptlmError(
                f"--input_dir: {weight!r} is no weight; expected 'weight1 prefix1 weight2 prefix2 ...'"
            ) from None
    weights = np.array([weight for weight, _ in parts])
    if not np.isfinite(weights).all() or weights.min() < 0 or weights.sum() <= 0:
        raise GptlmError(f"--input_dir {input_dir!r}: weights must be 0 or more, finite, and not all 0")
    return parts

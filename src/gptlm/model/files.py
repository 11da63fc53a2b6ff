"""Weight files, judged whole or not by their first bytes and their size. No torch here."""

import json
import struct
from pathlib import Path

from gptlm.errors import GptlmError

SAFETENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def check_weights(folder: Path) -> None:
    """Raises GptlmError, which names the file, if the safetensors of the model in `folder` are missing or damaged."""
    for path in weight_files(folder):
        check_safetensors(path)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model in `folder`; none if its weights are of another kind.

    Raises:
        GptlmError: if the list of files is damaged.
    """
    index = folder / INDEX
    if (folder / SAFETENSORS).is_file():
        return [folder / SAFETENSORS]
    if not index.is_file():
        return []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise GptlmError(f"{index} is damaged ({error!r}); copy the folder again") from error
    return [folder / name for name in sorted(names)]


def check_safetensors(path: Path) -> dict[str, list[int]]:
    """Name -> shape of the tensors in `path` (format: 8 bytes length of the header, JSON header, tensors).

    Raises:
        GptlmError: if the file cannot be read, or is not as long as its header says.
    """
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            size = path.stat().st_size
            header = json.loads(file.read(length)) if length < size else {}
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        shapes = {name: list(entry["shape"]) for name, entry in tensors.items()}
    except OSError as error:
        raise GptlmError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise GptlmError(f"{path} is damaged: its header is no list of tensors; copy or download it again") from error
    expected = 8 + length + end
    if size != expected:
        raise GptlmError(
            f"{path} is damaged: it has {size:,} bytes, its header says {expected:,}; copy or download it again"
        )
    return shapes

"""The one way to a checkpoint: recognised, said, opened."""

import logging
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from gptlm.conversion.detect import Found, is_zip_of_files, recognise
from gptlm.conversion.huggingface import HuggingFaceSource
from gptlm.conversion.megatron.deepspeed import DeepSpeedLayers
from gptlm.conversion.megatron.read import MegatronSource
from gptlm.conversion.paddle.read import PaddleSource, UnifiedSource
from gptlm.conversion.source import Asked, Source
from gptlm.errors import GptlmError, reason_of

logger = logging.getLogger(__name__)


@contextmanager
def opened(path: Path, asked: Asked, scratch: Path | None = None, *, speaks: bool = True) -> Iterator[Source]:
    """The checkpoint in `path`; its kind and what was concluded are in the log.

    Args:
        scratch: an existing folder to unpack a zip in; None: the system's.
        speaks: say in the log what it is and what was concluded.

    Raises:
        GptlmError: if it is none, is damaged, or of another network than GPT-2.
    """
    with TemporaryDirectory(dir=scratch) as folder:
        if is_zip_of_files(path):
            _unpack(path, Path(folder))
            logger.info("%s is a zip of Megatron's folders; unpacked", path)
            path = Path(folder)
        found = recognise(path)
        source = _opened(found, asked)
        for note in (f"{path} is a checkpoint of {found}", *source.notes) if speaks else ():
            logger.info("%s", note)
        yield source


def _opened(found: Found, asked: Asked) -> Source:
    try:
        return _source(found, asked)
    except GptlmError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise GptlmError(
            f"{found.folder} looks like a checkpoint of {found}, but its content is laid out otherwise ({error!r})"
        ) from error


def _source(found: Found, asked: Asked) -> Source:
    if found.kind == "hf":
        return HuggingFaceSource(found, asked)
    if found.kind == "megatron-deepspeed" and found.facts is not None:
        return DeepSpeedLayers(found, asked)
    if found.kind in ("megatron", "megatron-deepspeed"):
        return MegatronSource(found, asked)
    unified = found.files[0][0].suffix == ".safetensors"
    return UnifiedSource(found, asked) if unified else PaddleSource(found, asked)


def _unpack(path: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)  # which keeps inside the folder whatever the names are
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise GptlmError(f"{path} cannot be unpacked: {reason_of(error)}; copy or download it again") from error

"""Open a checkpoint of any format: detect it, log what it is, return its reader."""

import logging
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from gptlm.conversion.detect import Found, detect, is_zip_of_files
from gptlm.conversion.huggingface import HuggingFaceSource
from gptlm.conversion.megatron.read import DeepSpeedLayers, MegatronSource
from gptlm.conversion.paddle.read import PaddleSource, UnifiedSource
from gptlm.conversion.source import ReadOptions, Source
from gptlm.errors import GptlmError, reason_of

logger = logging.getLogger(__name__)


@contextmanager
def open_checkpoint(
    path: Path, options: ReadOptions, scratch: Path | None = None, *, log: bool = True
) -> Iterator[Source]:
    """The checkpoint in `path`.

    Args:
        scratch: an existing folder to extract a zip into; None: the system's temporary folder.
        log: log the format and the settings that were inferred.

    Raises:
        GptlmError: if there is no checkpoint, or it is damaged, or it is not GPT-2.
    """
    with TemporaryDirectory(dir=scratch) as folder:
        if is_zip_of_files(path):
            try:
                with zipfile.ZipFile(path) as archive:
                    archive.extractall(folder)  # drops absolute paths and ".." in the names
            except (OSError, zipfile.BadZipFile, EOFError) as error:
                raise GptlmError(f"cannot extract {path}: {reason_of(error)}; copy or download it again") from error
            logger.info("%s is a zip of Megatron's folders; extracted", path)
            path = Path(folder)
        found = detect(path)
        source = _reader_of(found, options)
        for note in (f"{path} is a checkpoint of {found}", *source.notes) if log else ():
            logger.info("%s", note)
        yield source


def _reader_of(found: Found, options: ReadOptions) -> Source:
    reader: type[HuggingFaceSource | MegatronSource | PaddleSource]
    match found.kind:
        case "hf":
            reader = HuggingFaceSource
        case "megatron" | "megatron-deepspeed":
            reader = MegatronSource if found.arguments_file is None else DeepSpeedLayers
        case "paddle" | "fleetx":
            reader = UnifiedSource if found.files[0][0].suffix == ".safetensors" else PaddleSource
        case _:
            raise AssertionError(f"no reader for {found.kind}")
    try:
        return reader(found, options)
    except GptlmError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise GptlmError(
            f"{found.folder} has the files of a {found} checkpoint, but unexpected content ({error!r})"
        ) from error

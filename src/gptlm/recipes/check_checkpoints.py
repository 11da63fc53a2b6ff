"""Compare the files of checkpoints with their checksums: `gptlm convert --check`."""

from pathlib import Path

from gptlm.checkpoint.folder import PATTERN, check_content, folders, read
from gptlm.checkpoint.manifest import MANIFEST
from gptlm.errors import GptlmError, named


def check_checkpoints(folder: Path) -> int:
    """Print one line for each checkpoint: `folder` itself, or those in it.

    Returns:
        1 if one is damaged, else 0.

    Raises:
        GptlmError: if there is none.
    """
    is_checkpoint = (folder / MANIFEST).is_file() or PATTERN.match(folder.name)
    paths = [folder] if is_checkpoint and folder.is_dir() else folders(folder)
    if not paths:
        raise GptlmError(f"{named('check')} {folder}: there is no checkpoint-N folder with a {MANIFEST}")
    return int(not all([_is_whole(path) for path in paths]))


def _is_whole(path: Path) -> bool:
    try:
        found = read(path)
        check_content(found)
    except GptlmError as error:
        print(error)
        return False
    files = f"{len(found.manifest.files)} files, {sum(found.manifest.files.values()):,} bytes"
    if found.manifest.checksums is None:
        print(f"{path}: {files}; it has no checksums, only the sizes were compared")
    else:
        print(f"{path} is whole: {files}")
    return True

"""Files on remote storage (s3://, gs://, hf://, memory://, ...): copied through fsspec, and kept until they change."""

import logging
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gptlm.data.folder_cache import FolderCache
from gptlm.errors import GptlmError, named, reason_of
from gptlm.model.hub import require_network
from gptlm.ranks import local_rank
from gptlm.recipes.common.caches import below_datasets

logger = logging.getLogger(__name__)

URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
CACHE = "gptlm-files"  # folder below that of `datasets`, or in the output folder
FILES = "files"  # in an entry

Found = dict[str, tuple[str, int, str]]


def local_copy(flag: str, path: str | None, *, data_cache: str | None, output_dir: str | None) -> str:
    """`path`, if it is not remote; else the local file, or the folder of local files, with its content.

    The first process of a node copies, the others wait. A copy is used again while the remote files are the same.

    Args:
        flag: that gives `path`, for messages.

    Raises:
        GptlmError: if the storage cannot be read, a package for its protocol is missing, or nothing is there.
    """
    path = path or ""
    if not URL.match(path):
        return path
    system, root, files = _find(flag, path)
    folders = [Path(data_cache)] if data_cache else below_datasets(CACHE, output_dir or "")
    sizes = {name: size for name, (_, size, _) in files.items()}

    def open_entry(folder: Path) -> Path:
        for name, size in sizes.items():
            if (found := (folder / FILES / name).stat().st_size) != size:
                raise ValueError(f"{name} has {found:,} bytes instead of {size:,}")
        return folder / FILES

    def copy(folder: Path) -> dict[str, Any]:
        logger.info("%s: copying %d files, %s bytes", path, len(files), f"{sum(sizes.values()):,}")
        for name, (remote, _, _) in files.items():
            target = folder / FILES / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _tried(flag, path, partial(system.get_file, remote, str(target)))
        return {}

    what = {"kind": "remote files", "url": path, "files": {name: [*file] for name, file in files.items()}}
    local, _ = FolderCache(folders, open_entry).load_or_build(what, copy, first=local_rank() == 0)
    name, (remote, _, _) = next(iter(files.items()))
    if len(files) == 1 and remote == root:  # one file, not a folder or glob with one
        local = local / name
    logger.info("%s is read from its copy %s", path, local)
    return str(local)


def _find(flag: str, url: str) -> tuple[Any, str, Found]:
    """The file system, the path of `url` in it, and its files: name -> (remote path, bytes, a mark of its content)."""
    import fsspec  # slow

    protocol = url.partition("://")[0].lower()
    _check_package(flag, url, protocol)

    if protocol == "hf":
        _tried(flag, url, require_network)

    def find() -> tuple[Any, str, Found]:
        system, root = fsspec.core.url_to_fs(url)
        if any(letter in root for letter in "*?["):
            paths = [found for found in system.glob(root) if system.isfile(found)]
            names = {found.rpartition("/")[2]: found for found in paths}
            if len(names) < len(paths):
                raise GptlmError(f"{named(flag)} {url}: several files have the same name; give a folder or fewer files")
        elif system.isdir(root):
            names = {found[len(root.rstrip("/")) + 1 :]: found for found in system.find(root)}
        else:
            names = {root.rpartition("/")[2]: root} if system.exists(root) else {}
        if not names:
            raise GptlmError(f"{named(flag)} {url}: there is no such file or folder")
        return (
            system,
            root,
            {name: (path, system.size(path), system.ukey(path)) for name, path in sorted(names.items())},
        )

    return _tried(flag, url, find)


def _check_package(flag: str, url: str, protocol: str) -> None:
    from fsspec.registry import known_implementations, registry

    if protocol in registry:
        return
    known = known_implementations.get(protocol)
    if known is None:
        raise GptlmError(
            f"{named(flag)} {url}: {protocol}:// is no storage that fsspec knows, such as s3://, gs:// or hf://"
        )
    package = known["class"].partition(".")[0]
    if find_spec(package) is None:
        raise GptlmError(f"{named(flag)} {url}: reading {protocol}:// needs {package}; pip install {package}")


def _tried(flag: str, url: str, step: Callable[[], Any]) -> Any:
    try:
        return step()
    except GptlmError:
        raise
    except Exception as error:  # each storage raises its own kinds
        raise GptlmError(f"cannot read {named(flag)} {url}: {reason_of(error)}") from error

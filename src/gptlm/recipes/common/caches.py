"""Where encoded data is kept between runs."""

import os
from pathlib import Path

from huggingface_hub.constants import HF_HOME


def below_datasets(name: str, output_dir: str) -> list[Path]:
    """The folder `name` beside the files that `datasets` keeps, else in the output folder."""
    theirs = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets")  # importing datasets is slow
    return [theirs.expanduser() / name, Path(output_dir) / name]

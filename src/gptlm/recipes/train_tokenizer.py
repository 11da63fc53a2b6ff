"""Train a tokenizer on text and save it."""

import logging
import tempfile
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from gptlm import owned
from gptlm.config.args.data import TokenizerArguments
from gptlm.data.documents import read_texts
from gptlm.data.encoder import in_pieces
from gptlm.data.text_files import list_files
from gptlm.disk import is_of_system, new_folders, write_failure
from gptlm.errors import GptlmError
from gptlm.model.tokenizer import fingerprint, train_tokenizer
from gptlm.recipes.common.command_results import check_files, maker
from gptlm.recipes.common.remote_files import local_copy
from gptlm.recipes.common.resume import check_output
from gptlm.training.metrics.throughput import start_logging

logger = logging.getLogger(__name__)


def tokenizer(arguments: TokenizerArguments) -> Path:
    """Run it; returns the folder with tokenizer.json, vocab.json and merges.txt.

    Raises:
        GptlmError: if there is no text, or the folder cannot be written.
    """
    start_logging(main_process=True)
    folder = Path(arguments.output_dir or "")
    check_output("output_dir", folder)
    path = local_copy("input_path", arguments.input_path, data_cache=None, output_dir=arguments.output_dir)
    inputs = list_files(path)
    by = maker("tokenizer", asdict(arguments), inputs, overwrite=arguments.overwrite)
    check_files("output_dir", _tokenizer_files(folder), by)
    texts = read_texts(path, arguments.json_key, arguments.txt_split)
    first = next((text for text in texts if text.strip()), None)
    if first is None:
        raise GptlmError(f"{arguments.input_path} has no text under {arguments.json_key!r} to train on")
    texts = in_pieces(chain([first], texts))
    trained = train_tokenizer(texts, arguments.vocab_size, min_frequency=arguments.min_frequency)
    if len(trained) < arguments.vocab_size:
        logger.warning(
            "the text gives %d entries, %d were requested (min_frequency %d)",
            len(trained), arguments.vocab_size, arguments.min_frequency,
        )  # fmt: skip
    try:
        with new_folders(folder):
            with tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=folder, ignore_cleanup_errors=True) as staging:
                trained.save_pretrained(staging)
                trained.backend_tokenizer.model.save(staging)  # vocab.json and merges.txt, for tools that need them
                owned.move_in(Path(staging), folder, by.command, by.key)
    except Exception as error:  # tokenizers raises no subclass
        if not is_of_system(error):
            raise
        raise GptlmError(f"cannot write the tokenizer to {folder}: {write_failure(error, folder)}") from error
    logger.info("tokenizer with %d entries (%s) written to %s", len(trained), fingerprint(trained), folder)
    return folder


def _tokenizer_files(folder: Path) -> list[Path]:
    """The files in `folder` that a tokenizer there would be read from."""
    return [file for file in folder.iterdir() if owned.TOKENIZER_FILE.fullmatch(file.name)] if folder.is_dir() else []

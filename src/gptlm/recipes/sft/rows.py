"""The rows of a source: encoded once, kept as Arrow files between runs, and what was found in its records."""

import logging
import os
from pathlib import Path
from time import monotonic
from typing import Any

from transformers import PreTrainedTokenizerBase

from gptlm.config.run import SftRun
from gptlm.data.folder_cache import FolderCache
from gptlm.data.row_building import Facts, RowSettings, build_rows
from gptlm.data.stored_rows import StoredRows
from gptlm.data.templates import form_of
from gptlm.data.workers import BYTES_PER_WORKER
from gptlm.ranks import local_rank
from gptlm.recipes.common.byte_bar import ByteBar
from gptlm.recipes.common.caches import below_datasets
from gptlm.recipes.sft.sources import Source

logger = logging.getLogger(__name__)

ROWS = "rows.arrow"
CACHE = "gptlm-rows"  # folder below that of `datasets`, or in the output folder


def read_rows(run: SftRun, source: Source, settings: RowSettings) -> StoredRows:
    """The rows of all examples of `source`, from the cache or encoded now.

    The first process of a node encodes, the others wait.

    Raises:
        GptlmError: with file and record that cannot be read, or if the rows cannot be written.
    """
    what = {"kind": "rows", "data": source.content(), **settings.key()}
    built: list[Facts] = []

    def build(folder: Path) -> dict[str, Any]:
        built.append(_encode(run, source, settings, folder / ROWS))
        return built[0].as_json()

    cache = FolderCache(_folders(run), lambda folder: StoredRows(folder / ROWS))
    rows, found = cache.load_or_build(what, build, first=local_rank() == 0)
    kept = Path(rows.path or "").parent
    logger.info("%s: encoded examples are %s %s", source, "kept in" if built else "loaded from", kept)
    facts = Facts.from_json(found)
    _log_facts(facts, source, settings)
    rows.forms = facts.forms
    return rows


def _folders(run: SftRun) -> list[Path]:
    """`--data_cache`, else beside the files that `datasets` keeps, else in the output folder."""
    if run.data.data_cache:
        return [Path(run.data.data_cache)]
    return below_datasets(CACHE, run.training.output_dir or "")


def _encode(run: SftRun, source: Source, settings: RowSettings, path: Path) -> Facts:
    size = source.size
    wanted = run.data.preprocessing_num_workers or len(os.sched_getaffinity(0))
    workers = max(1, min(wanted, size // BYTES_PER_WORKER))
    started, count = monotonic(), 0

    def show(read: int, examples: int) -> None:
        nonlocal count
        count = examples
        bar.show(read, f"{examples:,} examples")

    with ByteBar(size, f"encoding {source}", shown=not run.training.disable_tqdm) as bar:
        facts = build_rows(source.batches(), settings, path, name=str(source), workers=workers, on_progress=show)
    seconds, processes = monotonic() - started, f"{workers} process{'es' if workers > 1 else ''}"
    examples = f"{count:,} example{'' if count == 1 else 's'}"
    logger.info("%s: %s encoded in %.1f s by %s", source, examples, seconds, processes)
    return facts


def _log_facts(facts: Facts, source: Source, settings: RowSettings) -> None:
    """What forms the records have, and what of them is not used."""
    tokenizer = settings.tokenizer
    for form, count in facts.forms.items():
        is_chat = tokenizer.chat_template and (settings.renders_texts or form_of({form: 1}) == "messages")
        how = " in the tokenizer's chat template" if is_chat else ""
        logger.info("%s: %d record%s read as %s%s", source, count, "" if count == 1 else "s", form, how)
        if tokenizer.chat_template and not is_chat:
            logger.warning(
                "%s: %s is not rendered in the tokenizer's chat template, in which others will ask the model; "
                "--chat_template FILE renders all records in it", source, form,
            )  # fmt: skip
    if facts.ignored:
        keys = ", ".join(f"{key} ({count})" for key, count in sorted(facts.ignored.items()))
        logger.warning("%s: ignored keys: %s", source, keys)
    if facts.forms["source/target"] and facts.ignored["title"]:
        logger.warning("%s: for question generation from source and title give --task_name squad", source)
    _log_ends(facts, source, tokenizer)
    for reason, count in facts.skipped.items():
        logger.warning("%d records of %s are skipped: %s", count, source, reason)


def _log_ends(facts: Facts, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log which token ends assistant turns, and warn if it is not a target."""
    for end_id in facts.ends:
        if end_id < 0:
            logger.info(
                "%s: the chat template ends no turn with a token: %s follows the last response", source,
                tokenizer.eos_token,
            )  # fmt: skip
        else:
            logger.info("%s: %s ends a turn", source, tokenizer.convert_ids_to_tokens(end_id))
    if facts.open_ends:
        logger.warning(
            "%s: in %d conversations the {%% generation %%} of the chat template does not contain the end of a turn: "
            "the model does not learn to end; put that token inside it", source, facts.open_ends,
        )  # fmt: skip

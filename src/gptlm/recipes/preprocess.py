"""Text to token files: tokenizer -> encode in parallel -> write -> names and metadata."""

import hashlib
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from gptlm import owned
from gptlm.config.args.data import PreprocessArguments, PreprocessJob
from gptlm.data.corpora import missing_eos
from gptlm.data.documents import Batch, bytes_of_shard, read_batches
from gptlm.data.encoder import TextEncoder
from gptlm.data.indexed import open_tokens
from gptlm.data.preprocess import EncodeSettings, Part, Progress, write_corpus
from gptlm.data.sentences import ENGLISH_RULES, LINES, available_rules
from gptlm.data.text_files import list_files, size_of
from gptlm.data.workers import interrupts_ignored
from gptlm.data.writer import IndexedTokensWriter, token_files
from gptlm.disk import write_failure
from gptlm.errors import GptlmError, doing
from gptlm.model.hub import hub_folder
from gptlm.model.presets import GPT2_HUB_ID, PRESETS
from gptlm.model.tokenizer import fingerprint, load_gpt2_files, load_tokenizer
from gptlm.recipes.common.command_results import check_files, maker, note_files
from gptlm.recipes.common.remote_files import local_copy
from gptlm.training.metrics.throughput import start_logging

logger = logging.getLogger(__name__)

FEW_DOCUMENTS = 20  # fewer leave a part of the split 949,50,1 empty


def preprocess(job: PreprocessJob) -> list[Path]:
    """Run it; returns the written files.

    Raises:
        GptlmError: if input, tokenizer or disk fail; no file has its final name then.
    """
    start_logging(main_process=True)
    for note in job.notes:
        logger.info("%s", note)
    arguments = job.arguments
    sentences = _sentence_rules(job)
    tokenizer, name = _tokenizer(job)
    if arguments.append_eos and tokenizer.eos_token_id is None:
        raise GptlmError(f"--append_eos: the tokenizer {name} has no end-of-text token; add one or leave the flag out")
    beside = str(Path(arguments.output_prefix or "").parent)
    files = list_files(local_copy("input_path", arguments.input_path, data_cache=None, output_dir=beside))
    prefixes = _prefixes(job)
    file_format = "mmap" if arguments.dataset_impl == "infer" else arguments.dataset_impl
    outputs = [file for prefix in prefixes for file in token_files(prefix, file_format)]
    by = maker("preprocess", asdict(arguments), [*files, *_tokenizer_files(job, name)], overwrite=arguments.overwrite)
    check_files("output_prefix", outputs, by)
    logger.info("%d files, %d vocabulary entries, output %s", len(files), len(tokenizer), ", ".join(prefixes))
    writers: list[IndexedTokensWriter] = []
    try:
        writers += [IndexedTokensWriter(p, len(tokenizer), file_format) for p in prefixes]
        first, last = bytes_of_shard(files, job.shard)
        batches = read_batches(files, arguments.txt_split, keys=arguments.json_keys, shard=job.shard)
        progress = encode(job, tokenizer, sentences, batches, last - first, writers)
        if not writers[0].total and job.shard == (1, 1):
            raise GptlmError(f"{arguments.input_path} has no text under {' '.join(arguments.json_keys)}")
        facts = tokenizer_facts(arguments, tokenizer, name)
        written = []
        for key, writer in zip(arguments.json_keys, writers, strict=True):
            identity = _identity(job, sentences, files, key)
            shard = {"shard": list(job.shard), "shard_of": identity} if job.shard != (1, 1) else {}
            written += writer.finish(facts | shard)
        note_files(written, by)
    except OSError as error:
        output = Path(arguments.output_prefix or "")
        raise GptlmError(f"cannot write {output}: {write_failure(error, output)}") from error
    finally:
        with interrupts_ignored():
            for writer in writers:
                writer.abandon()
    _log_result(progress, writers, written, sharded=job.shard != (1, 1))
    for writer in writers:
        problem = missing_eos(open_tokens(writer.prefix), tokenizer.eos_token_id) if writer.total else None
        if problem:
            logger.warning("%s", problem)
    return written


def tokenizer_facts(arguments: PreprocessArguments, tokenizer: PreTrainedTokenizerBase, name: str) -> dict[str, Any]:
    """What the metadata of token files says about their tokenizer, which is in the folder (or on the hub) `name`."""
    return {
        "tokenizer": name,
        "tokenizer_fingerprint": fingerprint(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "append_eos": arguments.append_eos,
    }


def _tokenizer(job: PreprocessJob) -> tuple[PreTrainedTokenizerBase, str]:
    """The tokenizer, and the folder or name to load it from."""
    arguments = job.arguments
    if arguments.vocab_file and arguments.merge_file and arguments.model_name_or_path is None:
        folder = str(Path(arguments.vocab_file).resolve().parent)
        return load_gpt2_files(arguments.vocab_file, arguments.merge_file), folder
    name = arguments.model_name_or_path or arguments.tokenizer_model or arguments.tokenizer_name or ""
    if Path(name).exists():
        return load_tokenizer(name), str(Path(name).resolve())
    preset = PRESETS.get(name)
    if preset is None and "/" not in name:
        raise GptlmError(
            f"the tokenizer {name!r} is neither a folder nor a built-in name; give a folder with tokenizer.json, or "
            "--vocab_file and --merge_file"
        )
    hub_id = (preset.hub_id or GPT2_HUB_ID) if preset else name
    return load_tokenizer(hub_folder(hub_id, weights=False)), hub_id


def _tokenizer_files(job: PreprocessJob, name: str) -> list[Path]:
    """The files of the tokenizer; it may lie beside the token files."""
    given = (job.arguments.vocab_file, job.arguments.merge_file)
    if all(given) and job.arguments.model_name_or_path is None:
        return [Path(file) for file in given if file]
    folder = Path(name)
    return [file for file in folder.iterdir() if owned.TOKENIZER_FILE.fullmatch(file.name)] if folder.is_dir() else []


def _sentence_rules(job: PreprocessJob) -> str | None:
    """How sentences are split, a language of `sentence_splitter`; None: they are not."""
    arguments = job.arguments
    if not arguments.split_sentences:
        return None
    rules = available_rules(LINES if arguments.chinese else arguments.lang)
    if rules == ENGLISH_RULES:
        logger.warning(
            "nltk's data for English are missing: sentences are split by nltk's rules and gptlm's list of "
            "abbreviations, a few of them differently. For the original's: python -m nltk.downloader punkt_tab, or "
            "without network copy the folder nltk_data/tokenizers/punkt_tab and set NLTK_DATA to nltk_data"
        )
    return rules


def _prefixes(job: PreprocessJob) -> list[str]:
    """Output prefixes as the originals name them: Megatron adds key and level, PaddleNLP nothing. Shards add theirs."""
    prefix, (part, parts) = job.arguments.output_prefix or "", job.shard
    if parts > 1:
        prefix += f"_{part:05d}-of-{parts:05d}"
    level = "sentence" if job.arguments.split_sentences else "document"
    return [f"{prefix}_{key}_{level}" for key in job.arguments.json_keys] if job.megatron else [prefix]


@doing("encoding the texts")
def encode(
    job: PreprocessJob,
    tokenizer: PreTrainedTokenizerBase,
    sentences: str | None,
    batches: Iterator[Batch],
    size: int,
    writers: list[IndexedTokensWriter],
) -> Progress:
    """Encode `batches`, which are `size` bytes in all, into one writer per key.

    Args:
        sentences: how sentences are split, a language of `sentence_splitter`; None: they are not.

    Raises:
        GptlmError: if text cannot be read, or there is no room for temporary files.
        OSError: if the token files cannot be written.
    """
    arguments = job.arguments
    with tempfile.TemporaryDirectory(prefix="gptlm-") as folder:
        tokenizer_file = str(Path(folder) / "tokenizer.json")
        try:
            Path(tokenizer_file).write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
        except OSError as error:
            reason = write_failure(error, Path(folder))
            raise GptlmError(f"cannot write into {folder}: {reason}; TMPDIR names another folder") from error
        settings = EncodeSettings(
            tokenizer_file=tokenizer_file,
            keys=tuple(arguments.json_keys),
            eos_id=tokenizer.eos_token_id if arguments.append_eos else None,
            strip=not job.megatron,
            allow_special_tokens=arguments.allow_special_tokens,
            skip_bad=arguments.on_error == "skip",
            backend=arguments.tokenizer_backend,
            sentences=sentences,
            keep_newlines=arguments.keep_newlines,
            level=arguments.sequence_level,
        )
        # an error that every worker would raise is raised here, once
        TextEncoder(settings.tokenizer_file, settings.backend, settings.allow_special_tokens)
        with _Bar(size, arguments.log_interval) as bar:
            return write_corpus(
                batches,
                settings,
                writers,
                workers=arguments.workers,
                max_documents=arguments.max_doc_num,
                on_progress=bar.show,
                on_part=bar.show_part,
            )


def _identity(job: PreprocessJob, sentences: str | None, files: list[Path], key: str) -> str:
    """A hash of what shards must have in common to be parts of one corpus."""
    arguments = job.arguments
    names = ("txt_split", "split_sentences", "keep_newlines", "lang", "chinese", "sequence_level", "append_eos")
    flags = {name: getattr(arguments, name) for name in (*names, "allow_special_tokens", "on_error")}
    listed = [(file.name, size_of(file)) for file in files]
    content = json.dumps([flags, sentences, job.megatron, key, listed])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


class _Bar:
    """A progress bar on a terminal (stderr), Megatron's progress lines in the log elsewhere."""

    def __init__(self, size: int, log_interval: int):
        self.log_interval = log_interval
        self.logged = 0
        self.bar = tqdm(
            total=size, unit="B", unit_scale=True, unit_divisor=1024, desc="encode", disable=not sys.stderr.isatty()
        )

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()

    def show(self, progress: Progress) -> None:
        self.bar.set_postfix_str("", refresh=False)
        self.bar.update(progress.read - self.bar.n)
        if self.bar.disable and progress.documents - self.logged >= self.log_interval:
            self.logged = progress.documents
            logger.info("Processed %s", _rate(progress))

    def show_part(self, part: Part) -> None:
        """Progress within a long document; `show` counts it when it is finished."""
        text = f"{part.done / (1 << 20):.0f} of {part.size / (1 << 20):.0f} MB of a long document"
        if self.bar.disable:
            logger.info("Encoded %s", text)
        else:
            self.bar.set_postfix_str(text)


def _rate(progress: Progress) -> str:
    seconds = max(progress.seconds, 1e-9)
    return (
        f"{progress.documents} documents ({progress.documents / seconds:.1f} docs/s, "
        f"{progress.read / seconds / (1 << 20):.2f} MB/s)."
    )


def _log_result(progress: Progress, writers: list[IndexedTokensWriter], written: list[Path], *, sharded: bool) -> None:
    logger.info("Processed %s", _rate(progress))
    if progress.empty:
        logger.info("%d documents without text were skipped", progress.empty)
    for reason in progress.reasons:
        logger.warning("skipped: %s", reason)
    if progress.bad:
        logger.warning("%d broken documents were skipped (--on_error skip)", progress.bad)
    for writer in writers:
        documents = len(writer.document_starts) - 1
        logger.info("%s: %d documents, %s tokens, %s", writer.prefix, documents, f"{writer.total:,}", writer.dtype)
        if not documents:
            logger.warning("no document starts in this shard; merging needs its empty files as well")
        elif documents < FEW_DOCUMENTS and not sharded:
            logger.warning("only %d documents: splits consist of whole documents (for .txt see --txt_split)", documents)
    logger.info("written: %s", ", ".join(str(path) for path in written))

"""Evaluate a trained model: text or token files -> model -> accuracies and perplexities."""

import json
import logging
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from gptlm import ranks
from gptlm.config.args.inference import EvaluateArguments
from gptlm.data.corpora import Corpus, open_corpora
from gptlm.data.documents import read_texts
from gptlm.data.encoder import Cutter, log_special_tokens
from gptlm.data.indexed import SCAN_TOKENS, id_range
from gptlm.data.text_files import holds_records
from gptlm.data.token_file import Ids, StoredArray
from gptlm.errors import GptlmError, doing
from gptlm.inference.detokenizers import detokenize
from gptlm.inference.generation import some_of
from gptlm.inference.loading import check_model_folder, find_model, load_for_inference, tokenizer_folder
from gptlm.inference.scoring import batches, score
from gptlm.inference.tasks import MAX_EXPONENT, Cloze, Reading, Report, encode_documents, read_cloze, read_text
from gptlm.kernels.compiling import compile_model, compile_obstacle
from gptlm.model.files import shape_of_config
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.tokenizer import encode_texts, fingerprint, load_tokenizer
from gptlm.parallel.dims import ParallelDims
from gptlm.quiet import quiet_transformers
from gptlm.recipes.common.device import choose_device, close_process_group, own_device, tensor_groups, use_device
from gptlm.recipes.common.peers import Peers, find_peers
from gptlm.training.metrics.throughput import start_logging

logger = logging.getLogger(__name__)

MIN_EXAMPLES = 200  # from which an accuracy near 0 is not chance
WORTH_COMPILING = 3e16  # operations, about a minute of an H200; compiling takes some 10 s and saves 7 to 20 %
MAX_PADDING = 1024  # rows of the embedding without a token, which pad a vocabulary to a multiple


def evaluate(arguments: EvaluateArguments, notes: tuple[str, ...] = ()) -> Report:
    """Log the results, or print them as JSON; returns them.

    Raises:
        GptlmError: if data, weights or tokenizer cannot be read or do not fit each other.
    """
    quiet = redirect_stdout(sys.stderr) if arguments.json else nullcontext()
    with quiet, find_peers(arguments.ddp_timeout) as peers, close_process_group(peers):
        start_logging(main_process=ranks.is_main_process())
        quiet_transformers()
        for note in notes:
            logger.info("%s", note)
        report = _evaluate(arguments, peers)
    if arguments.json and ranks.is_main_process():
        sys.stdout.write(json.dumps(report) + "\n")
    return report


def _evaluate(arguments: EvaluateArguments, peers: Peers | None) -> Report:
    chosen = choose_device(arguments.device, fp16=arguments.fp16, bf16=arguments.bf16, level="O2")
    use_device(chosen)
    device = own_device(chosen.type)
    source, adapters = find_model(arguments.model_name_or_path or "", arguments.lora_path)
    check_model_folder(source, adapters)
    tokenizer, rows = _tokenizer(source, adapters)
    task = _task(arguments, tokenizer, rows)
    degree = arguments.tensor_parallel_degree
    mesh = tensor_groups(degree, device, peers) if degree > 1 else None
    if peers is not None and mesh is None:
        peers.heartbeat.ends = False
        peers.init_group("gloo")  # the processes exchange a few sums only
    model, _ = load_for_inference(source, device, dtype=chosen.dtype, lora_path=adapters, mesh=mesh)
    if isinstance(task, Reading):  # windows; texts of LAMBADA differ in length
        model.transformer.expect_repeated_shapes()
    dims = ParallelDims(ranks.world_size(), degree)
    _compile(model, task, arguments.torch_compile, chosen.type, dims)
    sums = _sums(model, task, arguments, dims)
    report = {
        "task": arguments.task,
        "model": arguments.model_name_or_path,
        **task.report(sums),
        "batch_size": arguments.batch_size,
        "max_seq_length": arguments.max_seq_length,
    }
    if isinstance(task, Reading):
        report["detokenizer"] = None if arguments.task == "DATA" else arguments.detokenizer
    _log(task, report, sums, model.config.vocab_size)
    return report


def _tokenizer(source: str, adapters: str | None) -> tuple[PreTrainedTokenizerBase, int]:
    """The tokenizer of the model or of its adapters, and the rows of the embedding. Needs no weights."""
    folder = tokenizer_folder(source, adapters)
    tokenizer = load_tokenizer(folder)
    rows = shape_of_config(Path(source) / "config.json").vocab_size
    if folder != source:
        rows = max(rows, len(tokenizer))  # adapters may have rows for added tokens
    highest = max(tokenizer.get_vocab().values())  # not the number of entries: ids may have gaps
    if highest >= rows:
        raise GptlmError(
            f"the tokenizer in {folder} has {len(tokenizer)} entries with ids up to {highest}, the model's vocabulary "
            f"{rows}: they are not of one model; put the model's own tokenizer there"
        )
    if rows - len(tokenizer) > MAX_PADDING:
        logger.warning(
            "the tokenizer in %s has %d entries, the model's vocabulary %d: is it the model's own?",
            *(folder, len(tokenizer), rows),
        )
    return tokenizer, rows


def _task(arguments: EvaluateArguments, tokenizer: PreTrainedTokenizerBase, rows: int) -> Cloze | Reading:
    length, step = arguments.max_seq_length or 0, arguments.overlapping_eval or 0
    if arguments.task == "LAMBADA":
        placed = read_cloze(arguments.eval_path or "", arguments.max_examples, arguments.detokenizer)
        texts, places = [text for _, text in placed], [place for place, _ in placed]
        allow = arguments.allow_special_tokens
        if not allow:
            log_special_tokens(f"texts of {arguments.eval_path}", tokenizer, texts)
        cloze = Cloze(texts, tokenizer, length, places, allow_special_tokens=allow)
        if cloze.cut:
            logger.info(
                "%d texts are longer than --max_seq_length %d and keep their end: %s",
                *(len(cloze.cut), length, some_of(cloze.cut)),
            )
        return cloze
    if arguments.task == "DATA":
        tokens, words, what = _split_tokens(arguments, tokenizer, rows), None, "the split"
    else:
        what = arguments.eval_path or ""
        tokens, words = (_record_tokens if holds_records(what) else _text_tokens)(arguments, tokenizer)
        if words == 1:
            logger.warning("%s has no blanks: without words there is no token ratio and no adjusted ppl", what)
    if len(tokens) < 2:
        raise GptlmError(f"{what} has {len(tokens)} token, scoring takes at least 2; give more text")
    return Reading(tokens, length, step, words=words, limit=arguments.max_examples)


def _text_tokens(arguments: EvaluateArguments, tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, int]:
    """The ids of a text file, which is one text, and its number of words."""
    text = read_text(arguments.eval_path or "")
    if not arguments.allow_special_tokens:
        log_special_tokens(f"texts of {arguments.eval_path}", tokenizer, [text])
    ids = _ids(tokenizer, detokenize(text, arguments.detokenizer), arguments.allow_special_tokens)
    return np.array(ids, dtype=np.int64), len(text.strip().split(" "))


def _record_tokens(arguments: EvaluateArguments, tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, int]:
    """The ids of the texts in a file of records, concatenated, and their number of words."""
    path, key = arguments.eval_path or "", arguments.json_key
    records = list(read_texts(path, key))
    texts = [text for text in records if text.strip()]
    if not texts:
        found = f"all {len(records)} texts under {key!r} are empty" if records else "it has no records"
        raise GptlmError(f"{path} holds nothing to evaluate: {found}; give another file or another --json_key")
    end = f", each followed by {tokenizer.eos_token}" if tokenizer.eos_token else ""
    logger.info("%s: the texts under %r of %d documents, end to end%s", path, key, len(texts), end)
    if not arguments.allow_special_tokens:
        log_special_tokens(f"texts of {path}", tokenizer, texts)
    prose = [detokenize(text, arguments.detokenizer) for text in texts]
    ids = encode_documents(prose, tokenizer, arguments.allow_special_tokens)
    return np.array(ids, dtype=np.int64), sum(len(text.strip().split(" ")) for text in texts)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, allow_special_tokens: bool) -> list[int]:
    """The ids of `text`. A long text is encoded in pieces: in one it takes 140 bytes of memory per character."""

    def encode(texts: list[str]) -> list[list[int]]:
        return encode_texts(tokenizer, texts, allow_special_tokens)

    pieces = Cutter(tokenizer.backend_tokenizer, allow_special_tokens, encode).pieces(text)
    return [number for piece in pieces for number in encode([piece])[0]]


def _split_tokens(arguments: EvaluateArguments, tokenizer: PreTrainedTokenizerBase, rows: int) -> Ids:
    """The ids of the split's documents, in the order of the file."""
    corpora = open_corpora(arguments.input_dir or "", arguments.split)
    if len(corpora) != 1:
        raise GptlmError(f"--input_dir {arguments.input_dir} names {len(corpora)} corpora; give the prefix of one")
    corpus: Corpus = corpora[0]
    name, (first, last) = arguments.split_name, corpus.sequences(arguments.split_name)
    if first == last:
        raise GptlmError(f"the {name} split of {corpus.tokens.prefix} is empty; change --split {arguments.split}")
    logger.info("%s split of %s, --split %s", name, corpus.tokens.prefix, arguments.split)
    start, count, ids = int(corpus.tokens.starts[first]), corpus.token_count(name), corpus.tokens.tokens
    tokens = ids.part(start, count) if isinstance(ids, StoredArray) else ids[start : start + count]
    low, high = id_range(tokens)
    if low < 0 or high >= rows:
        low = min(int(tokens[start : start + SCAN_TOKENS].min()) for start in range(0, count, SCAN_TOKENS))
        raise GptlmError(
            f"{corpus.tokens.prefix}: ids go from {low} to {high}, the model's vocabulary has {rows} "
            "entries; encode the text with the model's tokenizer"
        )
    made_with = corpus.metadata.get("tokenizer_fingerprint")
    if made_with and made_with != fingerprint(tokenizer):
        logger.warning("%s was encoded with another tokenizer than the model's", corpus.tokens.prefix)
    return tokens


def _compile(
    model: GPTLMHeadModel, task: Cloze | Reading, wanted: bool | None, device: str, dims: ParallelDims
) -> None:
    """Compile blocks and scores as --torch_compile asks; unset, on a GPU where it takes less time than it saves."""
    inputs = sum(len(row.ids) - 1 for row in task.rows) / dims.data
    is_long = 2 * model.num_parameters() * inputs > WORTH_COMPILING
    if not (device == "cuda" and is_long if wanted is None else wanted):
        return
    obstacle = compile_obstacle(device)
    if obstacle is None:
        compile_model(model, lengths_vary=True)
        logger.info(
            "blocks and scores are compiled, the first batch takes longer (--torch_compile 0 switches this off)"
        )
    elif wanted:
        logger.warning("--torch_compile has no effect: %s", obstacle)
    else:
        logger.info("blocks and scores are not compiled: %s", obstacle)


@doing("scoring")
def _sums(
    model: GPTLMHeadModel, task: Cloze | Reading, arguments: EvaluateArguments, dims: ParallelDims
) -> Sequence[float]:
    """The results of `task.tally`, summed over all rows and replicas of the model."""
    place = dims.place_of(ranks.rank())
    whole = batches(task.rows, arguments.batch_size)
    tallies = np.zeros(4 if isinstance(task, Cloze) else 2)
    for done, scores in enumerate(score(model, task.rows, whole[place.data :: dims.data]), start=1):
        tallies += np.sum([task.tally(number, one) for number, one in scores], axis=0)
        if done % arguments.logging_freq == 0:
            logger.info("batch %d of %d", min(done * dims.data, len(whole)), len(whole))
    if dims.world > 1:
        tallies *= place.tensor == 0  # the other processes of a replica have the same
        dist.all_reduce(torch.from_numpy(tallies))
    return tallies.tolist()


def _log(task: Cloze | Reading, report: dict[str, Any], sums: Sequence[float], vocab_size: int) -> None:
    for line in task.lines(report, sums):
        logger.info("validation results on %s | %s", report["task"], line)
    perplexity = math.exp(min(MAX_EXPONENT, task.loss(sums)))
    guesses = report.get("accuracy_last_token", 1.0) < 0.005 and report["num_examples"] >= MIN_EXAMPLES
    if guesses or perplexity > vocab_size / 2:
        logger.warning(
            "this looks like a wrong vocabulary, or like weights that were never trained: a token's perplexity is "
            "%.0f, guessing among the %d entries of the vocabulary gives %d; is the tokenizer the model's own?",
            *(perplexity, vocab_size, vocab_size),
        )

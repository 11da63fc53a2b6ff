"""The model of a training run, and the tokenizer saved beside it."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import GenerationConfig, GPT2Config, PreTrainedTokenizerBase, set_seed

from gptlm.checkpoint.folder import Checkpoint
from gptlm.config.run import PretrainRun, Run
from gptlm.data.corpora import Corpus, id_range_of
from gptlm.errors import GptlmError, doing, named
from gptlm.kernels.linear_cross_entropy import linear_cross_entropy
from gptlm.model.build import StoredWeights, blank_model, load_model, loaded_config, new_config, new_model
from gptlm.model.files import GENERATION_CONFIG
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.hub import hub_folder
from gptlm.model.presets import GPT2_HUB_ID, PRESETS
from gptlm.model.pretrained import load_pretrained
from gptlm.model.tokenizer import fingerprint, fit_to_model, load_tokenizer
from gptlm.parallel.deepspeed import build_zero3_model
from gptlm.parallel.parallelize import parallelize
from gptlm.parallel.process_groups import Mesh
from gptlm.parallel.zero_config import stage_of
from gptlm.recipes.pretrain.data import data_cache

logger = logging.getLogger(__name__)


def log_weights_source(run: Run, start: Checkpoint | None) -> None:
    """Where the weights of a run come from."""
    if start is not None:
        logger.info("weights from %s", start.path)
        return
    if run.model.continue_training:
        logger.info("weights from %s", run.source.weights)
        return
    logger.info("random initialisation")
    if run.source.kind == "folder" and run.source.weights:
        logger.warning(
            "%s holds weights, and they are NOT used: training starts from RANDOM weights "
            "(--continue_training starts from them)",
            run.source.weights,
        )


def find_tokenizer(run: PretrainRun, corpora: list[Corpus]) -> PreTrainedTokenizerBase | None:
    """The tokenizer that was named, else the model's, else the one the data was made with, else None, with a warning.

    A built-in name may come without its tokenizer, where there is no network; training needs none.

    Raises:
        GptlmError: if the named folder has no tokenizer, or the tokenizer has more entries than the model.
    """
    named = run.model.tokenizer_name_or_path
    tokenizer = None
    for candidate in [named] if named else _candidates(run, corpora):
        try:
            tokenizer = load_tokenizer(tokenizer_folder(candidate))
            break
        except GptlmError as error:
            if named and named.removesuffix(".json") not in PRESETS:
                raise
            logger.warning("%s", error)
    if tokenizer is None:
        logger.warning("no tokenizer: the model is saved without one (--tokenizer_name_or_path DIR adds it)")
        return None
    _check(run, tokenizer, corpora)
    fit_to_model(tokenizer, run.shape.max_position_embeddings)
    return tokenizer


@doing("building the model")
def make_model(
    run: Run,
    tokenizer: PreTrainedTokenizerBase | None,
    deepspeed: dict[str, Any] | None = None,
    groups: Mesh | None = None,
) -> GPTLMHeadModel:
    """The network with loaded or random weights; each rank holds its share only under ZeRO stage 3, or where `groups`
    split a replica.

    Raises:
        GptlmError: if weights cannot be loaded.
    """
    set_seed(run.training.seed)  # random weights depend on the seed alone
    hidden, attention = run.model.hidden_dropout_prob, run.model.attention_probs_dropout_prob
    eos_token_id = tokenizer.eos_token_id if tokenizer else None
    dropouts = (0.1 if hidden is None else hidden, 0.1 if attention is None else attention)
    mesh = groups if run.dims.is_model_parallel else None
    if mesh is not None or (deepspeed is not None and stage_of(deepspeed) == 3):
        stored, config = None, new_config(run.shape, *dropouts, eos_token_id, run.model.initializer_range)
        if run.model.continue_training:
            folder = weights_folder(run)
            stored, config = StoredWeights(folder), loaded_config(folder, hidden, attention, run.shape.vocab_size)
        if mesh is not None:
            model = _parallel_model(run, config, partial(_fill, stored), mesh)
        else:
            model = build_zero3_model(lambda: blank_model(config), partial(_fill, stored), deepspeed or {}, groups)
        if stored is not None:
            model.name_or_path = stored.source
            if (Path(stored.source) / GENERATION_CONFIG).is_file():
                model.generation_config = load_pretrained(GenerationConfig, stored.source)
    elif run.model.continue_training:
        model = load_model(
            weights_folder(run),
            vocab_size=run.shape.vocab_size,
            hidden_dropout=hidden,
            attention_dropout=attention,
        )
    else:
        model = new_model(
            run.shape,
            hidden_dropout=dropouts[0],
            attention_dropout=dropouts[1],
            eos_token_id=eos_token_id,
            initializer_range=run.model.initializer_range,
        )
    training = run.training
    granularity = training.recompute_granularity if training.recompute else None
    model.transformer.set_recompute(granularity, training.no_recompute_layers)
    return model


def _parallel_model(run: Run, config: GPT2Config, fill: Callable[[Any, str, nn.Module], None], mesh: Mesh) -> Any:
    if not config.tie_word_embeddings:
        raise GptlmError(
            f"{run.source.weights} has an output layer of its own (tie_word_embeddings is false), which is not split "
            f"over processes; use {named('sharding')} stage3 with {named('tensor_parallel_degree')} 1"
        )
    with torch.device("meta"):
        model = blank_model(config)
    return parallelize(
        model,
        mesh,
        fill,
        linear_cross_entropy,
        chunks=run.parallel.virtual_pp_degree if run.dims.pipeline > 1 else 1,
        sequence=is_sequence_parallel(run),
        device=generator_device(),
    )


def is_sequence_parallel(run: Run) -> bool:
    """Whether activations are split along the sequence."""
    return run.parallel.sequence_parallel and run.dims.tensor > 1


def generator_device() -> torch.device | None:
    """Whose generator draws the dropout of split layers; None: the CPU's."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else None


def weights_folder(run: Run) -> str:
    weights = run.source.weights or ""
    try:
        return hub_folder(weights, weights=True) if run.source.kind in ("preset", "hub") else weights
    except GptlmError as error:
        raise GptlmError(f"{error}, or start from random weights with --continue_training 0") from error


@torch.no_grad()
def _fill(stored: StoredWeights | None, model: GPTLMHeadModel, name: str, module: nn.Module) -> None:
    """Random values for the weights of `module`, then the stored ones over them, as far as they have rows.

    Random numbers are drawn in float32 on the CPU, as they are without sharding.
    """
    places = {weight: weight.data for weight in module.parameters(recurse=False)}
    for weight in places:
        weight.data = torch.empty(weight.shape)
    model._init_weights(module)
    for weight, place in places.items():
        place.copy_(weight.data)
        weight.data = place
    for own, weight in module.named_parameters(recurse=False) if stored else ():
        values = stored.get(f"{name}.{own}")  # type: ignore[union-attr]
        weight[: len(values)].copy_(values)


def _candidates(run: PretrainRun, corpora: list[Corpus]) -> list[str]:
    """Where a tokenizer may be when none was named, best first."""
    recorded = [corpora[0].metadata["tokenizer"]] if corpora[0].metadata.get("tokenizer") else []
    if run.source.kind in ("flags", "config"):
        return recorded
    return [run.model.model_name_or_path or "", *recorded]


def tokenizer_folder(name: str) -> str:
    """The folder `name` stands for; every English built-in name has GPT-2's tokenizer."""
    preset = PRESETS.get(name.removesuffix(".json"))
    if Path(name).is_dir():
        return name
    if preset is None and "/" not in name:
        raise GptlmError(f"the tokenizer {name!r} is neither a folder nor a built-in name")
    return hub_folder((preset.hub_id or GPT2_HUB_ID) if preset else name, weights=False)


def check_entries(run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises GptlmError if the tokenizer has more entries than the model."""
    if len(tokenizer) > run.shape.vocab_size:
        raise GptlmError(
            f"the tokenizer has {len(tokenizer)} entries, the model's vocabulary {run.shape.vocab_size}; "
            f"use --vocab_size {len(tokenizer)} or the model's own tokenizer"
        )


def _check(run: PretrainRun, tokenizer: PreTrainedTokenizerBase, corpora: list[Corpus]) -> None:
    check_entries(run, tokenizer)
    for corpus in corpora:
        tokens = corpus.tokens
        if len(tokenizer) - 1 > np.iinfo(tokens.tokens.dtype).max:
            raise GptlmError(
                f"{tokens.path} is {tokens.tokens.dtype}, which cannot hold the ids of a tokenizer with "
                f"{len(tokenizer)} entries: it was made with another one, or ids were cut off; preprocess again"
            )
        highest = id_range_of(corpus, data_cache(run))[1]
        if highest >= len(tokenizer):
            logger.warning(
                "%s holds id %d, the tokenizer has %d entries: the two do not belong together",
                tokens.prefix,
                highest,
                len(tokenizer),
            )
        recorded = corpus.metadata.get("tokenizer_fingerprint")
        if recorded and recorded != fingerprint(tokenizer):
            logger.warning(
                "%s was made with another tokenizer (%s): its ids mean other texts than the one saved with the model",
                corpus.tokens.prefix,
                corpus.metadata.get("tokenizer"),
            )

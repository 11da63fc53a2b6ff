"""README.md of a saved model: what the HuggingFace hub shows and searches, and how to load it."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from gptlm import owned
from gptlm.config.run import PretrainRun, Run, SftRun
from gptlm.model.adapter_files import is_adapter
from gptlm.model.hub import HUB_ID

logger = logging.getLogger(__name__)

METRICS = {"ppl": "perplexity", "accuracy": "accuracy", "bleu4": "bleu", "rouge1": "rouge", "rougel": "rouge"}
REMOTE = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)")


@dataclass(frozen=True)
class CardFacts:
    """What a model card says.

    Attributes:
        made: ends the sentence "It was ... with gptlm", such as "fine-tuned".
        base: name of the base model on the hub; None: there is none, or it is a local folder.
        datasets: names of datasets on the hub.
        gguf: name of the file that holds the model, for llama.cpp.
        settings: name -> value of the training.
        metrics: name of a result -> value.
    """

    made: str
    base: str | None = None
    datasets: Sequence[str] = ()
    tags: Sequence[str] = ()
    adapters: bool = False
    gguf: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def write_card(folder: Path, facts: CardFacts) -> bool:
    """Write `folder`/README.md, unless it holds somebody else's text; returns whether it was written.

    Raises:
        OSError: if it cannot be written.
    """
    path = folder / owned.CARD
    if not owned.is_own_card(path):
        return False
    path.write_text(card_text(facts), encoding="utf-8")
    return True


def write_run_card(run: Run, metrics: Mapping[str, float]) -> None:
    """Write the card of the model in the output folder of a finished run, or complete that of its adapters."""
    folder, facts = Path(run.training.output_dir or ""), facts_of_run(run, metrics)
    path = folder / owned.CARD
    if not owned.is_own_card(path):
        logger.info("%s was not written by gptlm: it is left as it is", path)
        return
    owned.note(folder, [owned.CARD], owned.RUN)
    if not (facts.adapters and path.is_file()):
        write_card(folder, facts)
        return
    card, found = ModelCard.load(path), _metadata(facts)  # saved with the adapters, says how to load them
    card.data.datasets, card.data.tags, card.data.metrics = found.datasets, found.tags, found.metrics
    parts = [f"---\n{card.data.to_yaml()}\n---", card.text.strip(), *_sections(facts)]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def checkpoint_card(run: Run, step: int) -> str:
    """The card of the checkpoint of `step`."""
    facts = facts_of_run(run, {})
    return card_text(replace(facts, settings={"step of this checkpoint": step, **facts.settings}))


def card_text(facts: CardFacts) -> str:
    """The card of a model, with the hub's metadata."""
    data = _metadata(facts)
    of = f" from [{facts.base}](https://huggingface.co/{facts.base})" if facts.base else ""
    title, what = ("LoRA adapters",) * 2 if facts.adapters else ("GPT-2 model", "A GPT-2 model")
    parts = [f"---\n{data.to_yaml()}\n---", owned.CARD_MARK, f"# {title}", f"{what}, {facts.made}{of} with gptlm."]
    parts += _sections(facts)
    if facts.gguf:
        parts.append(f"## Use\n\n```bash\nllama-server -m {facts.gguf} --jinja\n```")
    elif not facts.adapters:
        code = 'from transformers import pipeline\n\ngenerate = pipeline("text-generation", model=".")'
        parts.append(f"## Use\n\n```python\n{code}\n```")
    return "\n\n".join(parts) + "\n"


def _metadata(facts: CardFacts) -> ModelCardData:
    found = [METRICS[key] for metric in facts.metrics if (key := metric.partition("_")[2]) in METRICS]
    return ModelCardData(
        base_model=facts.base,
        datasets=list(facts.datasets) or None,
        library_name="peft" if facts.adapters else "gguf" if facts.gguf else "transformers",
        pipeline_tag="text-generation",
        tags=["gpt2", "gptlm", *facts.tags],
        metrics=list(dict.fromkeys(found)) or None,
    )


def _sections(facts: CardFacts) -> list[str]:
    parts = [f"## Training\n\n{_table('setting', facts.settings)}"] if facts.settings else []
    return parts + ([f"## Evaluation\n\n{_table('metric', facts.metrics)}"] if facts.metrics else [])


def _table(head: str, values: Mapping[str, object]) -> str:
    rows = [f"| {name} | {f'{value:.4g}' if isinstance(value, float) else value} |" for name, value in values.items()]
    return "\n".join([f"| {head} | value |", "|---|---|", *rows])


def facts_of_run(run: Run, metrics: Mapping[str, float]) -> CardFacts:
    """What the card of a trained model says: no path of this machine."""
    training, source = run.training, run.source
    base = None
    if run.model.continue_training:
        base = source.weights if source.kind in ("preset", "hub") else _hub_name(run.model.model_name_or_path)
    tuned = isinstance(run, SftRun)
    results = {
        name: value for name, value in metrics.items() if name.startswith(("eval_", "test_")) and _is_quality(name)
    }
    settings: dict[str, object] = {
        "optimizer steps": training.max_steps,
        "global batch size": run.batch.total,
        "sequence length": _length(run),
        "learning rate": f"{training.learning_rate:g}",
        "schedule": training.lr_scheduler_type,
        "precision": "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32",
        "seed": training.seed,
    }
    lora = isinstance(run, SftRun) and run.lora.lora
    return CardFacts(
        made="fine-tuned" if tuned else "trained further" if run.model.continue_training else "pretrained",
        base=base,
        datasets=_datasets(run),
        tags=["lora", "sft"] if lora else ["sft"] if tuned else ["pretraining"],
        adapters=lora,
        settings=settings,
        metrics=results,
    )


def _length(run: Run) -> int | None:
    if isinstance(run, SftRun):
        return run.data.max_length
    return run.data.max_seq_length if isinstance(run, PretrainRun) else None


def _is_quality(name: str) -> bool:
    return name.partition("_")[2] in ("loss", *METRICS)


def _datasets(run: Run) -> list[str]:
    """Names on the hub of what the run read."""
    names: list[str | None] = []
    if isinstance(run, SftRun):
        names = [run.data.dataset_name_or_path or run.data.task_name, run.data.eval_dataset_name_or_path]
    elif isinstance(run, PretrainRun):
        names = [run.data.dataset_name, run.data.train_file]
    return list(dict.fromkeys(name for given in names if (name := _hub_name(given))))


def _hub_name(name: str | None) -> str | None:
    """`name` if it is one of the hub, or the dataset that it is a file of; None for local files and folders."""
    if remote := REMOTE.match(name or ""):
        return remote[1]
    is_local = not name or Path(name).exists() or not HUB_ID.fullmatch(name) or Path(name).suffix in (".json", ".jsonl")
    return None if is_local else name


def card_of_folder(folder: Path, made: str, base: str | None = None) -> None:
    """Write the card of a converted or merged model.

    Args:
        base: name of the base model, which the card names if it is one of the hub.
    """
    gguf = next((path.name for path in folder.glob("*.gguf")), None)
    tags = ["gguf"] if gguf else []
    write_card(folder, CardFacts(made, _hub_name(base), tags=tags, adapters=is_adapter(folder), gguf=gguf))

"""One fine-tuning run, resolved: the flags of PaddleNLP's `finetune_generation.py` and of its argument files."""

from collections.abc import Sequence
from dataclasses import dataclass

from gptlm.compat import paddlenlp as spellings
from gptlm.compat import transformers as spellings_transformers
from gptlm.compat.auto_convert import take_external_adapters, take_external_model
from gptlm.config.field import arg
from gptlm.config.parser import Parsed, Vocabulary, build, parse
from gptlm.errors import UsageError, named

LESS_IS_BETTER = ("loss", "ppl")
MORE_IS_BETTER = ("accuracy", "bleu4", "rouge1", "rouge2", "rougel")
GENERATED = ("bleu4", "rouge1", "rouge2", "rougel")
METRIC_LEVELS = ("word", "char")


@dataclass(frozen=True, kw_only=True)
class SftArguments:
    """The examples and how they become samples."""

    dataset_name_or_path: str | None = arg(
        None, "a file (.json, .jsonl, .parquet), a folder with train and dev files, or a dataset; unset: task_name"
    )
    eval_dataset_name_or_path: str | None = arg(None, "examples for evaluation; unset: dev, else a share of train")
    task_name: str = arg("squad", "a dataset of the HuggingFace hub, when dataset_name_or_path is not given")
    src_length: int = arg(1024, "most tokens of a prompt; headings and a chat template's own text are never cut", ge=1)
    tgt_length: int = arg(
        142, "most tokens of an answer with its end-of-text token, in training and in evaluation", ge=2
    )
    max_length: int | None = arg(
        None,
        "most tokens of a sample; unset: src_length + tgt_length or the position table; cuts the prompt first",
        ge=2,
    )
    zero_padding: bool = arg(False, "pack short examples into samples of max_length; none attends to another")
    train_on_prompt: bool = arg(False, "prompts are targets, too, not only answers")
    paddle_compat: bool = arg(False, "PaddleNLP's encoding: </s> is text, padding on the left is attended to")
    truncation_side: str = arg(
        "left", "of a prompt that is too long: left cuts its beginning, right its end", choices=("left", "right")
    )
    allow_special_tokens: bool = arg(False, "let <|endoftext|> written in a text become its id")
    additional_special_tokens: list[str] = arg(
        [], "tokens to add to the vocabulary; a text that spells one gets it, where no chat template writes it"
    )
    lr_decay_ratio: float = arg(0.1, "last learning rate of the linear schedule as a share of the highest", ge=0, le=1)
    eval_with_do_generation: bool = arg(True, "evaluations also continue prompts and compare the texts")
    generate_num: int = arg(100, "evaluation prompts that are continued; 0: none, -1: all", ge=-1)
    metric_level: str = arg("word", "what BLEU and ROUGE count", choices=METRIC_LEVELS)


@dataclass(frozen=True, kw_only=True)
class LoraArguments:
    """Low-rank adapters."""

    lora: bool = arg(False, "train adapters only; the model's own weights stay")
    lora_rank: int = arg(8, "rank of the adapters", ge=1)
    lora_alpha: float | None = arg(None, "adapters are scaled by lora_alpha / lora_rank; unset: 2 x lora_rank", gt=0)
    lora_dropout: float = arg(0.0, "dropout before the adapters", ge=0, lt=1)
    lora_target_modules: list[str] = arg(
        ["c_attn", "c_proj", "c_fc"], "matrices that get an adapter: c_attn, c_proj, c_fc", words=True
    )
    lora_path: str | None = arg(None, "a folder with adapters to start from")
    merge_weights: bool = arg(False, "also write output_dir/merged: the model with the adapters added to its weights")


@dataclass(frozen=True, kw_only=True)
class MergeArguments:
    """Adapters into a model."""

    model_name_or_path: str | None = arg(None, "the model; unset: the one that lora_path names")
    lora_path: str | None = arg(None, "folder with adapters")
    output_path: str | None = arg(None, "folder for the merged model")
    dtype: str = arg("float32", "of the merged weights", choices=("float32", "bfloat16", "float16"))


MERGE = Vocabulary(
    (MergeArguments,),
    spellings.MERGE_RENAMED | spellings_transformers.MODEL_RENAMED,
    spellings.MERGE_IGNORED | spellings_transformers.MODEL_IGNORED,
    spellings_transformers.MODEL_REFUSED,
)


def parse_merge(argv: Sequence[str]) -> MergeArguments:
    """Raises UsageError listing everything that is wrong."""
    return build(MergeArguments, resolve_merge(argv).values)


def resolve_merge(argv: Sequence[str]) -> Parsed:
    """The command with everything filled in. Raises UsageError listing everything that is wrong."""
    parsed = parse(MERGE, argv)
    missing = [f"{named(name)} is missing" for name in ("lora_path", "output_path") if not parsed.values[name]]
    if missing:
        raise UsageError("\n".join(missing))
    take_external_model(parsed)
    take_external_adapters(parsed)
    return parsed

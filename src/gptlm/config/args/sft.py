"""Arguments of fine-tuning that pretraining does not have."""

from dataclasses import dataclass

from gptlm.config.field import LARGEST, arg

LESS_IS_BETTER = ("loss", "ppl")
MORE_IS_BETTER = ("accuracy", "bleu4", "rouge1", "rouge2", "rougel")
GENERATED = ("bleu4", "rouge1", "rouge2", "rougel")
METRIC_LEVELS = ("word", "char")


def bad_share(value: float) -> str | None:
    """What is wrong with a number of examples that may also be a fraction of them."""
    if 0 <= value < 1 or (float(value).is_integer() and 0 < value <= LARGEST):
        return None
    return f"{value:g}: expected a fraction below 1, or a whole number of examples"


@dataclass(frozen=True, kw_only=True)
class SftArguments:
    """Data and samples"""

    dataset_name_or_path: str | None = arg(
        None,
        "file or quoted glob (.json, .jsonl, also .gz or .zst; .parquet), saved dataset, folder with train and dev "
        "files, or dataset name; unset: task_name",
    )
    eval_dataset_name_or_path: str | None = arg(
        None, "evaluation data; unset: the dev split, else a part of the train split"
    )
    dataset_config: str | None = arg(None, "configuration of a dataset of the hub; unset: its default")
    dataset_split: str = arg("train", "split of a dataset of the hub to train on")
    prompt_column: str | None = arg(None, "column with the prompts (texts or messages); goes with response_column")
    response_column: str | None = arg(None, "column with the responses (texts or messages); goes with prompt_column")
    text_column: str | None = arg(None, "column with plain texts, all of which are targets; there are no prompts")
    max_train_samples: int | None = arg(None, "train on so many of the first examples; unset: all", ge=1)
    max_eval_samples: int | None = arg(None, "evaluate so many of the first examples; unset: all", ge=1)
    val_size: float | None = arg(
        None,
        "hold out training examples for evaluation, chosen at random, the same for every seed; below 1: a fraction of "
        "them",
        check=bad_share,
    )
    preprocessing_num_workers: int | None = arg(None, "encoder processes; unset: one per core", ge=1)
    data_cache: str | None = arg(
        None, "folder for encoded examples; unset: that of the datasets library (HF_DATASETS_CACHE), else output_dir"
    )
    task_name: str = arg("squad", "dataset of the HuggingFace hub, if dataset_name_or_path is not given")
    src_length: int = arg(
        1024, "maximum prompt length; headings and the text of a chat template are never cut", ge=1, unit="tokens"
    )
    tgt_length: int = arg(
        142, "maximum response length with its end-of-text token, in training and evaluation", ge=2, unit="tokens"
    )
    max_length: int | None = arg(
        None,
        "maximum sample length; unset: src_length + tgt_length or the maximum position; prompts are cut first",
        ge=2,
        unit="tokens",
    )
    zero_padding: bool = arg(False, "pack short samples up to max_length, without attention between them")
    pad_to_multiple_of: int | None = arg(
        None, "pad batches to a multiple of this length, at most max_length; unset: 64 on a GPU, else 1", ge=1
    )
    group_by_length: bool = arg(False, "batches of examples of similar length, random otherwise: less padding")
    train_on_prompt: bool = arg(False, "include prompt tokens in the loss, not only response tokens")
    paddle_compat: bool = arg(False, "encode as PaddleNLP: </s> is text, and left padding is attended to")
    truncation_side: str = arg("left", "side on which a prompt that is too long is cut", choices=("left", "right"))
    allow_special_tokens: bool = arg(False, "encode <|endoftext|> in a text as the special token")
    additional_special_tokens: list[str] = arg(
        [], "tokens to add to the vocabulary; also encoded where they occur in a text without a chat template"
    )
    lr_decay_ratio: float = arg(
        0.1, "final learning rate of the linear schedule as a fraction of learning_rate", ge=0, le=1
    )
    chat_template: str | None = arg(
        None,
        "chatml, plain (headings), or a Jinja file; chatml and a file also render prompts and responses. unset: the "
        "tokenizer's template for messages, else plain",
    )
    eos_token: str | None = arg(
        None, "token of the vocabulary that ends a text; unset: the tokenizer's. Chat templates end turns themselves"
    )
    eval_with_do_generation: bool = arg(True, "evaluations also generate responses and compute BLEU and ROUGE")
    generate_num: int = arg(100, "evaluation prompts to generate for; 0: none, -1: all", ge=-1)
    metric_level: str = arg("word", "unit of BLEU and ROUGE", choices=METRIC_LEVELS)


@dataclass(frozen=True, kw_only=True)
class LoraArguments:
    """LoRA"""

    lora: bool = arg(False, "train LoRA adapters only; the model's weights are frozen")
    lora_rank: int = arg(8, "adapter rank", ge=1)
    lora_alpha: float | None = arg(None, "adapter scale is lora_alpha / lora_rank; unset: 2 x lora_rank", gt=0)
    lora_dropout: float = arg(0.0, "dropout probability before the adapters", ge=0, lt=1)
    lora_target_modules: list[str] = arg(
        ["c_attn", "c_proj", "c_fc"], "layers with an adapter: c_attn, c_proj, c_fc", words=True
    )
    lora_path: str | None = arg(None, "adapter folder to start from")
    merge_weights: bool = arg(False, "also write output_dir/merged, the model with merged adapters")

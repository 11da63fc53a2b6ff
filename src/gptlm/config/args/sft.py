"""Arguments of fine-tuning that pretraining does not have."""

import json
from dataclasses import dataclass

from gptlm.config.field import LARGEST, arg
from gptlm.data.templates import bad_template
from gptlm.json_text import parse_json
from gptlm.model.adapter_kinds import BIASES, AdapterKind

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
        "files, or dataset name; unset: --task_name",
    )
    eval_dataset_name_or_path: str | None = arg(
        None, "evaluation data; unset: the dev split, else a part of the train split"
    )
    dataset_config: str | None = arg(None, "configuration of a dataset of the hub; unset: its default")
    dataset_split: str = arg("train", "split of a dataset of the hub to train on")
    prompt_column: str | None = arg(None, "column with the prompts (texts or messages); goes with --response_column")
    response_column: str | None = arg(None, "column with the responses (texts or messages); goes with --prompt_column")
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
        None, "folder for encoded examples; unset: that of the datasets library (HF_DATASETS_CACHE), else --output_dir"
    )
    task_name: str = arg("squad", "dataset of the HuggingFace hub, if --dataset_name_or_path is not given")
    src_length: int = arg(
        1024, "maximum prompt length; headings and the text of a chat template are never cut", ge=1, unit="tokens"
    )
    tgt_length: int = arg(
        142, "maximum response length with its end-of-text token, in training and evaluation", ge=2, unit="tokens"
    )
    max_length: int | None = arg(
        None,
        "maximum sample length; unset: --src_length + --tgt_length or the maximum position; prompts are cut first",
        ge=2,
        unit="tokens",
    )
    zero_padding: bool = arg(False, "pack short samples up to --max_length, without attention between them")
    pad_to_multiple_of: int | None = arg(
        None, "pad batches to a multiple of this length, at most --max_length; unset: 64 on a GPU, else 1", ge=1
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
        0.1, "final learning rate of the linear schedule as a fraction of --learning_rate", ge=0, le=1
    )
    chat_template: str | None = arg(
        None,
        "chatml, plain (headings), or a Jinja file; chatml and a file also render prompts and responses. unset: the "
        "tokenizer's template for messages, else plain",
        check=bad_template,
    )
    eos_token: str | None = arg(
        None, "token of the vocabulary that ends a text; unset: the tokenizer's. Chat templates end turns themselves"
    )
    eval_with_do_generation: bool = arg(True, "evaluations also generate responses and compute BLEU and ROUGE")
    generate_num: int = arg(100, "evaluation prompts to generate for; 0: none, -1: all", ge=-1)
    metric_level: str = arg("word", "unit of BLEU and ROUGE", choices=METRIC_LEVELS)


def _wrong_numbers(text: str, kinds: tuple[type, ...]) -> str | None:
    """What is wrong with `text` as a JSON object of positive numbers, or None."""
    try:
        numbers = parse_json(text)
    except ValueError as error:
        return f"{text!r} is not JSON ({error}); expected an object such as '{{\"c_attn\": 4}}'"
    if not isinstance(numbers, dict) or not numbers:
        return f"{text}: expected a JSON object such as '{{\"c_attn\": 4}}'"
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, kinds) or not 0 < float(str(number)) < float("inf"):
            return f"{name}: {json.dumps(number)}: expected a {'whole ' if kinds == (int,) else ''}number above 0"
    return None


def wrong_ranks(text: str) -> str | None:
    """What is wrong with a value of `lora_rank_pattern`, or None."""
    return _wrong_numbers(text, (int,))


def wrong_alphas(text: str) -> str | None:
    """What is wrong with a value of `lora_alpha_pattern`, or None."""
    return _wrong_numbers(text, (int, float))


@dataclass(frozen=True, kw_only=True)
class LoraArguments:
    """LoRA"""

    lora: bool = arg(False, "train LoRA adapters only; the model's weights are frozen")
    lora_rank: int = arg(8, "adapter rank", ge=1)
    lora_alpha: float | None = arg(None, "adapter scale is --lora_alpha / --lora_rank; unset: 2 x --lora_rank", gt=0)
    lora_dropout: float = arg(0.0, "dropout probability before the adapters", ge=0, lt=1)
    lora_target_modules: list[str] = arg(
        ["c_attn", "c_proj", "c_fc"],
        "matrices with an adapter: all-linear, or ends of names: c_attn, c_proj, c_fc, h.0.mlp.c_fc",
        words=True,
    )
    use_dora: bool = arg(False, "DoRA: the row norms of these matrices are trained, too")
    use_rslora: bool = arg(False, "rsLoRA: the adapter scale is --lora_alpha / sqrt(--lora_rank)")
    init_lora_weights: str = arg(
        "true", "first values of adapters, as in PEFT: true, gaussian, orthogonal, pissa, pissa_niter_N or olora"
    )
    lora_bias: str = arg("none", "biases that are trained, too: none, all, or those beside adapters", choices=BIASES)
    modules_to_save: list[str] = arg(
        [], "modules that are trained and saved whole: wte, wpe, ln_1, ln_2, ln_f, lm_head", words=True
    )
    lora_rank_pattern: str | None = arg(
        None, "JSON object: ends of names, or regular expressions -> rank of these matrices", check=wrong_ranks
    )
    lora_alpha_pattern: str | None = arg(
        None, "JSON object: ends of names, or regular expressions -> alpha of these matrices", check=wrong_alphas
    )
    load_in_4bit: bool = arg(False, "QLoRA: the frozen matrices are quantized to 4 bits (extra quantization)")
    load_in_8bit: bool = arg(False, "the frozen matrices are quantized to 8 bits (extra quantization)")
    bnb_4bit_quant_type: str = arg("nf4", "numbers of --load_in_4bit", choices=("nf4", "fp4"))
    use_bnb_nested_quant: bool = arg(False, "--load_in_4bit: quantize the scales of the blocks, too")
    lora_path: str | None = arg(
        None,
        "adapters to start from: folder, or OWNER/NAME of the hub; without --model_name_or_path on the base they name",
    )
    merge_weights: bool = arg(False, "also write output_dir/merged, the model with merged adapters")

    @property
    def bits(self) -> int | None:
        """Of the frozen matrices, if they are quantized."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else None

    @property
    def kind(self) -> AdapterKind:
        """What differs from plain LoRA. Its patterns have to be right (`wrong_ranks`)."""
        return AdapterKind(
            dora=self.use_dora,
            rslora=self.use_rslora,
            init=self.init_lora_weights.lower(),
            bias=self.lora_bias,
            modules_to_save=tuple(self.modules_to_save),
            rank_pattern=parse_json(self.lora_rank_pattern or "{}"),
            alpha_pattern=parse_json(self.lora_alpha_pattern or "{}"),
        )

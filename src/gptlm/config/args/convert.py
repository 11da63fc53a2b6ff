"""Arguments of `gptlm convert` and `gptlm merge-lora`."""

from dataclasses import dataclass

from gptlm.config.args.hub import RepositoryArguments
from gptlm.config.field import arg

FORMS = ("hf", "megatron", "paddle", "gguf")
GGUF_TYPES = ("f32", "f16", "q8_0")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ConvertArguments:
    """Input and output"""

    source: str | None = arg(
        None,
        "checkpoint folder, .pdparams, .pt or .zip file, built-in name, or OWNER/NAME of the hub. Detected formats: "
        "HuggingFace, Megatron-LM, Megatron-DeepSpeed, PaddleNLP, PaddleFleetX, LoRA adapters of PaddleNLP or PEFT "
        "(required)",
    )
    to: str = arg("hf", "output format", choices=FORMS)
    output: str | None = arg(None, "output folder, new or empty, or of the same command before (required)")
    overwrite: bool = arg(False, "replace what gptlm convert wrote to the output folder before")
    dtype: str = arg("keep", "data type of the output weights", choices=("keep", *DTYPES))
    with_optimizer: bool = arg(
        False, "hf: also convert Adam's moments and step, into OUTPUT/checkpoint-N; resume with --output_dir OUTPUT"
    )
    verify: bool = arg(True, "compare logits before and after on a fixed batch; a difference above 1e-3 is an error")
    check: str | None = arg(
        None,
        "convert nothing, but compare the files of gptlm's own checkpoints with their checksums: a checkpoint-N "
        "folder, or an output folder with several; exit code 1 if one is damaged",
    )
    tokenizer_name_or_path: str | None = arg(None, "tokenizer to save with the weights; unset: the checkpoint's")


@dataclass(frozen=True, kw_only=True)
class ReadingArguments:
    """Facts that the checkpoint does not contain"""

    vocab_size: int | None = arg(None, "vocabulary size; later rows of the embedding are padding and are dropped", ge=1)
    num_attention_heads: int | None = arg(None, "number of attention heads", ge=1)
    consumed_samples: int | None = arg(None, "--with_optimizer: samples that training has consumed", ge=0)
    activation: str | None = arg(
        None, "GELU variant: gelu_new (tanh approximation) or gelu (erf)", choices=("gelu_new", "gelu")
    )


@dataclass(frozen=True, kw_only=True)
class WritingArguments:
    """Output for Megatron-LM, PaddleNLP and llama.cpp"""

    tensor_parallel_degree: int = arg(1, "megatron: tensor-parallel ranks", ge=1)
    pipeline_parallel_degree: int = arg(1, "megatron: pipeline stages", ge=1)
    paddle_qkv: str = arg(
        "split", "paddle: separate q, k and v projections, or one qkv_proj", choices=("split", "fused")
    )
    paddle_file: str = arg(
        "safetensors",
        "paddle: sharded safetensors, or one pdparams file that is built in memory",
        choices=("safetensors", "pdparams"),
    )
    gguf_type: str = arg("f16", "gguf: numbers of matrices and token embedding, the rest is f32", choices=GGUF_TYPES)


@dataclass(frozen=True)
class Conversion:
    """A checked conversion command."""

    main: ConvertArguments
    reading: ReadingArguments
    writing: WritingArguments
    hub: RepositoryArguments = RepositoryArguments()


@dataclass(frozen=True, kw_only=True)
class MergeArguments:
    """Merging LoRA adapters into a model"""

    model_name_or_path: str | None = arg(None, "base model; unset: the one recorded with the adapters")
    lora_path: str | None = arg(None, "LoRA adapters: folder, or OWNER/NAME of the hub (required)")
    output_path: str | None = arg(None, "folder for the merged model, new or empty (required)")
    overwrite: bool = arg(False, "replace what gptlm merge-lora wrote to the output folder before")
    dtype: str = arg("float32", "data type of the merged weights", choices=DTYPES)


@dataclass(frozen=True)
class Merge:
    """A checked command that merges adapters."""

    main: MergeArguments
    hub: RepositoryArguments

"""Arguments of `gptlm evaluate` and `gptlm predict`."""

from dataclasses import dataclass

from gptlm.config.args.training import bad_device
from gptlm.config.field import LARGEST_PORT, LARGEST_SEED, LONGEST_WAIT, arg
from gptlm.data.templates import bad_template

TASKS = ("LAMBADA", "WIKITEXT103", "WIKITEXT2", "TEXT", "DATA")
DETOKENIZERS = ("auto", "wikitext", "lambada", "ptb", "none")
STDIN = "-"  # as input_file
DEFAULT_PROMPTS = (
    "问题：中国的首都是哪里？答案：北京。\n问题：苹果的CEO是谁? 答案：",
    "问题：中国的首都是哪里？答案：北京。\n问题：广东的省会是哪个城市? 答案：",
)


@dataclass(frozen=True, kw_only=True)
class EvaluateArguments:
    """Evaluation"""

    task: str | None = arg(None, "evaluation task (required)", choices=TASKS)
    model_name_or_path: str | None = arg(
        None, "model folder with its tokenizer, LoRA adapter folder, built-in name, or OWNER/NAME of the hub (required)"
    )
    lora_path: str | None = arg(
        None, "LoRA adapters in PEFT format, added to the weights in memory: folder, or OWNER/NAME of the hub"
    )
    eval_path: str | None = arg(
        None,
        "input file. LAMBADA: JSON lines with a text; WIKITEXT*, TEXT: UTF-8 text; TEXT also .jsonl, .json, .parquet",
    )
    json_key: str = arg("text", "TEXT: key of the text in .jsonl, .json and .parquet records")
    cloze_eval: bool | None = arg(None, "PaddleFleetX's task selection: true is LAMBADA, false is WIKITEXT103")
    input_dir: str | None = arg(None, "DATA: prefix of token files, or folder with one pair of token files")
    split: str = arg("949,50,1", "DATA: ratio of train, valid and test sequences")
    split_name: str = arg("valid", "DATA: split to evaluate", choices=("train", "valid", "test"))
    max_seq_length: int | None = arg(
        None,
        "window length; unset: the model's maximum position, at most 1024. LAMBADA: longer texts are cut on the left",
        ge=1,
        unit="tokens",
    )
    overlapping_eval: int | None = arg(
        32,
        "new tokens per window after the first, at most --max_seq_length; none: --max_seq_length",
        ge=1,
        unit="tokens",
    )
    batch_size: int | None = arg(
        None,
        "windows or texts per forward pass; unset: as many as have 16,384 tokens; does not change the results",
        ge=1,
    )
    max_examples: int | None = arg(None, "maximum number of texts (LAMBADA) or windows; unset: all", ge=1)
    detokenizer: str = arg(
        "auto", "how to undo the tokenization of the text; auto: by task; lambada: no change", choices=DETOKENIZERS
    )
    allow_special_tokens: bool = arg(False, "encode <|endoftext|> in a text as the special token")
    json: bool = arg(False, "print the result as one JSON object on stdout and the log on stderr")
    tensor_parallel_degree: int = arg(-1, "tensor parallelism: processes that split each layer; -1: 1")
    logging_freq: int = arg(10, "progress log interval", ge=1, unit="batches")
    ddp_timeout: int = arg(1800, "timeout of collective operations", ge=1, le=LONGEST_WAIT, unit="seconds")
    device: str = arg("gpu", "gpu, gpu:N or cpu; falls back to cpu with a warning if there is no GPU", check=bad_device)
    bf16: bool = arg(False, "bfloat16 weights; the loss stays float32")
    fp16: bool = arg(False, "float16 weights on a GPU, float32 on a CPU; the loss stays float32")
    torch_compile: bool | None = arg(None, "compile layers and scores; unset: on for long evaluations on a GPU")


@dataclass(frozen=True, kw_only=True)
class SizeArguments:
    """Model sizes, as in Megatron-LM commands; an error if they differ from the model's config.json"""

    num_layers: int | None = arg(None, "number of transformer layers")
    hidden_size: int | None = arg(None, "hidden size")
    num_attention_heads: int | None = arg(None, "number of attention heads")
    max_position_embeddings: int | None = arg(None, "rows of the position embedding")
    seq_length: int | None = arg(None, "same as --max_seq_length", ge=1, unit="tokens")


@dataclass(frozen=True, kw_only=True)
class PredictArguments:
    """Text generation"""

    model_name_or_path: str = arg(
        "gpt-cpm-large-cn", "model folder, LoRA adapter folder, built-in name, or OWNER/NAME of the hub"
    )
    lora_path: str | None = arg(
        None, "LoRA adapters in PEFT format, added to the weights in memory: folder, or OWNER/NAME of the hub"
    )
    prompt: list[str] = arg(
        [], "prompts; unset: --input_file, else standard input if piped, else PaddleNLP's two Chinese questions"
    )
    input_file: str | None = arg(
        None, "file with one prompt per line, or .jsonl/.json with prompt, src, text or messages; -: standard input"
    )
    output_file: str | None = arg(None, "also write prompts and generated texts to this .jsonl file")
    overwrite: bool = arg(False, "replace an --output_file that gptlm wrote of other prompts or arguments")
    batch_size: int = arg(1, "prompts per batch", ge=1)
    src_length: int = arg(200, "maximum prompt length; longer prompts are cut, with a log message", ge=1, unit="tokens")
    truncation_side: str = arg("left", "side on which a prompt that is too long is cut", choices=("left", "right"))
    allow_special_tokens: bool = arg(False, "encode <|endoftext|> in a prompt as the special token")
    chat_template: str | None = arg(
        None,
        "template of messages: chatml, plain (headings), or a Jinja file; unset: the tokenizer's, else plain",
        check=bad_template,
    )
    eos_token: str | None = arg(None, "token of the vocabulary that ends a text; unset: the tokenizer's")
    tgt_length: int = arg(200, "maximum number of new tokens, without the prompt", ge=1, unit="tokens")
    min_new_tokens: int = arg(0, "minimum number of new tokens", ge=0, unit="tokens")
    seed: int = arg(20, "random seed for sampling", ge=0, le=LARGEST_SEED)
    decode_strategy: str | None = arg(
        None,
        "PaddleFleetX's decoding: sampling (--do_sample), greedy_search, or beam_search (needs --num_beams)",
        choices=("sampling", "greedy_search", "beam_search"),
    )
    do_sample: bool = arg(False, "sample instead of greedy decoding")
    top_k: int = arg(50, "sampling: keep the k most likely tokens; 0: all", ge=0)
    top_p: float = arg(1.0, "sampling: keep the most likely tokens up to this total probability", gt=0, le=1)
    temperature: float = arg(1.0, "sampling temperature, 0.0001 to 10000")
    repetition_penalty: float = arg(1.0, "penalty for tokens that already occur; 1: none", gt=0)
    num_beams: int = arg(1, "number of beams; 1: no beam search", ge=1, le=1000)
    length_penalty: float = arg(1.0, "beam search: above 0 favors long sequences, below 0 short ones")
    early_stopping: bool = arg(False, "beam search: stop when --num_beams sequences are finished")
    num_return_sequences: int = arg(1, "generated texts per prompt; needs --do_sample or --num_beams", ge=1, le=10000)
    stop_at_eol: bool | None = arg(None, "stop at a line break; unset: for the built-in questions only")
    device: str = arg("gpu", "gpu, gpu:N or cpu; falls back to cpu with a warning if there is no GPU", check=bad_device)
    bf16: bool = arg(False, "bfloat16 weights and computation")
    fp16: bool = arg(False, "float16 weights and computation; GPU only")
    cuda_graphs: bool | None = arg(
        None, "replay each step of the generation as a CUDA graph; unset: on a GPU, without beam search"
    )
    tensor_parallel_degree: int = arg(-1, "tensor parallelism: processes that split each layer; -1: 1")
    ddp_timeout: int = arg(
        1800, "tensor parallelism: timeout of collective operations", ge=1, le=LONGEST_WAIT, unit="seconds"
    )
    serve: bool = arg(False, "open a local web page for prompts; needs gptlm[serve]")
    host: str = arg("127.0.0.1", "--serve: address to listen on")
    port: int = arg(7860, "--serve: port to listen on", ge=1, le=LARGEST_PORT)

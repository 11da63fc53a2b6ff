"""Small valid inputs of every kind, and commands that read them."""

import contextlib
import gzip
import io
import json
import os
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

import yaml
import zstandard

from gptlm.cli import COMMANDS, DATA_TOOLS, main
from gptlm.config.parser import Vocabulary

TEXTS = [
    f"{a} {b} {a} {c}." for a, b, c in zip("the cat sat on".split(), "dogs ran far away".split(), "old 花 é _".split())
]
PAIRS = [{"src": text, "tgt": text[:6]} for text in TEXTS]
CHATS = [
    {
        "messages": [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": text},
            {"role": "assistant", "content": text[:5], "weight": 1},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }
    for text in TEXTS
]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FLEETX_BASE = """\
Global: {device: cpu, seed: 1024, global_batch_size: , local_batch_size: 1, micro_batch_size: 1}
Engine:
  max_steps: 5
  logging_freq: 1
  eval_freq: 5
  eval_iters: 1
  mix_precision: {enable: True, dtype: float16, level: O2, scale_loss: 32768.0}
  save_load: {save_steps: 10, output_dir: ./output, ckpt_dir: }
Model: {module: GPTModule, name: GPT, vocab_size_divisible_unit: 128}
Data:
  Train:
    dataset: {name: GPTDataset, input_dir: tokens, split: [949, 50, 1], max_seq_len: 16}
    loader: {num_workers: 1, collate_fn: gpt_collate_fn}
Optimizer:
  name: FusedAdamW
  weight_decay: 0.01
  lr: {name: CosineAnnealingWithWarmupDecay, decay_steps: 360000, warmup_rate: 0.01, max_lr: 5.0e-05, min_lr: 1e-5}
  grad_clip: {name: ClipGradByGlobalNorm, clip_norm: 1.0}
"""
FLEETX = """\
_base_: ./base.yaml
Global:
  local_batch_size: 4
  micro_batch_size: 2
Model:
  vocab_size: 384
  hidden_size: 16
  num_layers: 2
  num_attention_heads: 2
  ffn_hidden_size:
  use_recompute: True
  recompute_granularity:
Distributed:
  dp_degree: 1
  mp_degree: 1
  pp_degree: 1
  sharding: {sharding_degree: 1, sharding_stage: 1}
"""
FLEETX_GENERATION = """\
_base_: ./base.yaml
Model: {module: GPTGenerationModule}
Generation: {top_k: 5, top_p: 0.9, max_dec_len: 3, decode_strategy: sampling, num_return_sequences: 1}
"""
FLEETX_EVALUATION = """\
_base_: ./base.yaml
Model: {module: GPTEvalModule, num_layers: 2, hidden_size: 16, num_attention_heads: 2}
Offline_Eval: {eval_path: lambada.jsonl, cloze_eval: True, overlapping_eval: 8, batch_size: 2, max_seq_len: 16}
"""
TRAIN = (
    "--per_device_train_batch_size 2 --per_device_eval_batch_size 2 --max_steps 1 --eval_iters 1 --logging_steps 1 "
    "--save_steps 1 --eval_steps 1 --do_train --device cpu --disable_tqdm true --report_to none"
)
MODEL = "--model_name_or_path model"
PRETRAIN = f"pretrain {MODEL} --max_seq_length 16 --split 80,10,10 {TRAIN} --output_dir out --input_dir"
SFT = (
    f"sft {MODEL} {TRAIN.replace('--eval_iters 1 ', '')} --src_length 20 --tgt_length 8 "
    "--preprocessing_num_workers 1 --generate_num 1 --output_dir out --dataset_name_or_path"
)
PREDICT = "predict --device cpu --tgt_length 2 --src_length 20 --model_name_or_path"
EVALUATE = "evaluate --device cpu --max_seq_length 16 --batch_size 2 --max_examples 2 --model_name_or_path"
BPE = ("bpe/vocab.json", "bpe/merges.txt")
HF = ("model/config.json", "model/model.safetensors")
TOKENIZER = ("model/tokenizer.json", "model/tokenizer_config.json")
ALL_OF_MODEL = (*HF, *TOKENIZER, "model/generation_config.json")
ADAPTERS = ("adapters/adapter_config.json", "adapters/adapter_model.safetensors")
PAIR = ("tokens/text.bin", "tokens/text.idx")
STEP = "out/checkpoint-1"
SHARDS = ("shards/checkpoint-1/shards.json", "shards/checkpoint-1/weights-00001-of-00001.safetensors")


@dataclass(frozen=True)
class Command:
    """A command line that ends well, and the files that it reads (folders: with all that is in them)."""

    line: str
    reads: tuple[str, ...]
    also: tuple[str, ...] = ()  # files that must be there and are not changed
    fixed: tuple[str, ...] = ()  # flags that are not changed

    @property
    def words(self) -> list[str]:
        return self.line.split()

    @property
    def vocabulary(self) -> Vocabulary:
        name, tool = self.words[0], self.words[1] if len(self.words) > 1 else ""
        if name == "request":
            return Vocabulary(())
        if name == "python":
            name = {"generate": "predict"}.get(tool, tool)
        return DATA_TOOLS[tool][1] if name == "data" else COMMANDS[name].vocabulary


DORA = ("dora/adapter_config.json", "dora/adapter_model.safetensors")
PISSA = ("pissa/adapter_config.json", "pissa/adapter_model.safetensors")
CHAT = ("chat/chat_template.jinja", "chat/tokenizer_config.json", "chat/config.json")

COMMAND_LINES = {
    "pretrain": Command(f"{PRETRAIN} tokens", (*HF, *TOKENIZER, *PAIR)),
    "pretrain-npy": Command(f"{PRETRAIN} npy", ("npy/text_ids.npy", "npy/text_idx.npz"), ("model",)),
    "pretrain-resume": Command(
        f"{PRETRAIN} tokens --max_steps 2", (STEP, "out/trainer_state.json"), ("model", "tokens", "out")
    ),
    "pretrain-resume-shards": Command(
        f"{PRETRAIN} tokens --max_steps 2 --checkpoint_format sharded --output_dir shards",
        ("shards/checkpoint-1",),
        ("model", "tokens", "shards"),
    ),
    "pretrain-bin": Command(
        f"{PRETRAIN} tokens --continue_training --model_name_or_path bin",
        ("bin/pytorch_model.bin",),
        ("bin", "model", "tokens"),
    ),
    "pretrain-sharded": Command(
        f"{PRETRAIN} tokens --continue_training --model_name_or_path sharded",
        ("sharded/model.safetensors.index.json", "sharded/config.json"),
        ("sharded", "tokens"),
    ),
    "pretrain-text": Command(
        f"{PRETRAIN.removesuffix('--input_dir')} --train_file text/c.jsonl",
        ("text/c.jsonl",),
        ("model",),
    ),
    "pretrain-dataset": Command(
        f"{PRETRAIN.removesuffix('--input_dir')} --dataset_name saved --text_column src", ("saved",), ("model",)
    ),
    "pretrain-config": Command(
        f"{PRETRAIN} tokens --model_name_or_path model/config.json --tokenizer_name_or_path bpe --vocab_size 384 "
        "--print_config",
        ("model/config.json", *BPE),
        ("model", "tokens", "bpe"),
    ),
    "pretrain-json": Command("pretrain run.json --print_config", ("run.json",), ("model", "tokens")),
    "pretrain-yaml": Command("pretrain -c run.yaml --print_config", ("run.yaml",), ("model", "tokens")),
    "pretrain-fleetx": Command("pretrain -c fleetx.yaml --print_config", ("fleetx.yaml", "base.yaml"), ("tokens",)),
    "pretrain-zero": Command(
        f"{PRETRAIN} tokens --deepspeed zero.json --print_config", ("zero.json",), ("model", "tokens")
    ),
    "sft": Command(f"{SFT} sft", ("sft/train.jsonl", "sft/dev.json", *ALL_OF_MODEL)),
    "sft-lora": Command(
        f"{SFT} sft/train.jsonl --lora --lora_path adapters --do_eval false", ("sft/train.jsonl", *ADAPTERS), ("model",)
    ),
    "sft-chat": Command(
        f"{SFT} chat.jsonl --model_name_or_path chat --src_length 80",
        ("chat.jsonl", "chat/chat_template.jinja", "chat/tokenizer_config.json"),
        ("chat",),
    ),
    "sft-parquet": Command(f"{SFT} pairs.parquet", ("pairs.parquet",), ("model",)),
    "sft-saved": Command(f"{SFT} saved", ("saved",), ("model",)),
    "sft-squad": Command(f"{SFT} squad.json", ("squad.json",), ("model",)),
    "sft-alpaca": Command(f"{SFT} alpaca.jsonl --zero_padding --src_length 80", ("alpaca.jsonl",), ("model",)),
    "sft-resume": Command(
        f"{SFT} sft --lora --do_eval false --max_steps 2 --output_dir tuned", ("tuned",), ("model", "sft")
    ),
    "sft-columns": Command(
        f"{SFT} pairs.parquet --prompt_column tgt --response_column src --val_size 1", ("pairs.parquet",), ("model",)
    ),
    "sft-dora": Command(f"{SFT} sft --lora --use_dora --lora_path dora --do_eval false", DORA, ("model", "sft")),
    "sft-json": Command("sft sft.json", ("sft.json",), ("model", "sft")),
    "predict": Command(f"{PREDICT} model --input_file prompts.txt", ("prompts.txt", *ALL_OF_MODEL)),
    "predict-json": Command(
        f"{PREDICT} model --input_file prompts.jsonl --output_file found.jsonl", ("prompts.jsonl",), ("model",)
    ),
    "predict-adapters": Command(f"{PREDICT} adapters --prompt hi", ADAPTERS, ("model",)),
    "predict-fleetx": Command(
        "predict -c generation.yaml --model_name_or_path model --device cpu",
        ("generation.yaml", "base.yaml"),
        ("model",),
    ),
    "predict-pissa": Command(f"{PREDICT} model --lora_path pissa --prompt hi", PISSA, ("model",)),
    "chat": Command("chat --model_name_or_path chat --device cpu --tgt_length 2", CHAT, ("chat",)),
    # ends at once: the address is of no machine
    "serve": Command(
        "serve --model_name_or_path chat --device cpu --host 192.0.2.1 --port 1", CHAT, ("chat",), ("host", "port")
    ),
    "request-chat": Command("request chat-request.json /v1/chat/completions", ("chat-request.json",), ("chat",)),
    "request-text": Command("request text-request.json /v1/completions", ("text-request.json",), ("chat",)),
    "request-raw": Command("request request.http", ("request.http",), ("chat",)),
    "report": Command("report out --output new.html", ("out/run_log.jsonl",), ("out",)),
    "report-two": Command(
        "report tuned out --output new.html", ("tuned/run_log.jsonl", "tuned/trainer_state.json"), ("out", "tuned")
    ),
    "report-state": Command("report old-run --output new.html", ("old-run/trainer_state.json",)),
    "python-evaluate": Command(
        "python evaluate model --task TEXT --eval_path text/b.txt --device cpu --max_seq_length 16 --batch_size 2",
        (),
        ("model", "text"),
    ),
    "python-generate": Command("python generate model --device cpu --tgt_length 2", (), ("model",), ("tgt_length",)),
    "python-pretrain": Command(
        f"python {PRETRAIN.replace('pretrain', 'pretrain -', 1)} tokens", (), ("model", "tokens")
    ),
    "python-sft": Command(f"python {SFT.replace('sft', 'sft -', 1)} sft --do_eval false", (), ("model", "sft")),
    "evaluate": Command(f"{EVALUATE} model --task TEXT --eval_path text/b.txt", ("text/b.txt", *HF, *TOKENIZER)),
    "evaluate-records": Command(
        f"{EVALUATE} model --task TEXT --eval_path text/c.jsonl", ("text/c.jsonl",), ("model",)
    ),
    "evaluate-lambada": Command(
        f"{EVALUATE} model --task LAMBADA --eval_path lambada.jsonl", ("lambada.jsonl",), ("model",)
    ),
    "evaluate-data": Command(f"{EVALUATE} model --task DATA --input_dir tokens --split 1,1,1", PAIR, ("model",)),
    "evaluate-adapters": Command(
        f"{EVALUATE} model --lora_path adapters --task TEXT --eval_path text/b.txt", ADAPTERS, ("model", "text")
    ),
    "evaluate-fleetx": Command(
        "evaluate -c evaluation.yaml --model_name_or_path model --device cpu",
        ("evaluation.yaml", "base.yaml"),
        ("model", "lambada.jsonl"),
    ),
    "convert-hf": Command("convert --from model --to megatron --output new", HF, ("model",)),
    "convert-gguf": Command("convert --from model --to gguf --output new", (*HF, *TOKENIZER), ("model",)),
    "convert-paddle": Command(
        "convert --from paddle --to hf --output new", ("paddle/config.json", "paddle/model_state.pdparams")
    ),
    "convert-unified": Command(
        "convert --from unified --output new", ("unified/config.json", "unified/model.safetensors")
    ),
    "convert-fleetx": Command(
        "convert --from fleetx --output new --num_attention_heads 4", ("fleetx/mp_00_sharding_00_pp_00",)
    ),
    "convert-megatron": Command("convert --from megatron --output new --vocab_size 50", ("megatron",)),
    "convert-deepspeed": Command("convert --from deepspeed --output new --vocab_size 50", ("deepspeed",)),
    "convert-zip": Command("convert --from megatron.zip --output new --vocab_size 50", ("megatron.zip",)),
    "convert-bin": Command("convert --from bin --to paddle --output new", ("bin/pytorch_model.bin", "bin/config.json")),
    "convert-adapters": Command("convert --from adapters --to paddle --output new", ADAPTERS, ("model",)),
    "convert-paddle-lora": Command(
        "convert --from paddle-lora --output new",
        ("paddle-lora/lora_config.json", "paddle-lora/lora_model_state.pdparams"),
    ),
    "convert-shards": Command("convert --from shards/checkpoint-1 --output new", SHARDS, ("shards",)),
    "convert-optimizer": Command("convert --from out/checkpoint-1 --output new", (STEP,), ("out",)),
    "merge-dora": Command("merge-lora --lora_path dora --output_path new", DORA, ("model",)),
    "merge-lora": Command("merge-lora --lora_path adapters --output_path new", (*ADAPTERS, *HF), ("model",)),
    **{
        f"preprocess-{suffix.replace('.', '-')}": Command(
            f"preprocess --input_path {folder}/{name}.{suffix} {MODEL} --output_prefix new/t --append_eos --workers 1",
            (f"{folder}/{name}.{suffix}",),
            ("model",),
        )
        for folder, name, suffix in [
            ("text", "a", "json"),
            ("text", "b", "txt"),
            ("text", "c", "jsonl"),
            ("other", "d", "jsonl.gz"),
            ("other", "e", "txt.zst"),
            ("other", "f", "parquet"),
        ]
    },
    "preprocess-bpe": Command(
        "preprocess --input text/b.txt --vocab_file bpe/vocab.json --merge_file bpe/merges.txt "
        "--tokenizer_type GPT2BPETokenizer --output_prefix t --workers 1",
        BPE,
        ("text",),
    ),
    "preprocess-saved": Command(
        "preprocess --input_path saved --json_key src --model_name_or_path model --output_prefix t --workers 2",
        ("saved", *TOKENIZER),
        ("model",),
    ),
    "tokenizer": Command(
        "tokenizer --input_path text --vocab_size 300 --output_dir new", ("text/a.json", "text/b.txt", "text/c.jsonl")
    ),
    "data-cached": Command("data check old/text", ("old/text.bin", "old/text.idx")),
    "data-check": Command("data check tokens/text", PAIR),
    "data-stats": Command("data stats npy/text", ("npy/text_ids.npy", "npy/text_idx.npz")),
    "data-show": Command(
        "data show --input_dir tokens --max_seq_length 8 --tokenizer_name_or_path model", (*PAIR, *TOKENIZER)
    ),
    "data-order": Command("data order --input_dir tokens --max_seq_length 8 --split 8,1,1 --json", PAIR),
    "data-merge": Command("data merge --input tokens/text tokens/text --output_prefix new", PAIR),
    "data-convert": Command(
        "data convert --input npy/text --output_prefix new --dataset_impl npy", ("npy/text_ids.npy", "npy/text_idx.npz")
    ),
    "data-index": Command(
        f"data index {MODEL} --max_seq_length 16 --split 80,10,10 --max_steps 2 --output_dir out --input_dir tokens",
        PAIR,
        ("model",),
    ),
    "plan": Command(
        "plan --num_hidden_layers 4 --hidden_size 64 --num_attention_heads 4 --vocab_size 512 --max_seq_length 16 "
        "--max_steps 3",
        (),
    ),
    "plan-yaml": Command("plan -c fleetx.yaml", ("fleetx.yaml", "base.yaml"), ("tokens",)),
    # these two end at once, as run.json is a file: a launcher takes seconds, the demo minutes
    "launch": Command("launch --nproc_per_node 1 --log_dir run.json/logs script.py", (), ("run.json", "script.py")),
    "demo": Command("demo --output_dir run.json/demo --max_steps 0", (), ("run.json",)),
}


def build_world(root: Path) -> None:
    """Write all files. Takes seconds and loads torch; call it in a process of its own."""
    os.chdir(root)
    _write_texts()
    _write_models()
    _write_others()
    _quietly(f"preprocess --input_path text {MODEL} --output_prefix tokens/text --append_eos --workers 1")
    _quietly("data convert --input tokens/text --output_prefix npy/text --dataset_impl npy")
    _quietly("data convert --input tokens/text --output_prefix old/text --dataset_impl cached")
    _quietly(f"{PRETRAIN} tokens --do_eval")
    _quietly(f"{PRETRAIN} tokens --checkpoint_format sharded --output_dir shards")
    _quietly(f"{SFT} sft --lora --do_eval false --output_dir tuned")
    _quietly("convert --from adapters --to paddle --output paddle-lora")
    settings = [*PRETRAIN.split()[1:-1], "--input_dir", "tokens", "--learning_rate", "1e-3", "--warmup_steps", "0.5"]
    arguments = _as_arguments(settings)
    Path("run.json").write_text(json.dumps(arguments, indent=1))
    Path("run.yaml").write_text("# of a run\n" + yaml.safe_dump(arguments))
    Path("old-run").mkdir()
    shutil.copy("out/trainer_state.json", "old-run")
    Path("sft.json").write_text(json.dumps(_as_arguments([*SFT.split()[1:], "sft"])))


def _as_arguments(words: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for word, value in zip(words, [*words[1:], "--"]):
        if word.startswith("--"):
            found[word[2:]] = True if value.startswith("--") else int(value) if value.isdigit() else value
    return found


def _quietly(line: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(line.split())
    assert code == 0, f"{line}: {said.getvalue()}"


def _write_texts() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset

    for name in ("text", "other", "sft", "new"):
        Path(name).mkdir(exist_ok=True)
    records = [{"text": text, "id": place, "meta": {"a": [1, None]}} for place, text in enumerate(TEXTS * 6)]
    lines = "\n".join(map(json.dumps, records)) + "\n"
    plain = "\n\n".join(TEXTS) + "\n"
    Path("text/a.json").write_text(json.dumps(records[:4], ensure_ascii=False))
    Path("text/b.txt").write_text(plain)
    Path("text/c.jsonl").write_text(lines)
    Path("other/d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    Path("other/e.txt.zst").write_bytes(zstandard.compress(plain.encode()))
    pq.write_table(pa.table({"text": TEXTS, "id": list(range(len(TEXTS)))}), "other/f.parquet")
    pq.write_table(pa.Table.from_pylist(PAIRS), "pairs.parquet")
    Dataset.from_list(PAIRS).save_to_disk("saved")
    Path("sft/train.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    Path("sft/dev.json").write_text(json.dumps(PAIRS[:2]))
    Path("chat.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    answers = {"context": "the cat sat", "question": "who sat?", "answers": {"text": ["the cat"], "answer_start": [0]}}
    Path("squad.json").write_text(json.dumps([{**answers, "id": place, "title": "t"} for place in range(3)]))
    task = {"instruction": "add", "input": "1 2", "output": "3", "system": "be short", "history": [["a", "b"]]}
    Path("alpaca.jsonl").write_text("\n".join(json.dumps(task) for _ in range(3)))
    Path("lambada.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    Path("prompts.txt").write_text("\n".join(TEXTS[:2]))
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text, "id": 1}) for text in TEXTS[:2]))
    chat = {"model": "m", "messages": CHATS[0]["messages"][1:2], "max_tokens": 2, "temperature": 0.5, "stop": ["x"]}
    text = {"model": "m", "prompt": ["the cat", [5, 6]], "max_tokens": 2, "seed": 1, "stream": True, "n": 2}
    Path("chat-request.json").write_text(json.dumps(chat))
    Path("text-request.json").write_text(json.dumps(text | {"stream_options": {"include_usage": True}}))
    body = json.dumps(chat)
    head = f"POST /v1/chat/completions HTTP/1.1\nHost: localhost\nConnection: close\nContent-Length: {len(body)}\n\n"
    Path("request.http").write_bytes(head.replace("\n", "\r\n").encode() + body.encode())
    Path("fleetx.yaml").write_text(FLEETX)
    Path("base.yaml").write_text(FLEETX_BASE)
    Path("generation.yaml").write_text(FLEETX_GENERATION)
    Path("evaluation.yaml").write_text(FLEETX_EVALUATION)
    Path("script.py").write_text("print('started')\n")
    shutil.copy(Path(__file__).parents[2] / "ds_configs" / "zero1.json", "zero.json")


def _write_models() -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    from gptlm.model.tokenizer import train_tokenizer

    torch.manual_seed(1)
    tokenizer = train_tokenizer(TEXTS * 3, 300)
    config = GPT2Config(vocab_size=384, n_positions=96, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    for folder in ("model", "bin", "sharded", "chat"):
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder, max_shard_size="20KB" if folder == "sharded" else "1GB")
    Path("bin/model.safetensors").unlink()
    torch.save(model.state_dict(), "bin/pytorch_model.bin")
    Path("chat/chat_template.jinja").write_text(TEMPLATE)
    Path("bpe").mkdir()
    tokenizer.backend_tokenizer.model.save("bpe")
    kinds = {"adapters": {}, "dora": {"use_dora": True, "use_rslora": True}, "pissa": {"init_lora_weights": "pissa"}}
    for folder, kind in kinds.items():
        base = GPT2LMHeadModel.from_pretrained("model")
        settings = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True, **kind)
        adapters = get_peft_model(base, settings)
        adapters.peft_config["default"].base_model_name_or_path = "model"
        adapters.save_pretrained(folder)


def _write_others() -> None:
    from safetensors.torch import save_file

    from tests.conversion import layouts

    model = layouts.stock()
    layouts.write_megatron(model, Path("megatron"), 3.0, 1, 1)
    layouts.write_deepspeed(model, Path("deepspeed"), 1)
    tensors = layouts.paddle_tensors(model, True)
    for folder in ("paddle", "unified"):
        Path(folder).mkdir()
        Path(folder, "config.json").write_text(json.dumps(layouts.PADDLE_CONFIG))
    layouts.write_pdparams(Path("paddle/model_state.pdparams"), tensors)
    layouts.write_pdparams(Path("fleetx/mp_00_sharding_00_pp_00/model.pdparams"), tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, "unified/model.safetensors")
    with zipfile.ZipFile("megatron.zip", "w") as archive:
        for path in Path("megatron").rglob("*"):
            archive.write(path, path.relative_to("megatron"))

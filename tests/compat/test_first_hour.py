"""What users of run_clm.py, TRL, LLaMA-Factory and litgpt type first: an effect, a reason, or what to type instead."""

import shlex

import pytest

from gptlm.commands.chat import parse_chat
from gptlm.commands.predict import parse_predict
from gptlm.commands.pretrain import PRETRAIN
from gptlm.commands.serve import parse_serve
from gptlm.commands.sft import SFT, parse_sft
from gptlm.config.parser import parse
from gptlm.errors import UsageError

# words -> our arguments
MEANS = [
    # TRL
    ("--dataset_name trl-lib/Capybara", {"dataset_name_or_path": "trl-lib/Capybara"}),
    ("--packing", {"zero_padding": True}),
    ("--max_length 512", {"max_length": 512}),
    ("--max_seq_length 512", {"max_length": 512}),
    ("--assistant_only_loss", {"train_on_prompt": False}),
    ("--completion_only_loss false", {"train_on_prompt": True}),
    ("--gradient_checkpointing", {"recompute": True}),
    ("--use_peft --lora_r 16 --lora_alpha 32 --lora_dropout 0.05",
     {"lora": True, "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.05}),
    ("--load_in_4bit --use_peft", {"load_in_4bit": True, "lora": True}),
    ("--dtype bfloat16", {"bf16": True, "fp16_opt_level": "O2"}),
    ("--eval_strategy steps --eval_steps 50", {"evaluation_strategy": "steps", "eval_steps": 50}),
    ("--report_to none", {"report_to": ["none"]}),
    # run_clm.py
    ("--train_file a.jsonl --validation_file b.jsonl",
     {"dataset_name_or_path": "a.jsonl", "eval_dataset_name_or_path": "b.jsonl"}),
    ("--block_size 128 --torch_dtype auto", {"max_length": 128, "bf16": False}),
    # LLaMA-Factory
    ("--stage sft --finetuning_type lora --template chatml --cutoff_len 1024 --max_samples 1000",
     {"lora": True, "chat_template": "chatml", "max_length": 1024, "max_train_samples": 1000}),
    ("--finetuning_type full --pure_bf16", {"lora": False, "bf16": True, "fp16_opt_level": "O2"}),
    ("--lora_target all --additional_target wte,lm_head",
     {"lora_target_modules": ["all-linear"], "modules_to_save": ["wte", "lm_head"]}),
    ("--quantization_bit 4 --quantization_type nf4 --double_quantization true",
     {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}),
    # PaddleNLP
    ("--weight_quantize_algo fp4 --lora", {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "load_in_8bit": False}),
    ("--weight_quantize_algo weight_only_int8 --lora", {"load_in_4bit": False, "load_in_8bit": True}),
    ("--weight_quantize_algo none", {"load_in_4bit": False, "load_in_8bit": False}),
    ("--neftune --pissa --lora", {"neftune_noise_alpha": 5.0, "init_lora_weights": "pissa"}),
    ("--adapter_name_or_path a --neat_packing true", {"lora_path": "a", "zero_padding": True}),
    ("--pissa_init true --use_rslora true --use_dora true",
     {"init_lora_weights": "pissa", "use_rslora": True, "use_dora": True}),
    ("--disable_gradient_checkpointing false", {"recompute": True}),
    # litgpt
    ("--checkpoint_dir gpt2 --out_dir o --data JSON --data.json_path a.json --data.val_split_fraction 0.1",
     {"model_name_or_path": "gpt2", "output_dir": "o", "dataset_name_or_path": "a.json", "val_size": 0.1}),
    ("--train.epochs 2 --train.micro_batch_size 4 --train.global_batch_size 16 --train.max_seq_length 256",
     {"num_train_epochs": 2, "per_device_train_batch_size": 4, "global_batch_size": 16, "max_length": 256}),
    ("--precision bf16-true --quantize bnb.nf4", {"bf16": True, "fp16_opt_level": "O2", "load_in_4bit": True}),
    ("--logger_name csv --devices 1", {"report_to": ["none"]}),
]  # fmt: skip
# words -> what the refusal names
INSTEAD = [
    ("--validation_split_percentage 5", "--val_size"),
    ("--dataset_dir data", "--dataset_name_or_path"),
    ("--stage pt", "gptlm pretrain"),
    ("--stage dpo", "not implemented"),
    ("--weight_quantize_algo a8w8", "expected one of none, nf4, fp4, weight_only_int8, llm.int8"),
    ("--finetuning_type freeze", "expected one of lora, full"),
    ("--mask_history true", '"weight": 0'),
    ("--default_system hello", "system text"),
    ("--rope_scaling linear", "max_position_embeddings"),
    ("--tokenized_path x", "--data_cache"),
    ("--use_galore true", "--optim"),
    ("--export_dir x", "gptlm merge-lora"),
    ("--data Alpaca", "--dataset_name_or_path"),
    ("--add_tokens a", "--additional_special_tokens"),
    ("--devices 4", "torchrun"),
    ("--train.log_interval 1", "--logging_steps"),
    ("--data.prompt_style alpaca", "--chat_template"),
]
WITHOUT_EFFECT = (
    "--attn_implementation flash_attention_2 --flash_attn fa2 --use_unsloth true --enable_liger_kernel true "
    "--plot_loss true --overwrite_cache true --trust_remote_code true --resize_vocab true --compute_accuracy true"
)


@pytest.mark.parametrize(("words", "meant"), MEANS)
def test_it_means(words, meant):
    found = parse(SFT, words.split())
    assert {name: found.value(name) for name in meant} == meant
    assert not found.notes


@pytest.mark.parametrize(("words", "named"), INSTEAD)
def test_the_refusal_says_what_to_type(words, named):
    with pytest.raises(UsageError, match=words.split()[0]) as caught:
        parse(SFT, words.split())
    assert named in str(caught.value)


def test_each_word_without_effect_is_named_once():
    notes = parse(SFT, WITHOUT_EFFECT.split()).notes
    words = [word for word in WITHOUT_EFFECT.split() if word.startswith("--")]
    assert len(notes) == len(words) and all(word in note for word, note in zip(words, notes, strict=True))


YAML = """
### model
model_name_or_path: gpt2
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
### dataset
dataset: rows.jsonl
template: chatml
cutoff_len: 1024
max_samples: 1000
### output
output_dir: out
plot_loss: true
report_to: none
learning_rate: 1.0e-4
lr_scheduler_type: cosine
bf16: true
resume_from_checkpoint: null
"""


def test_a_yaml_file_of_llama_factory(tmp_path):
    (tmp_path / "lora.yaml").write_text(YAML)
    found = parse(SFT, [str(tmp_path / "lora.yaml"), "--max_samples", "10"])
    wanted = {
        "lora": True, "lora_rank": 8, "lora_target_modules": ["all-linear"], "dataset_name_or_path": "rows.jsonl",
        "chat_template": "chatml", "max_length": 1024, "max_train_samples": 10, "learning_rate": 1e-4, "bf16": True,
    }  # fmt: skip
    assert {name: found.value(name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 --block_size 512",
         {"dataset_name": "wikitext", "dataset_config": "wikitext-2-raw-v1", "max_seq_length": 512}),
        ("--train_file a.txt --do_train --do_eval --torch_dtype bfloat16",
         {"train_file": "a.txt", "do_train": True, "do_eval": True, "bf16": True}),
    ],
)  # fmt: skip
def test_run_clm_from_scratch(words, meant):
    found = parse(PRETRAIN, words.split())
    assert {name: found.value(name) for name in meant} == meant


AXOLOTL = """
base_model: gpt2
load_in_4bit: false
datasets:
  - path: rows.jsonl
    type: alpaca
val_set_size: 0.1
output_dir: ./my out
adapter: lora
lora_r: 16
lora_target_linear: true
sequence_len: 512
sample_packing: true
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_torch
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
wandb_project:
evals_per_epoch: 4
special_tokens:
  pad_token: <|endoftext|>
"""
LITGPT = """
checkpoint_dir: gpt2
out_dir: out
precision: bf16-true
quantize: bnb.nf4
devices: 1
lora_r: 32
lora_query: true
data:
  class_path: litgpt.data.JSON
  init_args:
    json_path: rows.jsonl
    mask_prompt: false
    val_split_fraction: 0.05
train:
  epochs: 4
  micro_batch_size: 2
  max_steps:
  log_interval: 1
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.0002
    betas: [0.9, 0.95]
"""


@pytest.mark.parametrize(
    ("library", "text", "meant", "without"),
    [
        ("axolotl", AXOLOTL, {
            "model_name_or_path": "gpt2", "dataset_name_or_path": "rows.jsonl", "val_size": 0.1, "lora": True,
            "output_dir": "./my out", "lora_rank": 16, "lora_target_modules": ["all-linear"], "max_length": 512,
            "zero_padding": True, "per_device_train_batch_size": 2, "num_train_epochs": 3, "learning_rate": 2e-4,
            "bf16": True, "recompute": True, "load_in_4bit": False, "optim": "adamw_torch",
        }, "datasets.type, evals_per_epoch, special_tokens.pad_token"),
        ("litgpt", LITGPT, {
            "model_name_or_path": "gpt2", "output_dir": "out", "dataset_name_or_path": "rows.jsonl", "lora": True,
            "lora_rank": 32, "load_in_4bit": True, "fp16_opt_level": "O2", "train_on_prompt": True, "val_size": 0.05,
            "num_train_epochs": 4, "per_device_train_batch_size": 2, "max_steps": None, "learning_rate": 2e-4,
        }, "lora_query, train.log_interval, optimizer.betas"),
    ],
)  # fmt: skip
def test_yaml_of_axolotl_and_litgpt_is_refused_with_its_flags(library, text, meant, without, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    for vocabulary in (SFT, PRETRAIN):
        with pytest.raises(UsageError, match=f"x.yaml is a configuration of {library}, which is not read") as caught:
            parse(vocabulary, ["-c", str(path)])
        flags, _, rest = (
            str(caught.value).partition("gptlm sft ")[2].partition("; without a flag of the same meaning: ")
        )
        assert rest == without
        found = parse(SFT, shlex.split(flags))  # what the message says can be typed
        defaults = parse(SFT, [])
        wanted = {name: defaults.value(name) if value is None else value for name, value in meant.items()}
        assert {name: found.value(name) for name in wanted} == wanted


def test_yaml_for_pretraining_is_refused_with_flags_of_pretraining(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("base_model: gpt2\npretraining_dataset:\n  - path: owner/name\nsequence_len: 128\nmax_steps: 5\n")
    with pytest.raises(UsageError) as caught:
        parse(PRETRAIN, [str(path)])
    found = parse(PRETRAIN, shlex.split(str(caught.value).partition("gptlm pretrain ")[2]))
    assert (found.value("dataset_name"), found.value("max_seq_length"), found.value("max_steps")) == (
        "owner/name",
        128,
        5,
    )


def test_a_command_without_sections_says_what_its_files_hold(tmp_path):
    (tmp_path / "x.yaml").write_text("train:\n  epochs: 1\n")
    with pytest.raises(UsageError, match="x.yaml has sections.*lines of FLAG: VALUE"):
        parse(SFT, [str(tmp_path / "x.yaml")])


@pytest.mark.parametrize("read", [lambda words: parse_sft(words, {}), parse_chat, parse_serve, parse_predict])
def test_a_template_of_another_library_is_refused_before_anything_is_loaded(read):
    words = ["--model_name_or_path", "gpt2-en", "--chat_template", "llama3"]
    with pytest.raises(
        UsageError, match="--chat_template llama3: no such file; expected chatml, plain or a Jinja file"
    ):
        read(words)

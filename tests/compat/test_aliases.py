"""Every alias has its effect, is refused, or is logged; none is mistaken for another argument."""

import json
import re
from dataclasses import fields

import pytest
from transformers import TrainingArguments

from gptlm.cli import COMMANDS, DATA_TOOLS
from gptlm.commands.evaluate import EVALUATE
from gptlm.commands.merge_lora import MERGE
from gptlm.commands.predict import PREDICT
from gptlm.commands.preprocess import PREPROCESS
from gptlm.commands.pretrain import PRETRAIN, parse_pretrain
from gptlm.commands.sft import SFT, parse_sft
from gptlm.config.help import help_text
from gptlm.config.parser import FALSE, parse
from gptlm.errors import UsageError
from tests.config.test_problem import save_model

VOCABULARIES = {name: command.vocabulary for name, command in COMMANDS.items()}
VOCABULARIES |= {f"data {name}": tool[1] for name, tool in DATA_TOOLS.items()}

# Words of transformers 4, of its run_clm.py, and of TRL's SFTConfig, ModelConfig and ScriptArguments.
TRANSFORMERS_4 = """
    per_gpu_train_batch_size per_gpu_eval_batch_size evaluation_strategy no_cuda use_cpu use_mps_device jit_mode_eval
    use_ipex half_precision_backend fp16_backend bf16_full_eval fp16_full_eval xpu_backend tpu_num_cores
    tpu_metrics_debug dataloader_drop_last past_index sharded_ddp fsdp_min_num_params
    fsdp_transformer_layer_cls_to_wrap group_by_length length_column_name save_safetensors overwrite_output_dir
    logging_dir push_to_hub_model_id push_to_hub_organization push_to_hub_token torchdynamo ray_scope mp_parameters
    split_batches dispatch_batches include_tokens_per_second include_inputs_for_metrics adafactor
""".split()
RUN_CLM = """
    model_name_or_path model_type config_overrides config_name tokenizer_name cache_dir use_fast_tokenizer
    model_revision token trust_remote_code torch_dtype dtype low_cpu_mem_usage attn_implementation dataset_name
    dataset_config_name train_file validation_file max_train_samples max_eval_samples streaming block_size
    overwrite_cache validation_split_percentage preprocessing_num_workers keep_linebreaks
""".split()
TRL = """
    max_seq_length max_length packing packing_strategy padding_free eval_packing dataset_text_field dataset_num_proc
    dataset_kwargs model_init_kwargs chat_template_path eos_token pad_token pad_to_multiple_of completion_only_loss
    assistant_only_loss activation_offloading shuffle_dataset loss_type use_peft lora_r lora_alpha lora_dropout
    lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora load_in_8bit
    load_in_4bit bnb_4bit_quant_type bnb_4bit_quant_storage use_bnb_nested_quant dataset_config dataset_train_split
    dataset_test_split dataset_streaming gradient_checkpointing_use_reentrant ignore_bias_buffers
""".split()


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_name_has_one_meaning(name):
    vocabulary = VOCABULARIES[name]
    flags = set(vocabulary.flags())
    tables = [flags, vocabulary.renamed, vocabulary.ignored, vocabulary.refused, vocabulary.settings]
    words = [word for table in tables for word in table]
    assert sorted(words) == sorted(set(words))
    assert all(target in {*flags, *vocabulary.refused} for target in vocabulary.renamed.values())
    for meanings in vocabulary.settings.values():
        assert all(word[2:] in flags for text in meanings.values() for word in text.split()[::2])


@pytest.mark.parametrize("vocabulary", [PRETRAIN, SFT], ids=["pretrain", "sft"])
def test_every_training_argument_of_transformers_is_known(vocabulary):
    words = {field.name for field in fields(TrainingArguments)} | set(TRANSFORMERS_4) | set(RUN_CLM)
    assert words - vocabulary.names() == set()


def test_every_argument_of_trl_is_known_to_sft():
    assert set(TRL) - SFT.names() == set()


DEGREES = {  # 1 asks for nothing
    "sep_parallel_degree", "context_parallel_degree", "context_parallel_size", "expert_model_parallel_size",
    "num_experts", "tensor_model_parallel_size", "model_parallel_size", "pipeline_model_parallel_size",
    "pipeline_parallel_degree",
    "lora_plus_scale", "generation_num_beams", "devices",
}  # fmt: skip
ALWAYS_ON = {"average_tokens_across_devices"}  # what is true asks for nothing
OWN = {id(known.refused): name for name, known in VOCABULARIES.items()}.values()  # several commands share theirs
REFUSED = sorted((name, word) for name in OWN for word in VOCABULARIES[name].refused)


@pytest.mark.parametrize(("name", "word"), REFUSED)
def test_refused_arguments_are_refused_in_every_form(name, word, tmp_path):
    vocabulary = VOCABULARIES[name]
    degree = word in DEGREES and vocabulary.refused[word][0]  # Megatron's older name is refused whatever it says
    asks = [["--" + word], *(["--" + word, value] for value in ("true", "yes", "on", "1", "True"))]
    for number, value in enumerate((True, 1, "yes")):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps({word: value}))
        asks.append([str(file)])
    for argv in asks:
        on = not (argv[-1] == "1" or argv[-1].endswith("1.json")) if degree else word not in ALWAYS_ON
        if on:
            with pytest.raises(UsageError):
                parse(vocabulary, argv)
        else:
            assert parse(vocabulary, argv).notes == []
    if "false" in vocabulary.refused[word][0]:
        for value in FALSE:
            assert parse(vocabulary, ["--" + word, value]).notes == []


@pytest.mark.parametrize("name", OWN)
def test_suggestions_have_an_effect(name):
    vocabulary = VOCABULARIES[name]
    idle = {*vocabulary.ignored, *vocabulary.refused}
    for word in idle:
        for wrong in (word + "z", word.replace("_", "")):
            try:
                parse(vocabulary, ["--" + wrong, "1"])
            except UsageError as error:
                suggested = str(error).partition("did you mean --")[2].strip("?")
                assert suggested not in idle, (wrong, suggested)


@pytest.mark.parametrize(
    ("vocabulary", "words", "flag", "value"),
    [
        (PRETRAIN, "--block_size 64", "max_seq_length", 64),
        (PRETRAIN, "--max_seq_len 64", "max_seq_length", 64),
        (PRETRAIN, "--use_cpu", "device", "cpu"),
        (PRETRAIN, "--no_cuda true", "device", "cpu"),
        (PRETRAIN, "--use_cpu false", "device", "gpu"),
        (PRETRAIN, "--torch_dtype bfloat16", "bf16", True),
        (PRETRAIN, "--torch_dtype torch.bfloat16", "fp16_opt_level", "O2"),
        (PRETRAIN, "--dtype float32", "bf16", False),
        (PRETRAIN, "--use_fp8 1", "fp8", True),
        (PRETRAIN, "--use_fp8", "fp8", True),
        (PRETRAIN, "--use_fp8 0", "fp8", False),
        (PRETRAIN, "--per_device_batch_size 3", "per_device_train_batch_size", 3),
        (PRETRAIN, "--processing_class tok", "tokenizer_name_or_path", "tok"),
        (SFT, "--processing_class tok", "tokenizer_name_or_path", "tok"),
        (SFT, "--max_seq_len 64", "max_length", 64),
        (SFT, "--lr 1e-3", "learning_rate", 1e-3),
        (SFT, "--eval_dataset e.jsonl", "eval_dataset_name_or_path", "e.jsonl"),
        (SFT, "--use_peft --lora_r 4", "lora_rank", 4),
        (SFT, "--completion_only_loss false", "train_on_prompt", True),
        (SFT, "--no_cuda", "device", "cpu"),
        (SFT, "--group_by_length", "group_by_length", True),
        (SFT, "--train_sampling_strategy group_by_length", "group_by_length", True),
        (SFT, "--train_sampling_strategy random", "group_by_length", False),
        (SFT, "--pad_to_multiple_of 8", "pad_to_multiple_of", 8),
        (SFT, "--test_size 0.1", "val_size", 0.1),
        (SFT, "--dataset_train_split test", "dataset_split", "test"),
        (PRETRAIN, "--dataset_config_name en", "dataset_config", "en"),
        (PRETRAIN, "--dataset_text_field body", "text_column", "body"),
        (PRETRAIN, "--dataset_num_proc 3", "preprocessing_num_workers", 3),
        (SFT, "--max_train_samples 9", "max_train_samples", 9),
        (PREDICT, "--use_cpu", "device", "cpu"),
        (PREDICT, "--torch_dtype bfloat16", "bf16", True),
        (PREDICT, "--per_device_batch_size 3", "batch_size", 3),
        (EVALUATE, "--no_cuda 1", "device", "cpu"),
        (EVALUATE, "--dtype float16", "fp16", True),
        (EVALUATE, "--block_size 64", "max_seq_length", 64),
        (MERGE, "--torch_dtype bfloat16", "dtype", "bfloat16"),
        (PREPROCESS, "--tokenizer tok", "model_name_or_path", "tok"),
        (PREPROCESS, "--preprocessing_num_workers 2", "workers", 2),
    ],
)
def test_aliases_of_transformers_and_trl(vocabulary, words, flag, value):
    parsed = parse(vocabulary, words.split())
    assert parsed.value(flag) == value and parsed.notes == []


@pytest.mark.parametrize(
    ("vocabulary", "words", "says"),
    [
        (PRETRAIN, "--group_by_length", "samples all have --max_seq_length tokens"),
        (PRETRAIN, "--train_sampling_strategy group_by_length", "the sample order follows from --seed"),
        (SFT, "--train_sampling_strategy sequential", "expected one of random, group_by_length"),
        (PRETRAIN, "--val_size 0.1", "--split 95,5,0"),
        (SFT, "--validation_split_percentage 10", "--val_size"),
        (SFT, "--dataset_text_field body", "--text_column"),
        (PRETRAIN, "--test_size 0.1", "or --validation_file"),
        (PRETRAIN, "--torch_dtype int8", "expected one of auto, float32"),
        (PRETRAIN, "--torch_dtype", "--torch_dtype needs a value: one of auto"),
        (PRETRAIN, "--use_cpu 3", "expected one of true, false"),
        (PREDICT, "--tokenizer_name_or_path tok", "the tokenizer is loaded from the model folder"),
    ],
)
def test_refusals_give_the_reason(vocabulary, words, says):
    with pytest.raises(UsageError) as error:
        parse(vocabulary, words.split())
    assert says in str(error.value) and "did you mean" not in str(error.value)


BASE = "--input_dir d --output_dir o --max_steps 5"


@pytest.mark.parametrize(
    "words",
    [
        "--tensorboard-dir t --report-to wandb",
        "--tensorboard-dir t --report_to wandb",
        "--tensorboard-dir t --report_to=wandb",
        "--num-layers 2 --tensorboard-dir t --report_to wandb",
        "--compat oneflow --logging_dir t --report_to wandb",
    ],
)
def test_trackers_that_are_given_win_over_a_compat_mode_s(words):
    argv = f"{BASE} --hidden_size 32 --num_attention_heads 2 --num_hidden_layers 2 {words}".split()
    assert parse_pretrain(argv, {}).training.report_to == ["wandb"]


def test_megatron_s_words_for_wandb_say_what_to_type():
    sizes = "--num-layers 2 --hidden_size 32 --num_attention_heads 2"
    run = parse_pretrain(f"{BASE} {sizes} --wandb-project p --wandb-exp-name first --wandb-save-dir w".split(), {})
    assert run.training.run_name == "first"
    for variable, word in (("WANDB_PROJECT", "--wandb-project"), ("WANDB_DIR", "--wandb-save-dir")):
        note = next(note for note in run.notes if variable in note)
        assert note.startswith(word) and "--report_to wandb" in note


@pytest.mark.parametrize(
    ("content", "flag", "value"),
    [
        ({"report_to": ["wandb"], "tensorboard_dir": "t"}, "report_to", ["wandb"]),
        ({"seed": 7, "lr": 1e-4}, "seed", 7),
        ({"eval_steps": 3, "eval_iters": 0, "train_iters": 5}, "eval_steps", 3),
        ({"save_strategy": "steps", "train_iters": 5}, "save_strategy", "steps"),
        ({"document_masking": "position", "reset_attention_mask": True}, "document_masking", "position"),
        ({"document_masking": "none", "reset_position_ids": True}, "document_masking", "none"),
    ],
)
def test_what_a_file_says_wins_over_a_compat_mode_s_defaults(tmp_path, content, flag, value):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "output_dir": "o", "data_path": "d"}
    (tmp_path / "a.json").write_text(json.dumps(sizes | content))
    run = parse_pretrain([str(tmp_path / "a.json")], {})
    values = {f.name: getattr(group, f.name) for group in run.groups for f in fields(group)}
    assert values[flag] == value


HELPS = {
    name: help_text("x.py", COMMANDS[name].summary, known) for name, known in VOCABULARIES.items() if name in COMMANDS
}


@pytest.mark.parametrize("name", HELPS)
def test_help_shows_each_flag_once_with_its_aliases(name):
    vocabulary, lines = VOCABULARIES[name], HELPS[name].splitlines()
    plain = [line for line in lines if line and not line.startswith("  ")]
    assert len(plain) == len(set(plain)) and COMMANDS[name].summary in plain
    for flag in vocabulary.flags():
        own = [number for number, line in enumerate(lines) if line.startswith(f"  --{flag} <")]
        assert len(own) == (flag not in vocabulary.fixed), flag
        block = HELPS[name].partition(f"\n  --{flag} <")[2].partition("\n  --")[0]
        for alias in (word for word, target in vocabulary.renamed.items() if target == flag and own):
            assert re.search(rf"also .*--{alias}(,|$)", block, re.M), (flag, alias)
    words = HELPS[name].replace(",", " ").split()
    assert all(word in words for word in (*vocabulary.ignored, *vocabulary.refused))
    assert all(f"--{word}" in words for word in vocabulary.settings)


def test_help_of_fine_tuning_states_its_own_defaults(tmp_path):
    text = HELPS["sft"]
    assert "--continue_training <" not in text and "--continue_training: always on" in text
    assert "of the linear and cosine schedules (default: lr_decay_ratio x learning_rate)" in text
    words = (
        f"--model_name_or_path {save_model(tmp_path / 'm')} --output_dir o --learning_rate 1e-3 --lr_decay_ratio 0.5"
    )
    assert parse_sft(words.split(), {}).training.min_learning_rate == 5e-4


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_a_file_of_training_arguments_may_nest_what_has_no_effect(tmp_path, ending):
    """As transformers and TRL write them: lists that are empty ask for nothing, mappings are named or refused."""
    content = {"gradient_checkpointing_kwargs": {"use_reentrant": False}, "fsdp": [], "debug": [], "use_cpu": True}
    content |= {"report_to": [], "seed": 7, "accelerator_config": {}}
    file = tmp_path / f"a.{ending}"
    file.write_text(json.dumps(content))
    for vocabulary in (PRETRAIN, SFT):
        parsed = parse(vocabulary, [str(file)])
        assert (parsed.value("device"), parsed.value("seed"), parsed.value("report_to")) == ("cpu", 7, [])
        assert len(parsed.notes) == 1 and "gradient_checkpointing_kwargs" in parsed.notes[0]
    for wrong, says in (
        ({"accelerator_config": {"split_batches": True}}, "batches are split in one way"),
        ({"output_dir": {"a": 1}}, "holds a nested value"),
        ({"do_train": []}, "expected true or false"),
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(UsageError, match=says):
            parse(PRETRAIN, [str(file)])


def test_a_long_block_is_named_as_typed(tmp_path):
    model = save_model(tmp_path / "m")
    words = f"--model_name_or_path {model} --continue_training --block_size 4096 --output_dir o --input_dir d"
    with pytest.raises(UsageError) as error:
        parse_pretrain(words.split(), {})
    assert str(error.value).startswith("--block_size 4096 is longer than the position table of 64; use --block_size 64")

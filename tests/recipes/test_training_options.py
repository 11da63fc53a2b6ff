"""Options of transformers' TrainingArguments in a run: what they change, and that a resumed run goes on alike."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from gptlm.commands.pretrain import parse_pretrain
from gptlm.errors import UsageError
from gptlm.recipes.common.device import Device
from gptlm.recipes.common.training_args import hf_arguments
from gptlm.recipes.pretrain.run import pretrain
from tests.recipes.test_pretrain import reference_batches

BASE = (
    "--max_seq_length 16 --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --max_steps 4 --eval_iters 2 "
    "--logging_steps 1 --save_steps 1 --learning_rate 1e-2 --min_learning_rate 1e-3 --split 80,10,10 --warmup_steps 2 "
    "--weight_decay 0.1 --do_train --device cpu --disable_tqdm --report_to none --continue_training "
    "--hidden_dropout_prob 0 --attention_probs_dropout_prob 0"
).split()
STILL = ("--learning_rate", "0", "--min_learning_rate", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(7)
    config = GPT2Config(vocab_size=500, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    folder = tmp_path_factory.mktemp("one-layer")
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def arguments(model, corpus_folder, tmp_path):
    def words(*more, output="out"):
        own = ["--model_name_or_path", model, "--input_dir", corpus_folder / "mmap", "--output_dir", tmp_path / output]
        return [str(word) for word in (*BASE, *own, *more)]

    return words


@pytest.fixture
def train(arguments, tmp_path):
    """Run with BASE and more words; returns the log history, in which each step occurs once."""

    def run(*more, output="out"):
        pretrain(parse_pretrain(arguments(*more, output=output), {}))
        return json.loads((tmp_path / output / "trainer_state.json").read_text())["log_history"]

    return run


def values(history, key):
    return [entry[key] for entry in history if key in entry]


def checkpoints(folder):
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


def forget_after(folder, step):
    """Leave what a run that was killed after `step` leaves."""
    for number in checkpoints(folder):
        if number > step:
            shutil.rmtree(folder / f"checkpoint-{number}")
    for name in ("model.safetensors", "trainer_state.json"):
        (folder / name).unlink()


def same_weights(one, other):
    first, second = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_early_stopping_counts_on_after_a_resume(train, tmp_path):
    """A rate of 0 never improves: the first evaluation is the best, and the third one after it ends the run."""
    words = ("--do_eval", "--eval_steps", "1", "--max_steps", "9", "--early_stopping_patience", "3", *STILL)
    assert len(values(train(*words), "eval_loss")) == 4 and checkpoints(tmp_path / "out") == [1, 2, 3, 4]
    forget_after(tmp_path / "out", 3)
    assert len(values(train(*words), "eval_loss")) == 4
    assert len(values(train(*words), "eval_loss")) == 4  # the same command again trains nothing
    words = (*words[:-6], "--early_stopping_patience", "5", *STILL)
    assert len(values(train(*words), "eval_loss")) == 6


def test_the_threshold_of_early_stopping_is_not_an_improvement(train):
    words = ("--do_eval", "--eval_steps", "1", "--max_steps", "6", "--early_stopping_patience", "2")
    found = values(train(*words, "--early_stopping_threshold", "100"), "eval_loss")
    assert len(found) == 3 and found[1] < found[0]  # better, by less than the threshold
    assert len(values(train(*words, output="other"), "eval_loss")) > 3


def test_save_strategy_best_keeps_the_evaluations_that_improve(train, tmp_path):
    words = ("--do_eval", "--eval_steps", "1", "--save_strategy", "best", "--load_best_model_at_end")
    losses = values(train(*words, "--max_steps", "6", "--learning_rate", "0.3"), "eval_loss")
    better = [step for step, loss in enumerate(losses, 1) if loss < min([9e9, *losses[: step - 1]])]
    assert checkpoints(tmp_path / "out") == better and len(better) < 6
    assert same_weights(tmp_path / "out", tmp_path / "out" / f"checkpoint-{better[-1]}")


def test_eval_delay_leaves_the_first_evaluations_out(train):
    history = train("--do_eval", "--eval_steps", "1", "--eval_delay", "3")
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [3, 4]


def test_data_seed_changes_the_order_of_samples_alone(train):
    plain, same, other = (
        values(train(*words, output=name), "loss")
        for name, words in {"a": (), "b": ("--data_seed", "42"), "c": ("--data_seed", "7")}.items()
    )
    assert plain == same and plain != other
    assert values(train("--seed", "7", output="d"), "loss") == other  # weights are loaded: nothing else is random


def test_label_smoothing_is_torch_s_and_evaluations_have_none(train, model, corpus_folder):
    (tokens, *_), _ = reference_batches(corpus_folder / "mmap", 4, 2)
    logits = AutoModelForCausalLM.from_pretrained(model)(tokens[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=0.1).item()
    words = ("--max_steps", "1", "--do_eval", *STILL)
    smoothed = train("--label_smoothing_factor", "0.1", *words)
    assert values(smoothed, "loss")[0] == pytest.approx(expected, rel=1e-5)
    assert values(smoothed, "eval_loss") == values(train(*words, output="plain"), "eval_loss")


def test_neftune_is_noise_in_training_alone_and_resumes(train, tmp_path):
    words = ("--neftune_noise_alpha", "5", "--do_eval")
    noisy, plain = train(*words), train("--do_eval", output="plain")
    assert values(noisy, "loss") != values(plain, "loss")
    still = [values(train(*more, "--do_eval", *STILL, output=name), "eval_loss")[-1]
             for name, more in {"s": words, "t": ()}.items()]  # fmt: skip
    assert still[0] == still[1]
    shutil.copytree(tmp_path / "out", tmp_path / "whole")
    forget_after(tmp_path / "out", 2)
    assert values(train(*words), "loss") == values(noisy, "loss")
    assert same_weights(tmp_path / "out", tmp_path / "whole")


@pytest.mark.parametrize("how", ["all", "non_padding"])
def test_input_tokens_are_counted_over_a_resume(train, tmp_path, how):
    words = ("--include_num_input_tokens_seen", how)
    train(*words)
    forget_after(tmp_path / "out", 2)
    assert values(train(*words), "num_input_tokens_seen") == [32, 64, 96, 128]  # 2 samples of 16 tokens


def test_full_determinism_uses_deterministic_kernels(train):
    try:
        losses = values(train("--full_determinism"), "loss")
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
    assert losses == values(train(output="plain"), "loss")


def test_running_out_of_memory_changes_the_accumulation_alone(train, capsys):
    """Embeddings of more than one sample are too large; the losses are those of micro-batches of one sample."""
    words = ("--per_device_train_batch_size", "4", "--global_batch_size", "4")
    expected = values(train("--per_device_train_batch_size", "1", *words[2:], output="one"), "loss")

    def full(module, inputs):
        if isinstance(module, torch.nn.Embedding) and module.training and inputs[0].shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    handle = torch.nn.modules.module.register_module_forward_pre_hook(full)
    try:
        found = values(train(*words, "--auto_find_batch_size"), "loss")
        with pytest.raises(torch.OutOfMemoryError):
            train(*words, output="two")
    finally:
        handle.remove()
    assert found == pytest.approx(expected, rel=1e-5)
    assert "from step 1 on 1 samples and 4 accumulation steps, the global batch of 4 stays" in capsys.readouterr().out


def test_logging_strategy(train):
    assert values(train("--logging_strategy", "no"), "loss") == []


def test_loader_options_reach_torch_s_loader(arguments):
    words = "--dataloader_num_workers 1 --dataloader_prefetch_factor 5 --dataloader_persistent_workers"
    found = hf_arguments(parse_pretrain(arguments(*words.split()), {}), Device("cpu", "fp32"))
    assert (found.dataloader_prefetch_factor, found.dataloader_persistent_workers) == (5, True)
    run = parse_pretrain(arguments("--dataloader_prefetch_factor", "5", "--dataloader_pin_memory", "0"), {})
    found = hf_arguments(run, Device("cpu", "fp32"))
    assert found.dataloader_prefetch_factor is None and not found.dataloader_pin_memory
    assert any("--dataloader_prefetch_factor has no effect" in note for note in run.notes)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--early_stopping_patience 2", "compares evaluations, and there are none; add --do_eval"),
        ("--early_stopping_patience 0", "expected at least 1"),
        ("--save_strategy best", "add --do_eval"),
        ("--label_smoothing_factor 1", "less than 1"),
        ("--neftune_noise_alpha -1", "at least 0"),
        ("--neftune_noise_alpha 5 --tensor_parallel_degree 2", "tensor and pipeline parallelism"),
        ("--full_determinism --torch_compile", "leave --torch_compile out"),
        ("--torch_compile_mode reduce-overhead", "expected one of default, max-autotune-no-cudagraphs"),
        ("--include_num_input_tokens_seen some", "expected one of no, all, non_padding"),
        ("--auto_find_batch_size --sharding stage2", "is for one process"),
        ("--fsdp full_shard", "give --sharding stage3 for full_shard"),
        ("--fsdp_config fsdp.json", "give --sharding stage3"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(arguments, words, says):
    world = {"WORLD_SIZE": "2", "RANK": "0"} if "parallel" in words else {}
    with pytest.raises(UsageError) as error:
        parse_pretrain(arguments(*words.split()), world)
    assert says in str(error.value)

"""Resolving a run: derived values, and runs that are impossible."""

import itertools
import json
import shlex

import pytest
from transformers import TrainerState
from transformers import TrainingArguments as HFTrainingArguments

from gptlm.commands.pretrain import parse_pretrain
from gptlm.config.run import with_epochs_counted
from gptlm.errors import UsageError
from tests.golden import recorded

README = (
    '--model_name_or_path gpt2-medium-en --tokenizer_name_or_path gpt2-medium-en --input_dir "./data" --output_dir out '
    "--split 949,50,1 --max_seq_length 1024 --per_device_train_batch_size 1 --per_device_eval_batch_size 1 "
    "--tensor_parallel_degree 1 --pipeline_parallel_degree 1 --sequence_parallel 0 --fuse_attention_qkv 0 "
    '--use_flash_attention 0 --fp16 --fp16_opt_level "O2" --scale_loss 1024 --learning_rate 0.00001 '
    "--min_learning_rate 0.000005 --max_steps 10000 --save_steps 5000 --weight_decay 0.01 --warmup_ratio 0.01 "
    "--max_grad_norm 1.0 --logging_steps 1 --continue_training --dataloader_num_workers 1 --sharding stage2 "
    "--eval_steps 1000 --report_to visualdl --disable_tqdm true --recompute 1 --gradient_accumulation_steps 2 "
    "--do_train --do_eval --device gpu"
)


def resolve(text, world=None, printing=True):
    argv = shlex.split(text) + (["--world_size", str(world)] if world else [])
    return json.loads(parse_pretrain(argv, {}, printing=printing).as_json())


def refused(text, says, world=None, printing=False):
    with pytest.raises(UsageError, match=says):
        argv = shlex.split(text) + (["--world_size", str(world)] if world else [])
        parse_pretrain(argv, {}, printing=printing or world is not None)


BASE = "--input_dir d --output_dir o --max_steps 100 "


def test_paddlenlp_s_readme_command_on_eight_processes():
    found = resolve(README, world=8)
    run = found["run"]
    wanted = {
        "num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
        "vocab_size": 50304, "max_position_embeddings": 1024, "world_size": 8, "data_parallel_replicas": 8,
        "local_batch_size": 2, "global_batch_size": 16, "sharding": "stage2", "sharding_parallel_degree": 8,
        "warmup_steps": 100, "decay_steps": 10000, "fp16": True, "bf16": False, "fp16_opt_level": "O2",
        "scale_loss": 1024, "recompute": True, "recompute_granularity": "full", "eval_steps": 1000, "seed": 42,
        "data_order": "paddlenlp", "sequence_parallel": False, "virtual_pp_degree": 1,
    }  # fmt: skip
    assert {name: run[name] for name in wanted} == wanted
    assert isinstance(run["warmup_steps"], int) and set(run) == set(found["from"])
    assert found["from"]["hidden_size"] == "preset gpt2-medium-en"
    assert found["from"]["global_batch_size"] == "derived: 1 x 2 x 8"
    assert found["from"]["learning_rate"] == "--learning_rate" and found["from"]["adam_beta1"] == "default"
    assert sum("use_flash_attention" in note for note in found["notes"]) == 1


def test_what_is_always_printed():
    always = (
        "model_name_or_path input_dir output_dir max_seq_length num_hidden_layers hidden_size num_attention_heads "
        "intermediate_size vocab_size max_position_embeddings per_device_train_batch_size gradient_accumulation_steps "
        "local_batch_size global_batch_size world_size data_parallel_replicas tensor_parallel_degree "
        "pipeline_parallel_degree virtual_pp_degree sharding sharding_parallel_degree sequence_parallel fp16 bf16 "
        "fp16_opt_level scale_loss recompute recompute_granularity learning_rate min_learning_rate lr_scheduler_type "
        "warmup_steps decay_steps max_steps eval_steps save_steps logging_steps split seed data_order"
    ).split()
    found = resolve("")
    assert set(always) <= set(found["run"]) == set(found["from"])
    assert (found["run"]["input_dir"], found["run"]["eval_steps"], found["run"]["max_steps"]) == (None, None, -1)


def test_one_process_has_nothing_to_shard():
    found = resolve(README)
    assert found["run"]["sharding_parallel_degree"] == 1
    assert any("--sharding stage2 has no effect" in note for note in found["notes"])
    assert parse_pretrain(shlex.split(README), {}).refusals == ()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--pipeline_parallel_degree 2 --document_masking position", None),
        ("--tensor_parallel_degree 2 --document_masking attention", None),
        ("--tensor_parallel_degree 2", None),
        ("--pipeline_parallel_degree 2 --virtual_pp_degree 2 --gradient_accumulation_steps 2", None),
    ],
)
def test_layouts_that_are_refused_by_name(flags, says):
    run = parse_pretrain(shlex.split(BASE + flags), {"WORLD_SIZE": "2"})
    assert (len(run.refusals) == 0) if says is None else (len(run.refusals) == 1 and says in run.refusals[0])


@pytest.mark.parametrize(
    ("flags", "world", "says"),
    [
        ("--num_attention_heads 15 --hidden_size 960 --tensor_parallel_degree 2", 2, "num_attention_heads 15 is not a"),
        ("--pipeline_parallel_degree 32", 32, "is less than the 32 stages of the pipeline"),
        ("--pipeline_parallel_degree 2 --virtual_pp_degree 5", 2, "virtual pp doesn't support uneven layer split."),
        ("--max_seq_length 1023 --tensor_parallel_degree 2 --sequence_parallel 1", 2, "max_seq_length 1023"),
        ("--tensor_parallel_degree 2 --sharding stage1 --sharding_parallel_degree 3", 8, "3 does not divide the 4"),
    ],
)
def test_layouts_that_cannot_be(flags, world, says):
    with pytest.raises(UsageError) as error:
        parse_pretrain(shlex.split(BASE + flags), {"WORLD_SIZE": str(world)})
    assert says in str(error.value).replace("--", "")


@pytest.mark.parametrize(
    ("flags", "world", "says"),
    [
        ("", 1, "needs --bf16"),
        ("--fp16", 1, "needs --bf16"),
        ("--bf16 --fp16_opt_level O0", 1, "needs --bf16"),
        ("--bf16 --tensor_parallel_degree 2", 2, "does not work with tensor and pipeline parallelism"),
        ("--bf16 --pipeline_parallel_degree 2", 2, "does not work with tensor and pipeline parallelism"),
        ("--bf16 --sharding stage3", 2, "use stage1 or stage2"),
        ("--bf16 --hidden_size 1000 --num_attention_heads 10", 1, "needs a multiple of 16"),
        ("--bf16 --recompute 1 --recompute_granularity full_attn", 1, "use full or core_attn"),
        ("--bf16 --fp8_skip -1", 1, "fp8_skip"),
        ("--bf16 --num_hidden_layers 6 --fp8_skip 3", 1, "3: none of the 6 layers is left"),
        ("--bf16 --intermediate_size 1000", 1, "intermediate_size 1000: fp8 needs a multiple of 16"),
    ],
)
def test_float8_goes_with_whole_bfloat16_layers(flags, world, says):
    refused(f"{BASE} --fp8 {flags}", says, world=world)
    assert parse_pretrain(shlex.split(f"{BASE} --fp8 --bf16 --sharding stage2"), {"WORLD_SIZE": "2"}).training.fp8


def test_notes_about_the_parallel_layout():
    words = BASE + "--pipeline_parallel_degree 5 --gradient_accumulation_steps 4 --vocab_size 50257"
    notes = parse_pretrain(shlex.split(words), {"WORLD_SIZE": "5"}).notes
    assert any("the first 4 stages have 5 layers, the others 4" in note for note in notes)
    assert any("5 stages, 4 micro-batches in a step: the bubble is 50% of the time" in note for note in notes)
    run = parse_pretrain(shlex.split(BASE + "--tensor_parallel_degree 2 --vocab_size 50257"), {"WORLD_SIZE": "2"})
    assert run.shape.vocab_size == 50257 and any("a row more on the first 1" in note for note in run.notes)


def test_repeated_arguments_and_those_without_effect_are_logged():
    notes = parse_pretrain(shlex.split(BASE + "--seed 3 --seed 3 --seed 4 --recompute_granularity full"), {}).notes
    assert "--seed 3 has no effect: --seed 4 comes after it" in notes
    assert "--recompute_granularity has no effect: recompute is off" in notes
    notes = parse_pretrain(shlex.split(BASE + "--use_cpu --device gpu"), {}).notes
    assert "--use_cpu has no effect: --device gpu comes after it" in notes
    refused(f"{BASE} --recompute 1 --no_recompute_layers 0 99", "no_recompute_layers 99: the layers are 0 to")


def test_sharding_in_smaller_groups():
    split = "--tensor_parallel_degree 2", "--pipeline_parallel_degree 2"
    for stage, more in itertools.product(("stage1", "stage2", "stage3"), ("", *split, " ".join(split))):
        words = f"{BASE} --sharding {stage} --sharding_parallel_degree 2 {more}"
        if stage != "stage1" and "pipeline" in more:
            refused(words, "please using sharding stage1", world=16)
            continue
        run = parse_pretrain(shlex.split(words), {"WORLD_SIZE": "16"})
        assert run.refusals == () and run.parallel.sharding_parallel_degree == 2
        assert run.parallel.data_parallel_degree * 2 == run.dims.data
    mixed = f"{BASE} --sharding stage2 --sharding_parallel_degree 2 --tensor_parallel_degree 2 --data_parallel_degree 2"
    assert parse_pretrain(shlex.split(mixed), {"WORLD_SIZE": "8"}).dims.data == 4  # FleetX: mp 2 x sharding 2 x dp 2
    alone = parse_pretrain(f"{BASE} --sharding_parallel_degree 2".split(), {"WORLD_SIZE": "4"})
    assert "--sharding_parallel_degree 2 has no effect without --sharding stage1, stage2 or stage3" in alone.notes
    refused(BASE + "--sharding stage1 --sharding_parallel_degree 3", "does not divide the 4", world=4)


def test_the_world_comes_from_the_launcher():
    run = parse_pretrain(shlex.split(BASE), {"WORLD_SIZE": "4"})
    assert (run.dims.world, run.dims.data, run.sources["world_size"].text) == (4, 4, "WORLD_SIZE")
    refused(BASE + "--world_size 4", "works only with --print_config")
    with pytest.raises(UsageError, match="WORLD_SIZE.*'abc'"):
        parse_pretrain(shlex.split(BASE), {"WORLD_SIZE": "abc"})
    refused(BASE + "--device gpu:1", "one GPU for 2 processes", world=2)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--tensor_parallel_degree 2", "torchrun --nproc_per_node 2"),
        ("--fp16 --bf16", "--fp16 and --bf16 exclude each other"),
        ("--device npu", "'npu'"),
        ("--report_to tensorbord", "tensorbord"),
        ("--split 1;2", "split"),
        ("--per_device_train_batch_size 0", "--per_device_train_batch_size 0"),
        ("--micro_batch_size 0", "--micro_batch_size 0"),
        ("--learning_rate nan", "learning_rate"),
        ("--warmup_ratio 1.5", "expected 0 to 1"),
        ("--max_steps 0", "max_steps 0"),
        ("--sharding stage9", "stage9"),
        ("--sharding offload", "exactly one"),
        ("--sharding_parallel_config x", "'x' is unknown"),
        ("--sharding stage1 --deepspeed f.json", "give one"),
        ("--max_seq_length 2048 --max_position_embeddings 1024", "2048.*1024"),
        ("--hidden_size 10 --num_attention_heads 4 --num_hidden_layers 1", "multiple"),
        ("--num_attention_heads 0", "num_attention_heads"),
        ("--model_name_or_path gpt2-mediun", "did you mean gpt2-medium"),
        ("--model_name_or_path gpt3-13B-en --continue_training", "size only"),
        ("--continue_training --num_hidden_layers 3", "contradicts the weights"),
        ("--continue_training --max_seq_length 2048", "position table of 1024"),
        ("--load_best_model_at_end", "load_best_model_at_end"),
        ("--load_best_model_at_end --do_train --do_eval --eval_steps 30 --save_steps 50", "multiple"),
        ("--resume_from_checkpoint false", "overwrite_output_dir"),
        ("--optim galore_adamw", "galore_adamw"),
        ("--seed -1", "seed"),
        ("--max_steps 1e15", "no count is that large"),
        ("--do_train 0", "nothing to do"),
        ("--do_eval --model_name_or_path gpt2-en", "needs weights"),
        ("--model_name_or_path ''", "empty"),
    ],
)
def test_impossible_runs(flags, says):
    refused(BASE + flags, says)


@pytest.mark.parametrize("missing", ["input_dir", "output_dir"])
def test_folders_must_be_given_to_run_but_not_to_print(missing):
    text = " ".join(f"--{name} x" for name in ("input_dir", "output_dir") if name != missing) + " --max_steps 1"
    refused(text, f"--{missing} is missing")
    assert any(missing in note for note in resolve(text)["notes"])


def test_degrees_over_eight_processes():
    run = resolve(BASE + "--tensor_parallel_degree 2 --pipeline_parallel_degree 2 --sharding stage1", world=8)["run"]
    assert (run["data_parallel_replicas"], run["sharding_parallel_degree"]) == (2, 2)
    refused(BASE + "--pipeline_parallel_degree 2 --sharding stage2", "please using sharding stage1", world=4)
    refused(BASE + "--tensor_parallel_degree 3 --num_attention_heads 16", "multiple of --tensor", world=3)
    refused(BASE + "--sharding stage1 --sharding_parallel_degree 3", "does not divide the 4", world=4)
    assert resolve(BASE + "--tensor_parallel_degree -1", world=2)["run"]["tensor_parallel_degree"] == 1


def test_vocabulary_and_positions(tiny_model, tmp_path):
    def sizes(flags):
        run = resolve(BASE + flags)["run"]
        return run["vocab_size"], run["max_position_embeddings"]

    assert sizes("--model_name_or_path gpt2-en") == (50304, 1024)  # 50257 rounded up to 128 for random weights
    assert sizes("--model_name_or_path gpt2-en --continue_training") == (50257, 1024)
    assert sizes("--model_name_or_path gpt2-en --max_seq_length 2048") == (50304, 2048)
    assert sizes("--model_name_or_path gpt3-175B-en") == (51200, 1024)
    assert sizes("--model_name_or_path gpt3-13B-en.json") == (50304, 1024)
    folder = f"--model_name_or_path {tiny_model} --max_seq_length 64"
    assert sizes(folder) == (500, 64)
    assert sizes(folder + " --continue_training --vocab_size 512") == (512, 64)
    refused(BASE + folder + " --continue_training --vocab_size 499", "below the 500")
    flags = "--num_hidden_layers 2 --hidden_size 8 --num_attention_heads 2 --max_seq_length 16"
    assert sizes(flags) == (50304, 16)
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 200}')
    assert sizes(f"{flags} --tokenizer_name_or_path {tmp_path}") == (256, 16)
    run = resolve(BASE + flags)["run"]
    assert (run["intermediate_size"], run["num_hidden_layers"]) == (32, 2)


def test_warm_up():
    assert resolve(BASE + "--warmup_ratio 0.05")["run"]["warmup_steps"] == 5
    assert resolve(BASE + "--warmup_rate 0.05 --decay_steps 40")["run"]["warmup_steps"] == 2
    found = resolve(BASE + "--warmup_ratio 0.05 --warmup_steps 30")
    assert found["run"]["warmup_steps"] == 30 and any(
        "warmup_steps 30 takes precedence" in note for note in found["notes"]
    )


def test_flags_of_training_without_do_train_are_named():
    says = "nothing is trained, although --max_steps is given: --do_predict without --do_train only evaluates"
    assert says in resolve(BASE + "--do_predict --continue_training")["notes"]
    assert not any(
        "nothing is trained" in note
        for note in resolve(BASE + "--do_predict --continue_training --do_train 0")["notes"]
    )


def test_actions_without_do_arguments():
    assert resolve(BASE)["run"]["do_train"] is True
    assert resolve(BASE + "--do_eval --continue_training")["run"]["do_train"] is False
    run = resolve(BASE + "--do_train --do_eval --logging_steps 7")["run"]
    assert (run["evaluation_strategy"], run["eval_steps"]) == ("steps", 7)
    assert resolve(BASE + "--do_train")["run"]["eval_steps"] is None


def test_epochs_become_steps_when_the_data_is_known():
    run = parse_pretrain(
        shlex.split("--input_dir d --output_dir o --num_train_epochs 2.5 --warmup_ratio 0.1 --save_strategy epoch"), {}
    )
    assert run.training.max_steps == -1 and run.training.decay_steps is None
    counted = with_epochs_counted(run, 40)
    assert (counted.training.max_steps, counted.training.warmup_steps, counted.training.decay_steps) == (100, 10, 100)
    assert (counted.training.save_strategy, counted.training.save_steps) == ("steps", 40)
    assert counted.sources["max_steps"].text == "derived: 2.5 x 40 steps per epoch"
    partial = with_epochs_counted(run, 40, last_step=97).training  # of a trainer that knows when epochs end
    assert (partial.max_steps, partial.save_strategy, partial.save_steps) == (97, "epoch", 500)


FLAGS = recorded("paddlenlp/flags.json")
OTHER = {  # values of our own for the flags of commands and argument files found in the wild
    "amp_master_grad": 1, "attention_probs_dropout_prob": 0.2, "bf16": True, "continue_training": 0, "decay_steps": 90,
    "dataloader_num_workers": 2, "device": "cpu", "disable_tqdm": True, "distributed_dataloader": 1, "do_eval": True,
    "do_predict": True, "do_train": True, "enable_auto_parallel": 1, "enable_linear_fused_grad_add": False,
    "eval_steps": 20, "fp16": False, "fp16_opt_level": "O2", "fuse_attention_ffn": True, "fuse_attention_qkv": True,
    "gradient_accumulation_steps": 4, "grad_clip": 0.5, "hidden_dropout_prob": 0.2, "input_dir": "d",
    "learning_rate": 1e-3, "logging_steps": 2, "max_grad_norm": 0.5, "max_seq_length": 512, "max_steps": 100,
    "micro_batch_size": 2, "min_learning_rate": 1e-4, "model_name_or_path": "gpt2-medium-en", "model_type": "gpt",
    "output_dir": "o", "per_device_eval_batch_size": 2, "per_device_train_batch_size": 2,
    "pipeline_parallel_config": "disable_partial_send_recv", "pipeline_parallel_degree": 1,
    "pp_recompute_interval": 1, "recompute": 1, "recompute_granularity": "full", "recompute_use_reentrant": True,
    "report_to": "none", "save_steps": 10, "save_total_limit": 3, "scale_loss": 512, "seed": 7, "sequence_parallel": 0,
    "sharding": "stage1", "sharding_parallel_config": "split_param", "sharding_parallel_degree": 8,
    "skip_memory_metrics": 0, "split": "90,5,5", "tensor_parallel_config": "enable_mp_async_allreduce",
    "tensor_parallel_degree": 1, "to_static": 0, "tokenizer_name_or_path": "gpt2-medium-en", "unified_checkpoint": True,
    "use_fast_layer_norm": True, "use_flash_attention": 0, "use_fused_dropout_add": True, "use_fused_linear": True,
    "use_fused_rms_norm": True, "use_fused_rope": True, "virtual_pp_degree": 1, "warmup_rate": 0.1,
    "warmup_ratio": 0.1, "warmup_steps": 5, "weight_decay": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in FLAGS for name in FLAGS[kind]])
def test_flags_found_together_are_taken_together(tmp_path, kind, name):
    """Those of real pretraining commands and argument files, on 8 processes."""
    given = {flag: OTHER[flag] for flag in FLAGS[kind][name]}
    text = shlex.join(word for flag, value in given.items() for word in (f"--{flag}", str(value)))
    if kind == "json":
        (tmp_path / "args.json").write_text(json.dumps(given))
        text = str(tmp_path / "args.json")
    found = resolve(text, world=8)["run"]
    size = given.get("micro_batch_size", given.get("per_device_train_batch_size", 1))
    accumulated = size * given.get("gradient_accumulation_steps", 1)
    assert found["global_batch_size"] == accumulated * 8
    same = {flag for flag in given if flag in found and isinstance(given[flag], (int, float)) and given[flag] > 1}
    assert {flag: found[flag] for flag in same} == {flag: given[flag] for flag in same}


SHARES = ("warmup_steps", "eval_steps", "save_steps", "logging_steps")


@pytest.mark.parametrize("steps", [7, 30, 1000])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.001, 0.999])
@pytest.mark.parametrize("known", [True, False])
def test_shares_of_the_run_are_those_of_transformers(tmp_path, steps, share, known):
    """On the command line, in JSON and in YAML; also where max_steps follows from the data."""
    stock = HFTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], **dict.fromkeys(SHARES, share), eval_strategy="steps"
    )
    state = TrainerState()
    state.compute_steps(stock, steps)
    wanted = [stock.get_warmup_steps(steps), state.eval_steps, state.save_steps, state.logging_steps]
    (tmp_path / "a.json").write_text(json.dumps(dict.fromkeys(SHARES, share)))
    (tmp_path / "a.yaml").write_text("\n".join(f"{name}: {share}" for name in SHARES))
    more = ["--input_dir", "d", "--output_dir", "o", "--do_train", "--do_eval"]
    more += ["--max_steps", str(steps)] if known else []
    flags = [word for name in SHARES for word in (f"--{name}", str(share))]
    for words in (flags, [str(tmp_path / "a.json")], [str(tmp_path / "a.yaml")]):
        training = with_epochs_counted(parse_pretrain([*words, *more], {}), steps).training
        found = [getattr(training, name) for name in SHARES]
        assert found == wanted and all(isinstance(value, int) for value in found)


def test_a_share_of_warm_up_wins_over_a_ratio_as_steps_do():
    found = resolve(BASE + "--warmup_steps 0.2 --warmup_ratio 0.05")
    assert found["run"]["warmup_steps"] == 20 and found["from"]["warmup_steps"] == "derived: 0.2 x max_steps 100"
    assert any(
        "warmup_ratio 0.05 has no effect: --warmup_steps 0.2 takes precedence" in note for note in found["notes"]
    )


def test_steps_are_whole_numbers_or_shares():
    for name in SHARES[1:]:
        for value in ("1.5", "-0.1", "inf", "nan", "1e30"):
            with pytest.raises(
                UsageError, match=f"--{name} .*expected a whole number of at least 1 step, or a fraction"
            ):
                resolve(BASE + f"--do_train --do_eval --{name} {value}")
        assert resolve(BASE + f"--do_train --do_eval --{name} 20.0 --eval_steps 20")["run"][name] == 20
    base = BASE + "--do_train --do_eval --load_best_model_at_end "
    resolve(base + "--eval_steps 0.1 --save_steps 0.3")
    for words in ("--eval_steps 0.2 --save_steps 0.3", "--eval_steps 0.1 --save_steps 25"):
        with pytest.raises(UsageError, match="multiple"):
            resolve(base + words)
    late = base.replace("--max_steps 100", "") + "--eval_steps 0.1 --save_steps 0.2"
    run = parse_pretrain(shlex.split(late), {})
    assert with_epochs_counted(run, 100).training.save_steps == 20
    with pytest.raises(UsageError, match="save_steps .5. to be a multiple of .*eval_steps .3."):
        with_epochs_counted(run, 25)  # ceil(2.5) and ceil(5)


def test_an_argument_file_of_a_run_keeps_its_warm_up():
    """A ratio of few steps gives less than one, which would be read as a share."""
    run = parse_pretrain(shlex.split(BASE + "--warmup_ratio 0.005"), {})
    assert run.training.warmup_steps == 0.5
    assert "warmup_steps" not in json.loads(run.as_arguments())
    assert json.loads(parse_pretrain(shlex.split(BASE + "--warmup_steps 3"), {}).as_arguments())["warmup_steps"] == 3


def test_an_argument_file_of_a_run_keeps_rules_and_shares(tmp_path):
    """It starts the same run again; what follows from values that the command changes follows from the new ones."""
    words = "--warmup_steps 0.3333333 --save_steps 0.5 --eval_steps 0.25 --do_train --do_eval"
    run = parse_pretrain(shlex.split(BASE.replace("--max_steps 100", "--num_train_epochs 2") + words), {})
    first = with_epochs_counted(run, 30)
    (tmp_path / "run.json").write_text(first.as_arguments())

    def again(*more, steps=30):
        return with_epochs_counted(parse_pretrain([str(tmp_path / "run.json"), *more], {}), steps).training

    assert again() == first.training and first.training.max_steps == 60
    names = ("max_steps", "decay_steps", "warmup_steps", "save_steps", "eval_steps")
    assert [getattr(again("--num_train_epochs", "4"), name) for name in names] == [120, 120, 40, 60, 30]
    assert [getattr(again(steps=15), name) for name in names] == [30, 30, 10, 15, 8]
    typed = parse_pretrain(shlex.split(BASE + "--decay_steps 80 --save_steps 7"), {})
    assert {"max_steps": 100, "decay_steps": 80, "save_steps": 7}.items() <= json.loads(typed.as_arguments()).items()

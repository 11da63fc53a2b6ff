"""Numbers of a --deepspeed file hold where no flag was given; only flags that were typed can contradict them."""

import json

import pytest

from gptlm.commands.pretrain import parse_pretrain
from gptlm.commands.sft import parse_sft
from gptlm.errors import UsageError
from gptlm.recipes.common.deepspeed import check_file, deepspeed_config
from gptlm.recipes.common.device import Device
from tests.config.test_problem import save_model

SIZES = "--num_hidden_layers 2 --hidden_size 32 --num_attention_heads 2 --input_dir d --output_dir o --max_steps 5"
ZERO2 = {"zero_optimization": {"stage": 2}}


@pytest.fixture
def run(tmp_path):
    def parse(config, words="", world=1):
        (tmp_path / "ds.json").write_text(json.dumps(ZERO2 | config))
        argv = f"{SIZES} --deepspeed {tmp_path / 'ds.json'} {words}".split()
        return parse_pretrain(argv, {"WORLD_SIZE": str(world)})

    return parse


def test_the_file_s_numbers_hold(run, tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "bf16": {"enabled": True}, "fp16": {"loss_scale_window": 100, "hysteresis": 3},
    }  # fmt: skip
    found = run(config, world=2)
    training = found.training
    sizes = (training.per_device_train_batch_size, training.gradient_accumulation_steps, training.global_batch_size)
    assert sizes == (4, 2, 4 * 2 * 2) and training.max_grad_norm == 0.5
    assert (training.bf16, training.fp16_opt_level, training.loss_scale_window) == (True, "O2", 100)
    assert found.sources["max_grad_norm"].text == f"{tmp_path / 'ds.json'}: gradient_clipping"
    check_file(found)
    ready = deepspeed_config(found, Device("cuda", "bf16", "O2"))
    assert ready["bf16"]["enabled"] and ready["gradient_clipping"] == 0.5
    assert (ready["train_micro_batch_size_per_gpu"], ready["gradient_accumulation_steps"]) == (4, 2)
    on_a_cpu = deepspeed_config(found, Device("cpu", "fp32", "O2"))  # where half precision is not used
    assert not on_a_cpu["bf16"]["enabled"]


@pytest.mark.parametrize(
    ("config", "words", "world", "sizes"),
    [
        ({"train_batch_size": 32}, "", 2, (16, 1, 32)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, "", 2, (4, 4, 32)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, "", 1, (8, 4, 32)),
        ({"train_batch_size": 32}, "--per_device_train_batch_size 2", 2, (2, 8, 32)),
        ({"train_micro_batch_size_per_gpu": 4}, "--gradient_accumulation_steps 3", 1, (4, 3, 12)),
        ({"train_micro_batch_size_per_gpu": "auto"}, "", 1, (8, 1, 8)),
        ({"train_micro_batch_size_per_gpu": 2}, "--micro_batch_size 2", 1, (2, 1, 2)),
    ],
)
def test_batches_of_the_file(run, config, words, world, sizes):
    training = run(config, words, world).training
    found = (training.per_device_train_batch_size, training.gradient_accumulation_steps, training.global_batch_size)
    assert found == sizes


@pytest.mark.parametrize(
    ("config", "words", "says"),
    [
        (
            {"train_micro_batch_size_per_gpu": 4},
            "--micro_batch_size 8",
            "ds.json sets train_micro_batch_size_per_gpu to 4, --micro_batch_size is 8",
        ),
        ({"gradient_clipping": 1.0}, "--clip-grad 0.5", "sets gradient_clipping to 1.0, --clip-grad is 0.5"),
        ({"train_batch_size": 8}, "--global-batch-size 16", "sets train_batch_size to 8, --global-batch-size is 16"),
        ({"fp16": {"enabled": True}}, "--fp16 0", "sets fp16.enabled to true, --fp16 is false"),
        ({"fp16": {"enabled": True}}, "--bf16", "exclude each other; give one"),
        ({"fp16": {"hysteresis": 2}}, "--hysteresis 4", "sets fp16.hysteresis to 2, --hysteresis is 4"),
        ({"scheduler": {"type": "x"}}, "", "ds.json has a 'scheduler' block"),
        ({"train_batch_size": "many"}, "", "train_batch_size is 'many'; expected a whole number"),
        ({"train_batch_size": float("inf")}, "", "train_batch_size is inf; expected a whole number"),
        ({"train_batch_size": float("nan")}, "", "train_batch_size is nan; expected a whole number"),
        ({"gradient_clipping": 10**400}, "", "gradient_clipping is 1000"),
        ({"train_batch_size": 9}, "--micro_batch_size 2", "train_batch_size (/"),
    ],
)
def test_contradictions_name_what_was_typed(run, config, words, says):
    with pytest.raises(UsageError) as error:
        run(config, words)
    assert says in str(error.value), str(error.value)
    assert "--per_device_train_batch_size" not in str(error.value)


def test_levels_follow_the_file_unless_typed(run):
    assert run({"fp16": {"enabled": True}}, "--fp16").training.fp16_opt_level == "O2"
    assert run({"fp16": {"enabled": False}}, "--fp16").training.fp16_opt_level == "O1"
    assert run({"fp16": {"enabled": False}}, "--compat megatron --fp16").training.fp16_opt_level == "O1"
    typed = run({"fp16": {"enabled": True}}, "--fp16 --fp16_opt_level O1")
    with pytest.raises(UsageError, match="--fp16 --fp16_opt_level O1"):
        check_file(typed)


def test_a_pipeline_takes_the_file_s_micro_batches(run):
    words = "--pipeline_parallel_degree 2 --gradient_accumulation_steps 4"
    found = run({"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 2}, words, world=2)
    check_file(found)
    assert (found.batch.micro, found.batch.accumulation) == (2, 4)


def test_fine_tuning_takes_them_too(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(ZERO2 | {"train_micro_batch_size_per_gpu": 3}))
    words = f"--model_name_or_path {save_model(tmp_path / 'm')} --output_dir o --deepspeed {tmp_path / 'ds.json'}"
    assert parse_sft(words.split(), {}).training.per_device_train_batch_size == 3


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="--deepspeed nowhere.json cannot be read"):
        parse_pretrain(f"{SIZES} --deepspeed nowhere.json".split(), {})
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"deep\.json is not valid JSON"):
        parse_pretrain(f"{SIZES} --deepspeed {tmp_path / 'deep.json'}".split(), {})


@pytest.mark.parametrize("words", ["--deepspeed --deepspeed_config FILE", "--deepspeed_config=FILE --deepspeed"])
def test_megatron_deepspeed_s_switch_goes_with_its_file(tmp_path, words):
    (tmp_path / "ds.json").write_text(json.dumps(ZERO2 | {"gradient_clipping": 0.25}))
    run = parse_pretrain([*SIZES.split(), *words.replace("FILE", str(tmp_path / "ds.json")).split()], {})
    assert (run.parallel.deepspeed, run.training.max_grad_norm) == (str(tmp_path / "ds.json"), 0.25)
    assert not any("no effect" in note for note in run.notes)
    with pytest.raises(UsageError, match="--deepspeed needs a configuration file"):
        parse_pretrain([*SIZES.split(), "--deepspeed"], {})

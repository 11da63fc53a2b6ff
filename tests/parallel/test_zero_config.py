import dataclasses
import json
from pathlib import Path

import pytest

from gptlm.errors import UsageError
from gptlm.parallel.zero_config import RunSettings, fill_auto, zero_config

FOLDER = Path(__file__).parents[2] / "ds_configs"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_files_equal_what_the_code_builds(stage, offload):
    file = FOLDER / f"zero{stage}{'_offload' if offload else ''}.json"
    assert json.loads(file.read_text()) == zero_config(stage, offload=offload)


def test_there_are_no_other_files_and_no_optimizer_blocks():
    files = sorted(FOLDER.glob("*.json"))
    assert len(files) == 6
    for file in files:
        assert not {"optimizer", "scheduler"} & set(json.loads(file.read_text()))


@pytest.mark.parametrize("size", [None, 1000, "auto"])
def test_a_file_keeps_its_own_bucket_size(size):
    """Also none, which is DeepSpeed's own, and "auto", which the Trainer fills in from the model's width."""
    zero = {"stage": 2} if size is None else {"stage": 2, "reduce_bucket_size": size}
    assert fill_auto({"zero_optimization": zero}, RUN)["zero_optimization"] == zero
    assert zero_config(2)["zero_optimization"]["reduce_bucket_size"] == 5 * 10**7


def test_stage_zero_is_refused():
    with pytest.raises(ValueError, match="stage 0"):
        zero_config(0)


RUN = RunSettings(micro_batch=4, accumulation=2, replicas=8, max_grad_norm=1.0, precision="fp16", level="O2")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_flags_and_files_give_the_same_complete_configuration(stage):
    file = json.loads((FOLDER / f"zero{stage}.json").read_text())
    config = fill_auto(file, RUN)
    assert config == fill_auto(zero_config(stage), RUN) and "auto" not in json.dumps(config)
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (4, 2)
    assert config["gradient_clipping"] == 1.0 and file["gradient_clipping"] == "auto"  # the file's own dict stays


@pytest.mark.parametrize(
    ("precision", "level", "fp16", "bf16", "autocast"),
    [
        ("fp32", "O1", False, False, None),
        ("fp16", "O1", False, False, "float16"),
        ("bf16", "O1", False, False, "bfloat16"),
        ("fp16", "O2", True, False, None),
        ("bf16", "O2", False, True, None),
    ],
)
def test_precision(precision, level, fp16, bf16, autocast):
    wanted = RunSettings(1, 1, 2, 1.0, precision, level, scale_window=500, hysteresis=2, master_grad=True)
    config = fill_auto(zero_config(2), wanted)
    assert (config["fp16"]["enabled"], config["bf16"]["enabled"]) == (fp16, bf16)
    assert config.get("torch_autocast") == (autocast and {"enabled": True, "dtype": autocast})
    scale = {"loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1}
    assert config["fp16"] == {"enabled": fp16, **scale}
    assert config.get("data_types") == ({"grad_accum_dtype": "fp32"} if level == "O2" else None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"train_micro_batch_size_per_gpu": 2},
            "train_micro_batch_size_per_gpu 2, --per_device_train_batch_size says 4",
        ),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps 1, --gradient_accumulation_steps says 2"),
        ({"gradient_clipping": 0.5}, "gradient_clipping 0.5, --max_grad_norm says 1"),
        ({"train_batch_size": 63}, "another train_batch_size than 64"),
        ({"bf16": {"enabled": True}}, "bf16.enabled True, the flags say --fp16 --fp16_opt_level O2"),
        ({"fp16": {"enabled": False}}, "fp16.enabled False, the flags say --fp16 --fp16_opt_level O2"),
        ({"optimizer": {"type": "AdamW"}}, "'optimizer' block"),
        ({"zero_optimization": {"stage": 5}}, "stage is 5; expected 1, 2 or 3"),
        ({"zero_optimization": [2]}, "zero_optimization is [2]; expected an object"),
        ({"fp16": True}, "fp16 is True; expected an object"),
        ({"gradient_clippping": 3}, "gradient_clippping is not a key of DeepSpeed; did you mean gradient_clipping?"),
        ({"scheduler": {"type": "WarmupLR"}}, "'scheduler' block"),
        ({"zero_optimization": {"stage": 0}}, "half precision needs ZeRO stage 1, 2 or 3"),
    ],
)
def test_contradictions_name_both_values(change, says):
    with pytest.raises(UsageError) as caught:
        fill_auto({**zero_config(1), **change}, RUN, "f.json")
    assert "f.json" in str(caught.value) and says in str(caught.value)
    assert fill_auto({**zero_config(1), "train_batch_size": 64}, RUN)


def test_stage_3_exchanges_whole_blocks_where_all_of_a_block_is_trained():
    zero = fill_auto(zero_config(3), RUN)["zero_optimization"]
    assert zero["leaf_module"] == {"classes": ["gptlm.model.block.Block"]}
    assert zero["stage3_param_persistence_threshold"] == 0
    adapters = dataclasses.replace(RUN, whole_blocks=False)
    for config in (fill_auto(zero_config(3), adapters), fill_auto(zero_config(2), RUN)):
        assert "leaf_module" not in config["zero_optimization"]
    own = fill_auto({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 7}}, RUN)
    assert own["zero_optimization"]["stage3_param_persistence_threshold"] == 7  # a file's own words win

"""Optimizers and schedules of transformers: equal to the stock classes in a plain loop, resumed == uninterrupted."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, get_scheduler
from transformers.optimization import Adafactor
from transformers.training_args import OptimizerNames

from gptlm.commands.pretrain import parse_pretrain
from gptlm.config.args.choices import BITSANDBYTES, NO_SCHEDULES, OPTIMIZERS, STOCK_SCHEDULES
from gptlm.config.optimizers import settings_of
from gptlm.errors import UsageError
from gptlm.recipes.common.updates import stock_schedule
from gptlm.recipes.pretrain.run import pretrain
from gptlm.training.optimizers import MuonWithAdamW
from tests.conftest import run_script
from tests.recipes.test_pretrain import reference_batches
from tests.recipes.test_training_options import (  # noqa: F401 - fixtures
    arguments,
    forget_after,
    model,
    same_weights,
    train,
    values,
)

FLAT = ("--lr_scheduler_type", "constant", "--warmup_steps", "0", "--max_grad_norm", "0")
MOMENTUM = ("--optim", "sgd", "--optim_args", "momentum=0.9")
NEED_BITSANDBYTES = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
]


def groups_of(network, factory):
    decayed = [p for p in network.parameters() if p.ndim > 1]
    plain = [p for p in network.parameters() if p.ndim <= 1]
    return factory([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}])


STOCK = {
    MOMENTUM: lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    ("--optim", "rmsprop"): lambda groups: torch.optim.RMSprop(groups, lr=1e-2),
    ("--optim", "adagrad"): lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    ("--optim", "adafactor"): lambda groups: Adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False),
}


@pytest.mark.parametrize("words", STOCK, ids=lambda words: words[1])
def test_losses_are_those_of_the_stock_class(train, model, corpus_folder, words):  # noqa: F811
    network = AutoModelForCausalLM.from_pretrained(model).eval()  # without dropout
    optimizer = groups_of(network, STOCK[words])
    losses = []
    for batch in reference_batches(corpus_folder / "mmap", 4, 2)[0]:
        loss = F.cross_entropy(network(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert values(train(*words, *FLAT), "loss") == pytest.approx(losses, rel=1e-4)


def test_muon_is_torch_s_for_matrices_and_adamw_for_the_rest():
    torch.manual_seed(0)
    matrix, table, bias = torch.randn(4, 6), torch.randn(5, 4), torch.randn(6)
    ours, stock = ([torch.nn.Parameter(t.clone()) for t in (matrix, table, bias)] for _ in range(2))
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    one = MuonWithAdamW(ours[:1], ours[1:], betas=(0.9, 0.999), eps=1e-8, **settings)
    groups = [{"params": stock[1:2]}, {"params": stock[2:], "weight_decay": 0.0}]
    others = [
        torch.optim.Muon(stock[:1], adjust_lr_fn="match_rms_adamw", **settings),
        torch.optim.AdamW(groups, **settings),
    ]
    for step in range(3):
        for group in one.param_groups:  # as a schedule does
            group["lr"] = 1e-2 / (step + 1)
        for optimizer in others:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
        for a, b in zip(ours, stock, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        for optimizer in (one, *others):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True)) and len(one.state) == 3


RESUMED = [
    MOMENTUM,
    *(("--optim", name) for name in ("rmsprop", "adagrad", "adafactor", "muon")),
    ("--optim", "adamw", "--lr_scheduler_type", "inverse_sqrt"),
    *(pytest.param(("--optim", name), marks=NEED_BITSANDBYTES) for name in BITSANDBYTES),
]


@pytest.mark.parametrize("words", RESUMED, ids=lambda words: words[-1])
def test_resumed_is_uninterrupted(train, tmp_path, words):  # noqa: F811
    whole = values(train(*words), "loss")
    shutil.copytree(tmp_path / "out", tmp_path / "whole")
    forget_after(tmp_path / "out", 2)
    assert values(train(*words), "loss") == whole
    assert same_weights(tmp_path / "out", tmp_path / "whole")


def test_another_optimizer_does_not_take_a_checkpoint_s_state(train, tmp_path):  # noqa: F811
    train(*MOMENTUM)
    forget_after(tmp_path / "out", 2)
    with pytest.raises(UsageError, match="has the state of --optim sgd, not of adamw"):
        train()
    train("--ignore_load_lr_and_optim")


@pytest.mark.slow
@pytest.mark.parametrize("words", [MOMENTUM, ("--optim", "rmsprop")], ids=lambda words: words[1])
@pytest.mark.parametrize("layout", [(), ("--sharding", "stage1"), ("--sharding", "stage2"), ("--sharding", "stage3"),
                                    ("--tensor_parallel_degree", "2"), ("--pipeline_parallel_degree", "2")],
                         ids=lambda layout: "-".join(layout[1:]) or "ddp")  # fmt: skip
def test_two_processes_are_one(arguments, tiny_model, tmp_path, words, layout):  # noqa: F811
    """The same global batch, and a checkpoint of two processes resumed by one."""
    more = (
        *words,
        "--global_batch_size",
        "2",
        "--per_device_train_batch_size",
        "1",
        "--model_name_or_path",
        tiny_model,
    )
    pretrain(parse_pretrain(arguments(*more, output="one"), {}))
    result = run_script("run_pretrain", *arguments(*more, *layout, output="two"), processes=2)
    assert result.returncode == 0, result.stderr
    one, two = (
        json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"] for name in ("one", "two")
    )
    assert values(two, "loss") == pytest.approx(values(one, "loss"), rel=1e-4)
    forget_after(tmp_path / "two", 2)
    pretrain(parse_pretrain(arguments(*more, output="two"), {}))
    again = json.loads((tmp_path / "two" / "trainer_state.json").read_text())["log_history"]
    assert values(again, "loss") == pytest.approx(values(one, "loss"), rel=1e-4)


SCHEDULES = {
    "cosine_with_restarts": {"num_cycles": 2},
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "inverse_sqrt": {"timescale": 3},
    "warmup_stable_decay": {"num_decay_steps": 3},
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_rates_are_those_of_transformers(arguments, kind):  # noqa: F811
    words = ("--lr_scheduler_type", kind, "--lr_scheduler_kwargs", json.dumps(SCHEDULES[kind]), "--max_steps", "9")
    made = stock_schedule(parse_pretrain(arguments(*words), {}).training)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-2)
    theirs = get_scheduler(kind, optimizer, 2, 9, SCHEDULES[kind])
    for update in range(1, 12):
        assert made.rate(update) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_every_name_of_transformers_is_known():
    from transformers import SchedulerType

    assert {name.value for name in OptimizerNames} <= set(OPTIMIZERS)
    own = {"linear", "cosine", "polynomial", "constant", "constant_with_warmup"}
    assert {kind.value for kind in SchedulerType} == own | set(STOCK_SCHEDULES) | set(NO_SCHEDULES)


def test_settings_are_json_or_pairs():
    assert settings_of("a=1, b = 0.5,c=true,d=True,e=word,f=None") == (
        {"a": 1, "b": 0.5, "c": True, "d": True, "e": "word", "f": None}
    )
    assert settings_of('{"betas": [0.9, 0.95]}') == {"betas": [0.9, 0.95]} and settings_of(None) == {}


def test_settings_may_be_a_mapping_in_a_file(arguments, tmp_path):  # noqa: F811
    content = {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 3}}
    (tmp_path / "a.json").write_text(json.dumps(content))
    run = parse_pretrain([str(tmp_path / "a.json"), *arguments()], {})
    assert settings_of(run.training.lr_scheduler_kwargs) == {"timescale": 3}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--optim lomo", "updates during the backward pass"),
        ("--optim paged_adamw_8bit", "use the same one without paged_"),
        ("--optim galore_adamw", "use adafactor"),
        ("--optim adam9", "expected one of adamw"),
        ("--optim adafactor --sharding stage2", "adafactor does not work with --sharding, which splits its state"),
        ("--optim muon --tensor_parallel_degree 2", "muon does not work with tensor and pipeline parallelism"),
        ("--optim sgd --sharding stage2,offload", "whose optimizer is DeepSpeed's AdamW"),
        ("--optim adafactor --bf16 --fp16_opt_level O2", "use --fp16_opt_level O1"),
        ("--optim_args momentum=0.9", "with --optim adamw; give --adam_beta1"),
        ("--optim sgd --optim_args momentum", "expected name=value"),
        ("--optim sgd --optim_args {momentum", "not a JSON object"),
        ("--lr_scheduler_type greedy", "follows the losses"),
        ("--lr_scheduler_kwargs timescale=3", "with --lr_scheduler_type linear, which has --min_learning_rate"),
    ],
)
def test_what_does_not_work_is_refused_by_name(arguments, words, says):  # noqa: F811
    world = {"WORLD_SIZE": "2", "RANK": "0"} if "_degree" in words or "sharding" in words else {}
    with pytest.raises(UsageError) as error:
        parse_pretrain(arguments(*words.split()), world)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--optim sgd --optim_args momentom=0.9", "momentom: sgd takes dampening, momentum, nesterov, weight_decay"),
        ("--lr_scheduler_type warmup_stable_decay", "num_decay_steps"),
        ("--lr_scheduler_type inverse_sqrt --lr_scheduler_kwargs scale=3", "scale"),
        pytest.param("--optim lion", "bitsandbytes", marks=pytest.mark.skipif(
            find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")),
    ],
)  # fmt: skip
def test_settings_and_packages_are_checked_before_anything_is_loaded(arguments, tmp_path, words, says):  # noqa: F811
    with pytest.raises(UsageError, match=says):
        pretrain(parse_pretrain(arguments(*words.split()), {}))
    assert not (tmp_path / "out").exists()

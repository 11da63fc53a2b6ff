"""Private names of other libraries: used in upstream/ only, checked at start-up, and never missed silently."""

import ast
import logging
import re
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from gptlm.errors import GptlmError
from gptlm.upstream import accelerate as upstream_accelerate
from gptlm.upstream import datasets as upstream_datasets
from gptlm.upstream import deepspeed as upstream_deepspeed
from gptlm.upstream import peft as upstream_peft
from gptlm.upstream import torch as upstream_torch
from gptlm.upstream import transformers as upstream_transformers
from gptlm.upstream.check import Needed

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gptlm"
FILES = [file for file in sorted(SOURCE.rglob("*.py")) if file.parent.name != "upstream"]
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "safetensors", "datasets", "tokenizers")
MODULES = (
    upstream_torch,
    upstream_deepspeed,
    upstream_transformers,
    upstream_peft,
    upstream_accelerate,
    upstream_datasets,
)
ALLOWED = {
    # torch.optim is written with them, and they are the only operators on lists of tensors
    "_foreach_copy_", "_foreach_mul_", "_foreach_norm", "_foreach_zero_",
    # documented in `os`
    "_exit",
    # strings of file formats that look like names
    "_base_", "_inherited_", "_replace",
}  # fmt: skip
TRAINER_FILES = ("training/trainer.py", "training/loop.py")
OWN_METHODS = {
    "output_loss",
    "output_scores",
    "gather_hidden",
    "forward",
    "core_context",
    "names_of_group",
}  # of our own modules, replaced when they are compiled or split


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(trees: list[ast.AST]) -> set[str]:
    """Names that gptlm defines itself: functions, classes, attributes of `self` and of its dataclasses."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                if isinstance(node, ast.Name) or (isinstance(node.value, ast.Name) and node.value.id == "self"):
                    found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
OWN = defined(list(TREES.values()))


def foreign_names(tree: ast.AST) -> set[str]:
    """Private modules, imported names, attributes and names in `getattr` and its like that gptlm does not define."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            found |= {part for name in node.names for part in f"{node.module}.{name.name}".split(".") if private(part)}
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names if name.name.split(".")[0] in LIBRARIES]
            found |= {part for name in names for part in name.split(".") if private(part)}
        if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in OWN:
            found.add(node.attr)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr", "delattr"):
            name = getattr(node.args[1], "value", "")
            if isinstance(name, str) and private(name) and name not in OWN:
                found.add(name)
    return found - ALLOWED


def replaced_methods(tree: ast.AST) -> set[str]:
    """Attributes of other objects that are set to a function, and attributes set on modules of other libraries."""
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    imported = {
        name.asname or name.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in node.names
        if (getattr(node, "module", None) or name.name).split(".")[0] in LIBRARIES
    }
    found = set()
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if not isinstance(target, ast.Attribute) or getattr(target.value, "id", "") == "self":
                continue
            value, root = node.value, target.value
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            is_function = (
                isinstance(value, ast.Lambda)
                or (isinstance(value, ast.Name) and value.id in functions)
                or (isinstance(value, ast.Attribute) and value.attr in functions and value.attr.startswith("_"))
                or (isinstance(value, ast.Call) and getattr(value.func, "id", "") in ("partial", "staticmethod"))
            )
            if is_function or getattr(root, "id", "") in imported:
                found.add(target.attr)
    return found - OWN_METHODS


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_private_names_of_other_libraries_are_used_in_upstream_only(file):
    names = foreign_names(TREES[file])
    if str(file.relative_to(SOURCE)) in TRAINER_FILES:  # the Trainer's own, whose loop is replaced there
        names = {name for name in names if Needed("transformers", "Trainer", uses=(name,)).missing()}
    assert not names and not replaced_methods(TREES[file])


def test_the_guard_sees_what_it_is_for():
    code = """
import torch._dynamo
import torch.distributed._functional_collectives as functional
from transformers.trainer_utils import _is_peft
optimizer._hp = getattr(weight, "_hp_mapping", None)
def step(): ...
optimizer.step = step
torch.nn.functional.linear = 1
"""
    tree = ast.parse(code)
    assert foreign_names(tree) == {"_dynamo", "_functional_collectives", "_is_peft", "_hp", "_hp_mapping"}
    assert replaced_methods(tree) == {"step", "linear"}


@pytest.mark.parametrize("needed", [need for module in MODULES for need in module.ALL], ids=lambda need: need.path)
def test_installed_versions_have_every_name(needed):
    assert needed.missing() is None


def test_a_missing_name_a_missing_parameter_and_an_unused_attribute_are_found():
    module = "deepspeed.runtime.zero.stage_1_and_2"
    assert Needed("torch._nowhere", "x").missing() == "torch._nowhere.x"
    assert Needed(module, "DeepSpeedZeroOptimizer._nothing").missing() == f"{module}.DeepSpeedZeroOptimizer._nothing"
    assert Needed("torch.nn.functional", "gelu", ("approximate",)).missing() is None  # a C function has no signature
    assert Needed("deepspeed", "initialize", ("mpu", "mesh")).missing() == "initialize(mpu, mesh)"
    zero = Needed(module, "DeepSpeedZeroOptimizer", uses=("averaged_gradients", "_nothing"))
    assert zero.missing() == "DeepSpeedZeroOptimizer: _nothing"


# What happens where a name is missing: the library is changed, as another version would be ---------------------------


def zero_optimizer():
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return DeepSpeedZeroOptimizer


def test_nvlink_that_cannot_be_detected_is_taken_for_none(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delattr("torch._C._distributed_c10d._detect_dma_connectivity")
    with caplog.at_level(logging.WARNING):
        assert not upstream_torch.has_nvlink(2) and not upstream_torch.has_nvlink(4)
    version = re.escape(torch.__version__)
    line = (
        rf"torch {version} has no torch._C._distributed_c10d._detect_dma_connectivity: assuming that there is no NVLink"
    )
    assert [bool(re.fullmatch(line, record.message)) for record in caplog.records] == [True]  # said once


def test_triton_that_cannot_be_detected_is_an_obstacle_to_compiling(monkeypatch):
    from gptlm.kernels.compiling import compile_obstacle

    monkeypatch.delattr("torch.utils._triton.has_triton")
    assert compile_obstacle("cuda") == f"torch {torch.__version__} has no torch.utils._triton.has_triton"


def test_sequence_parallelism_is_refused_without_group_names(monkeypatch):
    monkeypatch.delattr("torch.distributed.distributed_c10d._resolve_process_group")
    upstream_torch.check_tensor_parallel(sequence=False)
    with pytest.raises(GptlmError, match="has no .*_resolve_process_group, which sequence parallelism needs; inst"):
        upstream_torch.check_tensor_parallel(sequence=True)


def test_flat_gradient_sync_gives_way_to_deepspeed_s_hooks(monkeypatch, caplog):
    monkeypatch.delattr(zero_optimizer(), "_model_parallel_all_reduce")
    with caplog.at_level(logging.WARNING):
        assert not upstream_deepspeed.has_flat_grad_sync()
    assert re.fullmatch(
        r"deepspeed 0\.\S+ has no deepspeed\.\S+\.DeepSpeedZeroOptimizer\._model_parallel_all_reduce: "
        "DeepSpeed's own hooks reduce gradients during backward",
        caplog.records[-1].message,
    )
    with pytest.raises(GptlmError, match="_model_parallel_all_reduce, which a pipeline with --amp_master_grad needs"):
        upstream_deepspeed.has_flat_grad_sync(needed=True)


def test_a_norm_that_deepspeed_no_longer_asks_for_is_noticed(monkeypatch):
    """The method is still there, but `step` calls another one."""

    def step(self, closure=None):
        return self.another_norm()

    monkeypatch.setattr(zero_optimizer(), "step", step)
    assert upstream_deepspeed.check(upstream_deepspeed.FLAT_GRAD_SYNC).endswith("step: scaled_global_norm")


def test_float16_is_refused_where_the_loss_scale_would_be_deepspeed_s_own(monkeypatch):
    class Optimizer:
        loss_scaler = "own"

    optimizer = Optimizer()
    upstream_deepspeed.use_loss_scaler(optimizer, "ours")
    assert optimizer.loss_scaler == "ours" and optimizer.torch_autocast_gradscaler is None
    monkeypatch.setattr("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3", Optimizer)
    with pytest.raises(GptlmError, match="has no DeepSpeedZeroOptimizer_Stage3: loss_scaler, which float16 .* needs"):
        upstream_deepspeed.use_loss_scaler(Optimizer(), "ours")


@pytest.mark.parametrize("kind", ["uses it", "another mpu", "never called"])
def test_an_engine_without_our_process_groups_is_refused(monkeypatch, kind):
    import deepspeed

    class Engine:
        def __init__(self, mpu):
            self.mpu = None if kind == "another mpu" else mpu

    def initialize(model=None, mpu=None):
        return Engine(mpu), None, None, None

    monkeypatch.setattr(deepspeed, "initialize", initialize)

    def start():
        with upstream_deepspeed.initialized_with("ours"):
            return None if kind == "never called" else deepspeed.initialize(model="model")[0]

    if kind == "uses it":
        assert start().mpu == "ours"
    else:
        with pytest.raises(GptlmError, match="was not set up with gptlm's process groups, so gradients"):
            start()
    assert deepspeed.initialize is initialize


def test_process_groups_that_deepspeed_cannot_take_are_refused(monkeypatch):
    monkeypatch.setattr("deepspeed.initialize", lambda model=None: None)
    with pytest.raises(GptlmError, match=r"has no initialize\(mpu\), which process groups of its own"):
        with upstream_deepspeed.initialized_with("ours"):
            pass


def test_state_of_stage_2_is_not_written_where_it_cannot_be_linked(monkeypatch):
    monkeypatch.delattr(zero_optimizer(), "_lazy_init_hp_params_optimizer_state")
    with pytest.raises(GptlmError, match="_optimizer_state, which saving the optimizer state needs"):
        upstream_deepspeed.link_optimizer_state(object())


def test_weights_are_not_loaded_the_wrong_way_round(monkeypatch):
    monkeypatch.delattr("transformers.core_model_loading.Transpose")
    with pytest.raises(GptlmError, match="Transpose.__init__, which loading and saving GPT-2 weights needs"):
        upstream_transformers.transpose_on_disk("GPTLMHeadModel", ["c_fc.weight"])


# Versions -------------------------------------------------------------------------------------------------------------


def requirements() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {found.name: found for found in map(Requirement, project["dependencies"])}


def constraints() -> dict[str, Version]:
    text = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8")
    return {name: Version(version) for name, version in re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("name", ["torch", "transformers", "accelerate", "deepspeed", "peft"])
def test_versions_are_capped_to_what_is_tested(name):
    """The newest is that of constraints.txt, the oldest that of `make test-oldest` (torch) or the same."""
    newest, found = constraints()[name], requirements()[name].specifier
    target = (ROOT / "Makefile").read_text(encoding="utf-8").split("test-oldest:")[-1]
    given = re.search(rf"{name}==([\d.]+)", target)
    oldest = Version(given[1]) if given else newest
    upper = f"<{newest.major}.{newest.minor + 1}"
    assert found in [SpecifierSet(f">={lower},{upper}") for lower in (oldest, f"{oldest.major}.{oldest.minor}")]
    assert newest in found and oldest in found

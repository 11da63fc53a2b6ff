"""AdamW's moments in a `checkpoint-N` of transformers' Trainer: `optimizer.pt` and `trainer_state.json`.

transformers/trainer.py, `create_optimizer`: one group with weight decay (matrices and embeddings) and one without
(biases and norms), each in the order of `GPT2LMHeadModel.named_parameters()`. torch numbers the parameters group by
group. `training_args.bin` is a pickle of classes and never read; nothing here needs it.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gptlm.conversion.gpt2_names import all_names, shape_of
from gptlm.conversion.source import MOMENTS, WITHOUT_OPTIMIZER, Progress
from gptlm.errors import GptlmError
from gptlm.model.files import read_json
from gptlm.model.presets import Shape
from gptlm.pickles.torch_file import read_torch

logger = logging.getLogger(__name__)

OPTIMIZER, STATE = "optimizer.pt", "trainer_state.json"


def is_trainer_checkpoint(folder: Path) -> bool:
    """Whether `folder` has the files of the Trainer's checkpoints."""
    return (folder / STATE).is_file() and (folder / OPTIMIZER).is_file()


class TrainerCheckpoint:
    """The optimizer of the checkpoint in `folder`, whose weights have the sizes of `shape`.

    Raises:
        GptlmError: if there is none, or it is not AdamW, or it is of other parameters.
    """

    def __init__(self, folder: Path, shape: Shape):
        self.path, self.shape = folder / OPTIMIZER, shape
        if not self.path.is_file():
            raise GptlmError(
                f"{folder} has no {OPTIMIZER} (DeepSpeed's and FSDP's optimizer states are not read); "
                f"{WITHOUT_OPTIMIZER}"
            )
        content = read_torch(self.path)
        if not isinstance(content, dict) or not {"state", "param_groups"} <= content.keys():
            raise GptlmError(f"{self.path} is no optimizer state of transformers' Trainer; {WITHOUT_OPTIMIZER}")
        self.groups: list[dict[str, Any]] = content["param_groups"]
        try:
            self.states = self._named(content["state"])
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise GptlmError(f"{self.path} has unexpected content ({error!r}); {WITHOUT_OPTIMIZER}") from error

    def progress(self) -> Progress:
        """The Trainer's steps and AdamW's updates; how many samples they consumed is not stored."""
        state = self.path.with_name(STATE)
        steps = read_json(state).get("global_step") if state.is_file() else None
        updates = {int(state["step"]) for state in self.states.values()}
        if not isinstance(steps, int) or steps < 1 or len(updates) != 1 or not 0 < min(updates) <= steps:
            raise GptlmError(
                f"{self.path.parent}: {STATE} has step {steps}, the parameters were updated {sorted(updates)} times; "
                f"{WITHOUT_OPTIMIZER}"
            )
        return Progress(steps, updates.pop(), None)

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        """(weight's name, kind, value), in stock GPT-2's tensor layout."""
        logger.info(
            "%s: AdamW with %s; give these and the learning-rate schedule of that run again, because training_args.bin "
            "is not read. RNG state and position in the data are not taken",
            self.path.parent.name,
            self._settings(),
        )
        for name, state in self.states.items():
            for kind in MOMENTS:
                yield name, kind, state[kind]

    def _named(self, states: Mapping[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The state of each parameter by the weight's name."""
        names = list(all_names(self.shape.num_hidden_layers))
        decayed = [name for name in names if len(shape_of(name, self.shape)) > 1]
        orders = ([decayed, [name for name in names if name not in decayed]], [names])
        sizes = [len(group["params"]) for group in self.groups]
        order = next((groups for groups in orders if [len(group) for group in groups] == sizes), None)
        if order is None:
            raise GptlmError(
                f"{self.path} has groups of {sizes} parameters; expected {[len(group) for group in orders[0]]}, with "
                f"and without weight decay, or one of {len(names)}; {WITHOUT_OPTIMIZER}"
            )
        found = {}
        for names, group in zip(order, self.groups, strict=True):
            for name, number in zip(names, group["params"], strict=True):
                found[name] = self._checked(name, states.get(number, {}))
        return found

    def _checked(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        if state.keys() != {"step", *MOMENTS}:
            kinds = ", ".join(map(str, state)) or "nothing"
            raise GptlmError(
                f"{self.path} has {kinds} of {name}; only AdamW's step, exp_avg and exp_avg_sq can be read; "
                f"{WITHOUT_OPTIMIZER}"
            )
        for kind in MOMENTS:
            shape, expected = tuple(getattr(state[kind], "shape", ())), shape_of(name, self.shape)
            if shape != expected:
                raise GptlmError(
                    f"{self.path}: {kind} of {name} has shape {shape}, the weight {expected}: it is of another model, "
                    f"or its parameters are in another order; {WITHOUT_OPTIMIZER}"
                )
        return state

    def _settings(self) -> str:
        group = self.groups[0]
        betas = group.get("betas", (None, None))
        found = {
            "learning_rate": group.get("initial_lr", group.get("lr")),
            "weight_decay": group.get("weight_decay"),
            "adam_beta1": betas[0],
            "adam_beta2": betas[1],
            "adam_epsilon": group.get("eps"),
        }
        return " ".join(f"--{flag} {value}" for flag, value in found.items())

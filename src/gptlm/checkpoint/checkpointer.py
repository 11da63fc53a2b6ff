"""Checkpoints of any layout that go on in any other: the part of the Trainer that writes and reads them.

Overridden, and why:
    _save_checkpoint                         written aside, then renamed
    save_model                               whole weights from every ZeRO stage, by one process
    _prepare_for_training                    the state of a checkpoint, whatever layout wrote it
    _init_training_state                     a resumed run obeys the new command's intervals
    _load_rng_state                          random numbers of another number of ranks start anew
    _load_from_checkpoint, _load_best_model  with the weight layout of model/gpt.py
"""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor
from transformers import TrainerState

from gptlm.checkpoint import folder as checkpoint
from gptlm.checkpoint import optimizer_state as states
from gptlm.errors import reason_of
from gptlm.model.build import StoredWeights
from gptlm.model.lora import StoredAdapters, save_adapters
from gptlm.parallel.deepspeed import gathered_parameters
from gptlm.training.pipeline_step import LayoutTrainer
from gptlm.upstream.torch import set_last_lr

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"


class SavingTrainer(LayoutTrainer):
    """Trainer with checkpoints that are whole or absent.

    Args:
        facts: noted in each checkpoint's manifest.
        keep: checkpoints to keep, the newest and the best always among them; None keeps all.
        run_file: the run as an argument file, saved beside each model as run.json.
        evaluated: the model, where it is not the one trained in `output_dir`.
        weights_only: go on with a checkpoint's weights and samples, but a new optimizer and schedule.
    """

    def __init__(
        self,
        *args: Any,
        facts: dict[str, Any] | None = None,
        keep: int | None = None,
        run_file: str = "",
        evaluated: str | None = None,
        weights_only: bool = False,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.facts = facts or {}
        self.keep = keep  # not args.save_total_limit, with which the Trainer may remove the newest one
        self.run_file = run_file
        self.weights_only = weights_only
        self.evaluated = evaluated

    @property
    def output_dir(self) -> Path:
        return Path(self.args.output_dir or "")

    @property
    def has_adapters(self) -> bool:
        """Whether only adapters are trained, and so saved."""
        return isinstance(self.network, PeftModel)

    @property
    def zero_optimizer(self) -> Any:
        """DeepSpeed's optimizer, or None."""
        return self.model_wrapped.optimizer if self.is_deepspeed_enabled else None

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer without accelerate's wrapper."""
        return self.zero_optimizer or getattr(self.optimizer, "optimizer", self.optimizer)

    # Writing ----------------------------------------------------------------------------------------------------

    def save_final(self) -> None:
        """Write the final model and tokenizer into `output_dir`.

        Raises:
            GptlmError: if they cannot be written.
        """
        with checkpoint.writing(self.output_dir, "the final model"):
            self.save_model()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model as a plain GPT-2 folder, adapters as a plain PEFT folder; stage 3 brings it together by weight."""
        weights = {}
        for name, tensor in self.whole_tensors(self._trained_values()):
            if self.args.should_save:
                weights[name] = tensor if self.mesh is None else tensor.cpu()
        if not self.args.should_save:
            return
        folder = output_dir or self.args.output_dir or ""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / RUN_FILE).write_text(self.run_file, encoding="utf-8")
        if not self.has_adapters:
            self._save(folder, state_dict=weights)
            return
        save_adapters(self.network, weights, Path(folder))
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)  # type: ignore[union-attr]

    def _trained_values(self) -> Iterator[tuple[str, Tensor]]:
        """Each trained parameter, without ZeRO's partition."""
        for name, parameter in states.trained(self.network):
            with gathered_parameters([parameter]):
                wanted = hasattr(parameter, "ds_id") and (self.args.should_save or self.mesh is not None)
                yield name, parameter.detach().cpu() if wanted else parameter.detach()

    def _save_checkpoint(self, model, trial) -> None:
        staging = checkpoint.staging_folder(self.output_dir, self.state.global_step)
        with checkpoint.writing(staging, "the checkpoint"):
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
            self._barrier()
            self._write_checkpoint(staging)
            self._barrier()
            if self.args.should_save:
                self._commit(staging)
            self._barrier()

    def _commit(self, staging: Path) -> None:
        final = checkpoint.commit(staging, self._manifest())
        logger.info("checkpoint written to %s", final)
        best = self.state.best_model_checkpoint
        for old in checkpoint.rotate(self.output_dir, self.keep, Path(best) if best else None, final):
            logger.info("checkpoint %s removed (save_total_limit %s)", old, self.keep)

    def _write_checkpoint(self, folder: Path) -> None:
        self.store_flos()
        self.save_model(str(folder), _internal_call=True)
        if not self.args.save_only_model:
            tensors = states.gather(self.network, self.inner_optimizer)
            states.write(folder, self.whole_tensors(tensors), writes=self.args.should_save)
            self._save_rng_state(str(folder))
        if self.state.best_global_step:  # every rank has to know it: all of them load it in the end
            best = self.output_dir / f"checkpoint-{self.state.best_global_step}"
            if best.is_dir() or self.state.best_global_step == self.state.global_step:
                self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.state.save_to_json(str(folder / "trainer_state.json"))

    def _manifest(self) -> dict[str, Any]:
        scheduler: Any = self.lr_scheduler
        return {
            **self.facts,
            "global_step": self.state.global_step,
            "optimizer_steps": scheduler.last_epoch,  # fewer than global_step where float16 skipped some
            "loss_scale": self.loss_scale.state_dict() if self.loss_scale is not None else None,
            "world_size": self.args.world_size,
            "layout": self._layout(),
            "weights_only": self.args.save_only_model,
        }

    def _layout(self) -> list[int]:
        """Degrees of tensor and pipeline parallelism, and chunks."""
        return [self.mesh.dims.tensor, self.mesh.dims.pipeline, self.chunks] if self.mesh else [1, 1, 1]

    # Reading ----------------------------------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if resume_from_checkpoint is not None:
            with checkpoint.reading(resume_from_checkpoint):
                self._load_states(Path(resume_from_checkpoint))
        return prepared

    def _load_states(self, folder: Path) -> None:
        facts = checkpoint.read(folder).facts
        optimizer = self.inner_optimizer
        steps = 0 if self.weights_only else facts["optimizer_steps"]
        states.load(folder, self._stored(folder), self.network, optimizer, steps, self.mesh)
        if self.weights_only:
            return
        scheduler: Any = self.lr_scheduler
        scheduler.last_epoch = steps
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scheduler.lr_lambdas[0](steps)
        set_last_lr(scheduler, [group["lr"] for group in optimizer.param_groups])
        if facts["loss_scale"] and self.loss_scale is not None:
            self.loss_scale.load_state_dict(facts["loss_scale"])

    def _init_training_state(self, max_steps, *args, **kwargs):
        position = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)
        return position

    def _load_rng_state(self, folder: str | None) -> None:
        if folder is None:
            return
        facts = checkpoint.read(Path(folder)).facts
        before = (facts["world_size"], facts.get("layout", [1, 1, 1]))
        if self.weights_only or before != (self.args.world_size, self._layout()):
            torch.manual_seed(self.dropout_seed + 1_000_003 * facts["global_step"])
            logger.info(
                "%s processes in another layout wrote the checkpoint, %d go on: dropout draws new numbers",
                facts["world_size"] or "another library's",
                self.args.world_size,
            )
            return
        unreadable = next(filter(None, self._of_all(self._load_own_rng_state(folder))), None)
        if unreadable:  # on one process: all draw anew, some of them share their numbers
            torch.manual_seed(self.dropout_seed + 1_000_003 * facts["global_step"])
            logger.warning("the random states of %s cannot be read (%s): dropout draws new numbers", folder, unreadable)

    def _load_own_rng_state(self, folder: str) -> str | None:
        """This process's random states; returns why they cannot be had."""
        name = "rng_state.pth" if self.args.world_size == 1 else f"rng_state_{self.args.process_index}.pth"
        if not (Path(folder) / name).is_file():
            return f"{name} is missing"
        reconstruct: Any = np.ones(1).__reduce__()[0]
        numpy_1 = torch.serialization.safe_globals([(reconstruct, "numpy.core.multiarray._reconstruct")])
        try:
            with numpy_1:  # where numpy 1 had the function
                super()._load_rng_state(folder)
        except Exception as error:  # damaged pickles make torch raise nearly anything
            return f"{name}: {reason_of(error)}"
        return None

    def _of_all(self, value: Any) -> list[Any]:
        """`value` of each process."""
        found = [value] * self.args.world_size
        if self.args.world_size > 1:
            dist.all_gather_object(found, value)
        return found

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Put the weights of a checkpoint into the model."""
        self.put(states.trained(self.network), self._stored(folder).get)

    def recall(self, folder: Path) -> None:
        """Take over the history of a checkpoint; one of another library may have none."""
        history = folder / "trainer_state.json"
        if history.is_file():
            self.state = TrainerState.load_from_json(str(history))
            self.state.is_world_process_zero = self.is_world_process_zero()
            self.state.is_local_process_zero = self.is_local_process_zero()

    def _stored(self, folder: Path) -> StoredAdapters | StoredWeights:
        return StoredAdapters(folder) if self.has_adapters else StoredWeights(str(folder))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Nothing: `_prepare_for_training` does it, when the optimizer is there."""

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        logger.info("best checkpoint: %s (%s %s)", best, self.args.metric_for_best_model, self.state.best_metric)
        self.restore(Path(best or ""))

    def _barrier(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()

"""Writes checkpoints that are complete or absent, and resumes from them in any parallel layout.

A checkpoint is written into `.checkpoint-N.incomplete`, flushed, given a manifest and renamed to `checkpoint-N`
(folder.py). Weights are a plain GPT-2 or PEFT folder, the optimizer state is independent of world size, ZeRO stage and
precision (optimizer_state.py); or each process writes its share of both (shards.py).
"""

import logging
import re
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor
from transformers import TrainingArguments

from gptlm import owned
from gptlm.checkpoint import folder as checkpoint
from gptlm.checkpoint import optimizer_state, random_states, shards
from gptlm.checkpoint.agreement import together
from gptlm.checkpoint.manifest import SHARDED, STOCK, Manifest
from gptlm.disk import sync_folder, sync_tree
from gptlm.errors import GptlmError
from gptlm.model.build import StoredWeights, blank_model
from gptlm.model.files import CONV1D_WEIGHTS
from gptlm.model.lora import StoredAdapters, save_adapters
from gptlm.model.tensor_files import save_model_one_by_one
from gptlm.model.tokenizer import save_tokenizer
from gptlm.parallel.deepspeed import gathered_parameters
from gptlm.parallel.process_groups import Mesh
from gptlm.parallel.sharding import gather_tensors
from gptlm.upstream.torch import set_last_lr

logger = logging.getLogger(__name__)

FINAL = ".model.incomplete"
WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class Checkpointer:
    """Saves and restores a training run.

    Args:
        manifest: fields noted in each checkpoint's manifest.
        keep: checkpoints to keep, the newest and the best always among them; None keeps all.
        protected: names of checkpoints in the output folder that the model is read from; they are never removed.
        run_file: the run as an argument file, saved beside each model as run.json; None: none.
        card: step -> the model card of the checkpoint of a whole model; None: none.
        checked: a checkpoint whose files have been compared with their checksums.
        resume_weights_only: resume with a checkpoint's weights and samples, but a new optimizer and schedule.
        mesh: process groups where several processes share a replica, with `chunks` pipeline stages each.
        sharded: each process writes its own share of a checkpoint (shards.py).
        in_background: training continues when the shares are copied to host memory; needs `sharded`.
    """

    def __init__(
        self,
        *,
        manifest: dict[str, Any] | None = None,
        keep: int | None = None,
        protected: Collection[str] = (),
        run_file: str | None = None,
        card: Callable[[int], str] | None = None,
        checked: Path | None = None,
        resume_weights_only: bool = False,
        mesh: Mesh | None = None,
        chunks: int = 1,
        sharded: bool = False,
        in_background: bool = False,
    ):
        self.manifest, self.keep, self.protected, self.run_file = manifest or {}, keep, protected, run_file
        self.card, self.checked, self.resume_weights_only = card, checked, resume_weights_only
        self.mesh, self.layout = mesh, [1, 1, 1]
        if mesh is not None:  # degrees of tensor and pipeline parallelism, and chunks
            self.layout = [mesh.dims.tensor, mesh.dims.pipeline, chunks]
        self.sharded, self.in_background = sharded, in_background
        self._group: Any = None  # of the threads that write
        self._pending: shards.Save | None = None

    def attach(self, model: Any, args: TrainingArguments, tokenizer: Any) -> None:
        """Called by the trainer: `model` is the one without wrappers."""
        self.model, self.args, self.tokenizer = model, args, tokenizer
        self.output_dir = Path(args.output_dir or "")

    @property
    def has_adapters(self) -> bool:
        """Whether only adapters are trained, and so saved."""
        return isinstance(self.model, PeftModel)

    # Writing ----------------------------------------------------------------------------------------------------

    def save(self, state: Any, optimizer: Any, scheduler: Any, loss_scale: Any, fields: Mapping[str, Any]) -> None:
        """Write checkpoint-N of step N; `fields` are added to its manifest.

        Raises:
            GptlmError: if it, or the one before it, cannot be written; older checkpoints stay complete.
        """
        self.wait()
        staging = checkpoint.staging_folder(self.output_dir, state.global_step)
        with checkpoint.writing(staging, "the checkpoint"):
            with together(f"the checkpoint {staging}"):
                if self.args.should_save:
                    checkpoint.start(staging)
            self._write(staging, state, optimizer)
            own = {
                "global_step": state.global_step,
                "optimizer_steps": scheduler.last_epoch,  # fewer than global_step where float16 skipped some
                "loss_scale": loss_scale.state_dict() if loss_scale is not None else None,
                "world_size": self.args.world_size,
                "layout": self.layout,
                "weights_only": self.args.save_only_model,
                "checkpoint_format": SHARDED if self.sharded else STOCK,
            }
            best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None
            commit = partial(self._commit, staging, {**self.manifest, **own, **fields}, best)
            if self.sharded:
                self._write_shards(staging, state.global_step, optimizer, commit)
                return
            with together(f"the checkpoint {staging}"):
                if self.args.should_save:
                    commit()

    def _write(self, folder: Path, state: Any, optimizer: Any) -> None:
        """All files but those of shards."""
        what = f"the checkpoint {folder}"
        with together(what):
            if not self.sharded:
                self.save_model(folder)
                if self.card is not None and self.args.should_save and not self.has_adapters:  # adapters have theirs
                    (folder / owned.CARD).write_text(self.card(state.global_step), encoding="utf-8")
            elif self.args.should_save:
                self._save_settings(folder)
                self.model.save_settings(folder)
        if not self.args.save_only_model and not self.sharded:
            with together(what):
                tensors = optimizer_state.gather(self.model, inner_optimizer(optimizer))
                optimizer_state.write(folder, self._whole_tensors(tensors), writes=self.args.should_save)
        if state.best_global_step:  # every rank has to know it: all of them load it in the end
            best = self.output_dir / f"checkpoint-{state.best_global_step}"
            if best.is_dir() or state.best_global_step == state.global_step:
                state.best_model_checkpoint = str(best)
        with together(what):
            if not self.args.save_only_model:
                random_states.save(folder / self._rng_file)
            if self.args.should_save:
                state.save_to_json(str(folder / checkpoint.HISTORY))

    def _write_shards(self, folder: Path, step: int, optimizer: Any, commit: Callable[..., None]) -> None:
        """The share of each process; the first one commits the checkpoint when all are written."""
        inner, weights_only = inner_optimizer(optimizer), self.args.save_only_model
        parts = shards.held_parts(self.model, inner, self.mesh, weights_only=weights_only)
        if not self.in_background:
            shards.Save(folder, parts, step, commit).run()
            return
        if self.args.world_size > 1 and self._group is None:  # training uses the other groups meanwhile
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.args.ddp_timeout))
        self._pending = shards.Save(folder, shards.copied(parts), step, commit, self._group)
        self._pending.start()

    def wait(self) -> None:
        """Wait until the checkpoint that is written in the background is complete.

        Raises:
            GptlmError: if it cannot be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with checkpoint.writing(pending.folder, "the checkpoint"):
                pending.wait()

    def close(self) -> None:
        """Let the thread that writes a checkpoint end, after an error of the run, too."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with suppress(Exception):  # the run has another error already
                pending.wait()

    def _commit(
        self, staging: Path, fields: Mapping[str, Any], best: Path | None, known: Mapping[str, str] | None = None
    ) -> None:
        """Name the finished folder `staging`, and remove older checkpoints beyond the limit."""
        final = checkpoint.commit(staging, fields, self.protected, known)
        names = (f"{final.name}/{name}" for name in owned.files_of_checkpoint(final))
        owned.note(self.output_dir, names, owned.RUN)
        logger.info("checkpoint written to %s", final)
        for old in checkpoint.rotate(self.output_dir, self.keep, best, final, self.protected):
            logger.info("checkpoint %s removed (save_total_limit %s)", old, self.keep)

    def save_final(self) -> None:
        """Write the final model and tokenizer into the output folder: complete first, then under their names.

        Raises:
            GptlmError: if they cannot be written; an older model stays complete.
        """
        self.wait()
        staging = self.output_dir / FINAL
        with checkpoint.writing(self.output_dir, "the final model"):
            try:
                what = f"the final model {self.output_dir}"
                with together(what):
                    if self.args.should_save:
                        checkpoint.start(staging)
                with together(what):
                    self.save_model(staging)
                with together(what):
                    if self.args.should_save:
                        self._replace_model(staging)
            finally:
                if self.args.should_save:
                    shutil.rmtree(staging, ignore_errors=True)

    def _replace_model(self, staging: Path) -> None:
        """Move the model in `staging` into the output folder; shards of an older model are removed."""
        sync_tree(staging)
        new, files = {path.name for path in staging.iterdir()}, owned.listing(self.output_dir)
        owned.move_in(staging, self.output_dir, owned.RUN)
        for name in files:
            if WEIGHT_FILE.fullmatch(name) and name not in new:
                owned.remove(self.output_dir, name)
        sync_folder(self.output_dir)

    def save_model(self, folder: Path) -> None:
        """The model as a plain GPT-2 folder, adapters as a plain PEFT folder; all ranks take part, rank 0 writes."""
        tensors = self._whole_tensors(self._trained_values())
        if self.sharded:
            self._save_tensor_by_tensor(folder, tensors)
            return
        weights = {}
        for name, tensor in tensors:
            if self.args.should_save:
                weights[name] = tensor if self.mesh is None else tensor.cpu()
        if not self.args.should_save:
            return
        self._save_settings(folder)
        if self.has_adapters:
            save_adapters(self.model, weights, folder)
        else:
            self.model.save_pretrained(folder, state_dict=weights)

    def _save_tensor_by_tensor(self, folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """A plain GPT-2 folder of a model that may be larger than the memory of rank 0."""
        if not self.args.should_save:
            deque(tensors, maxlen=0)  # gathering them is collective
            return
        try:
            self._save_settings(folder)
            self.model.save_settings(folder)
            with torch.device("meta"):
                whole = blank_model(self.model.config)
            dtype = self.model.dtype
            kinds = {name: (_stock(name, weight).shape, dtype) for name, weight in whole.named_parameters()}
            save_model_one_by_one(folder, kinds, ((name, _stock(name, tensor)) for name, tensor in tensors))
        finally:
            deque(tensors, maxlen=0)  # after an error, too

    def _save_settings(self, folder: Path) -> None:
        """The run as a file, and the tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.run_file is not None:
            (folder / checkpoint.RUN_FILE).write_text(self.run_file, encoding="utf-8")
        if self.tokenizer is not None:
            save_tokenizer(self.tokenizer, folder)

    def _trained_values(self) -> Iterator[tuple[str, Tensor]]:
        """Each trained parameter, without ZeRO's partition."""
        for name, parameter in optimizer_state.trained(self.model):
            with gathered_parameters([parameter]):
                is_copied = hasattr(parameter, "ds_id") and (self.args.should_save or self.mesh is not None)
                yield name, parameter.detach().cpu() if is_copied else parameter.detach()

    def _whole_tensors(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Shards of tensor and pipeline parallelism as whole tensors, on every process."""
        return tensors if self.mesh is None else gather_tensors(self.mesh, tensors)

    # Reading ----------------------------------------------------------------------------------------------------

    def read(self, folder: Path, *, weights: bool = False) -> Manifest:
        """The manifest of a checkpoint. Rank 0 compares the files, or those of the `weights`, with their checksums.

        Raises:
            GptlmError: on every rank, if the checkpoint is damaged.
        """
        found = checkpoint.read(folder)
        damage: list[str | None] = [None]
        if folder != self.checked and self.args.process_index == 0:
            try:
                checkpoint.check_content(found, weights=weights)
            except GptlmError as error:
                damage[0] = error.marked
        if folder != self.checked and self.args.world_size > 1:
            dist.broadcast_object_list(damage)
        if damage[0] is not None:
            raise GptlmError(damage[0])
        return found.manifest

    def load(self, folder: Path, optimizer: Any, scheduler: Any, loss_scale: Any) -> None:
        """Weights, optimizer state, schedule and loss scale of a checkpoint.

        Raises:
            GptlmError: if a file is damaged, or the schedule cannot be restored.
        """
        with checkpoint.reading(str(folder)):
            manifest = checkpoint.read(folder).manifest
            inner = inner_optimizer(optimizer)
            steps = 0 if self.resume_weights_only else manifest.optimizer_steps
            optimizer_state.load(folder, self._stored(folder), self.model, inner, steps, self.mesh)
            if self.resume_weights_only:
                return
            if not hasattr(scheduler, "lr_lambdas"):
                raise GptlmError(f"the schedule {type(scheduler).__name__} cannot be resumed; use another one")
            scheduler.last_epoch = steps
            for group in inner.param_groups:
                group["lr"] = group["initial_lr"] * scheduler.lr_lambdas[0](steps)
            set_last_lr(scheduler, [group["lr"] for group in inner.param_groups])
            if manifest.loss_scale and loss_scale is not None:
                loss_scale.load_state_dict(manifest.loss_scale)

    @torch.no_grad()
    def load_weights(self, folder: Path) -> None:
        """Put the weights of a checkpoint into the model, whatever its layout.

        Raises:
            GptlmError: if they are damaged.
        """
        self.wait()
        self.read(folder, weights=True)
        stored = optimizer_state.StoredStates(folder, self._stored(folder), self.mesh, weights_only=True)
        for name, parameter in optimizer_state.trained(self.model):
            optimizer_state.load_weight(stored, name, parameter)

    def _stored(self, folder: Path) -> StoredAdapters | StoredWeights:
        return StoredAdapters(folder, self.model) if self.has_adapters else StoredWeights(str(folder))

    # Random numbers ---------------------------------------------------------------------------------------------

    def load_rng_state(self, folder: Path, seed: int) -> None:
        """Random states of the same number of processes in the same layout; others draw new numbers from `seed`."""
        manifest = checkpoint.read(folder).manifest
        new_seed = seed + 1_000_003 * manifest.global_step
        written = (manifest.world_size, manifest.layout)
        own = (self.args.world_size, self.layout)
        if self.resume_weights_only or written != own:
            torch.manual_seed(new_seed)
            if self.resume_weights_only:
                logger.info("random states are not restored (ignore_load_lr_and_optim): dropout draws new numbers")
            else:
                logger.info(
                    "the checkpoint was written by %s processes in the parallel layout %s, and is resumed by %d in %s: "
                    "dropout draws new numbers",
                    *(manifest.world_size or "another library's", written[1]),
                    *own,
                )
            return
        reasons = [random_states.load(folder / self._rng_file)] * self.args.world_size
        if self.args.world_size > 1:
            dist.all_gather_object(reasons, reasons[0])
        reason = next(filter(None, reasons), None)
        if reason:  # of one process: all draw new numbers, or some would draw the same ones
            torch.manual_seed(new_seed)
            logger.warning("the random states of %s cannot be read (%s): dropout draws new numbers", folder, reason)

    @property
    def _rng_file(self) -> str:
        return random_states.file_name(self.args.process_index, self.args.world_size)


def _stock(name: str, tensor: Tensor) -> Tensor:
    """A weight in the tensor layout of stock GPT-2."""
    return tensor.t() if name.endswith(CONV1D_WEIGHTS) else tensor


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer without accelerate's wrapper, under DeepSpeed its ZeRO optimizer."""
    return getattr(optimizer, "optimizer", optimizer)

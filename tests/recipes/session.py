"""Several training runs after each other inside one launched group of processes: starting one takes ten seconds.

    torchrun --nproc_per_node N tests/recipes/session.py CASES.json RESULTS.json

A case with --fp16 computes in float16 on the CPU, which gptlm and DeepSpeed leave to GPUs otherwise.

CASES: [[name, [words of the command]], ...]; a case whose name has "one overflow" has an infinite
gradient in its third step, on the last process alone.
RESULTS: {name: {"history": [...], "metrics": {...}, "read": [...], "scale": [...], "moments": [...], "memory": "..."}
or {"error": text}}; read is how many bytes of token files each process has read, scale the state of its loss scale at
the end, moments how many elements of AdamW's first moment it holds, memory the log line of that name.
"""

import gc
import json
import logging
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import torch_autocast
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from gptlm.commands.pretrain import parse_pretrain
from gptlm.commands.sft import parse_sft
from gptlm.errors import GptlmError, UsageError
from gptlm.recipes.common import training
from gptlm.recipes.common.device import Device
from gptlm.recipes.common.hooks import Hooks
from gptlm.recipes.pretrain.run import pretrain
from gptlm.recipes.sft.run import sft
from tests.imports import freeze_imports


@contextmanager
def float16_on_the_cpu(words):
    """Inside, with --fp16; the list it gives gets the loss scale of the run."""
    accelerator, choose, make = get_accelerator(), training.choose_device, training.make_loss_scale
    made = []

    def kept(*arguments):
        made.append(make(*arguments))
        return made[-1]

    training.make_loss_scale = kept
    if "--fp16" in words:
        accelerator.is_fp16_supported = lambda: True
        accelerator.supported_dtypes = lambda: [torch.float, torch.bfloat16, torch.float16]
        training.choose_device = lambda device, *, level, **_: Device("cpu", "fp16", level)
    try:
        yield made
    finally:
        training.choose_device, training.make_loss_scale = choose, make


@contextmanager
def counted_reads():
    """Inside, sizes of the reads of token files; the list it gives gets them."""
    pread, sizes = os.pread, []

    def counted(file, size, place):
        if os.readlink(f"/proc/self/fd/{file}").endswith(".bin"):
            sizes.append(size)
        return pread(file, size, place)

    os.pread = counted
    try:
        yield sizes
    finally:
        os.pread = pread


class Lines(logging.Handler):
    """Keeps what a logger prints."""

    def __init__(self, name):
        super().__init__()
        self.texts = []
        logging.getLogger(name).addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def of_all(value):
    """`value` of each rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class OneOverflow(TrainerCallback):
    """Makes a gradient of the third step infinite on the last process."""

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            weight = next(parameter for parameter in model.parameters() if parameter.requires_grad)
            self.hook = weight.register_hook(lambda gradient: gradient * float("inf"))

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3 and hasattr(self, "hook"):
            self.hook.remove()


def train(words, hooks):
    if "--dataset_name_or_path" in words:
        return sft(parse_sft(words, os.environ), hooks)
    return pretrain(parse_pretrain(words, os.environ), hooks)


def moments(trainer):
    """Elements of the first moment on this process."""
    optimizer = trainer.optimizer
    while not isinstance(optimizer, torch.optim.Optimizer) or not optimizer.state:
        if not hasattr(optimizer, "optimizer"):
            return 0
        optimizer = optimizer.optimizer
    return sum(state["exp_avg"].numel() for state in optimizer.state.values() if "exp_avg" in state)


def main(cases: str, results: str) -> None:
    dist.init_process_group("gloo")
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # what is to be compiled is
    found, lines = {}, Lines("gptlm.training.metrics.memory_parts")
    linear = torch.nn.functional.linear  # ZeRO stage 3 leaves one of its own behind
    for name, words in json.loads(Path(cases).read_text()):
        lines.texts.clear()
        try:
            held = []
            callbacks = (OneOverflow(),) if "one overflow" in name else ()
            hooks = Hooks(callbacks=callbacks, finished=lambda trainer, held=held: held.append(moments(trainer)))
            with float16_on_the_cpu(words) as scales, counted_reads() as sizes:
                metrics = train(words, hooks)
            read = of_all(sum(sizes))
            scale = of_all(scales[0].state_dict() if scales else None)
            held = of_all(held[0] if held else 0)
            state = Path(words[words.index("--output_dir") + 1]) / "trainer_state.json"
            if dist.get_rank() == 0:
                history = json.loads(state.read_text())["log_history"] if state.exists() else []
                found[name] = {"metrics": metrics, "history": history, "read": read, "scale": scale, "moments": held}
                found[name]["memory"] = "".join(lines.texts)
        except (GptlmError, UsageError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            found[name] = {"error": str(error)}
        torch.nn.functional.linear = linear
        torch._dynamo.reset()
        torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
        unset_hf_deepspeed_config()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        freeze_imports()
        gc.collect()
        dist.barrier()
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

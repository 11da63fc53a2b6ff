"""The network: GPT-2 with `nn.Linear` in memory and plain GPT-2 checkpoints on disk.

Module names and shapes are those of HuggingFace's GPT-2 (`transformer.h.0.attn.c_attn`, ...), with one exception: the
four matrices of a block are `nn.Linear`, weight (out, in), where GPT-2's checkpoints have Conv1D, weight (in, out).
Loading and saving transposes them, so that stock `AutoModelForCausalLM.from_pretrained` reads our checkpoints.

Shapes: width = n_embd = heads x head_dim; vocabulary = vocab_size.
"""

import copy
import logging
import math
import re
from collections.abc import Callable, Collection
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, GPT2Config, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from gptlm.disk import apply_umask
from gptlm.kernels.attention import Documents
from gptlm.kernels.linear_cross_entropy import summed_loss, token_scores
from gptlm.kernels.output_layer import OutputLayer
from gptlm.kernels.residual_norm import residual_norm
from gptlm.model.block import AnyCache, Block
from gptlm.model.files import CONV1D_WEIGHTS
from gptlm.upstream.torch import leave_open
from gptlm.upstream.transformers import detach_from_model_config, transpose_on_disk

logger = logging.getLogger(__name__)


class GPTPreTrainedModel(PreTrainedModel):
    """Class attributes and initialization that transformers uses to create, load and save the network."""

    config_class = GPT2Config
    config: GPT2Config
    base_model_prefix = "transformer"
    _no_split_modules = ["Block"]
    _supports_sdpa = True
    _keys_to_ignore_on_load_unexpected = [r"attn\.bias$", r"attn\.masked_bias$"]  # buffers in old GPT-2 files

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, initializer_range), residual projections / sqrt(2 x layers) (GPT-2 paper, section 2.3)."""
        std = self.config.initializer_range
        if getattr(module, "is_residual_projection", False):
            std /= math.sqrt(2 * self.config.n_layer)
        if isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, mean=0.0, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)


class GPTModel(GPTPreTrainedModel):
    """Embeddings, blocks and the final layer norm."""

    def __init__(self, config: GPT2Config):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.chains_blocks = False  # call the blocks by `chained`
        self.lengths_vary = False  # and compile them for any batch and length
        self.post_init()

    def set_recompute(self, granularity: str | None, keep: Collection[int] = ()) -> None:
        """Choose which activations backward recomputes instead of keeping them from forward.

        Args:
            granularity: "full" the block, "full_attn" or "only_attn" its attention with both projections, "core_attn"
                only softmax(q k^T) v; None keeps everything.
            keep: numbers of layers that keep everything.
        """
        for block in self.own_blocks:
            chosen = (granularity or "").replace("only_attn", "full_attn") if block.attn.layer not in keep else ""
            block.recompute = chosen
            block.attn.recompute_core = chosen == "core_attn"

    def expect_repeated_shapes(self) -> None:
        """Allow kernels that plan once for each shape of a batch: there are few."""
        for block in self.own_blocks:
            block.attn.shapes_repeat = True

    @property
    def own_blocks(self) -> list[Any]:
        """The blocks of this process: all of them, unless other pipeline stages hold some."""
        return [block for block in self.h if hasattr(block, "attn")]

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, value: nn.Embedding) -> None:  # type: ignore[override]
        self.wte = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: AnyCache | None = None,
        use_cache: bool = False,
        documents: Documents | None = None,
    ) -> BaseModelOutputWithPast:
        """Token ids (batch, length) -> hidden states (batch, length, width).

        Args:
            attention_mask: (batch, past + length), 1 on tokens and 0 on padding.
            position_ids: (batch, length).
            cache: one that attends itself needs `position_ids`, and no mask.
            documents: limits attention to tokens of the same document; excludes `attention_mask` and `cache`.
        """
        assert documents is None or (attention_mask is None and cache is None and not use_cache)
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        x = self.wte(given) if inputs_embeds is None else given  # (batch, length, width)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if isinstance(cache, Cache) else 0
            position_ids = torch.arange(past, past + given.shape[1], device=x.device)[None]
        mask = None  # plain causal attention, for which SDPA has its fastest kernels
        if attention_mask is not None or isinstance(cache, Cache):  # (batch, 1, length, past + length)
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=x,
                attention_mask=attention_mask,
                cache=cache,
                position_ids=position_ids,
            )
        x = self.drop(x + self.wpe(position_ids))
        if self.training and torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_()  # with adapters: else the first block would be compiled apart from the others
        blocks: Any = self.h
        if self.chains_blocks and cache is None:
            normed = self._chained_blocks(x, mask, documents)
        else:
            for block in blocks:
                x = block(x, mask, cache, documents)
            normed = self.ln_f(x)
        returned: Any = cache if use_cache else None
        return BaseModelOutputWithPast(last_hidden_state=normed, cache=returned)

    def _chained_blocks(self, x: Tensor, mask: Tensor | None, documents: Documents | None) -> Tensor:
        """All blocks and the last norm, (batch, length, width) -> the same."""
        blocks: Any = self.h
        # zeros before the first block, so that all blocks are compiled as one
        branch, bias = torch.zeros_like(x, requires_grad=x.requires_grad), blocks[0].mlp.late_bias()
        bias = None if bias is None else nn.Parameter(torch.zeros_like(bias), bias.requires_grad)
        if self.lengths_vary:
            leave_open(branch, dimensions=(0, 1))
        for block in blocks:
            x, branch = block.chained(x, branch, bias, mask, documents)
            bias = block.mlp.late_bias()
        return residual_norm(x, branch, bias, self.ln_f)[1]


class GPTLMHeadModel(GPTPreTrainedModel, GenerationMixin):
    """GPT with a language-model head, which is tied to the token embedding unless the config disables it."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    accepts_loss_kwargs = True  # the Trainer passes num_items_in_batch

    def __init__(self, config: GPT2Config):
        super().__init__(config)
        self.transformer = GPTModel(config)
        self.lm_head = OutputLayer(config.n_embd, config.vocab_size, bias=False)
        self.output_loss = summed_loss  # (hidden, head weight, targets) -> sum; replaced where the head is sharded
        self.output_scores = token_scores  # the same for evaluation, token by token
        # Sequence parallelism: a process's part of the hidden states -> those of whole sequences
        self.gather_hidden: Callable[[Tensor], Tensor] | None = None
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:  # type: ignore[override]
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int | None = None,
        cache: Cache | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """The loss if there are labels, else the logits.

        Args:
            labels: (batch, length) token ids, shifted here (HuggingFace's convention); -100 is ignored.
            shift_labels: (batch, length) the target of each position, not shifted again; overrides `labels`.
            num_items_in_batch: divisor of the summed loss; None means the number of targets in this batch.
            logits_to_keep: also return logits of the last n positions (0 = all) beside a loss.
            cu_seqlens: (documents + 1,) int32, first token of each document in the flattened batch, then batch x
                length. Attention stays inside each document, which can be empty.
            max_seqlen: tokens of the longest document, or more.

        Returns:
            loss: float32 scalar or None; logits: (batch, n, vocabulary) or None.
        """
        out = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=use_cache,
            documents=None if cu_seqlens is None else Documents(cu_seqlens, max_seqlen),
        )
        hidden = out.last_hidden_state
        loss = None
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        if shift_labels is not None:
            loss = self._loss(hidden, shift_labels, num_items_in_batch)
        logits = None
        if loss is None or logits_to_keep is not None:  # training never needs them: 3.3 GB in fp32 for 16 x 1024 tokens
            logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=out.cache)

    def _loss(self, hidden: Tensor, targets: Tensor, num_items: Tensor | int | None) -> Tensor:
        total = self.output_loss(hidden, self.lm_head.weight, targets)
        count = (targets != -100).sum() if num_items is None else torch.as_tensor(num_items, device=total.device)
        return total / count.clamp(min=1)  # no target at all: 0, not 0 / 0

    def save_pretrained(self, save_directory: str | PathLike[str], **kwargs: Any) -> None:  # type: ignore[override]
        """Save a stock GPT-2 folder: config.json names GPT2LMHeadModel, which is what the files contain."""
        in_memory, self.generation_config = self.generation_config, saved_generation(self.generation_config)
        try:
            super().save_pretrained(save_directory, **kwargs)
        finally:
            self.generation_config = in_memory
        if kwargs.get("is_main_process", True):
            for file in Path(save_directory).glob("*.safetensors"):
                apply_umask(file)
            self._save_config(save_directory)

    def save_settings(self, folder: Path) -> None:
        """Save what `save_pretrained` saves, without the weights."""
        self.config.dtype = self.dtype
        self._save_config(folder)
        saved_generation(self.generation_config).save_pretrained(folder)

    def _save_config(self, folder: str | PathLike[str]) -> None:
        in_training, self.config.use_cache = self.config.use_cache, True  # the Trainer disables it
        self.config.architectures = ["GPT2LMHeadModel"]
        self.config.save_pretrained(folder)
        self.config.use_cache = in_training


def saved_generation(config: GenerationConfig) -> GenerationConfig:
    """`config` with a padding id, in a form that can be saved: only its special token ids if its fields conflict.

    transformers refuses to save conflicts that it only warns about on load (`temperature` without `do_sample`). A run
    must not lose its model over that.
    """
    kept = copy.deepcopy(config)
    detach_from_model_config(kept)
    ids = {name: getattr(kept, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if ids["pad_token_id"] is None:
        ends = ids["eos_token_id"]
        kept.pad_token_id = ids["pad_token_id"] = ends[0] if isinstance(ends, list) else ends
    try:
        kept.validate(strict=True)
        return kept
    except ValueError as error:
        fields = ", ".join(re.findall(r"^- `(\w+)`", str(error), re.MULTILINE))
        logger.warning(
            "the base model's generation_config.json has conflicting settings (%s), which transformers refuses to "
            "save; only its special token ids are saved",
            fields or error,
        )
        return GenerationConfig(**{name: None if value == -1 else value for name, value in ids.items()})


transpose_on_disk("GPTLMHeadModel", CONV1D_WEIGHTS)

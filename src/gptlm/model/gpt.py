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
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, GenerationMixin, GPT2Config, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from gptlm.disk import apply_umask
from gptlm.kernels.attention import Documents, attention
from gptlm.kernels.fused_gelu import fused_feed_forward, supports_fused
from gptlm.kernels.linear_cross_entropy import summed_loss, token_scores
from gptlm.kernels.output_layer import OutputLayer
from gptlm.kernels.residual_norm import residual_norm
from gptlm.model.files import CONV1D_WEIGHTS
from gptlm.upstream.transformers import detach_from_model_config, transpose_on_disk

logger = logging.getLogger(__name__)


class AttendingCache(Protocol):
    """A cache that also knows which of its places a token attends to, and how."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Extend the past by `k` and `v`; the result of attention, all (batch, heads, length, head_dim)."""


AnyCache = Cache | AttendingCache


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPT2Config, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.n_embd // config.n_head
        self.heads = config.n_head  # of this process: tensor parallelism splits them
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # output: [q | k | v], each heads x head_dim
        self.c_proj = residual_projection(config.n_embd, config.n_embd)
        self.dropout = config.attn_pdrop
        # PaddleNLP uses attention_probs_dropout_prob for the attention output as well, GPT-2 uses resid_pdrop there.
        self.resid_dropout = nn.Dropout(getattr(config, "attn_resid_pdrop", config.resid_pdrop))
        self.recompute_core = False
        self.shapes_repeat = False
        # Tensor parallelism: each rank draws the dropout of its own heads, all other dropout is the same on all ranks.
        self.core_context: Callable[[], AbstractContextManager] | None = None

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        cache: AnyCache | None,
        documents: Documents | None,
        without_bias: bool = False,
    ) -> Tensor:
        """(batch, length, width) -> (batch, length, width).

        Args:
            mask: (batch, 1, length, past + length), or None for causal attention.
            cache: keys and values of the past, which this call extends.
            documents: limits attention to tokens of the same document; needs `mask` None.
            without_bias: leave out the last bias, which the caller adds.
        """
        q, k, v = self.c_attn(x).chunk(3, dim=-1)  # (batch, length, width)
        # (batch, heads, length, head_dim), where heads are those of this rank under tensor parallelism.
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))
        if cache is not None and not isinstance(cache, Cache):
            return self.resid_dropout(self.c_proj(cache.attend(q, k, v, self.layer).transpose(1, 2).flatten(2)))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        repeat = self.shapes_repeat and cache is None  # with a cache each step is another shape
        if self.recompute_core and self.training:
            out = checkpoint(self._core, q, k, v, mask, documents, repeat, use_reentrant=False)
        else:
            out = self._core(q, k, v, mask, documents, repeat)
        out = out.transpose(1, 2).flatten(2)
        return F.linear(out, self.c_proj.weight) if without_bias else self.resid_dropout(self.c_proj(out))

    def late_bias(self) -> Tensor | None:
        """The last bias, where the caller may add it."""
        return late_bias(self.c_proj, self.resid_dropout)

    def _core(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, documents: Documents | None, repeat: bool
    ) -> Tensor:
        """dropout(softmax(q k^T / sqrt(head_dim))) v, (batch, heads, length, head_dim)."""
        dropout = self.dropout if self.training else 0.0
        attend = self._attend_in_context if dropout and self.core_context is not None else attention
        return attend(q, k, v, mask=mask, documents=documents, dropout=dropout, shapes_repeat=repeat)

    @torch.compiler.disable  # changing the RNG generator causes a graph break
    def _attend_in_context(self, *args: Any, **how: Any) -> Tensor:
        assert self.core_context is not None
        with self.core_context():
            return attention(*args, **how)


class MLP(nn.Module):
    """Feed-forward layer with GPT-2's tanh-approximated GELU."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, inner)
        self.c_proj = residual_projection(inner, config.n_embd)
        self.dropout = nn.Dropout(config.resid_pdrop)
        self.fused = False  # compute GELU in the epilogue of the matrix products, where compiled and supported

    def forward(self, x: Tensor, without_bias: bool = False) -> Tensor:
        """(batch, length, width) -> (batch, length, width); `without_bias` as in `Attention`."""
        if self.fused and torch.compiler.is_compiling() and supports_fused(x, self.c_fc, self.c_proj):
            return self.dropout(fused_feed_forward(x, self.c_fc, self.c_proj, without_bias=without_bias))
        hidden = gelu(self.c_fc(x))
        return F.linear(hidden, self.c_proj.weight) if without_bias else self.dropout(self.c_proj(hidden))

    def late_bias(self) -> Tensor | None:
        """The last bias, where the caller may add it."""
        return late_bias(self.c_proj, self.dropout)


def residual_projection(inputs: int, outputs: int) -> nn.Linear:
    """The last Linear of a residual branch; `_init_weights` scales it down."""
    linear = nn.Linear(inputs, outputs)
    linear.is_residual_projection = True  # type: ignore[assignment]
    return linear


def late_bias(linear: nn.Module, dropout: nn.Dropout) -> Tensor | None:
    """The bias of `linear`, unless it has to be added here: before a dropout, or inside another kind of layer."""
    drops = dropout.training and dropout.p > 0
    return linear.bias if type(linear) is nn.Linear and not drops else None


def gelu(x: Tensor) -> Tensor:
    """GPT-2's GELU, 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x.float()  # (1 + tanh z) / 2 = sigmoid 2 z, which is faster in generated GPU code
    return (wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide * wide * wide))).to(x.dtype)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPT2Config, layer: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)
        self.recompute = ""  # "full", "full_attn", "core_attn" or nothing

    def forward(self, x: Tensor, mask: Tensor | None, cache: AnyCache | None, documents: Documents | None) -> Tensor:
        if self.recompute == "full" and self.training:
            return checkpoint(self._forward, x, mask, None, documents, use_reentrant=False)
        return self._forward(x, mask, cache, documents)

    def _forward(self, x: Tensor, mask: Tensor | None, cache: AnyCache | None, documents: Documents | None) -> Tensor:
        if self.recompute == "full_attn" and self.training:
            x = x + checkpoint(self.attn, self.ln_1(x), mask, None, documents, use_reentrant=False)
        else:
            x = x + self.attn(self.ln_1(x), mask, cache, documents)
        return x + self.mlp(self.ln_2(x))

    def between_norms(
        self, x: Tensor, normed: Tensor, following: nn.LayerNorm, mask: Tensor | None, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        """The result of `forward`, and `following` of it, so that a sum and the norm after it are one kernel.

        Args:
            normed: `ln_1(x)`.
            following: the layer norm after this block.
        """
        bias = self.attn.late_bias()
        branch = self.attn(normed, mask, None, documents, without_bias=bias is not None)
        x, normed = residual_norm(x, branch, bias, self.ln_2)
        bias = self.mlp.late_bias()
        return residual_norm(x, self.mlp(normed, without_bias=bias is not None), bias, following)


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
        self.joins_norms = False  # call the blocks by `between_norms`
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
        if self.joins_norms and cache is None:
            normed = blocks[0].ln_1(x)
            for block, following in zip(blocks, [*(later.ln_1 for later in blocks[1:]), self.ln_f], strict=True):
                x, normed = block.between_norms(x, normed, following, mask, documents)
        else:
            for block in blocks:
                x = block(x, mask, cache, documents)
            normed = self.ln_f(x)
        returned: Any = cache if use_cache else None
        return BaseModelOutputWithPast(last_hidden_state=normed, cache=returned)


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

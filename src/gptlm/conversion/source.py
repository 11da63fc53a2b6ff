"""The interface of every checkpoint reader: stock GPT-2's weights by name, one at a time."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptlm.conversion.detect import Found
from gptlm.conversion.gpt2_names import WTE, all_names, layer_and_part, shape_of
from gptlm.errors import GptlmError, named
from gptlm.model.presets import PRESETS, Shape

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHT, MASTER = "weight", "master"
WITHOUT_OPTIMIZER = f"convert without {named('with_optimizer')}"
TOLERANCE = 0.02  # largest difference of two copies of a weight, relative to its largest absolute value


@dataclass(frozen=True)
class ReadOptions:
    """What the user specifies about a checkpoint.

    Attributes:
        vocab_size: entries without padding; later rows of the embedding are dropped.
        num_attention_heads, activation: used where the checkpoint does not contain them.
        keep_padding: keep the padding rows of the embedding. They take part in the loss (the softmax covers them), so
            resuming with the optimizer needs them.
        may_grow: allow a `vocab_size` above the stored rows; the model has the stored rows.
    """

    vocab_size: int | None = None
    num_attention_heads: int | None = None
    activation: str | None = None
    keep_padding: bool = False
    may_grow: bool = False


class Progress(NamedTuple):
    """`optimizer_steps` is below `iterations` where float16 skipped steps; `consumed_samples` None: unknown."""

    iterations: int
    optimizer_steps: int
    consumed_samples: int | None


class Source(ABC):
    """An open checkpoint.

    Attributes:
        shape: its sizes; the vocabulary is without padding.
        activation: HuggingFace's name of the activation function.
        epsilon: of the layer norms.
        dropouts: of hidden states and of attention.
        notes: lines for the log: sizes and settings that were inferred.
        arguments: the checkpoint's own configuration.
    """

    shape: Shape
    activation: str
    epsilon: float = 1e-5
    dropouts: tuple[float, float] = (0.1, 0.1)

    def __init__(self, found: Found):
        self.found = found
        self.notes: list[str] = []
        self.arguments: Mapping[str, Any] = {}

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The weight `name` in stock GPT-2's tensor layout; the embedding with all stored rows."""

    def get(self, name: str) -> Tensor:
        """The weight `name`, contiguous; the embedding without padding rows.

        Raises:
            GptlmError: if it is missing or has another shape.
        """
        expected = shape_of(name, self.shape)
        try:
            tensor = self.read(name)
        except GptlmError:
            raise
        except (RuntimeError, LookupError, TypeError, AttributeError, ValueError) as error:  # a rank's part is damaged
            raise GptlmError(f"{self.found.folder}: the parts of {name} do not fit together: {error}") from error
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise GptlmError(f"{self.found.folder}: {name} is {kind}, expected a floating-point tensor")
        if name == WTE:
            tensor = tensor[: expected[0]]
        if tuple(tensor.shape) != expected:
            raise GptlmError(
                f"{self.found.folder}: {name} has shape {tuple(tensor.shape)}, expected {expected} from the "
                "checkpoint's sizes"
            )
        return tensor.contiguous()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight with its name, in order."""
        for name in all_names(self.shape.num_hidden_layers):
            yield name, self.get(name)

    def progress(self) -> Progress:
        """How far training got. Raises GptlmError if the checkpoint has no optimizer state that can be read."""
        raise GptlmError(f"optimizer states of this format ({self.found}) cannot be read; {WITHOUT_OPTIMIZER}")

    def optimizer_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """(weight's name, kind, value) of each state; kinds are MOMENTS and "master", the float32 copy of a weight.

        Raises:
            GptlmError: if one is missing or has another shape.
        """
        raise NotImplementedError

    def infer_heads(self, layers: int, hidden_size: int) -> int:
        """The number of heads of the built-in models with these sizes, where they agree.

        Raises:
            GptlmError: if there is no such model.
        """
        shapes = [preset.shape for preset in PRESETS.values()]
        same = [s for s in shapes if (s.num_hidden_layers, s.hidden_size) == (layers, hidden_size)]
        heads = {shape.num_attention_heads for shape in same}
        if len(heads) != 1:
            raise GptlmError(
                f"{self.found.folder} does not contain the number of heads; give {named('num_attention_heads')}"
            )
        self.notes.append(
            f"{min(heads)} heads, as in the built-in models with {layers} layers and hidden size {hidden_size}"
        )
        return heads.pop()

    def set_vocabulary(self, rows: int, size: int | None, options: ReadOptions, reason: str) -> None:
        """Set `shape.vocab_size`.

        Args:
            rows: stored rows of the embedding.
            size: entries without padding, if the checkpoint contains that.
            reason: where `size` comes from, for the log.

        Raises:
            GptlmError: if the user asks for more entries than there are rows.
        """
        asked = options.vocab_size
        if asked and asked > rows and not options.may_grow:
            raise GptlmError(
                f"{named('vocab_size')} {asked}: the embedding in {self.found.folder} has {rows} rows; give less"
            )
        kept = min(asked or (rows if options.keep_padding else size) or rows, rows)
        self.shape = replace(self.shape, vocab_size=kept)
        if kept < rows:
            reason = "--vocab_size" if asked else reason
            self.notes.append(f"embedding reduced from {rows} rows to {kept} ({reason}); the rest is padding")
        elif size is None or size < rows:
            self.notes.append(f"all {rows} rows of the embedding are kept (--vocab_size N drops padding)")


class ShardedSource(Source):
    """A checkpoint in groups of files (pipeline stages or layers), each with one file per tensor-parallel rank.

    One group is in memory at a time.

    Attributes:
        kind: what is read now: the weights, or an optimizer state, which has the same layout.
    """

    def __init__(self, found: Found):
        super().__init__(found)
        self._loaded: tuple[tuple[int, str], Sequence[Mapping[str, Tensor]]] | None = None
        self._checked: set[int] = set()  # groups whose layer numbers were checked
        self.kind = WEIGHT

    @abstractmethod
    def group_of(self, name: str) -> int:
        """The group that contains `name`."""

    @abstractmethod
    def load_group(self, group: int) -> Sequence[Mapping[str, Tensor]]:
        """For each tensor-parallel rank its parts by GPT-2's names."""

    @abstractmethod
    def merge(self, name: str, parts: list[Tensor]) -> Tensor:
        """The whole weight in stock GPT-2's layout from the parts of all ranks."""

    @abstractmethod
    def has_master_weights(self) -> bool:
        """Whether the optimizer state has float32 copies of half-precision weights."""

    @abstractmethod
    def external_name(self, name: str) -> str:
        """The name of the weight in the checkpoint's own library, for messages."""

    def optimizer_state(self) -> Iterator[tuple[str, str, Tensor]]:
        for kind in (*MOMENTS, *([MASTER] if self.has_master_weights() else [])):
            self.kind = kind
            try:
                for name, tensor in self.weights():
                    yield name, kind, tensor
            finally:
                self.kind = WEIGHT

    def read(self, name: str) -> Tensor:
        return self.merge(name, self.parts(name))

    def parts(self, name: str) -> list[Tensor]:
        """The parts of `name` by tensor-parallel rank. Raises GptlmError if one is missing."""
        group = self.group_of(name)
        ranks = self.loaded_group(group)
        if group not in self._checked:
            self._checked.add(group)
            layers = [layer_and_part(stored)[0] for tensors in ranks for stored in tensors]
            last = max((layer for layer in layers if layer is not None), default=-1)
            if last >= self.shape.num_hidden_layers:
                raise GptlmError(
                    f"{self.found.folder} contains layer {last} (the first is 0), but its configuration has "
                    f"{self.shape.num_hidden_layers} layers: they belong to different models"
                )
        for rank, tensors in enumerate(ranks):
            if name not in tensors:
                state = "" if self.kind == WEIGHT else f"{self.kind} of "
                raise GptlmError(
                    f"{self.found.files[group][rank]} lacks {state}{self.external_name(name)} ({name}); copy it again"
                )
        return [tensors[name] for tensors in ranks]

    def loaded_group(self, group: int) -> Sequence[Mapping[str, Tensor]]:
        """`load_group`, kept in memory until another group is needed."""
        if self._loaded is None or self._loaded[0] != (group, self.kind):
            self._loaded = None  # free the last group before the next one is read
            self._loaded = ((group, self.kind), self.load_group(group))
        return self._loaded[1]


def first_value(values: Mapping[str, Any], *names: str) -> Any:
    """The value of the first of `names` that `values` has and that is not None."""
    return next((values[name] for name in names if values.get(name) is not None), None)


def checked_shape(sizes: Mapping[str, Any], where: Path) -> Shape:
    """The sizes of the checkpoint in `where` as a Shape.

    Raises:
        GptlmError: if a size is not a positive integer, or the heads do not divide the hidden size.
    """
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise GptlmError(f"{where}: {name} is {value!r}; expected a positive integer")
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise GptlmError(
            f"{where}: hidden size {sizes['hidden_size']} is not divisible by {sizes['num_attention_heads']} heads"
        )
    return Shape(**sizes)


def check_variants(values: Mapping[str, Any], variants: dict[str, tuple[tuple[object, ...], str]], where: Path) -> None:
    """Raises GptlmError if `values` describe another network than GPT-2.

    Args:
        variants: key -> (values that mean GPT-2, what any other value means).
    """
    for name, (gpt2_values, meaning) in variants.items():
        value = values.get(name)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value not in gpt2_values:
            raise GptlmError(f"{where} is not GPT-2: {name} = {value!r} means {meaning}")


def check_unknown(names: list[str], where: Path) -> None:
    """Raises GptlmError if there are any `names` of unknown tensors."""
    if names:
        raise GptlmError(f"{where} contains {len(names)} tensors that GPT-2 does not have (first: {names[0]})")


def merge_replicated(parts: list[Tensor], name: str, where: Path) -> Tensor:
    """A weight that every tensor-parallel rank has whole: their mean where rounding made them differ.

    Raises:
        GptlmError: if they differ by more than `TOLERANCE`.
    """
    if all(torch.equal(parts[0], part) for part in parts[1:]):
        return parts[0]
    if not all(nearly_equal(parts[0], part) for part in parts[1:]):
        raise GptlmError(f"{where}: the tensor-parallel ranks have different {name}, which they share; copy it again")
    logger.warning("the tensor-parallel ranks have slightly different %s; using their mean", name)
    return torch.stack([part.float() for part in parts]).mean(0).to(parts[0].dtype)


def nearly_equal(one: Tensor, other: Tensor) -> bool:
    """Whether the two are copies of one weight, up to rounding during training."""
    if one.shape != other.shape:
        return False
    return float((one.float() - other.float()).abs().max()) <= TOLERANCE * float(one.float().abs().max())

"""A checkpoint of any kind as stock GPT-2's weights, asked for by name and read one at a time."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlm.conversion.detect import Found
from gptlm.conversion.gpt2_names import WTE, all_names, layer_and_part, shape_of
from gptlm.errors import GptlmError
from gptlm.model.presets import PRESETS, Shape

logger = logging.getLogger(__name__)

GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu")  # HuggingFace's names; the first three are one formula

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
DRIFT = 0.02  # how far copies of one weight may lie apart, as a share of the largest value
BUILT_IN = [preset.shape for preset in PRESETS.values()]


@dataclass(frozen=True)
class Asked:
    """What the user says of a checkpoint: what it does not say itself, and where its vocabulary is cut.

    Attributes:
        vocab_size: true entries; the rows after them are padding.
        num_attention_heads, activation: count where the checkpoint does not have them.
        may_grow: `vocab_size` may be more than is stored, and is cut to that.
        keep_padding: the embedding keeps the rows of padding, too, which take part in the loss.
    """

    vocab_size: int | None = None
    num_attention_heads: int | None = None
    activation: str | None = None
    keep_padding: bool = False
    may_grow: bool = False


class Source(ABC):
    """An opened checkpoint.

    Attributes:
        shape: its sizes, with the true vocabulary.
        activation: HuggingFace's name of it.
        epsilon: of the layer norms.
        dropouts: of hidden states and of attention.
        notes: what was concluded, for the log.
        arguments: everything it says of itself.
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
        """The weight `name` in stock GPT-2's layout, the embedding with all stored rows."""

    def get(self, name: str) -> Tensor:
        """The weight `name`, contiguous, the embedding without rows of padding.

        Raises:
            GptlmError: if it is missing or of another shape.
        """
        wanted = shape_of(name, self.shape)
        try:
            tensor = self.read(name)
        except GptlmError:
            raise
        except (RuntimeError, LookupError, TypeError, AttributeError, ValueError) as error:  # odd or cut pieces
            raise GptlmError(f"{self.found.folder}: the pieces of {name} do not fit together: {error}") from error
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise GptlmError(f"{self.found.folder}: {name} is {kind}, expected a tensor of floating-point numbers")
        if name == WTE and len(tensor) > wanted[0]:
            tensor = tensor[: wanted[0]]
        if tuple(tensor.shape) != wanted:
            raise GptlmError(
                f"{self.found.folder}: {name} is {tuple(tensor.shape)}, expected {wanted} by the checkpoint's sizes"
            )
        return tensor.contiguous()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, in order."""
        for name in all_names(self.shape.num_hidden_layers):
            yield name, self.get(name)

    def heads_by_size(self, layers: int, width: int) -> int:
        """The heads of a checkpoint that does not say them: those of the built-in models of its sizes.

        Raises:
            GptlmError: if there is none.
        """
        heads = usual_heads(layers, width)
        if heads is None:
            raise GptlmError(f"{self.found.folder} does not say how many heads: give --num_attention_heads")
        self.notes.append(f"{heads} heads, as the built-in models with {layers} layers of {width} have")
        return heads

    def steps(self) -> tuple[int, int, int | None]:
        """Iterations, updates that Adam's moments have seen, and samples consumed if it says them.

        Raises:
            GptlmError: if it has no optimizer that is read here.
        """
        raise GptlmError(
            f"no optimizer is read from this kind of checkpoint ({self.found}); convert without --with_optimizer"
        )

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Name, kind ("exp_avg", "exp_avg_sq", "master") and value, laid out as the weight, of every state.

        Raises:
            GptlmError: if one is missing, or of another shape.
        """
        raise NotImplementedError

    def cut_vocabulary(self, rows: int, true: int | None, asked: Asked, why: str) -> None:
        """Settle `shape.vocab_size`: `rows` are stored, `true` is what the checkpoint knows.

        Raises:
            GptlmError: if more is asked for than is stored.
        """
        size = asked.vocab_size or (rows if asked.keep_padding else true) or rows
        if asked.vocab_size and size > rows and not asked.may_grow:
            raise GptlmError(f"--vocab_size {size}: the embedding in {self.found.folder} has {rows} rows; give less")
        size = min(size, rows)
        self.shape = replace(self.shape, vocab_size=size)
        if size < rows:
            reason = "--vocab_size" if asked.vocab_size else why
            self.notes.append(f"the embedding is cut from {rows} rows to {size} ({reason}); the others are padding")
        elif true is None or true < rows:
            self.notes.append(f"all {rows} rows of the embedding are kept (--vocab_size N cuts padding)")


class Sharded(Source):
    """A checkpoint in groups of files (pipeline stages or layers), each cut over tensor ranks; one group is held.

    Attributes:
        kind: what is read: the weights, or a state of the optimizer laid out as they are.
    """

    def __init__(self, found: Found):
        super().__init__(found)
        self._held: tuple[tuple[int, str], Sequence[Mapping[str, Tensor]]] | None = None
        self._judged: set[int] = set()  # groups whose layers were counted
        self.kind = WEIGHT

    @abstractmethod
    def group_of(self, name: str) -> int:
        """The group that holds `name`."""

    @abstractmethod
    def load_group(self, group: int) -> Sequence[Mapping[str, Tensor]]:
        """The stored pieces of each tensor rank by GPT-2's names."""

    def has_masters(self) -> bool:
        """Whether float32 copies of half-precision weights are among the states."""
        return False

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        for kind in (*MOMENTS, *(["master"] if self.has_masters() else [])):
            self.kind = kind
            try:
                for name, tensor in self.weights():
                    yield name, kind, tensor
            finally:
                self.kind = WEIGHT

    @abstractmethod
    def join(self, name: str, pieces: list[Tensor]) -> Tensor:
        """The weight in stock GPT-2's layout."""

    def pieces(self, name: str) -> list[Tensor]:
        """The stored pieces of `name`, by tensor rank.

        Raises:
            GptlmError: if one is missing.
        """
        group = self.group_of(name)
        ranks = self.hold(group)
        if group not in self._judged:
            self._judged.add(group)
            self._check_layers(ranks)
        for rank, stored in enumerate(ranks):
            if name not in stored:
                raise GptlmError(f"{self.found.files[group][rank]} lacks {self._called(name)}")
        return [stored[name] for stored in ranks]

    def _check_layers(self, ranks: Sequence[Mapping[str, Tensor]]) -> None:
        layers = [layer_and_part(name)[0] for stored in ranks for name in stored]
        last = max((layer for layer in layers if layer is not None), default=-1)
        if last >= self.shape.num_hidden_layers:
            raise GptlmError(
                f"{self.found.folder} holds layer {last} (the first is 0), its configuration says "
                f"{self.shape.num_hidden_layers} layers: they are not of one model"
            )

    def hold(self, group: int) -> Sequence[Mapping[str, Tensor]]:
        """The pieces of `group`, which stay until another group is asked for."""
        if self._held is None or self._held[0] != (group, self.kind):
            self._held = None  # before the next one is read
            self._held = ((group, self.kind), self.load_group(group))
        return self._held[1]

    def read(self, name: str) -> Tensor:
        return self.join(name, self.pieces(name))

    def _called(self, name: str) -> str:
        what = "" if self.kind == WEIGHT else f"{self.kind} of "
        return f"{what}{self.foreign_name(name)} ({name})"

    def foreign_name(self, name: str) -> str:
        """How the checkpoint's own library calls `name`, for messages."""
        return name


def first(values: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The first of `names` that `values` has."""
    return next((values[name] for name in names if values.get(name) is not None), None)


def checked_shape(sizes: Mapping[str, Any], where: Path) -> Shape:
    """The sizes of the checkpoint in `where`.

    Raises:
        GptlmError: if one is no positive whole number, or heads do not divide the width.
    """
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise GptlmError(f"{where} says {name} is {value!r}; expected a positive whole number")
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise GptlmError(
            f"{where}: a width of {sizes['hidden_size']} is not {sizes['num_attention_heads']} equal heads"
        )
    return Shape(**sizes)


def usual_heads(layers: int, width: int) -> int | None:
    """The heads of the built-in models with these sizes, where they agree."""
    sizes = {(shape.num_hidden_layers, shape.hidden_size, shape.num_attention_heads) for shape in BUILT_IN}
    heads = {own for deep, wide, own in sizes if (deep, wide) == (layers, width)}
    return heads.pop() if len(heads) == 1 else None


def check_variants(values: Mapping[str, Any], variants: dict[str, tuple[tuple[object, ...], str]], where: Path) -> None:
    """Raises GptlmError, which names it, if `values` describe another network than GPT-2's."""
    for name, (plain, meaning) in variants.items():
        value = values.get(name)
        if isinstance(value, list):
            value = value[0] if len(value) == 1 else value
        if value not in plain:
            raise GptlmError(f"{where} is of another network than GPT-2: {name} = {value!r} means {meaning}")


def join_equal(pieces: list[Tensor], name: str, where: Path) -> Tensor:
    """What every rank holds whole; where ranks have drifted apart by rounding, their mean, which is said.

    Raises:
        GptlmError: if they differ by more.
    """
    if all(torch.equal(pieces[0], piece) for piece in pieces[1:]):
        return pieces[0]
    if not all(near(pieces[0], piece) for piece in pieces[1:]):
        raise GptlmError(f"{where}: the tensor ranks hold different {name}, which should be one; copy it again")
    logger.warning("the tensor ranks hold slightly different %s; their mean is taken", name)
    return torch.stack([piece.float() for piece in pieces]).mean(0).to(pieces[0].dtype)


def near(one: Tensor, other: Tensor) -> bool:
    """Whether the two are copies of one weight, which rounding may have moved apart."""
    if one.shape != other.shape:
        return False
    return float((one.float() - other.float()).abs().max()) <= DRIFT * float(one.float().abs().max())

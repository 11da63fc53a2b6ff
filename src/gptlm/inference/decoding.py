"""The decode loop: prompts wait for a slot of a static key-value cache, all slots get a token per step.

On a GPU a step is one CUDA graph, so that Python launches once per token. It is captured from the kernels of the plain
modules, which takes as long as a few steps; adapters and all else in a module are part of it. For one row there are
kernels of its own (single_row.py).

There the host looks at new tokens every few steps only. A row that has ended in between is continued, and then cut.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptlm.errors import GptlmError, named, reason_of
from gptlm.inference.sampling import NextToken, Sampling
from gptlm.inference.single_row import single_row, supports_single_row
from gptlm.inference.slots import Prefill, Slots
from gptlm.kernels.output_layer import OutputLayer, padded_rows
from gptlm.model.build import check_finite

STEPS = 8  # on a GPU, between two looks at the new tokens
FEW = 16  # slots that cost a GPU about the time of one
WARM_UP = 2  # steps before the capture: kernels are compiled, libraries choose theirs and allocate workspaces
SIMILAR = 1.5  # prompts of up to this times the shortest one's length are padded to the same length
FREE = 4096  # tokens of prompts that cost a GPU about the time of one, padding included


@dataclass
class Progress:
    """A row that is being continued.

    Attributes:
        number: of the row.
        prompt: its ids.
        limit: of new ids.
        new: new ids so far, without the one that ended it.
        ended: by a stop id, or because it reached the limit.
    """

    number: int
    prompt: list[int]
    limit: int
    new: list[int] = field(default_factory=list)
    ended: bool = False

    def extend(self, ids: Sequence[int], stops: Collection[int]) -> None:
        for token in ids:
            if token in stops:
                self.ended = True
                return
            self.new.append(token)
        self.ended = len(self.new) >= self.limit


class Decoder:
    """Continues rows with a model, greedily or by sampling. Cache and graph are kept for the next call.

    A graph holds addresses: weights may change in place, but after they were replaced a new decoder is needed.

    Args:
        model: a network, or one with PEFT's adapters, in evaluation mode.
        slots: rows that are continued at the same time.
        capacity: tokens of the longest row, prompt and new ones.
        never: ids that are not chosen.
        graph: replay steps as a CUDA graph, on a GPU.
    """

    def __init__(self, model: Any, *, slots: int, capacity: int, never: Collection[int] = (), graph: bool = True):
        self.network = getattr(model, "get_base_model", lambda: model)()
        self._slots, self._capacity, self._never, self._graph = slots, capacity, never, graph
        self._asked: Any = None
        self._choose: NextToken | None = None
        self._batch: _Batch | None = None

    def decode(
        self,
        rows: Sequence[list[int]],
        max_new_tokens: int,
        sampling: Sampling,
        stops: Collection[int],
    ) -> Iterator[Progress]:
        """Yields a row whenever it has new ids, the last time as ended. Rows begin in order and end in any.

        Args:
            rows: ids of prompts, at least one each.
            max_new_tokens: of each row; fewer where `capacity` ends.
            stops: ids that end a row.

        Raises:
            GptlmError: if logits are not finite, or a step cannot be captured.
        """
        limits = [min(max_new_tokens, self._capacity - len(row)) for row in rows]
        waiting = deque(Progress(number, *row) for number, row in enumerate(zip(rows, limits, strict=True)))
        batch, stops = self._prepared(min(self._slots, len(rows)), sampling, stops), frozenset(stops)
        running: list[Progress | None] = [None] * batch.count
        while waiting or any(running):
            free = [slot for slot, row in enumerate(running) if row is None]
            active = [slot for slot, row in enumerate(running) if row is not None]
            # on a GPU a prompt alone costs as much as several do, about that of some steps
            if waiting and len(free) >= max(1, batch.count // 4 if batch.on_gpu else 1):
                batch.fill({slot: one.prompt for slot, one in zip(free, waiting, strict=False)})
                for slot in free[: len(waiting)]:
                    running[slot] = waiting.popleft()
            elif free and not waiting and (not batch.on_gpu or batch.count >= max(2 * len(active), FEW + 1)):
                batch.keep(active)
                running = [running[slot] for slot in active]
            left = min(row.limit - len(row.new) for row in running if row is not None)
            for slot, ids in enumerate(batch.advance(min(left, batch.steps))):
                row = running[slot]
                if row is not None:
                    row.extend(ids, stops)
                    yield row
            ended = [slot for slot, row in enumerate(running) if row is not None and row.ended]
            batch.clear(ended)
            for slot in ended:
                running[slot] = None

    def _prepared(self, count: int, sampling: Sampling, stops: Collection[int]) -> "_Batch":
        """An empty batch of `count` slots, captured if steps are replayed."""
        asked = (sampling, tuple(stops))
        if asked != self._asked:
            entries, device = self.network.config.vocab_size, self.network.device
            self._choose, self._asked = NextToken(sampling, stops, self._never, entries, device), asked
        assert self._choose is not None
        if self._batch is None or self._batch.count != count:
            self._batch = None  # its memory is freed before more is allocated
            self._batch = _Batch(self.network, count, self._capacity, graph=self._graph)
        self._batch.start(self._choose)
        return self._batch


class _Batch:
    """The state of a number of slots on the device, and the step that adds a token to each."""

    @torch.inference_mode()
    def __init__(self, network: Any, count: int, capacity: int, *, graph: bool):
        self.network, self.count = network, count
        config, device = network.config, network.device
        self.on_gpu = device.type == "cuda"
        self.steps = STEPS if self.on_gpu else 1
        self._graphed = graph and self.on_gpu
        self._graph: torch.cuda.CUDAGraph | None = None
        self._choose: NextToken | None = None
        dtype = network.transformer.wpe.weight.dtype
        heads = network.transformer.h[0].attn.heads
        self._cache = Slots(config, count, capacity, heads=heads, dtype=dtype, device=device)
        self._ids = torch.zeros(count, capacity, dtype=torch.int64, device=device)  # behind a row: its first id
        self._starts = torch.zeros(count, dtype=torch.int64, device=device)  # the place of a prompt's last id
        self._active = torch.zeros_like(self._starts)  # 1, or 0 for an empty slot
        self._largest = torch.zeros(count, device=device)  # 0, or NaN once logits were not finite
        self._back = torch.arange(self.steps - 1, -1, -1, device=device)
        self._plain = supports_single_row(network)
        self._lengths: list[int | None] = [None] * count  # those of the cache, as the host knows them
        # The head's rows are padded once, not at each step. It may be a module of PEFT.
        plain = self.on_gpu and type(network.lm_head) is OutputLayer
        self._head = padded_rows(network.lm_head.weight.detach()) if plain else None

    @torch.inference_mode()
    def start(self, choose: NextToken) -> None:
        """Empty all slots, and capture a step if it is another one than before."""
        self.clear(range(self.count))
        entries = self.network.config.vocab_size
        if self._head is not None and len(self._head) > entries:  # a copy, which weights may have left behind
            self._head[:entries].copy_(self.network.lm_head.weight)
        self._largest.zero_()
        if choose is not self._choose:
            self._choose, self._graph = choose, None
        if self._graphed and self._graph is None:
            self._capture()

    @torch.inference_mode()
    def clear(self, slots: Sequence[int]) -> None:
        """Empty `slots`; their lengths stay 0."""
        if not slots:
            return
        chosen = self._numbers(slots)
        for state in (self._cache.lengths, self._starts, self._active):
            state[chosen] = 0
        for slot in slots:
            self._lengths[slot] = None

    @torch.inference_mode()
    def keep(self, slots: Sequence[int]) -> None:
        """Give up all other slots."""
        self._graph = None
        chosen = self._numbers(slots)
        self._cache.keep(chosen)
        self._ids, self._starts, self._active, self._largest = (
            state[chosen] for state in (self._ids, self._starts, self._active, self._largest)
        )
        self._lengths, self.count = [self._lengths[slot] for slot in slots], len(slots)
        if self._graphed:
            self._capture()

    @torch.inference_mode()
    def fill(self, prompts: dict[int, list[int]]) -> None:
        """Put prompts into empty slots: a forward pass over all ids but the last, with which the next step begins."""
        chosen, capacity = self._numbers(prompts), self._ids.shape[1]
        # a repetition penalty sees what is behind a row: its first id, which has the penalty anyway
        self._ids[chosen] = self._numbers([row + row[:1] * (capacity - len(row)) for row in prompts.values()])
        starts = {slot: len(row) - 1 for slot, row in prompts.items()}
        self._starts[chosen] = self._cache.lengths[chosen] = self._numbers(starts.values())
        self._active[chosen] = 1
        for slot, start in starts.items():
            self._lengths[slot] = start
        for group in _similar(starts, FREE if self.on_gpu else 0):
            rows, longest = self._numbers(group), max(starts[slot] for slot in group)
            places = torch.arange(longest, device=rows.device)[None]
            self._hidden(self._ids[rows, :longest], places, Prefill(self._cache, rows))

    @torch.inference_mode()
    def advance(self, steps: int) -> list[list[int]]:
        """The next `steps` ids of each slot.

        Raises:
            GptlmError: if logits were not finite.
        """
        for _ in range(steps):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step([length or 0 for length in self._lengths])
            self._lengths = [None if length is None else length + 1 for length in self._lengths]
        places = (self._cache.lengths[:, None] - self._back[-steps:]).clamp(min=0)
        wrong = self._largest.isnan()[:, None].long()
        rows = torch.cat((self._ids.gather(1, places), wrong), dim=1).tolist()  # waits for the device, once
        if any(row.pop() for row in rows):
            check_finite(self._largest, self.network)
        return rows

    def _step(self, lengths: list[int] | None = None) -> None:
        """Without `lengths`, those of the cache on the host, nothing here depends on the host."""
        cache = self._cache
        cache.begin(lengths)
        tokens = self._ids.gather(1, cache.lengths[:, None])
        if self.count == 1 and self._plain:
            hidden = single_row(self.network.transformer, tokens, cache.lengths[:, None], cache)[:, 0]
        else:
            hidden = self._hidden(tokens, cache.lengths[:, None], cache)[:, 0]
        if self._head is None:
            logits = self.network.lm_head(hidden)
        else:
            logits = F.linear(hidden, self._head)[:, : self.network.config.vocab_size]
        assert self._choose is not None
        chosen, largest = self._choose(logits.float(), self._ids, cache.lengths - self._starts)
        self._largest += largest * 0  # NaN from NaN and infinity, and it stays
        cache.lengths += self._active
        self._ids.scatter_(1, cache.lengths[:, None], chosen[:, None])

    def _hidden(self, ids: Tensor, places: Tensor, cache: Slots | Prefill) -> Tensor:
        return self.network.transformer(input_ids=ids, position_ids=places, cache=cache).last_hidden_state

    def _capture(self) -> None:
        """Make the graph of a step. The state of all rows is afterwards as before."""
        ids, active = self._ids.clone(), self._active.clone()
        self._active.zero_()  # lengths stay; the last id of a row and its keys and values are written anew
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.random.fork_rng(devices=[self._ids.device]):
                for _ in range(WARM_UP):
                    self._step()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step()
        except RuntimeError as error:
            reason = reason_of(error.__context__ or error)
            raise GptlmError(
                f"the decode step cannot be captured as a CUDA graph; try again with {named('cuda_graphs')} 0: {reason}"
            ) from error
        self._ids.copy_(ids)
        self._active.copy_(active)
        self._graph = graph

    def _numbers(self, numbers: Iterable[Any]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self._ids.device)


def _similar(starts: dict[int, int], free: int) -> list[list[int]]:
    """Slots in groups of similar lengths, or of up to `free` tokens with padding; without those of length 0."""
    groups: list[list[int]] = []
    for slot in sorted((slot for slot, start in starts.items() if start), key=starts.__getitem__):
        length = starts[slot]
        if not groups or length > max(SIMILAR * starts[groups[-1][0]], free / (len(groups[-1]) + 1)):
            groups.append([])
        groups[-1].append(slot)
    return groups

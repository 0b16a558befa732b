"""A batch, the examples that belong in it, the part of it for each rank, and batches prepared ahead."""

import heapq
import queue
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, TypeVar, overload

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from regard.attention.offsets import Offsets
from regard.errors import RegardError
from regard.layers.packed import Packed

# Target value that the loss ignores, like `ignore_index` of torch.nn.functional.cross_entropy.
IGNORE_INDEX = -1
T = TypeVar("T")
# Sequences are sorted by length within pools of this many batches: enough for similar lengths within a batch, few
# enough to keep batches random.
BATCHES_PER_POOL = 64
# With constant shapes, the part of a rank has its share of the budget, plus 0, 1, 2, 4, 8, … of these fractions of it.
PART_STEPS = 32


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and targets of one training step: `inputs` are the arguments of the model, `targets` the expected outputs,
    row by row.

    Targets without an expected output are IGNORE_INDEX. `sentences` and `tokens` do not count padding; a batch of 0
    sentences is padding for a rank without a sequence, and its loss counts 0.
    """

    inputs: tuple[Packed | Tensor, ...]
    targets: Int[Tensor, "rows *more"]
    sentences: int
    tokens: int
    # Whether a CUDA graph captured on one batch can be replayed on any other whose inputs have the same shapes.
    supports_cuda_graph: ClassVar[bool] = True

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        inputs = tuple(x.to(device, non_blocking=non_blocking) for x in self.inputs)
        return replace(self, inputs=inputs, targets=self.targets.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        inputs = tuple(x.pin_memory() for x in self.inputs)
        return replace(self, inputs=inputs, targets=self.targets.pin_memory())

    def split(self, parts: int) -> "list[Batch]":
        """Split a batch into at most `parts` batches with about as many tokens each, for a device whose memory is too
        small for the whole; no sequence is divided.

        The sum of the losses of the parts is the loss of the batch, to rounding. On a GPU, this synchronizes.

        >>> from regard.layers.packed import pack
        >>> texts = pack([[5, 6], [7], [8, 9, 10]])
        >>> [part.inputs[0].ids.tolist() for part in Batch((texts,), texts.ids, 3, 6).split(2)]
        [[5, 6, 7], [8, 9, 10]]
        """
        if parts == 1:
            return [self]
        packed = [x for x in self.inputs if isinstance(x, Packed)]
        starts = [x.offsets.starts.tolist() for x in packed]
        count = len(starts[0]) - 1 if packed else len(self.targets)
        # Tokens before each sequence, on all sides together.
        before = [sum(column) for column in zip(*starts)] if packed else list(range(count + 1))
        pieces: list[Batch] = []
        for begin, end in pairwise(split_points(before, parts)):
            # A tensor has a row for each sequence, or for each token; targets belong to the tokens of the last side.
            rows = {count: slice(begin, end)}
            rows |= {len(x.ids): slice(start[begin], start[end]) for x, start in zip(packed, starts)}
            sentences = max(0, min(end, self.sentences) - begin)
            pieces.append(
                replace(
                    self,
                    inputs=tuple(_slice(x, begin, end, rows) for x in self.inputs),
                    targets=_slice(self.targets, begin, end, rows),
                    sentences=sentences,
                    tokens=round(self.tokens * sentences / max(1, self.sentences)),
                )
            )
        return pieces


def split_points(before: list[int], parts: int) -> list[int]:
    """Indices at which to split sequences with this many tokens before each, and in all.

    >>> split_points([0, 2, 3, 6, 6], 2)
    [0, 2, 4]
    """
    total, count = before[-1], len(before) - 1
    boundaries = [0]
    for part in range(1, parts):
        target = total * part / parts
        nearest = min(range(count + 1), key=lambda i: (abs(before[i] - target), i))
        if boundaries[-1] < nearest < count:
            boundaries.append(nearest)
    return [*boundaries, count]


def _slice(x: Any, begin: int, end: int, rows: dict[int, slice]) -> Any:
    if isinstance(x, Packed):
        starts = x.offsets.starts[begin : end + 1]
        first, last = int(starts[0]), int(starts[-1])
        offsets = Offsets(starts - first, last - first, x.offsets.max_len)
        return Packed(x.ids[first:last], offsets, x.positions[first:last])
    return x[rows[len(x)]]


def prefetch(items: Iterable[T], depth: int = 4) -> Iterator[T]:
    """Yield the same items in the same order, computed by a thread that runs up to `depth` items ahead.

    An exception in the thread is raised here. When the caller stops early, the thread stops too; an item that takes
    longer than a second at that point is not waited for, so that Ctrl-C ends the program.

    >>> list(prefetch(range(3)))
    [0, 1, 2]
    """
    results: queue.Queue[tuple[bool, object]] = queue.Queue(depth)  # (is_item, item | exception | None at the end)
    stopped = threading.Event()

    def put(entry: tuple[bool, object]) -> bool:
        while not stopped.is_set():
            try:
                results.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put((True, item)):
                    return
            put((False, None))
        except BaseException as error:
            put((False, error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            is_item, value = results.get()
            if is_item:
                yield value  # type: ignore[misc]
            elif value is None:
                return
            else:
                raise value  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join(timeout=1.0)


class RankSlice(NamedTuple):
    """Rank `rank` of `size`: the batches are the same for every `size`, and each sequence belongs to one rank.

    >>> lengths = [2, 9, 4, 4]
    >>> [RankSlice(rank, 2).select(lengths) for rank in range(2)]
    [([1], 1), ([0, 2, 3], 3)]
    """

    rank: int = 0
    size: int = 1

    def select(self, lengths: Sequence[int]) -> tuple[list[int], int]:
        """Indices of the sequences of this rank, and how many of them count in the loss.

        The longest sequence goes first to the rank with the fewest tokens, so that all ranks get about as many. A rank
        without a sequence, in a batch with fewer sequences than ranks, gets the shortest one as padding: every rank
        takes part in every update.

        >>> RankSlice(rank=2, size=3).select([7, 5])
        ([1], 0)
        """
        selected = self.select_all(lengths)[self.rank]
        return selected, len(selected) if self.rank < len(lengths) else 0

    def select_all(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices of the sequences of each rank."""
        if self.size == 1:
            return [list(range(len(lengths)))]
        longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
        loads = [(0, rank) for rank in range(self.size)]
        selected: list[list[int]] = [[] for _ in range(self.size)]
        for index in longest_first:
            tokens, rank = loads[0]
            heapq.heapreplace(loads, (tokens + max(1, lengths[index]), rank))
            selected[rank].append(index)
        return [sorted(indices) or longest_first[-1:] for indices in selected]


WHOLE = RankSlice()


class SampledBatches(Sequence[list[int]]):
    """The batches of an epoch as lists of sequence indices, stored as arrays: a few bytes per sequence.

    Batch i is order[bounds[j]:bounds[j + 1]] with j = permutation[i].

    >>> batches = SampledBatches(np.array([4, 2, 7]), np.array([0, 2, 3]), np.array([1, 0]))
    >>> batches[0], list(batches[1:])
    ([7], [[4, 2]])
    """

    def __init__(
        self, order: Int[np.ndarray, "M"], bounds: Int[np.ndarray, "borders"], permutation: Int[np.ndarray, "K"]
    ) -> None:
        self._order, self._bounds, self._permutation = order, bounds, permutation

    def __len__(self) -> int:
        return len(self._permutation)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> "SampledBatches": ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return SampledBatches(self._order, self._bounds, self._permutation[index])
        batch = self._permutation[index]
        return self._order[self._bounds[batch] : self._bounds[batch + 1]].tolist()


class BatchSampler:
    """Samples batches of at most `budget` tokens per side, for single sequences or pairs (source and target).

    Sequences are shuffled, sorted by length within pools, split into batches where either side is full, and the batches
    are shuffled. With `constant_shapes`, each side of a batch is padded to `budget` tokens and a constant number of
    sequences, and its max_len is one of 16, 32, 64, … or the maximum, so that compiled code is reused. That number of
    sequences follows from `mean_length`.

    >>> sampler = BatchSampler(3.0, budget=8, max_len=8)
    >>> [sorted(rows) for rows in sampler.sample(np.random.default_rng(0), np.array([2, 8, 3, 2]))]
    [[1], [0, 2, 3]]
    """

    def __init__(self, mean_length: float, *, budget: int, max_len: int, constant_shapes: bool = False) -> None:
        if max_len > budget:
            raise RegardError(
                f"The maximum length is {max_len} tokens, but a batch has only {budget}.",
                hint="Raise the batch size in tokens, or lower the maximum length.",
            )
        self.budget, self.max_len, self.constant_shapes = budget, max_len, constant_shapes
        self._buckets = np.array([self._bucket_length(length) for length in range(max_len + 1)])
        self._pool_size = max(1, int(BATCHES_PER_POOL * budget / mean_length))
        # Enough for sequences of half the mean length or half the smallest bucket. With fewer, the padding sequences
        # would use up the slots of short sequences, and batches of short sequences would be nearly empty.
        self._count = _round_up(int(2 * max(budget / mean_length, budget / self._bucket_length(1)) + 2), 64)

    def sample(
        self,
        generator: np.random.Generator,
        source_lengths: Int[np.ndarray, "B"],
        target_lengths: Int[np.ndarray, "B"] | None = None,
    ) -> SampledBatches:
        """Sample the batches of one epoch. Lengths include special tokens.

        Sequences longer than max_len are left out. It is an error if all of them are: training would loop forever over
        epochs without a batch.
        """
        target_lengths = source_lengths if target_lengths is None else target_lengths
        longer = np.maximum(source_lengths, target_lengths)
        order = generator.permutation(len(source_lengths))
        if len(order) and longer.max() > self.max_len:
            order = order[longer[order] <= self.max_len]
        if len(source_lengths) and not len(order):
            raise RegardError(
                f"All {len(source_lengths)} sequences are longer than max_len ({self.max_len} tokens): "
                "the epoch has no batch.",
                "Raise model.max_len, or lower tokenizer.dropout if BPE-dropout is on.",
            )
        if len(source_lengths) < 1 << 32:
            order = order.astype(np.uint32)  # half the memory
        bounds = array("q", [0])
        for start in range(0, len(order), self._pool_size):
            pool = order[start : start + self._pool_size]
            # by the longer side, then by the source: least padding for kernels that need rectangles
            pool = pool[np.lexsort((source_lengths[pool], longer[pool]))]
            order[start : start + self._pool_size] = pool
            bounds.extend(self._batch_ends(start, source_lengths[pool], target_lengths[pool]))
        return SampledBatches(order, np.array(bounds), generator.permutation(len(bounds) - 1))

    def pack_options(self, *sides: Int[np.ndarray, "B"], part: RankSlice = WHOLE) -> dict[str, int]:
        """Keyword arguments of `pack` for a batch, or for a part of it; `sides` are the lengths of all its sequences.

        They are the same for all parts of a batch, since ranks must capture and replay CUDA graphs together. A part of
        a full batch has slightly more than its share of the tokens, rounded up so that there are few shapes.

        >>> sampler = BatchSampler(8.0, budget=512, max_len=32, constant_shapes=True)
        >>> sampler.pack_options(np.full(60, 8)), sampler.pack_options(np.full(60, 8), part=RankSlice(0, 4))
        ({'total': 512, 'count': 192, 'max_len': 16}, {'total': 128, 'count': 64, 'max_len': 16})
        """
        if not self.constant_shapes:
            return {}
        max_len = self._bucket_length(max(int(side.max()) for side in sides))
        if part.size == 1:
            return {"total": self.budget, "count": self._count, "max_len": max_len}
        parts = part.select_all(sum(sides).tolist())  # type: ignore[union-attr]
        loads = [(len(indices), int(side[indices].sum())) for indices in parts for side in sides]
        share = -(-self.budget // part.size)
        excess, step = max(tokens for _, tokens in loads) - share, -(-share // PART_STEPS)
        total = share if excess <= 0 else share + (step << ((excess - 1) // step).bit_length())
        slots = max(sequences - (tokens - total) // max_len for sequences, tokens in loads)
        count = _round_up(-(-self._count // part.size), 64)
        return {"total": total, "count": _round_up(max(count, slots), count), "max_len": max_len}

    def _batch_ends(
        self, first: int, source_lengths: Int[np.ndarray, "P"], target_lengths: Int[np.ndarray, "P"]
    ) -> Iterator[int]:
        """Split sequences first, first + 1, … into batches where either side is full; yields the end of each batch.

        They are sorted by the longer side.
        """
        sums = [np.concatenate([[0], np.cumsum(side)]) for side in (source_lengths, target_lengths)]
        sides = [side.tolist() for side in sums]
        start = 0
        while start < len(source_lengths):
            # A batch has at least one sequence; of more, as many as both sides can hold.
            end = min(bisect_right(side, side[start] + self.budget) for side in sides) - 1
            end = max(end, start + 1)
            if self.constant_shapes and end > start + 1:
                longest = np.maximum(source_lengths[start + 1 : end], target_lengths[start + 1 : end])
                smaller = np.minimum(*(side[start + 2 : end + 1] - side[start] for side in sums))
                # Padding sequences follow the real ones, and all of them must fit into the slots.
                slots = np.arange(2, end - start + 1) - (smaller - self.budget) // self._buckets[longest]
                too_many = np.flatnonzero(slots > self._count)
                end = start + 1 + int(too_many[0]) if len(too_many) else end
            yield first + end
            start = end

    def _bucket_length(self, length: int) -> int:
        """Round up to 16, 32, 64, …, at most max_len."""
        return min(max(16, 1 << (length - 1).bit_length()), self.max_len)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

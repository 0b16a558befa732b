"""Pairs of sentences as packed batches of a constant number of tokens."""

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from regard.data.dropout import BpeDropout
from regard.data.sequences import Sequences
from regard.data.tokenizer import EOS, SOS, Tokenizer
from regard.errors import RegardError
from regard.layers.packed import Packed, pack

# Sentences are sorted by length within pools of this many batches: enough for even lengths, few enough for chance.
POOL = 64


# One side of the corpus; an epoch draws its encoding, always the same or, with dropout, always another.
Side = Sequences | BpeDropout


def encode_pairs(
    pairs: Sequence[tuple[str, str]],
    source: Tokenizer,
    target: Tokenizer,
    *,
    max_len: int,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[Side, Side, int]:
    """Both sides of the pairs as ids, without those longer than `max_len` on either side (`<eos>` counts), and how
    many those were.

    >>> tokenizer = Tokenizer.train(["a b c d"], "word")
    >>> sources, targets, too_long = encode_pairs([("a b", "c"), ("a b c", "d")], tokenizer, tokenizer, max_len=3)
    >>> len(sources), len(targets), too_long
    (1, 1, 1)
    """
    sources = source.encode_batch([one for one, _ in pairs])
    targets = target.encode_batch([other for _, other in pairs])
    kept = [i for i in range(len(pairs)) if max(len(sources[i]), len(targets[i])) < max_len]
    if not kept:
        raise RegardError(
            f"Every one of {len(pairs)} pairs is longer than {max_len} tokens.", hint="Raise the longest length."
        )
    too_long = len(pairs) - len(kept)
    if dropout:
        return (
            BpeDropout(source, [pairs[i][0] for i in kept], dropout, seed),
            BpeDropout(target, [pairs[i][1] for i in kept], dropout, seed),
            too_long,
        )
    return Sequences.of(sources[i] for i in kept), Sequences.of(targets[i] for i in kept), too_long


@dataclass(frozen=True, eq=False)
class Batch:
    """What one step learns from: `target_out` is what should follow each token of `target_in`, 0 where nothing should.

    The source ends with `<eos>`, `target_in` begins with `<sos>`, `target_out` ends with `<eos>`. The counts are of
    real tokens and sentences: the tail that fills a batch to its size is not in them.
    """

    source: Packed
    target_in: Packed
    target_out: Int[Tensor, "N"]
    sentences: int
    source_tokens: int
    target_tokens: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        return replace(
            self,
            source=self.source.to(device, non_blocking),
            target_in=self.target_in.to(device, non_blocking),
            target_out=self.target_out.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "Batch":
        return replace(
            self,
            source=self.source.pin_memory(),
            target_in=self.target_in.pin_memory(),
            target_out=self.target_out.pin_memory(),
        )


class Batches:
    """Batches of at most `budget` tokens a side; epoch e is a function of (seed, e) alone.

    Sentences are shuffled, sorted by length within pools, cut into batches where either side is full, and the batches
    shuffled. With `constant_shapes` each side is filled to `budget` tokens and a constant number of sequences, and both
    sides' max_len is one of 16, 32, 64, …, so that compiled code is reused; without, batches are as they come.

    Where BPE-dropout makes a pair longer than `max_len`, the pair is not in that epoch.

    >>> sides = Sequences.of([[5], [6, 7], [8]]), Sequences.of([[9], [9, 9], [9]])
    >>> [batch] = Batches(*sides, budget=16, max_len=16, seed=0).epoch(0)
    >>> batch.source.padded()
    (tensor([[8, 3, 0],
            [5, 3, 0],
            [6, 7, 3]]), tensor([2, 2, 3]))
    """

    def __init__(
        self, source: Side, target: Side, *, budget: int, max_len: int, seed: int, constant_shapes: bool = False
    ) -> None:
        if not 0 < len(source) == len(target):
            raise ValueError(f"{len(source)} sources and {len(target)} targets: there must be as many, and some")
        if max_len > budget:
            raise RegardError(
                f"A sentence may have {max_len} tokens, but a batch only {budget}.",
                hint="Raise the tokens of a batch, or lower the longest length.",
            )
        self.source, self.target = source, target
        self.budget, self.max_len, self.seed = budget, max_len, seed
        self.constant_shapes = constant_shapes
        first = np.random.default_rng(seed)
        usual = float(1 + np.maximum(source.draw(first).lengths, target.draw(first).lengths).mean())
        self._pool = max(1, int(POOL * budget / usual))
        # Room for sentences of half the usual length, and for the tail of a batch that holds a single short one.
        self._count = _round_up(int(max(2 * budget / usual, budget / _step(1) + 2)), 64)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on: those before it cost nothing but the plan."""
        generator = np.random.default_rng([self.seed, number])
        source, target = self.source.draw(generator), self.target.draw(generator)
        plan = self._plan(source.lengths + 1, target.lengths + 1, generator)
        source, target = source.framed(end=EOS), target.framed(SOS, EOS)
        for rows in plan[start:]:
            yield self._batch(source, target, rows)

    def _plan(
        self, source: Int[np.ndarray, "B"], target: Int[np.ndarray, "B"], generator: np.random.Generator
    ) -> list[list[int]]:
        """Which pairs make up each batch, given the lengths with `<eos>`."""
        order = generator.permutation(len(source))
        order = order[np.maximum(source, target)[order] <= self.max_len]
        batches: list[list[int]] = []
        for first in range(0, len(order), self._pool):
            pool = order[first : first + self._pool]
            # by the longer side, then by the source: the least padding where a kernel needs rectangles
            pool = pool[np.lexsort((source[pool], np.maximum(source, target)[pool]))]
            batches += self._cut(pool.tolist(), source[pool].tolist(), target[pool].tolist())
        return [batches[i] for i in generator.permutation(len(batches))]

    def _cut(self, rows: list[int], source: list[int], target: list[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        source_sum = target_sum = longest = 0
        for row, source_len, target_len in zip(rows, source, target):
            source_sum, target_sum = source_sum + source_len, target_sum + target_len
            longest = max(longest, source_len, target_len)
            if batch and not self._fits(len(batch) + 1, source_sum, target_sum, longest):
                yield batch
                batch = []
                source_sum, target_sum, longest = source_len, target_len, max(source_len, target_len)
            batch.append(row)
        if batch:
            yield batch

    def _fits(self, sentences: int, source: int, target: int, longest: int) -> bool:
        if max(source, target) > self.budget:
            return False
        if not self.constant_shapes:
            return True
        tail = self.budget - min(source, target)
        return sentences + -(-tail // _step(longest)) <= self._count

    def _batch(self, source: Sequences, target: Sequences, rows: list[int]) -> Batch:
        """The source ends with `<eos>`; the target has both ends, of which each of its two copies lacks one."""
        sources, targets = [source[row] for row in rows], [target[row] for row in rows]
        shape: dict[str, int] = {}
        if self.constant_shapes:
            longest = max(max(map(len, sources)), max(map(len, targets)) - 1)
            shape = {"total": self.budget, "count": self._count, "max_len": _step(longest)}
        return Batch(
            source=pack(sources, **shape),
            target_in=pack([one[:-1] for one in targets], **shape),
            target_out=pack([one[1:] for one in targets], **shape).ids,
            sentences=len(rows),
            source_tokens=sum(map(len, sources)),
            target_tokens=sum(map(len, targets)) - len(rows),
        )


def _step(length: int) -> int:
    """The least of 16, 32, 64, … that is no less."""
    return max(16, 1 << (length - 1).bit_length())


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


Item = TypeVar("Item")


def prefetch(items: Iterable[Item], depth: int = 4) -> Iterator[Item]:
    """The same items in the same order, made by a thread that is up to `depth` of them ahead.

    What the thread raises is raised here; when the caller stops early, so does the thread.

    >>> list(prefetch(range(3)))
    [0, 1, 2]
    """
    ready: queue.Queue[tuple[bool, object]] = queue.Queue(depth)  # (is an item, the item | what ended the work)
    stopped = threading.Event()

    def offer(entry: tuple[bool, object]) -> bool:
        while not stopped.is_set():
            try:
                ready.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not offer((True, item)):
                    return
            offer((False, None))
        except BaseException as error:
            offer((False, error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            is_item, value = ready.get()
            if is_item:
                yield value  # type: ignore[misc]
            elif value is None:
                return
            else:
                raise value  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()

"""Which sequences make up a batch together, and the shape that it is filled to."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from regard.errors import RegardError

# Sentences are sorted by length within pools of this many batches: enough for even lengths, few enough for chance.
POOL = 64


class Planner:
    """Plans batches of at most `budget` tokens a side for sequences of one side or two.

    Sequences are shuffled, sorted by length within pools, cut into batches where either side is full, and the batches
    shuffled. With `constant_shapes` each side of a batch is to be filled to `budget` tokens and a constant number of
    sequences, and its max_len is one of 16, 32, 64, … or the largest, so that compiled code is reused; `usual` is the
    mean length, from which follows how many sequences that are.

    >>> planner = Planner(3.0, budget=8, max_len=8)
    >>> [sorted(rows) for rows in planner.plan(np.random.default_rng(0), np.array([2, 8, 3, 2]))]
    [[1], [0, 2, 3]]
    """

    def __init__(self, usual: float, *, budget: int, max_len: int, constant_shapes: bool = False) -> None:
        if max_len > budget:
            raise RegardError(
                f"A sentence may have {max_len} tokens, but a batch only {budget}.",
                hint="Raise the tokens of a batch, or lower the longest length.",
            )
        self.budget, self.max_len, self.constant_shapes = budget, max_len, constant_shapes
        self._pool = max(1, int(POOL * budget / usual))
        # Room for sentences of half the usual length, and for those of half the shortest step: with less, what fills
        # the tail in such steps would take the places of short sentences, and their batches would be nearly empty.
        self._count = _round_up(int(2 * max(budget / usual, budget / self._step(1)) + 2), 64)

    def plan(
        self, generator: np.random.Generator, first: Int[np.ndarray, "B"], second: Int[np.ndarray, "B"] | None = None
    ) -> list[list[int]]:
        """Which sequences make up each batch, given the lengths of each side with what frames them.

        Sequences longer than max_len are left out. If that is all of them, it is an error: an epoch without a batch
        would make training loop forever.
        """
        second = first if second is None else second
        longer = np.maximum(first, second)
        order = generator.permutation(len(first))
        order = order[longer[order] <= self.max_len]
        if len(first) and not len(order):
            raise RegardError(
                f"An epoch has no batch: all {len(first)} sequences are longer than max_len ({self.max_len} tokens).",
                "Raise model.max_len, or lower tokenizer.dropout if BPE-dropout is on.",
            )
        batches: list[list[int]] = []
        for begin in range(0, len(order), self._pool):
            pool = order[begin : begin + self._pool]
            # by the longer side, then by the first: the least padding where a kernel needs rectangles
            pool = pool[np.lexsort((first[pool], longer[pool]))]
            batches += self._cut(pool.tolist(), first[pool].tolist(), second[pool].tolist())
        return [batches[i] for i in generator.permutation(len(batches))]

    def shape(self, longest: int) -> dict[str, int]:
        """What `pack` is told of a side, `longest` being the longest sequence of either."""
        if not self.constant_shapes:
            return {}
        return {"total": self.budget, "count": self._count, "max_len": self._step(longest)}

    def _cut(self, rows: list[int], first: list[int], second: list[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        first_sum = second_sum = longest = 0
        for row, first_len, second_len in zip(rows, first, second):
            first_sum, second_sum = first_sum + first_len, second_sum + second_len
            longest = max(longest, first_len, second_len)
            if batch and not self._fits(len(batch) + 1, first_sum, second_sum, longest):
                yield batch
                batch = []
                first_sum, second_sum, longest = first_len, second_len, max(first_len, second_len)
            batch.append(row)
        if batch:
            yield batch

    def _fits(self, sentences: int, first: int, second: int, longest: int) -> bool:
        if max(first, second) > self.budget:
            return False
        if not self.constant_shapes:
            return True
        tail = self.budget - min(first, second)
        return sentences + -(-tail // self._step(longest)) <= self._count

    def _step(self, length: int) -> int:
        """The least of 16, 32, 64, … that is no less; but no more than there are places for."""
        return min(max(16, 1 << (length - 1).bit_length()), self.max_len)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

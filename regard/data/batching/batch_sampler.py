"""Batch sampler: groups sequences of similar length into batches within a token budget."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from regard.errors import RegardError

# Sequences are sorted by length within pools of this many batches: enough for similar lengths within a batch, few
# enough to keep batches random.
BATCHES_PER_POOL = 64


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
        self._pool_size = max(1, int(BATCHES_PER_POOL * budget / mean_length))
        # Enough for sequences of half the mean length or half the smallest bucket. With fewer, the padding sequences
        # would use up the slots of short sequences, and batches of short sequences would be nearly empty.
        self._count = _round_up(int(2 * max(budget / mean_length, budget / self._bucket_length(1)) + 2), 64)

    def sample(
        self,
        generator: np.random.Generator,
        source_lengths: Int[np.ndarray, "B"],
        target_lengths: Int[np.ndarray, "B"] | None = None,
    ) -> list[list[int]]:
        """Sample the batches of one epoch as lists of sequence indices. Lengths include special tokens.

        Sequences longer than max_len are left out. It is an error if all of them are: training would loop forever over
        epochs without a batch.
        """
        target_lengths = source_lengths if target_lengths is None else target_lengths
        longer = np.maximum(source_lengths, target_lengths)
        order = generator.permutation(len(source_lengths))
        order = order[longer[order] <= self.max_len]
        if len(source_lengths) and not len(order):
            raise RegardError(
                f"All {len(source_lengths)} sequences are longer than max_len ({self.max_len} tokens): "
                "the epoch has no batch.",
                "Raise model.max_len, or lower tokenizer.dropout if BPE-dropout is on.",
            )
        batches: list[list[int]] = []
        for start in range(0, len(order), self._pool_size):
            pool = order[start : start + self._pool_size]
            # by the longer side, then by the source: least padding for kernels that need rectangles
            pool = pool[np.lexsort((source_lengths[pool], longer[pool]))]
            batches += self._split(pool.tolist(), source_lengths[pool].tolist(), target_lengths[pool].tolist())
        return [batches[i] for i in generator.permutation(len(batches))]

    def pack_options(self, max_length: int) -> dict[str, int]:
        """Keyword arguments of `pack` for a batch whose longest sequence, on either side, has `max_length` tokens."""
        if not self.constant_shapes:
            return {}
        return {"total": self.budget, "count": self._count, "max_len": self._bucket_length(max_length)}

    def _split(self, rows: list[int], source_lengths: list[int], target_lengths: list[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        source_sum = target_sum = longest = 0
        for row, source_length, target_length in zip(rows, source_lengths, target_lengths):
            source_sum, target_sum = source_sum + source_length, target_sum + target_length
            longest = max(longest, source_length, target_length)
            if batch and not self._fits(len(batch) + 1, source_sum, target_sum, longest):
                yield batch
                batch = []
                source_sum, target_sum, longest = source_length, target_length, max(source_length, target_length)
            batch.append(row)
        if batch:
            yield batch

    def _fits(self, count: int, source_sum: int, target_sum: int, longest: int) -> bool:
        if max(source_sum, target_sum) > self.budget:
            return False
        if not self.constant_shapes:
            return True
        padding = self.budget - min(source_sum, target_sum)
        return count + -(-padding // self._bucket_length(longest)) <= self._count

    def _bucket_length(self, length: int) -> int:
        """Round up to 16, 32, 64, …, at most max_len."""
        return min(max(16, 1 << (length - 1).bit_length()), self.max_len)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

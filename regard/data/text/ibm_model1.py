"""IBM Model 1: translation probabilities of tokens, learned from sentence pairs (Brown et al. 1993)."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

# Links (source token, target token) that are processed at once; limits memory.
CHUNK_LINKS = 1 << 22

TokenPair = tuple[Sequence[int], Sequence[int]]
"""ids of a source sentence and of its translation"""


class TranslationTable(NamedTuple):
    """Probabilities p(target | source) of all tokens that occur in the same pair, sorted by source, then target."""

    source: Int[np.ndarray, "P"]
    target: Int[np.ndarray, "P"]
    probability: Float[np.ndarray, "P"]

    def best_targets(self, source_vocab: int, count: int) -> Int[np.ndarray, "S n"]:
        """The `count` most probable targets of each source token, most probable first, padded with -1.

        >>> table = learn_translation_table([([5, 6], [8, 9]), ([5], [8])], 10)
        >>> table.best_targets(10, 1)[5:7, 0]
        array([8, 9], dtype=int32)
        """
        order = np.lexsort((self.target, -self.probability, self.source))
        source, target = self.source[order], self.target[order]
        rank = np.arange(len(source)) - np.searchsorted(source, source)
        kept = rank < count
        best = np.full((source_vocab, count), -1, np.int32)
        best[source[kept], rank[kept]] = target[kept]
        return best


def learn_translation_table(
    pairs: Sequence[TokenPair],
    target_vocab: int,
    *,
    iterations: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> TranslationTable:
    """Expectation maximization of IBM Model 1, from uniform probabilities; deterministic.

    `progress(done, total)` is called after each iteration.

    >>> table = learn_translation_table([([5, 6], [8, 9]), ([5], [8])], 10)
    >>> [(int(s), int(t), round(float(p), 2)) for s, t, p in zip(*table)]
    [(5, 8, 0.96), (5, 9, 0.04), (6, 8, 0.17), (6, 9, 0.83)]
    """
    keys = np.zeros(0, np.int64)
    for source, target, _ in _links(pairs):
        keys = np.union1d(keys, source * target_vocab + target)
    row, column = np.divmod(keys, target_vocab)
    probability = np.ones(len(keys))
    for iteration in range(iterations):
        counts = np.zeros(len(keys))
        for source, target, position in _links(pairs):
            index = np.searchsorted(keys, source * target_vocab + target)
            p = probability[index]
            share = p / np.bincount(position, p)[position]
            counts += np.bincount(index, share, len(keys))
        totals = np.bincount(row, counts)
        # A count may underflow to 0 after many iterations.
        probability = counts / np.maximum(totals[row], np.finfo(float).tiny)
        if progress is not None:
            progress(iteration + 1, iterations)
    return TranslationTable(row, column, probability)


def _links(
    pairs: Sequence[TokenPair],
) -> Iterator[tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"], Int[np.ndarray, "n"]]]:
    """All links of a target token to a source token of its pair, in chunks: source id, target id, and an index of the
    target token in the chunk.
    """
    start = 0
    while start < len(pairs):
        end, total = start, 0
        while end < len(pairs) and (end == start or total + len(pairs[end][0]) * len(pairs[end][1]) <= CHUNK_LINKS):
            total += len(pairs[end][0]) * len(pairs[end][1])
            end += 1
        chunk = pairs[start:end]
        start = end
        source_lens, target_lens = (np.array([len(pair[side]) for pair in chunk]) for side in (0, 1))
        sources, targets = (np.fromiter((token for pair in chunk for token in pair[side]), np.int64) for side in (0, 1))
        per_target = np.repeat(source_lens, target_lens)  # links of each target token
        position = np.repeat(np.arange(len(targets)), per_target)
        first_link = np.cumsum(per_target) - per_target
        first_source = np.repeat(np.cumsum(source_lens) - source_lens, target_lens)
        source_index = np.arange(len(position)) + (first_source - first_link)[position]
        yield sources[source_index], targets[position], position

"""Partition of a (B, H, T, S) score tensor into blocks of bounded memory, for blockwise attention."""

from collections.abc import Iterator

# Elements per block: on a CPU about the size of its caches, on other devices enough to keep them busy.
BLOCK_ELEMENTS = {"cpu": 1 << 20}
OTHER_BLOCK_ELEMENTS = 1 << 26


def score_blocks(
    shape: tuple[int, int, int, int],
    device_type: str,
    pair_elements: int = 1,
    causal: bool = False,
    window: int | None = None,
    distance: int | None = None,
) -> Iterator[tuple[slice, slice, slice]]:
    """The sequences, queries and keys of each block of scores of this shape; `pair_elements` is elements per score.

    Keys that are masked for all queries of a block are left out. Query t is at position t + S − T of the keys, and
    `distance` is the largest distance of a key in both directions.

    >>> [keys for _, _, keys in score_blocks((1, 1, 4, 4), "cpu", pair_elements=1 << 17, causal=True)]
    [slice(0, 2, None), slice(0, 4, None)]
    """
    B, H, T, S = shape
    if 0 in (B, H, T, S):
        return
    limit = BLOCK_ELEMENTS.get(device_type, OTHER_BLOCK_ELEMENTS)
    queries = min(T, max(1, limit // (H * S * pair_elements)))
    sequences = min(B, max(1, limit // (H * S * pair_elements * queries)))
    for t in range(0, T, queries):
        first, last = t + S - T, min(t + queries, T) - 1 + S - T
        low = 0 if window is None else max(0, first - window + 1)
        high = S if window is None and not causal else min(S, last + 1)
        if distance is not None:
            low, high = max(low, first - distance), min(high, last + distance + 1)
        if low < high:
            for b in range(0, B, sequences):
                yield slice(b, b + sequences), slice(t, t + queries), slice(low, high)

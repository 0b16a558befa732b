"""Batches for language models, from one long stream of token ids: each token predicts the next."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from regard.data.batching.batch import IGNORE_INDEX, WHOLE, Batch, RankSlice
from regard.errors import RegardError
from regard.layers.packed import pack


class TokenStreamBatches:
    """A token stream split into windows of `context` tokens, `budget // context` of them per batch, without padding.

    A window may span several documents, with the special tokens between them. The offset of the first window is sampled
    in each epoch, so that window boundaries change; windows are shuffled. Epoch e depends on (seed, e) alone. Tokens
    before the first window and after the last full one are left out of that epoch. With `constant_shapes`, the last
    batch is padded.

    >>> [batch] = TokenStreamBatches(np.array([2, 4, 5, 6, 3]), 4, budget=8, seed=0).epoch(0)
    >>> batch.inputs[0].ids, batch.targets
    (tensor([2, 4, 5, 6]), tensor([4, 5, 6, 3]))
    """

    def __init__(
        self, ids: Int[np.ndarray, "N"], context: int, *, budget: int, seed: int, constant_shapes: bool = False
    ) -> None:
        if len(ids) <= context:
            raise RegardError(
                f"The text has {len(ids)} tokens; a window of {context} and its next token need {context + 1}.",
                hint="Provide more text, or lower model.max_len.",
            )
        self.ids, self.context, self.seed = ids, context, seed
        self.count, self.constant_shapes = _windows_per_batch(context, budget), constant_shapes

    def epoch(self, number: int, start: int = 0, part: RankSlice = WHOLE) -> Iterator[Batch]:
        """The batches of an epoch from index `start` on, or a part of each. Skipped batches are not built."""
        generator = np.random.default_rng([self.seed, number])
        last = len(self.ids) - 1 - self.context  # last possible start of a window
        first = int(generator.integers(min(self.context, last + 1)))
        window_starts = generator.permutation(np.arange(first, last + 1, self.context))
        options: dict[str, int] = {}
        if self.constant_shapes:
            # Full-length sequences that fill the batch, so that kernels may treat it as a rectangle.
            count = -(-self.count // part.size)
            options = {"total": count * self.context, "count": count, "max_len": self.context}
        for index in range(start * self.count, len(window_starts), self.count):
            batch_starts = window_starts[index : index + self.count].tolist()
            selected, count = part.select([self.context] * len(batch_starts))
            windows = [slice(batch_starts[i], batch_starts[i] + self.context) for i in selected]
            batch = _make_batch(self.ids, windows, options)
            yield batch if count else replace(batch, sentences=0, tokens=0)


def sliding_window_batches(
    ids: Int[np.ndarray, "N"], context: int, *, budget: int, overlap: int = 0, constant_shapes: bool = False
) -> Iterator[Batch]:
    """Batches for evaluation: a stream in order, in which every token but the first is predicted exactly once.

    Windows have `context` tokens; the last one may be shorter. With `overlap`, each window starts that many tokens
    before the end of the previous one, so that every prediction has more than `overlap` tokens of context.

    >>> [batch] = sliding_window_batches(np.array([2, 4, 5, 6, 7, 3]), 3, budget=9, overlap=1)
    >>> batch.inputs[0].padded()[0], batch.targets
    (tensor([[2, 4, 5],
            [5, 6, 7]]), tensor([ 4,  5,  6, -1,  7,  3]))
    """
    if len(ids) < 2:
        raise RegardError("The text has a single token: there is nothing to predict.", hint="Provide more text.")
    if not 0 <= overlap < context:
        raise RegardError(
            f"The overlap ({overlap}) must be smaller than the window ({context} tokens).",
            hint=f"Choose an overlap from 0 to {context - 1}.",
        )
    count, last = _windows_per_batch(context, budget), len(ids) - 1
    options: dict[str, int] = {}
    if constant_shapes:  # one more sequence: the padding after a shorter window
        options = {"total": count * context, "count": count + 1, "max_len": context}
    window_starts = range(0, max(1, last - overlap), context - overlap)
    windows = [slice(begin, min(begin + context, last)) for begin in window_starts]
    for index in range(0, len(windows), count):
        yield _make_batch(ids, windows[index : index + count], options, overlap)


def _windows_per_batch(context: int, budget: int) -> int:
    if context > budget:
        raise RegardError(
            f"A window has {context} tokens, but a batch has only {budget}.",
            hint="Raise the batch size in tokens, or lower model.max_len.",
        )
    return budget // context


def _make_batch(
    ids: Int[np.ndarray, "N"], windows: Sequence[slice], options: dict[str, int], overlap: int = 0
) -> Batch:
    """The windows and their next tokens. The first `overlap` targets are ignored, except in the first window."""
    targets = [ids[window.start + 1 : window.stop + 1].copy() for window in windows]
    for window, row in zip(windows, targets):
        row[: overlap if window.start else 0] = IGNORE_INDEX
    return Batch(
        inputs=(pack([ids[window] for window in windows], **options),),
        targets=pack(targets, **options, fill=IGNORE_INDEX).ids,
        sentences=len(windows),
        tokens=sum(int((row != IGNORE_INDEX).sum()) for row in targets),
    )

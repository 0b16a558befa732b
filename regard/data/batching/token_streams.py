"""Batches from one long stream of ids, for models that write: every token is to be followed by the next."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from regard.data.batching.pair_batches import IGNORED, Batch
from regard.errors import RegardError
from regard.layers.packed import pack


class TextBatches:
    """A stream cut into pieces of `context` tokens, `budget // context` of them a batch; no padding.

    Documents follow each other in a piece, with what frames them in between. The first cut is drawn anew each epoch, so
    that the borders move; the pieces are shuffled. Epoch e is a function of (seed, e) alone. What comes before the
    first cut, and after the last whole piece, is not in that epoch. With `constant_shapes` the last batch is filled up.

    >>> [batch] = TextBatches(np.array([2, 4, 5, 6, 3]), 4, budget=8, seed=0).epoch(0)
    >>> batch.inputs[0].ids, batch.targets
    (tensor([2, 4, 5, 6]), tensor([4, 5, 6, 3]))
    """

    def __init__(
        self, ids: Int[np.ndarray, "N"], context: int, *, budget: int, seed: int, constant_shapes: bool = False
    ) -> None:
        if len(ids) <= context:
            raise RegardError(
                f"The text has {len(ids)} tokens, too few for a piece of {context} and the token after it.",
                hint="Give more text, or lower the longest length.",
            )
        self.ids, self.context, self.seed = ids, context, seed
        self.count, self.constant_shapes = _pieces_a_batch(context, budget), constant_shapes

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on: those before it cost nothing but the plan."""
        generator = np.random.default_rng([self.seed, number])
        last = len(self.ids) - 1 - self.context  # where a piece can begin at the latest
        first = int(generator.integers(min(self.context, last + 1)))
        begins = generator.permutation(np.arange(first, last + 1, self.context))
        shape: dict[str, int] = {}
        if self.constant_shapes:
            # As many sequences as fill it, each of the full length: kernels may take it for the rectangle that it is.
            shape = {"total": self.count * self.context, "count": self.count, "max_len": self.context}
        for place in range(start * self.count, len(begins), self.count):
            pieces = [slice(begin, begin + self.context) for begin in begins[place : place + self.count].tolist()]
            yield _batch(self.ids, pieces, shape)


def whole_text(
    ids: Int[np.ndarray, "N"], context: int, *, budget: int, overlap: int = 0, constant_shapes: bool = False
) -> Iterator[Batch]:
    """A stream once, in order: batches in which every token but the first is predicted exactly once.

    The pieces have `context` tokens, the last what is left. With `overlap` a piece begins that many tokens before the
    end of the one before it, so that whatever is predicted there is predicted from more than `overlap` tokens.

    >>> [batch] = whole_text(np.array([2, 4, 5, 6, 7, 3]), 3, budget=9, overlap=1)
    >>> batch.inputs[0].padded()[0], batch.targets
    (tensor([[2, 4, 5],
            [5, 6, 7]]), tensor([ 4,  5,  6, -1,  7,  3]))
    """
    if len(ids) < 2:
        raise RegardError("A text of a single token leaves nothing to predict.", hint="Give more text.")
    if not 0 <= overlap < context:
        raise RegardError(
            f"Pieces of {context} tokens cannot share {overlap}.", hint=f"Give an overlap from 0 to {context - 1}."
        )
    count, last = _pieces_a_batch(context, budget), len(ids) - 1
    shape: dict[str, int] = {}
    if constant_shapes:  # one sequence more: the tail that follows a shorter piece
        shape = {"total": count * context, "count": count + 1, "max_len": context}
    begins = range(0, max(1, last - overlap), context - overlap)
    pieces = [slice(begin, min(begin + context, last)) for begin in begins]
    for place in range(0, len(pieces), count):
        yield _batch(ids, pieces[place : place + count], shape, overlap)


def _pieces_a_batch(context: int, budget: int) -> int:
    if context > budget:
        raise RegardError(
            f"A piece of text has {context} tokens, but a batch only {budget}.",
            hint="Raise the tokens of a batch, or lower the longest length.",
        )
    return budget // context


def _batch(ids: Int[np.ndarray, "N"], pieces: Sequence[slice], shape: dict[str, int], overlap: int = 0) -> Batch:
    """The pieces, and what follows each token; in all but the stream's first piece the first `overlap` do not count."""
    targets = [ids[piece.start + 1 : piece.stop + 1].copy() for piece in pieces]
    for piece, row in zip(pieces, targets):
        row[: overlap if piece.start else 0] = IGNORED
    return Batch(
        inputs=(pack([ids[piece] for piece in pieces], **shape),),
        targets=pack(targets, **shape, fill=IGNORED).ids,
        sentences=len(pieces),
        tokens=sum(int((row != IGNORED).sum()) for row in targets),
    )

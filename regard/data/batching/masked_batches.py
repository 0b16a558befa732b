"""Batches for models that read: some of the tokens are hidden, and are to be told from the rest."""

from collections.abc import Iterator
from dataclasses import astuple

import numpy as np
import torch

from regard.data.batching.pair_batches import IGNORED, Batch
from regard.data.batching.sequences import Sequences
from regard.data.batching.text_batches import ByLength, Texts, room
from regard.data.text.special_tokens import Special
from regard.errors import RegardError
from regard.layers.packed import Packed

# Of the chosen tokens so many are hidden, so many replaced by any other, and the rest left (Devlin et al., 2019).
HIDDEN, REPLACED = 0.8, 0.1


class MaskedBatches:
    """Texts in batches of similar length, in which `share` of the tokens are to be named: these are the targets.

    Texts longer than `max_len` are cut into pieces, and each piece framed. Of the chosen tokens 80% are hidden behind
    `special.mask`, 10% replaced by an id drawn from those that are not special, and 10% left as they are. Epoch e is a
    function of (seed, e) alone: to validate, take the same epoch each time.

    >>> texts = Sequences.of([[5, 6, 7], [8, 9, 10]])
    >>> special = Special(begin=2, end=3, mask=4)
    >>> [batch] = MaskedBatches(texts, vocab=20, special=special, budget=16, max_len=16, seed=0, share=0.5).epoch(0)
    >>> batch.inputs[0].ids, batch.targets
    (tensor([2, 5, 4, 7, 3, 2, 8, 4, 4, 3]), tensor([-1, -1,  6, -1, -1, -1, -1,  9, 10, -1]))
    """

    def __init__(
        self,
        texts: Sequences,
        *,
        vocab: int,
        special: Special,
        budget: int,
        max_len: int,
        seed: int,
        constant_shapes: bool = False,
        share: float = 0.15,
    ) -> None:
        if special.mask is None:
            raise RegardError(
                "The model has no id that hides a token.",
                hint="Train a tokeniser with <mask>, or import another model.",
            )
        if not 0 < share <= 1:
            raise RegardError(f"The share of hidden tokens lies between 0 and 1; it cannot be {share}.", "Give 0.15.")
        pieces = _cut(texts, room(special, 1, max_len))
        if not len(pieces):
            raise RegardError("Every text is empty: there is nothing to hide.", hint="Give other texts.")
        self.seed, self.share, self.mask = seed, share, special.mask
        self._special = np.array([one for one in astuple(special) if one is not None])
        self._ordinary = np.setdiff1d(np.arange(vocab), self._special)
        framed = Texts(pieces.framed(special.begin, special.end))
        self._texts = ByLength(framed, budget=budget, max_len=max_len, seed=seed, constant_shapes=constant_shapes)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on: those before it cost nothing but the plan."""
        for index, (rows, inputs) in enumerate(self._texts.epoch(number, start), start):
            # Numbers count from 1: numpy takes [seed, number, 0] for [seed, number], which has drawn the plan.
            yield self._batch(rows, inputs[0], np.random.default_rng([self.seed, number, index + 1]))

    def _batch(self, rows: list[int], packed: Packed, generator: np.random.Generator) -> Batch:
        tokens = int(packed.offsets.starts[len(rows)])  # without what fills the batch up
        ids, targets = packed.ids.numpy(), np.full(len(packed.ids), IGNORED)
        places = np.flatnonzero(~np.isin(ids[:tokens], self._special))
        chosen = generator.permutation(places)[: max(1, round(self.share * len(places)))]
        targets[chosen] = ids[chosen]
        fate = generator.random(len(chosen))
        replaced = (fate >= HIDDEN) & (fate < HIDDEN + REPLACED)
        ids[chosen[fate < HIDDEN]] = self.mask
        ids[chosen[replaced]] = generator.choice(self._ordinary, replaced.sum())
        return Batch((packed,), torch.from_numpy(targets), sentences=len(rows), tokens=tokens)


def _cut(texts: Sequences, longest: int) -> Sequences:
    """The texts in pieces of at most `longest` tokens; an empty one has none."""
    counts = -(-texts.lengths // longest)
    before = np.repeat(np.cumsum(counts) - counts, counts)  # pieces of the texts before
    starts = np.repeat(texts.starts[:-1], counts) + longest * (np.arange(len(before)) - before)
    return Sequences(texts.ids, np.append(starts, texts.starts[-1]))

"""Simple cleaning of sentence pairs, with counts; and a validation split where none is given."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from regard.data.text.readers import Pair
from regard.errors import RegardError

# Of little data a tenth, up to a hundred examples: with fewer, the choice of the best model would be chance.
VALIDATION_SHARE, VALIDATION_MOST = 0.02, 2000
SMALL_SHARE, SMALL_MOST = 0.1, 100


@dataclass(frozen=True)
class Counts:
    """How many pairs were kept, and how many left out for which reason.

    >>> print(Counts(kept=29000, empty=3, duplicate=14))
    29,000 pairs; left out: 3 empty, 14 duplicate
    """

    kept: int = 0
    empty: int = 0
    duplicate: int = 0
    unequal: int = 0
    too_long: int = 0

    @property
    def left_out(self) -> int:
        return sum(getattr(self, one.name) for one in fields(self)) - self.kept

    @property
    def reasons(self) -> str:
        """How many were left out for each reason; empty where none were."""
        names = [one.name for one in fields(self)[1:] if getattr(self, one.name)]
        return ", ".join(f"{getattr(self, name):,} {name.replace('_', ' ')}" for name in names)

    def __str__(self) -> str:
        return f"{self.kept:,} pairs" + (f"; left out: {self.reasons}" if self.reasons else "")


def clean(pairs: Sequence[Pair], max_ratio: float = 9.0, max_chars: int = 5000) -> tuple[list[Pair], Counts]:
    """Leave out pairs with an empty side, repeated pairs, and those that can hardly be translations of each other:
    one side has more than `max_ratio` times the other's characters, 20 of grace. Nor is a side longer than `max_chars`
    of use. White space around a sentence is removed.

    >>> clean([("A cat.", "Un chat. "), ("A dog.", ""), ("A cat.", "Un chat.")])
    ([('A cat.', 'Un chat.')], Counts(kept=1, empty=1, duplicate=1, unequal=0, too_long=0))
    """
    kept: dict[Pair, None] = {}  # a set that remembers the order
    empty = duplicate = unequal = too_long = 0
    for source, target in pairs:
        pair = source.strip(), target.strip()
        shorter, longer = sorted(map(len, pair))
        if shorter == 0:
            empty += 1
        elif longer > max_chars:
            too_long += 1
        elif longer > max_ratio * shorter + 20:
            unequal += 1
        elif pair in kept:
            duplicate += 1
        else:
            kept[pair] = None
    return list(kept), Counts(len(kept), empty, duplicate, unequal, too_long)


Example = TypeVar("Example", bound=tuple[Any, Any])


def split_validation(pairs: Sequence[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """Training and validation pairs. About 2% are held out, at most 2000; of fewer than 5000 pairs, a hundred or a
    tenth, whichever is less, and at least 1. They are chosen by the seed.

    All pairs of one source sentence go the same way, so that nothing in validation was trained on. (Of texts and
    labels, all of one text; of contexts and questions, all of one context.)

    >>> training, validation = split_validation([(f"{i}", f"{i}") for i in range(100)], seed=0)
    >>> len(training), len(validation)
    (90, 10)
    """
    rows_of: dict[Any, list[int]] = {}
    for row, (source, _) in enumerate(pairs):
        rows_of.setdefault(source, []).append(row)
    if len(rows_of) < 2:
        raise RegardError(
            f"{len(rows_of)} different source sentences are too few to set some aside for validation.",
            hint="Give more of them, or validation files of their own.",
        )
    small = min(round(SMALL_SHARE * len(pairs)), SMALL_MOST)
    wanted = min(max(1, small, round(VALIDATION_SHARE * len(pairs))), VALIDATION_MOST)
    groups = list(rows_of.values())
    aside: set[int] = set()
    for index in np.random.default_rng(seed).permutation(len(groups)):
        if len(aside) + len(groups[index]) <= wanted:
            aside.update(groups[index])
        if len(aside) == wanted:
            break
    if not aside:  # every source has several targets
        smallest = min(groups, key=len)
        aside.update(smallest)
    training = [pair for row, pair in enumerate(pairs) if row not in aside]
    return training, [pair for row, pair in enumerate(pairs) if row in aside]

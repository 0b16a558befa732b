"""Cleaning of sentence pairs, with counts, and the automatic validation split."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from regard.data.text.readers import TextPair
from regard.errors import RegardError

# Validation split: 2%, at most 2000 examples. Of small data a tenth, up to 100 examples: with fewer, the choice of the
# best checkpoint would be random.
VALIDATION_SHARE, MAX_VALIDATION = 0.02, 2000
SMALL_VALIDATION_SHARE, MAX_SMALL_VALIDATION = 0.1, 100
MAX_CHARS = 5000


@dataclass(frozen=True)
class CleaningCounts:
    """Number of pairs kept, and number removed for each reason.

    >>> print(CleaningCounts(kept=29000, empty=3, duplicate=14))
    29,000 pairs; left out: 3 empty, 14 duplicate
    """

    kept: int = 0
    empty: int = 0
    duplicate: int = 0
    mismatched_length: int = 0
    too_long: int = 0

    @property
    def left_out(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self)) - self.kept

    @property
    def reasons(self) -> str:
        """Number of removed pairs by reason, as text; empty if none were removed."""
        names = [field.name for field in fields(self)[1:] if getattr(self, field.name)]
        return ", ".join(f"{getattr(self, name):,} {name.replace('_', ' ')}" for name in names)

    def __str__(self) -> str:
        return f"{self.kept:,} pair{'' if self.kept == 1 else 's'}" + (
            f"; left out: {self.reasons}" if self.reasons else ""
        )


def clean(
    pairs: Iterable[TextPair], max_ratio: float = 9.0, max_chars: int = MAX_CHARS
) -> tuple[list[TextPair], CleaningCounts]:
    """Remove pairs with an empty side, duplicates, pairs with a side of more than `max_chars` characters, and pairs
    whose lengths differ too much to be translations: the longer side has more than `max_ratio` times the characters of
    the shorter one, plus 20. White space around sentences is stripped.

    >>> clean([("A cat.", "Un chat. "), ("A dog.", ""), ("A cat.", "Un chat.")])
    ([('A cat.', 'Un chat.')], CleaningCounts(kept=1, empty=1, duplicate=1, mismatched_length=0, too_long=0))
    """
    kept: dict[TextPair, None] = {}  # an ordered set
    dropped: Counter[str] = Counter()
    for source, target in pairs:
        pair = source.strip(), target.strip()
        fault = pair_fault(*pair, max_ratio, max_chars) or ("duplicate" if pair in kept else "")
        if fault:
            dropped[fault] += 1
        else:
            kept[pair] = None
    return list(kept), CleaningCounts(len(kept), **dropped)


def pair_fault(source: str, target: str, max_ratio: float = 9.0, max_chars: int = MAX_CHARS) -> str:
    """The reason, a field of CleaningCounts, for which `clean` drops a stripped pair on its own; "" if it is kept.

    >>> pair_fault("A cat.", ""), pair_fault("A cat.", "Un chat.")
    ('empty', '')
    """
    shorter, longer = sorted((len(source), len(target)))
    if shorter == 0:
        return "empty"
    if longer > max_chars:
        return "too_long"
    return "mismatched_length" if longer > max_ratio * shorter + 20 else ""


PairLike = TypeVar("PairLike", bound=tuple[Any, Any])


def split_validation(pairs: Sequence[PairLike], seed: int) -> tuple[list[PairLike], list[PairLike]]:
    """Split pairs into training and validation. Validation gets about 2%, at most 2000; of fewer than 5000 pairs, 100
    or a tenth, whichever is less, and at least 1. The seed determines which.

    All pairs with the same source sentence go to the same side, so that no validation sentence was trained on. (Of
    labeled texts, all with the same text; of questions, all with the same context.) If most sources have
    targets that no other source has (those of labels have not), the validation targets are not in training either.

    >>> training, validation = split_validation([(f"{i}", f"{i}") for i in range(100)], seed=0)
    >>> len(training), len(validation)
    (90, 10)
    """
    rows_by_source: dict[Any, list[int]] = {}
    for row, (source, _) in enumerate(pairs):
        rows_by_source.setdefault(source, []).append(row)
    if len(rows_by_source) < 2:
        raise RegardError(
            f"A validation split needs at least 2 different source sentences (got {len(rows_by_source)}).",
            hint="Provide more data, or separate validation files.",
        )
    size = validation_size(len(pairs))
    groups = list(rows_by_source.values())
    occurrences = Counter(target for _, target in pairs)
    selected: set[int] = set()
    order, unique = np.random.default_rng(seed).permutation(len(groups)), []
    for index in order:
        targets = Counter(pairs[row][1] for row in groups[index])
        if all(occurrences[target] == count for target, count in targets.items()):
            unique.append(index)
    for index in unique if 2 * len(unique) > len(groups) else order:
        if len(selected) + len(groups[index]) <= size:
            selected.update(groups[index])
        if len(selected) == size:
            break
    if not selected:  # every source has several targets
        smallest = min(groups, key=len)
        selected.update(smallest)
    training = [pair for row, pair in enumerate(pairs) if row not in selected]
    return training, [pair for row, pair in enumerate(pairs) if row in selected]


def count_near_duplicates(training: Iterable[TextPair], validation: Sequence[TextPair]) -> int:
    """The number of validation pairs whose source differs from a training source only in case and punctuation.

    >>> count_near_duplicates([("A cat!", "")], [("a cat", ""), ("A dog", "")])
    1
    """
    known = {_letters(source) for source, _ in training}
    return sum(_letters(source) in known for source, _ in validation)


def _letters(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold())) or text


def validation_size(count: int) -> int:
    """The number of validation examples for a corpus of `count` examples.

    >>> validation_size(100), validation_size(50_000), validation_size(10**9)
    (10, 1000, 2000)
    """
    small = min(round(SMALL_VALIDATION_SHARE * count), MAX_SMALL_VALIDATION)
    return min(max(1, small, round(VALIDATION_SHARE * count)), MAX_VALIDATION)

"""Anything to learn from, and more of it to be judged by."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from regard.data.cleaning import split_validation
from regard.errors import RegardError
from regard.training.datasets import describe_split

Item = TypeVar("Item")


@dataclass(frozen=True)
class Held(Generic[Item]):
    """Items to train with and to validate with, and what one is called.

    >>> Held([1, 2], [3], "numbers").describe()
    '2 numbers for training, 1 for validation'
    """

    training: Sequence[Item]
    validation: Sequence[Item]
    called: str

    @property
    def fingerprints(self) -> dict[str, Any]:
        """Sizes and SHA-256 of what is trained on and validated by."""
        return {
            name: {self.called: len(items), "sha256": _digest(items)}
            for name, items in (("training", self.training), ("validation", self.validation))
        }

    def describe(self) -> str:
        return describe_split(len(self.training), len(self.validation), self.called)


def with_validation(
    items: Sequence[Item], validation: Sequence[Item], called: str, key: Callable[[Item], Any]
) -> Held[Item]:
    """The items as they are where there are others to validate with; otherwise some are set aside, always the same.

    Items of one `key` stay together, so that validation asks for nothing that was seen.
    """
    if not validation:
        if len({key(item) for item in items}) < 2:
            raise RegardError(
                f"There are too few {called} to set some aside for validation.",
                "Give more of them, or validation files of their own.",
            )
        parts = split_validation([(key(item), item) for item in items], seed=0)
        items, validation = ([item for _, item in part] for part in parts)
    return Held(items, validation, called)


def _digest(items: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()

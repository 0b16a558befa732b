"""Helpers for tests of the Triton kernels."""

import itertools
from collections.abc import Sequence
from typing import Any

from regard.kernels.triton.support import is_interpreted


def combine(every: int, *values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations of values on a GPU; in the slow interpreter every n-th, such that each value occurs.

    With three or more lists, of which none is shorter than `every`, each two values of two lists occur together.
    """
    combinations = itertools.product(*map(enumerate, values))
    return [
        tuple(value for _, value in chosen)
        for chosen in combinations
        if not is_interpreted() or sum(index for index, _ in chosen) % every == 0
    ]

"""Confidence intervals of metrics, and paired comparisons of models, by the bootstrap (Koehn 2004)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float

RESAMPLES = 500


def _percent(sums: Float[np.ndarray, "2"]) -> float:
    return float(100 * sums[0] / max(1.0, sums[1]))


@dataclass(frozen=True, eq=False)
class ExampleSums:
    """A metric of test examples computed from sums over them; by default the first sum in percent of the second.

    >>> ExampleSums(np.array([[1, 1], [0, 1]])).value
    50.0
    """

    rows: Float[np.ndarray, "M K"]
    """the summands of each example"""
    compute: Callable[[Float[np.ndarray, "K"]], float] = field(default=_percent)

    @property
    def value(self) -> float:
        return self.compute(self.rows.sum(0))

    @cached_property
    def resampled(self) -> Float[np.ndarray, "R"]:
        """The metric of test sets of the same size, drawn from the examples with replacement.

        The draws depend on the number of examples alone, so those of two models on the same examples are paired.
        """
        rng, count = np.random.default_rng(0), len(self.rows)
        draws = (np.bincount(rng.integers(0, count, count), minlength=count) for _ in range(RESAMPLES))
        return np.array([self.compute(draw @ self.rows) for draw in draws])

    @property
    def margin(self) -> float:
        """Half of the width of the 95% confidence interval."""
        low, high = interval(self.resampled)
        return (high - low) / 2


def share(correct: Sequence[bool] | Bool[np.ndarray, "M"]) -> ExampleSums:
    """The percentage of examples that are correct, such as exact match or accuracy.

    >>> share([True, False] * 50).margin
    10.0
    """
    return ExampleSums(np.stack([np.asarray(correct), np.ones(len(correct))], 1).astype(float))


def interval(resampled: Float[np.ndarray, "R"]) -> tuple[float, float]:
    """The 95% confidence interval of a metric, or of the difference of two, from resampled values."""
    low, high = np.percentile(resampled, (2.5, 97.5), method="nearest")
    return float(low), float(high)

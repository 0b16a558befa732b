"""Guard against non-finite losses and loss spikes: which updates are skipped, and when the run is rolled back."""

import math
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.training.losses import LossParts

# Skipped updates in a row after which the run returns to its last checkpoint.
MAX_SKIPPED = 3
# Statistics of the loss: updates in the moving average, updates before any loss counts as a spike, and the first
# updates, whose mean is the loss at the start.
WINDOW, MIN_UPDATES, START_UPDATES = 200, 100, 10
# A spike is this many standard deviations above the mean, and at least this multiple of it.
DEVIATIONS, MULTIPLE = 10.0, 2.0


@dataclass
class LossStatistics:
    """Moving average and variance of the loss per token, and its mean at the start of the run.

    >>> statistics = LossStatistics()
    >>> for loss in [4.0, 3.0] * 100:
    ...     statistics.add(loss)
    >>> round(statistics.limit, 1)  # 3.5 + 10 standard deviations
    8.5
    """

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0
    start: float = 0.0

    def add(self, loss: float) -> None:
        """Add the loss per token of an update."""
        self.count += 1
        share, change = 1 / min(self.count, WINDOW), loss - self.mean
        self.mean += share * change
        self.variance = (1 - share) * (self.variance + share * change**2)
        if self.count <= START_UPDATES:
            self.start = self.mean

    @property
    def limit(self) -> float:
        """The loss from which on an update is skipped.

        A spike is ten standard deviations above the mean, at least twice the mean, and at least half the loss at the
        start: a model with a loss near 0 may meet a batch that it does not know yet.
        """
        if self.count < MIN_UPDATES:
            return math.inf
        return max(self.mean + DEVIATIONS * math.sqrt(self.variance), MULTIPLE * self.mean, self.start / 2)

    def to_list(self) -> list[float]:
        return list(astuple(self))

    @staticmethod
    def from_list(values: list[float]) -> "LossStatistics":
        if not values:
            return LossStatistics()
        mean, variance, count, start = values
        return LossStatistics(mean, variance, int(count), start)


class Position(NamedTuple):
    """A position in the data: the batch with this index of this epoch is the next one."""

    epoch: int
    batch: int


class SkippedUpdate(NamedTuple):
    """An update that was not applied: its step, the position in the data before it, and its loss per token."""

    step: int
    start: Position
    loss: float

    def describe(self, limit: float) -> str:
        """The reason.

        >>> SkippedUpdate(7, Position(0, 6), math.nan).describe(5.0)
        'Step 7: the loss or its gradient is not finite'
        """
        if not math.isfinite(self.loss):
            return f"Step {self.step}: the loss or its gradient is not finite"
        return f"Step {self.step}: the loss is {self.loss:.4g}, which is a spike (from {limit:.4g} on)"


class LossGuard:
    """Decides on the device which updates are applied, without synchronization; `inspect` reads the decisions.

    >>> guard = LossGuard(torch.device("cpu"), skips_spikes=True)
    >>> guard.accepts(LossParts(*torch.tensor([6.0, 6.0, 2.0])))
    tensor(True)
    >>> guard.accepts(LossParts(*torch.tensor([torch.nan, 6.0, 2.0])))
    tensor(False)
    """

    def __init__(self, device: torch.device, *, skips_spikes: bool) -> None:
        self.statistics, self.skips_spikes = LossStatistics(), skips_spikes
        self.limit = torch.full((), math.inf, device=device)
        self.pending: list[tuple[int, Position, LossParts]] = []
        """step, start and loss of the updates that were not inspected yet"""
        self.streak = 0
        """skipped updates in a row, up to the last inspection"""

    def accepts(self, parts: LossParts) -> Bool[Tensor, ""]:
        """Whether the update is applied: the loss is below the limit, which no NaN and no infinity is."""
        return _is_below(parts, self.limit)

    def add(self, step: int, start: Position, parts: LossParts) -> None:
        """Add an update for the next inspection."""
        self.pending.append((step, start, parts))

    def inspect(self) -> tuple[list[LossParts], list[SkippedUpdate]]:
        """Read the updates since the last call: the losses of those that were applied, and those that were skipped.

        Ends with the update that completes `MAX_SKIPPED` in a row, until `reset`: ranks that read more often than
        others come to the same result. Synchronizes with the device.
        """
        if self.has_failed or not self.pending:
            self.pending = []
            return [], []
        columns = LossParts(*(torch.stack(column).cpu() for column in zip(*(parts for _, _, parts in self.pending))))
        accepted, losses = _is_below(columns, self.limit.cpu()).tolist(), columns.loss / columns.tokens.clamp(min=1)
        applied: list[LossParts] = []
        skipped: list[SkippedUpdate] = []
        for (step, start, parts), is_accepted, loss in zip(self.pending, accepted, losses.tolist()):
            self.streak = 0 if is_accepted else self.streak + 1
            if is_accepted:
                applied.append(parts)
            else:
                skipped.append(SkippedUpdate(step, start, loss))
            if self.has_failed:
                break
        self.pending = []
        return applied, skipped

    @property
    def has_failed(self) -> bool:
        """Whether too many updates in a row were skipped."""
        return self.streak >= MAX_SKIPPED

    def learn(self, losses: list[float]) -> None:
        """Add losses per token of applied updates to the statistics, which set the limit of the next updates."""
        for loss in losses:
            self.statistics.add(loss)
        self._set_limit()

    def reset(self, statistics: LossStatistics) -> None:
        """Return to the statistics of a checkpoint."""
        self.statistics, self.streak, self.pending = statistics, 0, []
        self._set_limit()

    def _set_limit(self) -> None:
        self.limit.fill_(self.statistics.limit if self.skips_spikes else math.inf)


def _is_below(parts: LossParts, limit: Tensor) -> Tensor:
    return parts.loss.abs() < limit * parts.tokens.clamp(min=1)


def mark_non_finite(parts: LossParts, norm: Float[Tensor, ""]) -> LossParts:
    """The same loss, or NaN if the gradient norm is not finite.

    >>> one = torch.tensor(1.0)
    >>> mark_non_finite(LossParts(one, one, one), torch.tensor(torch.inf)).loss
    tensor(nan)
    """
    return parts._replace(loss=parts.loss + 0.0 * norm)

"""Learning-rate schedules: a linear warm-up, then a decay chosen by name."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from regard.errors import RegardError

ScheduleName = Literal["wsd", "cosine", "linear", "inverse_root", "constant"]
# The decay of "wsd" takes a quarter as many steps as precede it: the last fifth of the run.
DECAY_RATIO = 0.25


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each update.

    "wsd" (warm-up, stable, decay; Hu et al. 2024) stays at its peak until `decay_start`, then decays to 0 as one minus
    the square root of the elapsed fraction (Hägele et al. 2024). Its decay can start earlier than planned, so it suits
    early stopping and time budgets. "cosine" and "linear" reach 0 at the last step. "inverse_root" is the schedule of
    Vaswani et al. (2017), parametrized by its peak.

    >>> Schedule("linear", peak=1.0, warmup=10, steps=110).rate(60)
    0.5
    >>> wsd = Schedule("wsd", peak=1.0, warmup=10, steps=100)
    >>> wsd.planned_decay, wsd.rate(79), wsd.rate(85), wsd.end(40)
    (80, 1.0, 0.5, 50)
    """

    name: ScheduleName
    peak: float
    warmup: int
    steps: int

    def rate(self, step: int, decay_start: int | None = None) -> float:
        """The learning rate of update `step`, counted from 0; `decay_start` is where the decay of "wsd" starts."""
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        done = min(1.0, max(0, step - self.warmup) / max(1, self.steps - self.warmup))
        match self.name:
            case "wsd":
                return self.peak * warm * self._decay(step, decay_start)
            case "inverse_root":
                return self.peak * min(warm, math.sqrt(max(1, self.warmup) / max(1, step + 1)))
            case "cosine":
                return self.peak * warm * 0.5 * (1 + math.cos(math.pi * done))
            case "linear":
                return self.peak * warm * (1 - done)
            case "constant":
                return self.peak * warm

    @property
    def planned_decay(self) -> int:
        """The step at which the decay of "wsd" starts unless it starts early."""
        return math.floor(self.steps / (1 + DECAY_RATIO))

    def end(self, decay_start: int | None) -> int:
        """The last step of a run whose decay started at `decay_start` (None: as planned)."""
        if self.name != "wsd" or decay_start is None:
            return self.steps
        return min(self.steps, decay_start + max(1, math.ceil(DECAY_RATIO * decay_start)))

    def _decay(self, step: int, decay_start: int | None) -> float:
        start = self.planned_decay if decay_start is None else decay_start
        if step < start:
            return 1.0
        return 1.0 - math.sqrt(min(1.0, (step - start) / max(1, self.end(decay_start) - start)))


def parse_duration(text: str) -> float:
    """Convert a duration such as "90s", "10m" or "1h30m" to seconds; an empty string is 0.

    >>> parse_duration("1h30m"), parse_duration("")
    (5400.0, 0.0)
    """
    if not text:
        return 0.0
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", text.strip())
    seconds = sum(float(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1))) if match else 0.0
    if not 0 < seconds < math.inf:
        raise RegardError(f"train.time = {text!r} is not a valid duration.", "Write, for example, 90s, 10m or 1h30m.")
    return seconds


def format_duration(seconds: float) -> str:
    """Format a duration for display.

    >>> format_duration(42), format_duration(600), format_duration(5400)
    ('42 s', '10 min', '1 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"

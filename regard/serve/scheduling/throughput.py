"""Measured throughput of a worker, from which waiting times are predicted."""

import math

# Time constant of the moving average, in seconds of work.
TIME_CONSTANT = 1.0


class ThroughputMeter:
    """Seconds of work per unit, as a moving average over the last seconds of work.

    >>> meter = ThroughputMeter()
    >>> meter.seconds_per_unit is None
    True
    >>> for _ in range(1000):
    ...     meter.add(0.1, units=2)
    >>> round(meter.seconds_per_unit, 6)
    0.05
    """

    def __init__(self) -> None:
        self._seconds = self._units = 0.0

    def add(self, seconds: float, units: float) -> None:
        """Count work: its duration, and the units that were completed."""
        decay = math.exp(-seconds / TIME_CONSTANT)
        self._seconds = self._seconds * decay + seconds
        self._units = self._units * decay + units

    @property
    def seconds_per_unit(self) -> float | None:
        """None before the first unit is completed."""
        return self._seconds / self._units if self._units else None

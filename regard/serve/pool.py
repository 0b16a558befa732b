"""Several schedulers of one model: on a CPU, one per core."""

import dataclasses
import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

from regard.decode import NBest
from regard.pipelines.decoding_request import DecodingRequest
from regard.serve.scheduler import OnToken, Scheduler, SchedulerCounts


class SchedulerPool:
    """Schedulers that share a model; each request goes to the one with the least work.

    >>> pool = SchedulerPool(2)
    >>> pool.call(("double",), lambda values: [2 * value for value in values], [1, 2]).result()
    [2, 4]
    >>> pool.close()
    True
    """

    def __init__(self, workers: int, *, latency_target: float = 0.5, name: str = "model") -> None:
        self._schedulers = [
            Scheduler(latency_target=latency_target, name=f"{name}-{number}") for number in range(workers)
        ]

    def submit(
        self, request: DecodingRequest[Any], *, timeout: float = 30.0, on_token: OnToken | None = None
    ) -> "Future[list[NBest]]":
        """Decode a request: see `Scheduler.submit`."""
        return self._least_busy().submit(request, timeout=timeout, on_token=on_token)

    def call(
        self,
        kind: tuple[Hashable, ...],
        function: Callable[[list[Any]], Sequence[Any]],
        inputs: list[Any],
        *,
        timeout: float = 30.0,
        is_alone: bool = False,
    ) -> "Future[list[Any]]":
        """Run a function of a list of inputs: see `Scheduler.call`."""
        return self._least_busy().call(kind, function, inputs, timeout=timeout, is_alone=is_alone)

    def _least_busy(self) -> Scheduler:
        return min(self._schedulers, key=lambda scheduler: (scheduler.expected_seconds(), scheduler.outstanding))

    @property
    def workers(self) -> list[Scheduler]:
        return list(self._schedulers)

    @property
    def counts(self) -> SchedulerCounts:
        """What all schedulers did."""
        names = [field.name for field in dataclasses.fields(SchedulerCounts)]
        sums = {name: sum(getattr(scheduler.counts, name) for scheduler in self._schedulers) for name in names}
        return SchedulerCounts(**sums)

    @property
    def outstanding(self) -> int:
        """The number of texts that are accepted and not finished."""
        return sum(scheduler.outstanding for scheduler in self._schedulers)

    def expected_seconds(self) -> float:
        """The time that the accepted work takes, at the measured throughput, of the busiest scheduler."""
        return max(scheduler.expected_seconds() for scheduler in self._schedulers)

    def excess_seconds(self, seconds: float = 0.0, items: int = 0) -> float:
        """See `Scheduler.excess_seconds`; of the least busy scheduler."""
        return min(scheduler.excess_seconds(seconds, items) for scheduler in self._schedulers)

    def close(self, timeout: float | None = None) -> bool:
        """Take no new requests and finish those accepted; False if that took too long."""
        for scheduler in self._schedulers:
            scheduler.stop_accepting()
        are_closed = [scheduler.close(timeout) for scheduler in self._schedulers]
        return all(are_closed)


def default_workers(device: str) -> int:
    """Schedulers per model: one per core of a CPU, and one on a GPU.

    >>> default_workers("cuda")
    1
    """
    if device != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""Metrics of a server in the text format of Prometheus."""

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable

from regard.serve.pool import SchedulerPool

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Counters of each model, from its scheduler.
_COUNTERS = {
    "accepted": "Requests accepted",
    "completed": "Requests completed",
    "refused": "Requests refused because the server was at its capacity (429)",
    "cancelled": "Requests whose client left",
    "expired": "Requests that exceeded their time limit",
    "failed": "Requests that failed",
    "output_tokens": "Tokens generated",
    "steps": "Decoding steps",
    "rows": "Texts in the batch, summed over decoding steps",
    "busy_seconds": "Seconds of work",
}


class RequestMetrics:
    """Counts and durations of HTTP requests.

    >>> metrics = RequestMetrics()
    >>> metrics.observe("/translate", 200, 0.02)
    >>> 'regard_requests_total{path="/translate",status="200"} 1' in metrics.render()
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, int], int] = defaultdict(int)
        self._buckets: dict[str, list[int]] = defaultdict(lambda: [0] * (len(BUCKETS) + 1))
        self._seconds: dict[str, float] = defaultdict(float)

    def observe(self, path: str, status: int, seconds: float) -> None:
        """Count a request; `path` is the pattern of its route."""
        with self._lock:
            self._counts[path, status] += 1
            self._buckets[path][bisect_left(BUCKETS, seconds)] += 1
            self._seconds[path] += seconds

    def render(self) -> str:
        lines = ["# HELP regard_requests_total HTTP requests", "# TYPE regard_requests_total counter"]
        with self._lock:
            for (path, status), count in sorted(self._counts.items()):
                lines.append(f'regard_requests_total{{path="{escape_label(path)}",status="{status}"}} {count}')
            name = "regard_request_duration_seconds"
            lines += [f"# HELP {name} Duration of HTTP requests", f"# TYPE {name} histogram"]
            for path, counts in sorted(self._buckets.items()):
                label, total = f'path="{escape_label(path)}"', 0
                for bound, count in zip((*map(str, BUCKETS), "+Inf"), counts):
                    total += count
                    lines.append(f'{name}_bucket{{{label},le="{bound}"}} {total}')
                lines += [f"{name}_sum{{{label}}} {self._seconds[path]:.6f}", f"{name}_count{{{label}}} {total}"]
        return "\n".join(lines) + "\n"


def render_schedulers(schedulers: Iterable[tuple[str, SchedulerPool]]) -> str:
    """The metrics of the schedulers of all models."""
    models = [(escape_label(name), scheduler) for name, scheduler in schedulers]
    totals = [(name, scheduler.counts) for name, scheduler in models]
    lines = []
    for field, text in _COUNTERS.items():
        metric = f"regard_model_{field}_total"
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} counter"]
        lines += [f'{metric}{{model="{name}"}} {getattr(counts, field)}' for name, counts in totals]
    gauges = {
        "regard_model_outstanding": ("Texts accepted and not finished", lambda scheduler: scheduler.outstanding),
        "regard_model_expected_seconds": (
            "Expected time to finish all",
            lambda scheduler: f"{scheduler.expected_seconds():.6f}",
        ),
    }
    for metric, (text, read) in gauges.items():
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} gauge"]
        lines += [f'{metric}{{model="{name}"}} {read(scheduler)}' for name, scheduler in models]
    return "\n".join(lines) + "\n"


def escape_label(value: str) -> str:
    """A label value with its special characters escaped.

    >>> len(escape_label('a"b'))
    4
    """
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

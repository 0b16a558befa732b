"""Fast settings for tests of benchmarks: short timings and small matrices."""

import pytest

from regard.bench import measurement


@pytest.fixture(autouse=True)
def _fast_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "MIN_TIMED_SECONDS", 1e-4)
    monkeypatch.setitem(measurement.MATRIX_SIZE, "cpu", 64)

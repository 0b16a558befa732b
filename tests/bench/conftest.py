"""Nobody is to be judged by these runs: turns are short, and ceilings low."""

import pytest

from regard.bench import measurement


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "TURN", 1e-4)
    monkeypatch.setitem(measurement.SIDE, "cpu", 64)

"""Nobody is to be judged by these runs: turns are short, and ceilings low."""

import pytest

from regard.bench import measuring


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "TURN", 1e-4)
    monkeypatch.setitem(measuring.SIDE, "cpu", 64)

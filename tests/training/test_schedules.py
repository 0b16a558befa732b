"""The schedule wsd with an early decay, and durations."""

import pytest

from regard.errors import RegardError
from regard.training.schedules import Schedule, parse_duration

WSD = Schedule("wsd", peak=1.0, warmup=10, steps=100)


def test_wsd_warms_up_stays_constant_and_decays_to_zero():
    assert [WSD.rate(step) for step in (0, 9, 10, 79)] == [0.1, 1.0, 1.0, 1.0]
    rates = [WSD.rate(step) for step in range(80, 100)]
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.05
    assert WSD.rate(100) == 0.0


def test_early_decay_takes_the_last_fifth_of_the_run():
    assert WSD.end(40) == 50
    assert WSD.rate(39, decay_start=40) == 1.0
    assert WSD.rate(49, decay_start=40) == pytest.approx(1 - 0.9**0.5)


def test_decay_during_warm_up_starts_from_the_current_rate():
    assert WSD.rate(4, decay_start=4) == pytest.approx(0.5)
    assert WSD.end(1) == 2


def test_end_is_never_after_the_last_step():
    assert WSD.end(90) == 100
    assert Schedule("cosine", 1.0, 10, 100).end(40) == 100


@pytest.mark.parametrize("text", ["10", "m", "-5m", "0s", "5x", "1m1h", "nan", " "])
def test_invalid_duration_is_an_error(text):
    with pytest.raises(RegardError, match="is not a valid duration"):
        parse_duration(text)

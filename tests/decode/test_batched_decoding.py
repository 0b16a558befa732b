"""Any number of sentences, and the options."""

import pytest

from regard.decode import DecodeConfig, decode_all, decode_batch
from regard.errors import RegardError
from tests.decode.helpers import HistoryModel, pack

SENTENCES = [[4 + (7 * i) % 23, *[1] * ((5 * i) % 9)] for i in range(40)]
CONFIGS = [
    DecodeConfig("greedy"),
    DecodeConfig("beam", beam=3, n_best=2),
    DecodeConfig("sample", n_best=3, temperature=1.5),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
def test_order_and_results_do_not_depend_on_the_batches(config: DecodeConfig) -> None:
    model = HistoryModel(14, seed=1)
    prefixes = [[5] * (i % 3) for i in range(len(SENTENCES))]
    whole = decode_batch(model, pack(SENTENCES), config, prefixes=prefixes)
    for budget in (1, 100, 10**6):
        assert decode_all(model, SENTENCES, pack, config, prefixes=prefixes, budget=budget) == whole


def test_batches_hold_the_budget_and_report_progress() -> None:
    model, reports, batches = HistoryModel(14), [], []

    def keep(sentences: list[list[int]]):
        batches.append(sentences)
        return pack(sentences)

    config = DecodeConfig(beam=3)
    decode_all(model, SENTENCES, keep, config, budget=100, progress=lambda *now: reports.append(now))
    assert sum(map(len, batches)) == 40
    assert all(len(batch) * max(map(len, batch)) * 3 <= 100 for batch in batches)
    assert len(batches) < 15
    assert [len(batch[0]) for batch in batches] == sorted((len(batch[0]) for batch in batches), reverse=True)
    assert reports[-1] == (40, 40)
    assert len(reports) == len(batches)


def test_nothing_to_do() -> None:
    assert decode_all(HistoryModel(6), [], pack, DecodeConfig()) == []


def test_history_through_the_door() -> None:
    result = decode_all(HistoryModel(9), SENTENCES, pack, DecodeConfig(beam=2), history=True)
    assert all(r.history is not None and r.history.path(r[0]) for r in result)


@pytest.mark.parametrize(
    "options",
    [
        {"beam": 0},
        {"n_best": 0},
        {"beam": 2, "n_best": 3},
        {"method": "greedy", "n_best": 2},
        {"length_penalty": -1.0},
        {"coverage_penalty": -0.1},
        {"patience": 0.0},
        {"max_len": -1},
        {"max_ratio": -1.0},
        {"max_extra": -1},
        {"min_len": -1},
        {"temperature": 0.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
)
def test_senseless_options_are_refused(options: dict) -> None:
    with pytest.raises(RegardError, match=list(options)[-1]):
        DecodeConfig(**options)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(Exception, match="method"):  # of another class where types are checked too
        DecodeConfig("best")  # type: ignore[arg-type]


def test_the_limit_on_length() -> None:
    config = DecodeConfig(max_len=50, max_ratio=1.5, max_extra=10)
    assert [config.limit(n) for n in (0, 1, 10, 100)] == [10, 11, 25, 50]

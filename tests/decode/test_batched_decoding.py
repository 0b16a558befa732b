"""Decoding in batches, and checks of the decoding options."""

from typing import Any

import pytest

from regard.decode import DecodeConfig, Request, decode_all
from regard.errors import RegardError
from tests.decode.helpers import HistoryModel

SENTENCES = [[4 + (7 * i) % 23, *[1] * ((5 * i) % 9)] for i in range(40)]
CONFIGS = [
    DecodeConfig("greedy"),
    DecodeConfig("beam", beam=3, n_best=2),
    DecodeConfig("sample", n_best=3, temperature=1.5),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
def test_results_do_not_depend_on_batching(config: DecodeConfig) -> None:
    model = HistoryModel(14, seed=1)
    prefixes = [[5] * (i % 3) for i in range(len(SENTENCES))]
    request = Request(SENTENCES, config, prefixes=prefixes)
    one_batch = decode_all(model, request, budget=10**6)
    for budget in (1, 100):
        assert decode_all(model, request, budget=budget) == one_batch


class RecordingModel(HistoryModel):
    """Notes the lengths of the sentences of each batch."""

    def __init__(self) -> None:
        super().__init__(14)
        self.batches: list[list[int]] = []

    def start(self, source: Any) -> Any:
        self.batches.append(source.offsets.lengths.tolist())
        return super().start(source)


def test_batches_stay_within_the_budget_and_report_progress() -> None:
    model, reports = RecordingModel(), []
    config = DecodeConfig(beam=3)
    decode_all(model, Request(SENTENCES, config), budget=100, progress=lambda *now: reports.append(now))
    batches = model.batches
    assert sum(map(len, batches)) == 40
    assert all(len(batch) * max(batch) * 3 <= 100 for batch in batches)
    assert len(batches) < 15
    assert [batch[0] for batch in batches] == sorted((batch[0] for batch in batches), reverse=True)
    assert reports == [(done, 40) for done in range(1, 41)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
def test_no_sentences_give_no_results(config: DecodeConfig) -> None:
    assert decode_all(HistoryModel(6), Request([], config)) == []


def test_decode_all_records_history() -> None:
    result = decode_all(HistoryModel(9), Request(SENTENCES, DecodeConfig(beam=2), history=True))
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
def test_invalid_options_raise(options: dict) -> None:
    with pytest.raises(RegardError, match=list(options)[-1]):
        DecodeConfig(**options)


def test_unknown_method_raises() -> None:
    with pytest.raises(Exception, match="method"):  # another exception class when types are checked at run time
        DecodeConfig("best")  # type: ignore[arg-type]


def test_output_length_limit() -> None:
    config = DecodeConfig(max_len=50, max_ratio=1.5, max_extra=10)
    assert [config.limit(n) for n in (0, 1, 10, 100)] == [10, 11, 25, 50]

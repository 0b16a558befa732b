"""Decoding in batches, and checks of the decoding options."""

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
def test_results_do_not_depend_on_batching(config: DecodeConfig) -> None:
    model = HistoryModel(14, seed=1)
    prefixes = [[5] * (i % 3) for i in range(len(SENTENCES))]
    one_batch = decode_batch(model, pack(SENTENCES), config, prefixes=prefixes)
    for budget in (1, 100, 10**6):
        assert decode_all(model, SENTENCES, pack, config, prefixes=prefixes, budget=budget) == one_batch


def test_batches_stay_within_the_budget_and_report_progress() -> None:
    model, reports, batches = HistoryModel(14), [], []

    def pack_and_record(sentences: list[list[int]]):
        batches.append(sentences)
        return pack(sentences)

    config = DecodeConfig(beam=3)
    decode_all(model, SENTENCES, pack_and_record, config, budget=100, progress=lambda *now: reports.append(now))
    assert sum(map(len, batches)) == 40
    assert all(len(batch) * max(map(len, batch)) * 3 <= 100 for batch in batches)
    assert len(batches) < 15
    assert [len(batch[0]) for batch in batches] == sorted((len(batch[0]) for batch in batches), reverse=True)
    assert reports == [(done, 40) for done in range(1, 41)]


def test_no_sentences_give_no_results() -> None:
    assert decode_all(HistoryModel(6), [], pack, DecodeConfig()) == []


def test_decode_all_records_history() -> None:
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
def test_invalid_options_raise(options: dict) -> None:
    with pytest.raises(RegardError, match=list(options)[-1]):
        DecodeConfig(**options)


def test_unknown_method_raises() -> None:
    with pytest.raises(Exception, match="method"):  # another exception class when types are checked at run time
        DecodeConfig("best")  # type: ignore[arg-type]


def test_output_length_limit() -> None:
    config = DecodeConfig(max_len=50, max_ratio=1.5, max_extra=10)
    assert [config.limit(n) for n in (0, 1, 10, 100)] == [10, 11, 25, 50]

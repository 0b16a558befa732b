"""`decode_all` gives the results of the textbook search, and wide beams those of exhaustive search."""

import math

import pytest
import torch

from regard.decode import SPECIAL, DecodeConfig, reference
from tests.decode.helpers import HistoryModel, beam, exhaustive_search
from tests.decode.models import assert_equal_search, gpt, make_sources, seq2seq, special_options, transformer

OPTIONS = {
    "greedy": {"method": "greedy"},
    "greedy with limits": {"method": "greedy", "min_len": 4, "max_len": 6},
    "beam": {"beam": 4, "n_best": 3},
    "beam of one": {"beam": 1},
    "limits": {"beam": 3, "n_best": 2, "min_len": 5, "max_len": 8, "unknown": False},
    "length penalty": {"beam": 4, "n_best": 4, "length_penalty": 0.3},
    "no length penalty": {"beam": 3, "length_penalty": 0.0},
    "patience": {"beam": 3, "n_best": 2, "patience": 3.0},
    "no early stopping": {"beam": 3, "n_best": 2, "early_stopping": False},
    "no output": {"beam": 3, "max_len": 0},
    "more beams than tokens": {"beam": 30, "n_best": 5, "max_len": 4},
}


def search(module, model, source, config, **options):
    return getattr(module, config.method)(model, source, config, **options)


@pytest.mark.parametrize("option", OPTIONS)
def test_search_equals_the_reference(option):
    config = DecodeConfig(**({"max_len": 12} | OPTIONS[option]))
    sources = [[5, 1, 1, 1], [9, 1], [4, 1, 1], [7], [6, 1, 1, 1, 1, 1]]
    for seed in range(4):
        model = HistoryModel(14, seed)
        expected = [search(reference, model, source, config) for source in sources]
        assert_equal_search(beam(model, sources, config), expected)
        if option in ("greedy", "beam of one"):
            each_best = [reference.greedy(model, source, DecodeConfig("greedy", max_len=12)) for source in sources]
            assert [[h.ids for h in result] for result in expected] == [[h.ids for h in best] for best in each_best]


@pytest.mark.parametrize("option", ["greedy", "limits", "length penalty"])
@pytest.mark.parametrize("make", [transformer, gpt, seq2seq])
def test_models_equal_the_reference(make, option):
    model, sources = make(), make_sources(4)
    special = special_options(model)["special"]
    config = DecodeConfig(**({"max_len": 8} | OPTIONS[option]))
    expected = [search(reference, model, source, config, special=special) for source in sources]
    assert_equal_search(beam(model, sources, config, special=special), expected)


def test_wide_reference_finds_the_best_outputs():
    config = DecodeConfig(max_len=3, beam=85, n_best=6, patience=math.inf)
    model = HistoryModel(7, seed=2)
    expected = exhaustive_search(model, [5], 7, config, SPECIAL)[:6]
    result = reference.beam(model, [5], config)
    assert [h.ids for h in result] == [ids for _, ids in expected]
    assert [h.score for h in result] == pytest.approx([score for score, _ in expected], abs=1e-5)


def test_rules_exclude_tokens():
    def no_repetition(ids, log_p):
        return log_p.index_fill(0, torch.tensor(ids, dtype=torch.long), -math.inf)

    for method in ("greedy", "beam"):
        config = DecodeConfig(method, max_len=20)
        (best,) = search(reference, HistoryModel(12), [5], config, rule=no_repetition)
        assert len(best.ids) == len(set(best.ids)) > 1

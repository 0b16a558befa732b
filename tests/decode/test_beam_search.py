"""Beam search, compared with exhaustive search, greedy search and a plain reference implementation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.decode import SPECIAL, DecodeConfig
from regard.errors import RegardError
from tests.decode.helpers import HistoryModel, TableModel, beam, exhaustive_search, log_prob

SENTENCES = [[5, 1, 1, 1], [9, 1], [4, 1, 1], [7], [6, 1, 1, 1, 1, 1]]


def limited(length: int, **options) -> DecodeConfig:
    return DecodeConfig(max_len=length, **options)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("min_len", [0, 2])
def test_wide_beam_finds_the_best_outputs(length_penalty: float, min_len: int) -> None:
    V, n_best = 7, 6
    # 4 words at 3 positions: at most 64 outputs, so nothing is pruned, and only the score bound stops the search.
    config = limited(3, beam=85, n_best=n_best, length_penalty=length_penalty, min_len=min_len, patience=math.inf)
    for seed in range(4):
        model = HistoryModel(V, seed)
        for source, result in zip(SENTENCES, beam(model, SENTENCES, config)):
            expected = exhaustive_search(model, source, V, config, SPECIAL)[:n_best]
            assert [h.ids for h in result] == [ids for _, ids in expected]
            assert [h.score for h in result] == pytest.approx([score for score, _ in expected], abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 4),
    n_best=st.integers(1, 4),
    length_penalty=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    sharpness=st.sampled_from([0.3, 1.0, 3.0]),
)
def test_early_stopping_does_not_change_the_result(
    seed: int, width: int, n_best: int, length_penalty: float, sharpness: float
) -> None:
    """Compared with the same search without early stopping."""
    n_best = min(n_best, width)
    model = HistoryModel(9, seed, sharpness)
    config = limited(8, beam=width, n_best=n_best, length_penalty=length_penalty, patience=math.inf)
    source = [[5], [6]]
    result = beam(model, source, config)
    for sentence, n_best_list in zip((5, 6), result):
        expected = search_without_early_stopping(model, sentence, width, limit=8, length_penalty=length_penalty)
        assert [h.ids for h in n_best_list] == [ids for _, ids in expected[:n_best]]
        assert [h.score for h in n_best_list] == pytest.approx([s for s, _ in expected[:n_best]], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"patience": 1.0}, 2),  # "" and "4" have finished
        ({"patience": 2.0}, 4),
        ({"patience": math.inf, "length_penalty": 0.0}, 1),  # nothing beats "", which has probability 0.6
        ({"patience": math.inf, "length_penalty": 0.0, "n_best": 2}, 2),
        # Normalized by length, a long one could: the bound for n fours, log(0.4) * n / 21, is below log(0.6) at n = 12.
        ({"patience": math.inf, "length_penalty": 1.0}, 12),
    ],
)
def test_search_stops_after_the_expected_number_of_steps(options: dict, expected: int) -> None:
    """Each token is followed by <eos> with probability 0.6, else by a 4: an output of n tokens has 0.6 * 0.4 ** n."""
    p = torch.zeros((5, 5))
    p[:, SPECIAL.eos], p[:, 4] = 0.6, 0.4
    model = TableModel(p.log())
    result = beam(model, [[4]], limited(20, beam=2, **options))[0]
    assert len(model.step_shapes) == expected
    assert [h.ids for h in result] == [[], [4]][: len(result)]


def search_without_early_stopping(
    model: HistoryModel, sentence: int, width: int, limit: int, length_penalty: float
) -> list[tuple[float, list[int]]]:
    """Beam search with plain lists and without early stopping."""
    live, finished = [(0.0, [])], []
    for t in range(limit + 1):
        candidates = []
        for total, ids in live:
            past = torch.tensor([SPECIAL.sos, *ids])
            log_p = model.scores(torch.tensor(sentence), past).log_softmax(-1).tolist()
            allowed = [SPECIAL.eos] if t == limit else [v for v in range(len(log_p)) if v not in (0, 2)]
            candidates += [(total + log_p[v], [*ids, v]) for v in allowed]
        candidates.sort(key=lambda pair: -pair[0])
        for total, ids in candidates[:width]:
            if ids[-1] == SPECIAL.eos:
                finished.append((total / len(ids) ** length_penalty, ids[:-1]))
        live = [pair for pair in candidates if pair[1][-1] != SPECIAL.eos][:width]
    return sorted(finished, key=lambda pair: -pair[0])


@pytest.mark.parametrize("patience", [1.0, math.inf])
def test_results_do_not_depend_on_other_sentences_in_the_batch(patience: float) -> None:
    config = DecodeConfig(beam=4, n_best=3, patience=patience, max_ratio=2.0, max_extra=4)
    model = HistoryModel(20, seed=3)
    sentences = [[first, *[1] * (first % 5)] for first in range(4, 24)]
    together = beam(model, sentences, config)
    sizes = [rows for rows, _ in model.step_shapes]
    assert sizes[0] == 20
    assert len(set(sizes)) > 3, "finished sentences leave the batch"
    for sentence, result in zip(sentences, together):
        alone = beam(model, [sentence], config)[0]
        assert [h.ids for h in alone] == [h.ids for h in result]


def test_scores_match_the_model() -> None:
    model = HistoryModel(12, seed=5)
    for source, result in zip(SENTENCES, beam(model, SENTENCES, limited(10, beam=5, n_best=5))):
        assert len({tuple(h.ids) for h in result}) == len(result) == 5
        assert [h.score for h in result] == sorted((h.score for h in result), reverse=True)
        for h in result:
            assert h.logprob == pytest.approx(log_prob(model, source[0], h.ids, SPECIAL), abs=1e-4)
            assert sum(h.token_logprobs) == pytest.approx(h.logprob, abs=1e-4)
            assert len(h.token_logprobs) == len(h.ids) + 1
            assert h.score == pytest.approx(h.logprob / (len(h.ids) + 1), abs=1e-5)
            assert not {SPECIAL.pad, SPECIAL.sos, SPECIAL.eos} & set(h.ids)


def test_output_ends_when_no_token_is_possible() -> None:
    logits = torch.full((6, 6), -torch.inf)
    logits[SPECIAL.sos, 4] = logits[SPECIAL.sos, 5] = 0.0  # then no token is possible
    result = beam(TableModel(logits), [[4], [5]], limited(9, beam=3, n_best=3))
    for hypotheses in result:
        assert sorted(h.ids for h in hypotheses) == [[4], [5]]
        assert all(h.token_logprobs == pytest.approx([math.log(0.5)]) for h in hypotheses)
    nothing = beam(TableModel(torch.full((6, 6), -torch.inf)), [[4]], limited(9, beam=3))
    assert [h.ids for h in nothing[0]] == [[]]


def test_outputs_end_with_eos_at_the_limit() -> None:
    logits = torch.zeros((6, 6))
    logits[:, SPECIAL.eos] = -9.0
    result = beam(TableModel(logits), [[4]], limited(4, beam=2, n_best=2))[0]
    assert [len(h.ids) for h in result] == [4, 4]
    assert [len(h.token_logprobs) for h in result] == [5, 5]
    by_ratio = DecodeConfig(beam=2, max_ratio=1.5, max_extra=1)
    lengths = [len(r[0].ids) for r in beam(TableModel(logits), [[4], [4, 4], [4] * 4], by_ratio)]
    assert lengths == [2, 4, 7]


def test_prefix_is_kept_and_scored() -> None:
    model = HistoryModel(12, seed=2)
    prefixes = [[7, 8, 9], [], [11], [5, 5, 5, 5, 5, 5], [4]]
    config = limited(6, beam=3, n_best=3)
    result = beam(model, SENTENCES, config, prefixes=prefixes)
    free = beam(model, SENTENCES, config)
    for source, prefix, hypotheses, unforced in zip(SENTENCES, prefixes, result, free):
        for h in hypotheses:
            assert h.ids[: len(prefix)] == prefix
            assert h.logprob == pytest.approx(log_prob(model, source[0], h.ids, SPECIAL), abs=1e-4)
        if not prefix:
            assert [h.ids for h in hypotheses] == [h.ids for h in unforced]
        assert len({tuple(h.ids) for h in hypotheses}) == len(hypotheses)
    assert [h.ids for h in result[3]] == [[5] * 6]


@pytest.mark.parametrize("seed", range(3))
def test_history_contains_the_path_of_every_hypothesis(seed: int) -> None:
    model = HistoryModel(9, seed)
    result = beam(model, SENTENCES, limited(8, beam=4, n_best=4), history=True)
    for hypotheses in result:
        history = hypotheses.history
        assert history is not None
        for step, nxt in zip(history.steps, history.steps[1:]):
            assert step.logprobs == sorted(step.logprobs, reverse=True)
            assert step.statuses.count("live") <= 4
            assert max(nxt.parents) < step.statuses.count("live")
        for h in hypotheses:
            path = history.path(h)
            chosen = [(step.tokens[i], step.statuses[i]) for step, i in zip(history.steps, path)]
            assert chosen == [*((token, "live") for token in h.ids), (SPECIAL.eos, "finished")]
            totals = [step.logprobs[i] for step, i in zip(history.steps, path)]
            sums = torch.tensor(h.token_logprobs).cumsum(0).tolist()
            assert totals == pytest.approx(sums, abs=1e-4)
            # A parent is an index among the live candidates of the previous step.
            for t in range(1, len(path)):
                live = [i for i, status in enumerate(history.steps[t - 1].statuses) if status == "live"]
                assert live[history.steps[t].parents[path[t]]] == path[t - 1]
    finished = sum(step.statuses.count("finished") for step in result[0].history.steps)
    assert finished >= 4


def test_history_is_not_recorded_by_default() -> None:
    assert beam(HistoryModel(9), [[4]])[0].history is None


@pytest.mark.parametrize("history", [False, True])
def test_beam_larger_than_the_vocabulary_finds_every_output_once(history) -> None:
    """Three words and at most two tokens: 1 + 3 + 9 outputs, fewer than n_best."""
    model = HistoryModel(6, seed=3)
    sources = [[4], [5, 1], [7, 1, 1]]
    config = DecodeConfig("beam", beam=50, n_best=50, max_len=2, patience=math.inf)
    for source, result in zip(sources, beam(model, sources, config, history=history)):
        assert [one.ids for one in result] == [ids for _, ids in exhaustive_search(model, source, 6, config, SPECIAL)]
        assert len(result) == 13


def test_min_len_above_max_len_raises() -> None:
    with pytest.raises(RegardError, match=r"min_len must be at most max_len, 2 \(got 9\)"):
        DecodeConfig(min_len=9, max_len=2)

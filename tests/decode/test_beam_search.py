"""Beam search against the search that tries everything, and against itself under other circumstances."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.decode import SPECIAL, DecodeConfig, beam, greedy
from regard.errors import RegardError
from tests.decode.helpers import HistoryModel, TableModel, log_prob, pack, try_everything

SENTENCES = [[5, 1, 1, 1], [9, 1], [4, 1, 1], [7], [6, 1, 1, 1, 1, 1]]


def limited(length: int, **options) -> DecodeConfig:
    return DecodeConfig(max_len=length, **options)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("min_len", [0, 2])
def test_a_wide_beam_finds_the_best_of_all(length_penalty: float, min_len: int) -> None:
    V, n_best = 7, 6
    # 4 words at 3 places: 64 outputs at the widest, and nothing is pruned; only the proof ends the search.
    config = limited(3, beam=85, n_best=n_best, length_penalty=length_penalty, min_len=min_len, patience=math.inf)
    for seed in range(4):
        model = HistoryModel(V, seed)
        for source, found in zip(SENTENCES, beam(model, pack(SENTENCES), config)):
            truth = try_everything(model, source, V, config, SPECIAL)[:n_best]
            assert [h.ids for h in found] == [ids for _, ids in truth]
            assert [h.score for h in found] == pytest.approx([score for score, _ in truth], abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 4),
    n_best=st.integers(1, 4),
    length_penalty=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    sharpness=st.sampled_from([0.3, 1.0, 3.0]),
)
def test_stopping_early_loses_nothing(
    seed: int, width: int, n_best: int, length_penalty: float, sharpness: float
) -> None:
    """Against a search that goes on to the limit, made of the same steps, whose history lists all that finished."""
    n_best = min(n_best, width)
    model = HistoryModel(9, seed, sharpness)
    config = limited(8, beam=width, n_best=n_best, length_penalty=length_penalty, patience=math.inf)
    source = pack([[5], [6]])
    found = beam(model, source, config)
    for sentence, n_best_list in zip((5, 6), found):
        everything = search_to_the_limit(model, sentence, width, limit=8, length_penalty=length_penalty)
        assert [h.ids for h in n_best_list] == [ids for _, ids in everything[:n_best]]
        assert [h.score for h in n_best_list] == pytest.approx([s for s, _ in everything[:n_best]], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"patience": 1.0}, 2),  # "" and "4" have finished
        ({"patience": 2.0}, 4),
        ({"patience": math.inf, "length_penalty": 0.0}, 1),  # nothing beats "", of probability 0.6
        ({"patience": math.inf, "length_penalty": 0.0, "n_best": 2}, 2),
        # By average a long one could: n fours may end at log(0.4) * n / 21, below log(0.6) for n = 12.
        ({"patience": math.inf, "length_penalty": 1.0}, 12),
    ],
)
def test_when_the_search_stops(options: dict, expected: int) -> None:
    """Each token is followed by <eos> with probability 0.6, else by a 4: an output of n tokens has 0.6 * 0.4 ** n."""
    p = torch.zeros((5, 5))
    p[:, SPECIAL.eos], p[:, 4] = 0.6, 0.4
    model = TableModel(p.log())
    result = beam(model, pack([[4]]), limited(20, beam=2, **options))[0]
    assert len(model.rows_seen) == expected
    assert [h.ids for h in result] == [[], [4]][: len(result)]


def search_to_the_limit(
    model: HistoryModel, sentence: int, width: int, limit: int, length_penalty: float
) -> list[tuple[float, list[int]]]:
    """Beam search in plain lists, which never stops early."""
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


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_one_is_greedy(seed: int) -> None:
    model, source = HistoryModel(12, seed), pack(SENTENCES)
    by_beam = beam(model, source, limited(15, beam=1))
    one_by_one = greedy(model, source, limited(15, method="greedy"))
    assert [r[0].ids for r in by_beam] == [r[0].ids for r in one_by_one]
    for ours, theirs in zip(by_beam, one_by_one):
        assert ours[0].token_logprobs == pytest.approx(theirs[0].token_logprobs, abs=1e-6)
        assert ours[0].score == pytest.approx(theirs[0].score, abs=1e-6)


@pytest.mark.parametrize("patience", [1.0, math.inf])
def test_neighbours_in_the_batch_change_nothing(patience: float) -> None:
    config = DecodeConfig(beam=4, n_best=3, patience=patience, max_ratio=2.0, max_extra=4)
    model = HistoryModel(20, seed=3)
    sentences = [[first, *[1] * (first % 5)] for first in range(4, 24)]
    together = beam(model, pack(sentences), config)
    sizes = [rows for rows, _ in model.rows_seen]
    assert sizes[0] == 20
    assert len(set(sizes)) > 3, "finished sentences leave the batch"
    for sentence, result in zip(sentences, together):
        alone = beam(model, pack([sentence]), config)[0]
        assert [h.ids for h in alone] == [h.ids for h in result]


def test_scores_are_those_of_the_model() -> None:
    model = HistoryModel(12, seed=5)
    for source, result in zip(SENTENCES, beam(model, pack(SENTENCES), limited(10, beam=5, n_best=5))):
        assert len({tuple(h.ids) for h in result}) == len(result) == 5
        assert [h.score for h in result] == sorted((h.score for h in result), reverse=True)
        for h in result:
            assert h.logprob == pytest.approx(log_prob(model, source[0], h.ids, SPECIAL), abs=1e-4)
            assert sum(h.token_logprobs) == pytest.approx(h.logprob, abs=1e-4)
            assert len(h.token_logprobs) == len(h.ids) + 1
            assert h.score == pytest.approx(h.logprob / (len(h.ids) + 1), abs=1e-5)
            assert not {SPECIAL.pad, SPECIAL.sos, SPECIAL.eos} & set(h.ids)


def test_a_vocabulary_smaller_than_the_beam() -> None:
    V = 5  # two words
    model = HistoryModel(V, seed=1)
    config = limited(2, beam=10, n_best=10)
    truth = try_everything(model, [8], V, config, SPECIAL)
    found = beam(model, pack([[8]]), config)[0]
    assert len(truth) == 7  # "", a, b, aa, ab, ba, bb
    assert [h.ids for h in found] == [ids for _, ids in truth]


def test_no_sentences() -> None:
    assert beam(HistoryModel(6), pack([])) == []


def test_a_model_that_allows_nothing_ends_its_outputs() -> None:
    logits = torch.full((6, 6), -torch.inf)
    logits[SPECIAL.sos, 4] = logits[SPECIAL.sos, 5] = 0.0  # then nothing
    result = beam(TableModel(logits), pack([[4], [5]]), limited(9, beam=3, n_best=3))
    for hypotheses in result:
        assert sorted(h.ids for h in hypotheses) == [[4], [5]]
        assert all(h.token_logprobs == pytest.approx([math.log(0.5)]) for h in hypotheses)
    nothing = beam(TableModel(torch.full((6, 6), -torch.inf)), pack([[4]]), limited(9, beam=3))
    assert [h.ids for h in nothing[0]] == [[]]


def test_the_limit_closes_outputs_with_eos() -> None:
    logits = torch.zeros((6, 6))
    logits[:, SPECIAL.eos] = -9.0
    result = beam(TableModel(logits), pack([[4]]), limited(4, beam=2, n_best=2))[0]
    assert [len(h.ids) for h in result] == [4, 4]
    assert [len(h.token_logprobs) for h in result] == [5, 5]
    by_ratio = DecodeConfig(beam=2, max_ratio=1.5, max_extra=1)
    lengths = [len(r[0].ids) for r in beam(TableModel(logits), pack([[4], [4, 4], [4] * 4]), by_ratio)]
    assert lengths == [2, 4, 7]


def test_a_prefix_is_kept_and_priced() -> None:
    model = HistoryModel(12, seed=2)
    prefixes = [[7, 8, 9], [], [11], [5, 5, 5, 5, 5, 5], [4]]
    config = limited(6, beam=3, n_best=3)
    result = beam(model, pack(SENTENCES), config, prefixes=prefixes)
    free = beam(model, pack(SENTENCES), config)
    for source, prefix, hypotheses, unforced in zip(SENTENCES, prefixes, result, free):
        for h in hypotheses:
            assert h.ids[: len(prefix)] == prefix
            assert h.logprob == pytest.approx(log_prob(model, source[0], h.ids, SPECIAL), abs=1e-4)
        if not prefix:
            assert [h.ids for h in hypotheses] == [h.ids for h in unforced]
        assert len({tuple(h.ids) for h in hypotheses}) == len(hypotheses)
    assert [h.ids for h in result[3]] == [[5] * 6]


@pytest.mark.parametrize("seed", range(3))
def test_history_leads_to_every_hypothesis(seed: int) -> None:
    model = HistoryModel(9, seed)
    result = beam(model, pack(SENTENCES), limited(8, beam=4, n_best=4), history=True)
    for hypotheses in result:
        history = hypotheses.history
        assert history is not None
        for step, nxt in zip(history.steps, history.steps[1:]):
            assert step.logprobs == sorted(step.logprobs, reverse=True)
            assert step.fates.count("live") <= 4
            assert max(nxt.parents) < step.fates.count("live")
        for h in hypotheses:
            path = history.path(h)
            taken = [(step.tokens[i], step.fates[i]) for step, i in zip(history.steps, path)]
            assert taken == [*((token, "live") for token in h.ids), (SPECIAL.eos, "finished")]
            totals = [step.logprobs[i] for step, i in zip(history.steps, path)]
            sums = torch.tensor(h.token_logprobs).cumsum(0).tolist()
            assert totals == pytest.approx(sums, abs=1e-4)
            # A parent is named by its place among the live ones of the step before.
            for t in range(1, len(path)):
                live = [i for i, fate in enumerate(history.steps[t - 1].fates) if fate == "live"]
                assert live[history.steps[t].parents[path[t]]] == path[t - 1]
    finished = sum(step.fates.count("finished") for step in result[0].history.steps)
    assert finished >= 4


def test_history_is_kept_only_when_asked_for() -> None:
    assert beam(HistoryModel(9), pack([[4]]))[0].history is None


@pytest.mark.parametrize("history", [False, True])
def test_a_beam_larger_than_the_vocabulary_finds_every_output_once(history) -> None:
    """Three words and at most two tokens: 1 + 3 + 9 outputs, fewer than asked for."""
    model = HistoryModel(6, seed=3)
    sources = [[4], [5, 1], [7, 1, 1]]
    config = DecodeConfig("beam", beam=50, n_best=50, max_len=2, patience=math.inf)
    for source, found in zip(sources, beam(model, pack(sources), config, history=history)):
        assert [one.ids for one in found] == [ids for _, ids in try_everything(model, source, 6, config, SPECIAL)]
        assert len(found) == 13


def test_a_least_length_above_the_largest_is_refused() -> None:
    with pytest.raises(RegardError, match=r"min_len is 9, more than max_len \(2\)"):
        DecodeConfig(min_len=9, max_len=2)

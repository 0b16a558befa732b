"""Search history: candidates, pruning and refusal reasons; recording does not change the outputs."""

import math

import pytest
import torch

from regard.decode import SPECIAL, DecodeConfig, NBest, Request, SearchHistory, decode_all
from tests.decode.helpers import HistoryModel, TableModel

SENTENCES = [[5, 1, 1, 1], [9, 1], [4, 1, 1], [7], [6, 1, 1, 1, 1, 1]]
CONFIGS = [
    DecodeConfig("greedy", max_len=9),
    DecodeConfig("beam", beam=4, n_best=3, max_len=9, min_len=2),
    DecodeConfig("sample", n_best=5, max_len=9, top_k=6),
    DecodeConfig("sample", n_best=3, max_len=9, top_p=0.7, temperature=1.3),
]
NAMES = [f"{one.method}{i}" for i, one in enumerate(CONFIGS)]
PREFIXES = [[7, 8], [], [4], [], [9, 9, 9]]


def decode_with_history(config: DecodeConfig, seed: int = 1, sharpness: float = 2.0, **other) -> list[NBest]:
    return decode_all(HistoryModel(12, seed, sharpness), Request(SENTENCES, config, history=True, **other))


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("prefixes", [None, PREFIXES])
def test_recording_the_history_does_not_change_outputs(config, prefixes):
    model = HistoryModel(12, seed=1)
    without_history = decode_all(model, Request(SENTENCES, config, prefixes=prefixes))
    with_history = decode_all(model, Request(SENTENCES, config, prefixes=prefixes, history=True))
    assert with_history == without_history  # ids, scores and log-probabilities, bit for bit
    assert all(one.history is None for one in without_history)
    assert all(one.history is not None for one in with_history)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_history_contains_the_path_of_every_output(config, seed):
    for n_best in decode_with_history(config, seed):
        history = n_best.history
        assert [sorted(step.logprobs, reverse=True) for step in history.steps] == [s.logprobs for s in history.steps]
        for h in n_best:
            path = history.path(h)
            steps = list(zip(history.steps, path))
            assert [step.tokens[i] for step, i in steps] == [*h.ids, SPECIAL.eos]
            assert [step.statuses[i] for step, i in steps] == ["live"] * len(h.ids) + ["finished"]
            assert [step.logprobs[i] for step, i in steps] == pytest.approx(
                torch.tensor(h.token_logprobs).cumsum(0).tolist(), abs=1e-4
            )
            assert steps[-1][0].scores[path[-1]] == pytest.approx(h.score, abs=1e-5)
            assert {step.reasons[i] for step, i in steps} == {""}


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_every_pruned_candidate_has_a_reason(config):
    for n_best in decode_with_history(config):
        for step in n_best.history.steps:
            assert len(step.statuses) == len(step.reasons) == len(step.scores) == len(step.tokens)
            assert [status == "pruned" for status in step.statuses] == [reason != "" for reason in step.reasons]


def markov_chain(rows: dict[int, dict[int, float]], V: int = 7) -> TableModel:
    """A Markov chain with these transition probabilities; by default <eos> follows."""
    p = torch.zeros((V, V))
    p[:, SPECIAL.eos] = 1.0
    for last, transitions in rows.items():
        p[last] = 0.0
        for token, probability in transitions.items():
            p[last, token] = probability
    return TableModel(p.log())


A, B, C = 4, 5, 6
TRANSITIONS = {SPECIAL.sos: {A: 0.5, B: 0.3, C: 0.2}, A: {A: 0.45, SPECIAL.eos: 0.55}, B: {C: 0.9, SPECIAL.eos: 0.1}}


def search_history(config: DecodeConfig, **other) -> SearchHistory:
    return decode_all(markov_chain(TRANSITIONS), Request([[1]], config, history=True, **other))[0].history


def test_beam_history_with_known_probabilities():
    history = search_history(DecodeConfig(beam=2, max_len=3, length_penalty=0.5))
    first, second = history.steps[:2]
    assert (first.parents, first.tokens, first.statuses) == ([0, 0, 0], [A, B, C], ["live", "live", "pruned"])
    assert first.reasons == ["", "", "beam"]
    assert [math.exp(x) for x in first.logprobs] == pytest.approx([0.5, 0.3, 0.2])
    # 0.3 · 0.9 = 0.27 and 0.5 · 0.55 = 0.275 rank first, then 0.5 · 0.45 = 0.225 and 0.3 · 0.1.
    assert list(zip(second.parents, second.tokens)) == [(0, SPECIAL.eos), (1, C), (0, A), (1, SPECIAL.eos)]
    assert second.statuses == ["finished", "live", "live", "pruned"]
    assert second.reasons == ["", "", "", "end"]
    assert [math.exp(x) for x in second.logprobs] == pytest.approx([0.275, 0.27, 0.225, 0.03])
    assert second.scores == pytest.approx([math.log(p) / 2**0.5 for p in (0.275, 0.27, 0.225, 0.03)])
    assert not first.refused


def test_refused_tokens_have_the_reason_of_their_constraint():
    forced = search_history(DecodeConfig(beam=2, max_len=3), prefixes=[[B]])
    (first, *_) = forced.steps
    assert (first.tokens, first.statuses) == ([B], ["live"])
    assert [(one.token, one.reason) for one in first.refused] == [(A, "prefix"), (C, "prefix")]
    assert [math.exp(one.logprob) for one in first.refused] == pytest.approx([0.5, 0.2])

    short = search_history(DecodeConfig(beam=2, max_len=1))
    assert {(one.token, one.reason) for one in short.steps[1].refused} == {(A, "limit"), (C, "limit")}
    long = search_history(DecodeConfig("greedy", min_len=2, max_len=2))
    assert [(one.token, one.reason) for one in long.steps[1].refused] == [(SPECIAL.eos, "min_len")]
    assert [math.exp(one.logprob) for one in long.steps[1].refused] == pytest.approx([0.275])
    pads = decode_all(
        markov_chain({SPECIAL.sos: {SPECIAL.pad: 0.6, A: 0.4}}), Request([[1]], DecodeConfig(beam=2), history=True)
    )
    assert [(one.token, one.reason) for one in pads[0].history.steps[0].refused] == [(SPECIAL.pad, "special")]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"patience": 1.0}, "enough"),
        ({"patience": math.inf, "length_penalty": 0.0}, "bound"),
        ({"patience": math.inf, "max_len": 1}, "ended"),
    ],
)
def test_history_states_why_the_search_stopped(options, reason):
    assert search_history(DecodeConfig(beam=2, **options)).stopped == reason


def test_greedy_prunes_less_probable_candidates():
    history = search_history(DecodeConfig("greedy", max_len=3))
    assert [step.tokens for step in history.steps] == [[A, B, C], [SPECIAL.eos, A]]
    assert [step.reasons for step in history.steps] == [["", "greedy", "greedy"], ["", "greedy"]]
    assert [step.statuses for step in history.steps] == [["live", "pruned", "pruned"], ["finished", "pruned"]]


def test_sampling_history_states_why_tokens_were_not_drawn():
    flat = markov_chain({SPECIAL.sos: {SPECIAL.eos: 0.4, A: 0.3, B: 0.2, C: 0.1}})
    for options, reasons in [
        ({"top_k": 2}, {"top_k"}),
        ({"top_p": 0.6}, {"top_p"}),
        ({}, {"not drawn"}),
    ]:
        config = DecodeConfig("sample", seed=3, **options)
        step = decode_all(flat, Request([[1]], config, history=True))[0].history.steps[0]
        by_token = dict(zip(step.tokens, step.reasons))
        assert {by_token[B], by_token[C]} - {""} == reasons
        if options:
            assert {by_token[SPECIAL.eos], by_token[A]} == {"", "not drawn"}


def test_equal_samples_share_a_branch():
    history = search_history(DecodeConfig("sample", n_best=20, max_len=3))
    first, second = history.steps[:2]
    assert len(first.tokens) == len(set(first.tokens)) == 3
    assert len(set(zip(second.parents, second.tokens))) == len(second.tokens)
    assert max(second.parents) < first.statuses.count("live")

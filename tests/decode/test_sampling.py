"""Greedy decoding and sampling."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.decode import SPECIAL, DecodeConfig
from regard.decode.search import draw
from regard.errors import RegardError
from tests.decode.helpers import HistoryModel, TableModel, greedy, log_prob, sample

SENTENCES = [[first, *[1] * (first % 5)] for first in range(4, 24)]


def test_removing_finished_sentences_does_not_change_results() -> None:
    model = HistoryModel(12, seed=1)
    together = greedy(model, SENTENCES)
    sizes = [rows for rows, _ in model.step_shapes]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 2
    assert together == [greedy(model, [sentence])[0] for sentence in SENTENCES]


@pytest.mark.parametrize("decode", [greedy, sample])
def test_prefix_is_kept_and_scored(decode) -> None:
    model = HistoryModel(12, seed=2)
    prefixes = [[4 + i % 3] * (i % 4) for i in range(len(SENTENCES))]
    for source, prefix, result in zip(SENTENCES, prefixes, decode(model, SENTENCES, prefixes=prefixes)):
        h = result[0]
        assert h.ids[: len(prefix)] == prefix
        assert h.logprob == pytest.approx(log_prob(model, source[0], h.ids, SPECIAL), abs=1e-4)


@pytest.mark.parametrize("decode", [greedy, sample])
def test_outputs_respect_length_limits(decode) -> None:
    model = HistoryModel(6, seed=3)
    free = decode(model, SENTENCES, DecodeConfig(decode.__name__))
    assert min(len(r[0].ids) for r in free) < 4
    assert max(len(r[0].ids) for r in free) > 6
    limited = decode(model, SENTENCES, DecodeConfig(decode.__name__, min_len=4, max_len=6))
    assert {len(r[0].ids) for r in limited} == {4, 5, 6}
    assert all(len(r[0].token_logprobs) == len(r[0].ids) + 1 for r in limited)
    short = decode(model, SENTENCES, DecodeConfig(decode.__name__, max_len=0))
    assert all(r[0].ids == [] and len(r[0].token_logprobs) == 1 for r in short)


@pytest.mark.parametrize("decode", [greedy, sample])
def test_output_ends_when_no_token_is_possible(decode) -> None:
    logits = torch.full((6, 6), -torch.inf)
    logits[SPECIAL.sos, 4] = 0.0
    result = decode(TableModel(logits), [[4], [5]])
    assert [(r[0].ids, r[0].token_logprobs) for r in result] == [([4], [0.0])] * 2
    nothing = decode(TableModel(torch.full((6, 6), -torch.inf)), [[4]])
    assert [(h.ids, h.logprob) for h in nothing[0]] == [([], 0.0)]


@pytest.mark.parametrize("decode", [greedy, sample])
def test_nan_logits_raise(decode) -> None:
    with pytest.raises(RegardError, match="NaN"):
        decode(TableModel(torch.full((6, 6), torch.nan)), [[4]])


def test_invalid_prefixes_raise() -> None:
    with pytest.raises(RegardError, match="2 prefixes for 1 sentences"):
        greedy(HistoryModel(6), [[4]], prefixes=[[4], [5]])
    with pytest.raises(RegardError, match="<eos>"):
        greedy(HistoryModel(6), [[4]], prefixes=[[4, SPECIAL.eos]])


def frequencies(temperature: float, top_k: int, top_p: float, p: torch.Tensor, draws: int = 20000) -> torch.Tensor:
    u = torch.rand((draws, 1), generator=torch.Generator().manual_seed(0))
    tokens = draw(p.log().expand(draws, 1, -1), u, temperature, top_k, top_p)
    return torch.bincount(tokens.flatten(), minlength=len(p)) / draws


P = torch.tensor([0.05, 0.4, 0.0, 0.1, 0.3, 0.15])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((1.0, 0, 1.0), P),
        ((0.5, 0, 1.0), P**2 / (P**2).sum()),
        ((2.0, 0, 1.0), P**0.5 / (P**0.5).sum()),
        ((1.0, 1, 1.0), torch.tensor([0, 1.0, 0, 0, 0, 0])),
        ((1.0, 2, 1.0), torch.tensor([0, 4 / 7, 0, 0, 3 / 7, 0])),
        ((1.0, 99, 1.0), P),
        ((1.0, 0, 1e-9), torch.tensor([0, 1.0, 0, 0, 0, 0])),
        ((1.0, 0, 0.39), torch.tensor([0, 1.0, 0, 0, 0, 0])),
        ((1.0, 0, 0.41), torch.tensor([0, 4 / 7, 0, 0, 3 / 7, 0])),
        ((1.0, 0, 0.84), torch.tensor([0, 8 / 17, 0, 0, 6 / 17, 3 / 17])),
        ((1.0, 3, 0.7), torch.tensor([0, 4 / 7, 0, 0, 3 / 7, 0])),
        ((0.5, 2, 1.0), torch.tensor([0, 16 / 25, 0, 0, 9 / 25, 0])),
    ],
)
def test_draws_follow_the_distribution(options: tuple, expected: torch.Tensor) -> None:
    observed = frequencies(*options, P)
    assert (observed[expected == 0] == 0).all()
    possible = expected > 0
    chi_square = (20000 * (observed - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 20.5  # the 0.999 quantile at 5 degrees of freedom


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), u=st.sampled_from([0.0, 0.5, 1 - 2**-24]), top_p=st.sampled_from([0.3, 1.0]))
def test_impossible_tokens_are_never_drawn(seed: int, u: float, top_p: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_p = torch.randn((1, 1, 50), generator=generator) * 10
    log_p[torch.rand(log_p.shape, generator=generator) < 0.7] = -torch.inf
    log_p[..., seed % 50] = 0.0
    token = draw(log_p, torch.tensor([[u]]), top_p=top_p)
    assert log_p[0, 0, token.item()] > -torch.inf


def test_sampled_outputs_follow_the_distribution_of_the_model() -> None:
    """A chain whose outputs are a geometric number of fours, each followed by another with probability 2/3."""
    logits = torch.full((5, 5), -torch.inf)
    logits[:, 4], logits[:, SPECIAL.eos] = math.log(2 / 3), math.log(1 / 3)
    batches = sample(TableModel(logits), [[4]] * 6, DecodeConfig("sample", n_best=1000, max_len=40))
    samples = [hypothesis for batch in batches for hypothesis in batch]
    lengths = torch.bincount(torch.tensor([len(h.ids) for h in samples]), minlength=8)[:8]
    expected = 6000 * (1 / 3) * (2 / 3) ** torch.arange(8)
    assert ((lengths - expected) ** 2 / expected).sum() < 26.1  # the 0.999 quantile at 8 degrees of freedom
    for h in samples[:50]:
        assert h.logprob == pytest.approx(len(h.ids) * math.log(2 / 3) + math.log(1 / 3), abs=1e-4)


def test_samples_depend_only_on_seed_and_sentence_index() -> None:
    model = HistoryModel(12, seed=4)
    config = DecodeConfig("sample", n_best=3, top_p=0.95, temperature=1.3, seed=11)
    first = sample(model, SENTENCES, config)
    assert first == sample(model, SENTENCES, config)
    assert first != sample(model, SENTENCES, replace(config, seed=12))
    for index, (sentence, result) in enumerate(zip(SENTENCES, first)):
        assert sample(model, [sentence], config, sample_indices=[index])[0] == result
    assert len({tuple(h.ids) for r in first for h in r}) > 20


def test_log_probabilities_are_before_temperature_and_top_k() -> None:
    model = HistoryModel(12, seed=4)
    config = DecodeConfig("sample", n_best=4, top_k=3, temperature=0.7)
    for source, result in zip(SENTENCES, sample(model, SENTENCES, config)):
        assert len(result) == 4
        assert [h.score for h in result] == sorted((h.score for h in result), reverse=True)
        for h in result:
            assert h.logprob == pytest.approx(log_prob(model, source[0], h.ids, SPECIAL), abs=1e-4)


def test_top_k_of_one_equals_greedy() -> None:
    model = HistoryModel(12, seed=6)
    assert sample(model, SENTENCES, DecodeConfig("sample", top_k=1)) == greedy(model, SENTENCES)

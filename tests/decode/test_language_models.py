"""Decoding of language models: total length limit, token callback, special tokens that share an id."""

import math
from dataclasses import replace

import pytest
import torch

from regard.decode import DecodeConfig, Request, SpecialTokens, decode_all
from regard.errors import RegardError
from tests.decode.helpers import HistoryModel, beam, exhaustive_search, greedy, log_prob, sample

SENTENCES = [[first, *[1] * (first % 5)] for first in range(4, 24)]
V = 12
GREEDY, SAMPLE, BEAM = DecodeConfig("greedy"), DecodeConfig("sample", seed=5), DecodeConfig("beam", beam=3, n_best=2)
every_method = pytest.mark.parametrize("config", [GREEDY, SAMPLE, BEAM], ids=lambda config: config.method)


def decode(config: DecodeConfig, on_token=None, budget=8192, **options):
    request = Request(SENTENCES, config, **options)
    return decode_all(HistoryModel(V, seed=1), request, on_token=on_token, budget=budget)


# Limit on the total length


@every_method
def test_source_and_output_stay_within_the_total_length(config) -> None:
    for source, n_best in zip(SENTENCES, decode(config, max_total_len=7)):
        limit = 7 - len(source)
        for one in n_best:
            assert len(one.ids) <= limit
            assert len(one.token_logprobs) == len(one.ids) + 1  # <eos> has a log-probability too
    free = decode(config)
    assert max(len(source) + len(n_best[0].ids) for source, n_best in zip(SENTENCES, free)) > 12


@pytest.mark.parametrize("config", [GREEDY, SAMPLE], ids=lambda config: config.method)
def test_total_length_truncates_outputs(config) -> None:
    for source, [free], [limited] in zip(SENTENCES, decode(config), decode(config, max_total_len=7)):
        assert limited.ids == free.ids[: 7 - len(source)]


@every_method
def test_large_total_length_has_no_effect(config) -> None:
    assert decode(config, max_total_len=1000) == decode(config)


@every_method
def test_total_length_of_the_source_gives_empty_outputs(config) -> None:
    for n_best in decode(config, max_total_len=1):
        assert n_best[0].ids == []
        assert len(n_best[0].token_logprobs) == 1


@every_method
def test_other_limits_apply_too(config) -> None:
    result = decode(replace(config, max_len=3), max_total_len=6)
    for source, n_best in zip(SENTENCES, result):
        assert max(len(one.ids) for one in n_best) <= min(3, 6 - len(source))


@every_method
@pytest.mark.parametrize("prefix", [2, 3, 4, 5])
def test_prefix_beyond_the_total_length_raises(config, prefix) -> None:
    """Sources have 1 to 5 tokens; a prefix that does not fit raises instead of being truncated."""
    prefixes = [[4] * min(prefix, 7 - len(source)) for source in SENTENCES]
    for source, forced, n_best in zip(SENTENCES, prefixes, decode(config, max_total_len=7, prefixes=prefixes)):
        for one in n_best:
            assert one.ids[: len(forced)] == forced
            assert len(source) + len(one.ids) <= 7
            assert len(one.token_logprobs) == len(one.ids) + 1
    longest = max(range(len(SENTENCES)), key=lambda i: len(SENTENCES[i]))
    prefixes[longest] = [4, 4, 4]
    with pytest.raises(
        RegardError, match=f"Prefix {longest + 1} has 3 tokens, more than the 2 that fit after a prompt of 5"
    ):
        greedy(HistoryModel(V, seed=1), SENTENCES, max_total_len=7, prefixes=prefixes)


# Token callback


class TokenLog:
    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def __call__(self, sentence: int, token: int) -> None:
        self.tokens.setdefault(sentence, []).append(token)

    def tokens_of(self, sentence: int) -> list[int]:
        return self.tokens.get(sentence, [])


@pytest.mark.parametrize("config", [GREEDY, SAMPLE], ids=lambda config: config.method)
@pytest.mark.parametrize("budget", [1, 20, 8192])
def test_on_token_receives_every_token(config, budget) -> None:
    """With any batching, and after other sentences have left the batch; <eos> is not reported."""
    log = TokenLog()
    result = decode(config, on_token=log, budget=budget)
    assert [log.tokens_of(index) for index in range(len(SENTENCES))] == [n_best[0].ids for n_best in result]
    assert result == decode(config)


def test_on_token_reports_the_first_of_several_samples() -> None:
    log = TokenLog()
    config = replace(SAMPLE, n_best=3)
    result = decode(config, on_token=log)
    for index, n_best in enumerate(result):
        assert log.tokens_of(index) in [one.ids for one in n_best]
    # Results are sorted by score, so the first result is not always the first sample.
    assert any(log.tokens_of(index) != n_best[0].ids for index, n_best in enumerate(result))


def test_on_token_is_called_step_by_step() -> None:
    """Called for all sentences of a step before the next step."""
    sentences: list[int] = []
    greedy(HistoryModel(V, seed=1), SENTENCES, on_token=lambda sentence, token: sentences.append(sentence))
    first = next(i for i, sentence in enumerate(sentences) if sentence in sentences[:i])  # the first second token
    assert len(set(sentences[:first])) == first > 5


def test_on_token_is_not_called_for_outputs_without_tokens() -> None:
    class NoTokens(HistoryModel):
        def scores(self, sentence, past):
            return torch.full((*sentence.shape, V), -torch.inf)

    log = TokenLog()
    assert greedy(NoTokens(V), [[4], [5]], on_token=log)[0][0].ids == []
    assert log.tokens == {}


def test_on_token_is_not_called_in_beam_search() -> None:
    log = TokenLog()
    decode(BEAM, on_token=log)
    assert log.tokens == {}


# Special tokens that share an id

SHARED_IDS = pytest.mark.parametrize(
    "special",
    [
        SpecialTokens(sos=3, eos=3),
        SpecialTokens(pad=3, eos=3),
        SpecialTokens(pad=5, sos=5, eos=5),
        SpecialTokens(pad=0, sos=0, eos=3),
    ],
    ids=["sos is eos", "pad is eos", "all are one", "sos is pad"],
)


@SHARED_IDS
def test_greedy_ends_at_the_most_probable_eos(special) -> None:
    model = HistoryModel(V, seed=1)
    ended = 0
    for source, [result] in zip(SENTENCES, greedy(model, SENTENCES, special=special)):
        past, limit = [special.sos], DecodeConfig().limit(len(source))
        while len(past) <= limit:
            scores = model.scores(torch.tensor(source[0]), torch.tensor(past)).clone()
            scores[[token for token in (special.pad, special.sos) if token != special.eos]] = -torch.inf
            if int(scores.argmax()) == special.eos:
                ended += 1
                break
            past.append(int(scores.argmax()))
        assert result.ids == past[1:]
        assert result.logprob == pytest.approx(log_prob(model, source[0], past[1:], special), abs=1e-4)
        assert len(result.token_logprobs) == len(result.ids) + 1
    assert ended > 10


@SHARED_IDS
def test_samples_end_and_contain_no_special_id(special) -> None:
    model = HistoryModel(V, seed=2)
    config = DecodeConfig("sample", n_best=20, max_len=8)
    for source, n_best in zip(SENTENCES, sample(model, SENTENCES, config, special=special)):
        assert len({len(one.ids) for one in n_best}) > 2
        for one in n_best:
            assert not {special.pad, special.sos, special.eos} & set(one.ids)
            assert one.logprob == pytest.approx(log_prob(model, source[0], one.ids, special), abs=1e-4)


@SHARED_IDS
def test_wide_beam_finds_the_best_outputs(special) -> None:
    model = HistoryModel(6, seed=3)
    # At most 5 words at 3 positions: nothing is pruned, and only the score bound stops the search.
    config = DecodeConfig("beam", beam=160, n_best=5, max_len=3, patience=math.inf)
    for source, result in zip(SENTENCES[:6], beam(model, SENTENCES[:6], config, special=special)):
        expected = exhaustive_search(model, source, 6, config, special)
        assert [one.ids for one in result] == [ids for _, ids in expected[:5]]
        assert [one.score for one in result] == pytest.approx([score for score, _ in expected[:5]], abs=1e-4)


@SHARED_IDS
@pytest.mark.parametrize("method", ["greedy", "sample", "beam"])
def test_outputs_have_the_minimum_length(special, method) -> None:
    config = DecodeConfig(method, min_len=4, max_len=6)
    result = decode(config, special=special)
    lengths = {len(n_best[0].ids) for n_best in result}
    assert lengths <= {4, 5, 6}
    assert len(lengths) > 1


def test_prefix_with_eos_raises() -> None:
    with pytest.raises(RegardError, match="A forced prefix contains"):
        decode(GREEDY, special=SpecialTokens(sos=5, eos=5), prefixes=[[5]] * len(SENTENCES))
    free = decode(GREEDY, special=SpecialTokens(sos=5, eos=5), prefixes=[[3]] * len(SENTENCES))  # an ordinary id here
    assert all(n_best[0].ids[0] == 3 for n_best in free)

"""What language models ask of decoding: room for source and output together, tokens as they come, ids that coincide."""

import math
from dataclasses import replace

import pytest
import torch

from regard.decode import DecodeConfig, Special, beam, decode_all, greedy, sample
from regard.errors import RegardError
from tests.decode.helpers import HistoryModel, log_prob, pack, try_everything

SENTENCES = [[first, *[1] * (first % 5)] for first in range(4, 24)]
V = 12
GREEDY, SAMPLE, BEAM = DecodeConfig("greedy"), DecodeConfig("sample", seed=5), DecodeConfig("beam", beam=3, n_best=2)
every_method = pytest.mark.parametrize("config", [GREEDY, SAMPLE, BEAM], ids=lambda config: config.method)


def decode(config: DecodeConfig, **options):
    return decode_all(HistoryModel(V, seed=1), SENTENCES, pack, config, **options)


# Room


@every_method
def test_source_and_output_share_the_room(config) -> None:
    for source, n_best in zip(SENTENCES, decode(config, room=7)):
        limit = 7 - len(source)
        for one in n_best:
            assert len(one.ids) <= limit
            assert len(one.token_logprobs) == len(one.ids) + 1  # its end has its price, wherever it comes
    free = decode(config)
    assert max(len(source) + len(n_best[0].ids) for source, n_best in zip(SENTENCES, free)) > 12


@pytest.mark.parametrize("config", [GREEDY, SAMPLE], ids=lambda config: config.method)
def test_little_room_cuts_an_output_short(config) -> None:
    for source, [free], [bound] in zip(SENTENCES, decode(config), decode(config, room=7)):
        assert bound.ids == free.ids[: 7 - len(source)]


@every_method
def test_much_room_changes_nothing(config) -> None:
    assert decode(config, room=1000) == decode(config)


@every_method
def test_no_room_gives_empty_outputs(config) -> None:
    for n_best in decode(config, room=1):
        assert n_best[0].ids == []
        assert len(n_best[0].token_logprobs) == 1


@every_method
def test_the_other_limits_hold_too(config) -> None:
    found = decode(replace(config, max_len=3), room=6)
    for source, n_best in zip(SENTENCES, found):
        assert max(len(one.ids) for one in n_best) <= min(3, 6 - len(source))


@every_method
@pytest.mark.parametrize("prefix", [2, 3, 4, 5])
def test_a_prefix_stays_within_the_room(config, prefix) -> None:
    """Sources have 1 to 5 tokens; a prefix that does not fit is an error, not an output cut short."""
    prefixes = [[4] * min(prefix, 7 - len(source)) for source in SENTENCES]
    for source, given, n_best in zip(SENTENCES, prefixes, decode(config, room=7, prefixes=prefixes)):
        for one in n_best:
            assert one.ids[: len(given)] == given
            assert len(source) + len(one.ids) <= 7
            assert len(one.token_logprobs) == len(one.ids) + 1
    longest = max(range(len(SENTENCES)), key=lambda i: len(SENTENCES[i]))
    prefixes[longest] = [4, 4, 4]
    with pytest.raises(RegardError, match=f"Prefix {longest + 1} has 3 tokens; after a prompt of 5 .* room for 2"):
        greedy(HistoryModel(V, seed=1), pack(SENTENCES), room=7, prefixes=prefixes)


# Tokens as they come


class Told:
    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def __call__(self, sentence: int, token: int) -> None:
        self.tokens.setdefault(sentence, []).append(token)

    def of(self, sentence: int) -> list[int]:
        return self.tokens.get(sentence, [])


@pytest.mark.parametrize("config", [GREEDY, SAMPLE], ids=lambda config: config.method)
@pytest.mark.parametrize("budget", [1, 20, 8192])
def test_tokens_are_told_as_they_are_chosen(config, budget) -> None:
    """Of each sentence its own, in whatever batch it is, and whoever has left the batch; the end is not told."""
    told = Told()
    found = decode(config, on_token=told, budget=budget)
    assert [told.of(number) for number in range(len(SENTENCES))] == [n_best[0].ids for n_best in found]
    assert found == decode(config)


def test_of_several_samples_the_first_drawn_is_told() -> None:
    told = Told()
    config = replace(SAMPLE, n_best=3)
    found = decode(config, on_token=told)
    for number, n_best in enumerate(found):
        assert told.of(number) in [one.ids for one in n_best]
    # The best comes first in the list, and is not always the one that was drawn first.
    assert any(told.of(number) != n_best[0].ids for number, n_best in enumerate(found))


def test_tokens_come_in_order_and_before_the_end() -> None:
    """Step by step through the batch, not sentence by sentence."""
    heard: list[int] = []
    greedy(HistoryModel(V, seed=1), pack(SENTENCES), on_token=lambda sentence, token: heard.append(sentence))
    first = heard.index(heard[0], 1)  # where its second token comes
    assert len(set(heard[:first])) == first > 5


def test_nothing_is_told_of_outputs_that_may_not_go_on() -> None:
    class Mute(HistoryModel):
        def scores(self, sentence, past):
            return torch.full((*sentence.shape, V), -torch.inf)

    told = Told()
    assert greedy(Mute(V), pack([[4], [5]]), on_token=told)[0][0].ids == []
    assert told.tokens == {}


def test_a_beam_tells_nothing() -> None:
    told = Told()
    decode(BEAM, on_token=told)
    assert told.tokens == {}


# Ids that coincide

COINCIDING = pytest.mark.parametrize(
    "special",
    [Special(sos=3, eos=3), Special(pad=3, eos=3), Special(pad=5, sos=5, eos=5), Special(pad=0, sos=0, eos=3)],
    ids=["sos is eos", "pad is eos", "all are one", "sos is pad"],
)


@COINCIDING
def test_greedy_ends_where_the_end_is_likeliest(special) -> None:
    model = HistoryModel(V, seed=1)
    ended = 0
    for source, [found] in zip(SENTENCES, greedy(model, pack(SENTENCES), special=special)):
        past, limit = [special.sos], DecodeConfig().limit(len(source))
        while len(past) <= limit:
            scores = model.scores(torch.tensor(source[0]), torch.tensor(past)).clone()
            scores[[token for token in (special.pad, special.sos) if token != special.eos]] = -torch.inf
            if int(scores.argmax()) == special.eos:
                ended += 1
                break
            past.append(int(scores.argmax()))
        assert found.ids == past[1:]
        assert found.logprob == pytest.approx(log_prob(model, source[0], past[1:], special), abs=1e-4)
        assert len(found.token_logprobs) == len(found.ids) + 1
    assert ended > 10


@COINCIDING
def test_samples_end_and_never_hold_a_special_id(special) -> None:
    model = HistoryModel(V, seed=2)
    config = DecodeConfig("sample", n_best=20, max_len=8)
    for source, n_best in zip(SENTENCES, sample(model, pack(SENTENCES), config, special=special)):
        assert len({len(one.ids) for one in n_best}) > 2
        for one in n_best:
            assert not {special.pad, special.sos, special.eos} & set(one.ids)
            assert one.logprob == pytest.approx(log_prob(model, source[0], one.ids, special), abs=1e-4)


@COINCIDING
def test_a_wide_beam_finds_the_best_of_all(special) -> None:
    model = HistoryModel(6, seed=3)
    # At most 5 words at 3 places: nothing is pruned, and only the proof ends the search.
    config = DecodeConfig("beam", beam=160, n_best=5, max_len=3, patience=math.inf)
    for source, found in zip(SENTENCES[:6], beam(model, pack(SENTENCES[:6]), config, special=special)):
        everything = try_everything(model, source, 6, config, special)
        assert [one.ids for one in found] == [ids for _, ids in everything[:5]]
        assert [one.score for one in found] == pytest.approx([score for score, _ in everything[:5]], abs=1e-4)


@COINCIDING
@pytest.mark.parametrize("method", ["greedy", "sample", "beam"])
def test_no_end_before_the_least_length(special, method) -> None:
    config = DecodeConfig(method, min_len=4, max_len=6)
    found = decode(config, special=special)
    lengths = {len(n_best[0].ids) for n_best in found}
    assert lengths <= {4, 5, 6}
    assert len(lengths) > 1


def test_a_prefix_with_the_end_in_it_is_refused() -> None:
    with pytest.raises(RegardError, match="A forced prefix contains"):
        decode(GREEDY, special=Special(sos=5, eos=5), prefixes=[[5]] * len(SENTENCES))
    free = decode(GREEDY, special=Special(sos=5, eos=5), prefixes=[[3]] * len(SENTENCES))  # which is an id like others
    assert all(n_best[0].ids[0] == 3 for n_best in free)

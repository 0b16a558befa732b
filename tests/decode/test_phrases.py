"""Lexical constraints in beam search, greedy decoding and sampling, compared with exhaustive search."""

import functools
import math
import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.decode import SPECIAL, DecodeConfig, Ensemble, LexicalConstraints, NBest, Request, TokenTexts, decode_all
from regard.decode.phrases import allocate_beam
from regard.errors import RegardError
from tests.decode.helpers import HistoryModel, TableModel, beam, exhaustive_search, log_prob, sample

# Words and parts of words: "ab", "aba", "abab" and so on can be spelled in several ways.
PIECES = ["", "", "", "", " a", " ab", "b", "a", ".", " "]
TEXTS = TokenTexts([piece.encode() for piece in PIECES])
V = len(PIECES)
SENTENCES = [[5, 1, 1, 1], [9, 1], [4, 1, 1], [7], [6, 1, 1, 1, 1, 1]]
PHRASES = ["a", "ab", "aba", "a a", "a ab", "a.", "b.", ".", "ab ab"]
POSSIBLE = [phrase for phrase in PHRASES if phrase != "b."]


Phrases = list[str] | tuple[str, ...]


def text_of(ids: list[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def count_phrase(text: str, phrase: str, space: str = " ") -> int:
    """Occurrences as whole words, without overlaps: independent of the implementation."""
    pattern = space.join(map(re.escape, phrase.split()))
    before = r"(?<![^\W_])" if phrase[0].isalnum() else ""
    after = r"(?![^\W_])" if phrase[-1].isalnum() else ""
    return len(re.findall(f"{before}{pattern}{after}", text))


def satisfies(text: str, required: Phrases, forbidden: Phrases) -> bool:
    return all(count_phrase(text, phrase) >= required.count(phrase) for phrase in required) and not any(
        count_phrase(text, phrase, " +") for phrase in forbidden
    )


def constraints(required: Phrases = (), forbidden: Phrases = (), count: int = 1) -> list[LexicalConstraints]:
    return [LexicalConstraints(TEXTS, required, forbidden)] * count


def try_beam(required: Phrases, forbidden: Phrases, config: DecodeConfig, model: HistoryModel) -> list[NBest]:
    """Beam search; [] if the phrases contradict each other or do not fit, or need several other tokens in between."""
    try:
        lexical = constraints(required, forbidden, len(SENTENCES))
        return beam(model, SENTENCES, config, lexical=lexical)
    except RegardError as error:
        if re.search("contains a forbidden phrase|maximum output length leaves|found no output", str(error)):
            return []
        raise


@functools.cache
def all_outputs(sentence: int, config: DecodeConfig) -> list[tuple[float, list[int]]]:
    return exhaustive_search(HistoryModel(V, seed=1), [sentence], V, config, SPECIAL)


@pytest.mark.parametrize(
    ("required", "forbidden"),
    [
        (["a"], []),
        (["ab"], []),
        (["aba"], ["a"]),
        (["a", "a"], []),
        (["a ab"], []),
        (["a", "ab"], []),
        (["a", "a a"], ["."]),
        ([".", "a"], []),
        ([], ["a", "ab"]),
        ([], ["a."]),
        (["ab."], ["a"]),
    ],
)
@pytest.mark.parametrize("options", [{}, {"length_penalty": 0.0}, {"min_len": 3}])
def test_wide_beam_finds_the_best_outputs(required, forbidden, options):
    config = DecodeConfig(max_len=4, beam=1000, n_best=4, patience=math.inf, **options)
    model = HistoryModel(V, seed=1)
    source = [[5], [7]]
    results = beam(model, source, config, lexical=constraints(required, forbidden, 2))
    for sentence, n_best in zip(source, results):
        outputs = all_outputs(sentence[0], config)
        expected = [pair for pair in outputs if satisfies(text_of(pair[1]), required, forbidden)][:4]
        assert [h.ids for h in n_best] == [ids for _, ids in expected]
        assert [h.score for h in n_best] == pytest.approx([score for score, _ in expected], abs=1e-5)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 5),
    required=st.lists(st.sampled_from(POSSIBLE), max_size=3),
    forbidden=st.lists(st.sampled_from(PHRASES), max_size=2),
    max_len=st.integers(1, 14),
    sharpness=st.sampled_from([0.3, 2.0, 6.0]),
)
def test_outputs_satisfy_the_constraints(seed, width, required, forbidden, max_len, sharpness):
    model = HistoryModel(V, seed, sharpness)
    config = DecodeConfig(beam=width, n_best=width, max_len=max_len)
    for sentence, n_best in zip(SENTENCES, try_beam(required, forbidden, config, model)):
        assert n_best
        for h in n_best:
            assert satisfies(text_of(h.ids), required, forbidden), text_of(h.ids)
            assert len(h.ids) <= max_len
            assert h.logprob == pytest.approx(log_prob(model, sentence[0], h.ids, SPECIAL), abs=1e-4)


@pytest.mark.parametrize("method", ["greedy", "sample"])
def test_greedy_decoding_and_sampling_leave_out_forbidden_phrases(method):
    draw = random.Random(1)
    for seed in range(30):
        forbidden = draw.sample(PHRASES, 3)
        config = DecodeConfig(method, n_best=3 if method == "sample" else 1, max_len=draw.randint(1, 9), seed=seed)
        model = HistoryModel(V, seed)
        plain = decode_all(model, Request(SENTENCES, config))
        results = decode_all(model, Request(SENTENCES, config, lexical=constraints((), forbidden, 5), history=True))
        for before, n_best in zip(plain, results):
            assert [len(n_best)] == [config.n_best]
            assert all(satisfies(text_of(h.ids), (), forbidden) for h in n_best)
            if all(satisfies(text_of(h.ids), (), forbidden) for h in before) and method == "greedy":
                assert n_best == before


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_constraints_without_phrases_change_nothing(method):
    model = HistoryModel(V, seed=3)
    config = DecodeConfig(method, beam=3, n_best=1 if method == "greedy" else 3, max_len=9)
    expected = decode_all(model, Request(SENTENCES, config))
    assert decode_all(model, Request(SENTENCES, config, lexical=constraints(count=5))) == expected


def test_sentences_of_a_batch_do_not_depend_on_each_other():
    model, config = HistoryModel(V, seed=5), DecodeConfig(beam=3, n_best=2, max_len=10)
    lexical = [
        LexicalConstraints(TEXTS, required, forbidden)
        for required, forbidden in [(["ab"], []), ([], []), (["a", "aba"], ["ab"]), ([], ["a"]), (["a ab"], [])]
    ]
    together = decode_all(model, Request(SENTENCES, config, lexical=lexical))
    for source, constraint, n_best in zip(SENTENCES, lexical, together):
        (alone,) = beam(model, [source], config, lexical=[constraint])
        assert [h.ids for h in alone] == [h.ids for h in n_best]


def test_required_phrases_can_be_in_any_order_and_repeated():
    # " ab" is likely after " a", and <eos> after " ab".
    logits = torch.full((V, V), -4.0)
    logits[:, SPECIAL.eos], logits[SPECIAL.sos, 4], logits[4, 5], logits[5, SPECIAL.eos] = -1.0, 0.0, 0.0, 3.0
    model = TableModel(logits)

    def best(*required: str) -> str:
        config = DecodeConfig(beam=4, length_penalty=0.0)
        return text_of(beam(model, [[5]], config, lexical=constraints(required))[0][0].ids)

    assert best("ab", "a") == best("a", "ab") == best("a ab") == " a ab"
    assert best("ab", "ab").split().count("ab") == 2
    assert sorted(best("a", "a", "ab").split()) == ["a", "a", "ab"]
    assert best("ab.", "ab").split().count("ab") == 0  # one occurrence can be part of another


def test_very_long_phrase():
    phrase = " ".join(["a", "ab"] * 120)
    config = DecodeConfig(beam=2, max_len=250, max_extra=250)
    (n_best,) = beam(HistoryModel(V), [[5]], config, lexical=constraints([phrase], ["."]))
    assert satisfies(text_of(n_best[0].ids), [phrase], ["."])


def test_prefix_counts_for_required_phrases():
    model, config = HistoryModel(V, seed=2), DecodeConfig(beam=3, max_len=6)
    for prefix in ([5], [4, 6], [8, 5, 8]):  # " ab", " a" + "b", ". ab."
        (n_best,) = beam(model, [[5]], config, prefixes=[prefix], lexical=constraints(["ab", "a"]))
        ids = n_best[0].ids
        assert ids[: len(prefix)] == prefix
        assert satisfies(text_of(ids), ["ab", "a"], [])
    with pytest.raises(RegardError, match=r"^A prefix contains a forbidden phrase\."):
        beam(model, [[5]], config, prefixes=[[5, 8]], lexical=constraints([], ["ab"]))
    (n_best,) = beam(model, [[5]], config, prefixes=[[5]], lexical=constraints([], ["ab"]))
    assert satisfies(text_of(n_best[0].ids), [], ["ab"])  # the word continues


def test_constraints_with_ensemble_min_len_and_limits():
    model = Ensemble([HistoryModel(V, seed=1), HistoryModel(V, seed=2)])
    for min_len, max_len in ((0, 3), (5, 5), (2, 9)):
        config = DecodeConfig(beam=4, n_best=4, min_len=min_len, max_len=max_len)
        for n_best in beam(model, SENTENCES, config, lexical=constraints(["aba", "a"], ["ab"], 5)):
            assert n_best
            assert all(min_len <= len(h.ids) <= max_len for h in n_best)
            assert all(satisfies(text_of(h.ids), ["aba", "a"], ["ab"]) for h in n_best)
    # With max_total_len, source and output share 6 positions.
    config = DecodeConfig(beam=2, max_len=9)
    (n_best,) = beam(HistoryModel(V), [[5, 1, 1]], config, max_total_len=6, lexical=constraints(["a ab"]))
    assert len(n_best[0].ids) <= 3
    with pytest.raises(RegardError, match="need 2 tokens; the maximum output length leaves 1"):
        beam(HistoryModel(V), [[5, 1, 1]], config, max_total_len=4, lexical=constraints(["a ab"]))


def test_characters_of_several_tokens_are_matched_as_characters():
    pieces = [b"", b"", b"", b"", " é".encode(), b"t", b" \xc3", b"\xa9", b" \xe2", b"\x80\x9d", b"."]
    texts = TokenTexts(pieces)
    for seed in range(20):
        model = HistoryModel(len(pieces), seed)
        for required, forbidden in [(["é"], []), (["ét"], ["é"]), ([], ["é", "t"]), (["é", "ét"], ["."])]:
            lexical = [LexicalConstraints(texts, required, forbidden)]
            n_best = beam(model, [[5]], DecodeConfig(beam=3, n_best=3, max_len=8), lexical=lexical)[0]
            for h in n_best:
                text = b"".join(pieces[i] for i in h.ids).decode(errors="replace")
                assert satisfies(text, required, forbidden), text


def test_history_has_the_reasons_of_lexical_constraints():
    model, config = HistoryModel(V, seed=1, sharpness=3.0), DecodeConfig(beam=3, n_best=2, max_len=8)
    plain = beam(model, SENTENCES, config, lexical=constraints(["aba"], ["a", "ab"], 5))
    results = beam(model, SENTENCES, config, lexical=constraints(["aba"], ["a", "ab"], 5), history=True)
    assert results == plain
    pruned, refused = set(), set()
    for n_best in results:
        for h in n_best:
            steps = list(zip(n_best.history.steps, n_best.history.path(h)))
            assert [step.tokens[i] for step, i in steps] == [*h.ids, SPECIAL.eos]
        for step in n_best.history.steps:
            assert step.logprobs == sorted(step.logprobs, reverse=True)
            pruned |= set(step.reasons)
            refused |= {(one.token == SPECIAL.eos, one.reason) for one in step.refused}
    assert pruned >= {"", "beam", "required"}
    assert refused >= {(True, "required"), (False, "forbidden")}
    one = decode_all(model, Request([[5]], DecodeConfig("greedy"), lexical=constraints((), ["a", "ab"]), history=True))
    assert "forbidden" in {r.reason for step in one[0].history.steps for r in step.refused}


def test_whole_word_tokens_are_refused_at_once():
    """No word continues in the next token, so a forbidden word cannot become a longer one."""
    texts = TokenTexts(TEXTS.texts, whole_words=True)
    for seed in range(10):
        config = DecodeConfig("greedy", max_len=8)
        (n_best,) = decode_all(
            HistoryModel(V, seed), Request([[5]], config, lexical=[LexicalConstraints(texts, (), ["a"])])
        )
        assert 4 not in n_best[0].ids


def test_allocate_beam_shares_the_beam_among_banks():
    log_prob = np.array([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    assert allocate_beam(log_prob, np.array([2, 2, 2, 1, 0, 0]), 4).tolist() == [4, 3, 0, 5]
    assert allocate_beam(log_prob, np.zeros(6), 3).tolist() == [0, 1, 2]
    assert allocate_beam(log_prob, np.array([2, 2, 2, 1, 0, 0]), 1).tolist() == [4]


@pytest.mark.parametrize(
    ("required", "forbidden", "message"),
    [
        ([" "], [], r"^A required phrase is empty: ' '\."),
        ([], [""], r"^A forbidden phrase is empty"),
        (
            ["ab cd a"],
            [],
            r"^The required phrase 'ab cd a' cannot be generated: .* lacks 'cd'",
        ),
        (["ab"], ["ab"], r"^The required phrase 'ab' contains a forbidden phrase"),
        (["a ab"], ["ab"], r"^The required phrase 'a ab' contains a forbidden phrase"),
    ],
)
def test_invalid_phrases_raise(required, forbidden, message):
    with pytest.raises(RegardError, match=message):
        constraints(required, forbidden)
    constraints(["aba"], ["ab"])  # part of a word only


def test_invalid_calls_raise():
    source = [[5]]
    for method in ("greedy", "sample"):
        with pytest.raises(RegardError, match=rf"^Required phrases need beam search \(got method {method}\)"):
            decode_all(HistoryModel(V), Request([[5]], DecodeConfig(method), lexical=constraints(["a"])))
    with pytest.raises(RegardError, match=r"\('a ab', 'aba'\) need 4 tokens; .* leaves 3\. Raise"):
        beam(HistoryModel(V), source, DecodeConfig(max_len=3), lexical=constraints(["a ab", "aba"]))
    with pytest.raises(RegardError, match="got 2 for 1 sentences"):
        beam(HistoryModel(V), source, lexical=constraints(["a"], count=2))
    logits = torch.zeros((V, V))
    logits[:, [4, 5, 7]] = -math.inf  # the model never generates an a
    with pytest.raises(RegardError, match=r"found no output .* \(required: 'a'; forbidden: 'b'\)\. Raise"):
        beam(TableModel(logits), source, DecodeConfig(max_len=3), lexical=constraints(["a"], ["b"]))
    with pytest.raises(RegardError, match="NaN"):
        beam(TableModel(torch.full((V, V), math.nan)), source, lexical=constraints(["a"]))


def test_output_after_a_prompt():
    constraint = LexicalConstraints(TEXTS, ["a"], ["ab a"])
    inside, forbidden = constraint.after([6]), constraint.after([8, 5])
    assert 7 not in inside.next_tokens(inside.start_state)  # "ba" is not the phrase
    assert 7 in constraint.next_tokens(constraint.start_state)
    # " a" after "ab" is forbidden unless its word continues.
    state = forbidden.advance(forbidden.start_state, 4)
    assert not forbidden.can_end(state)
    assert constraint.after([4]).missing_phrases(constraint.after([4]).start_state) == ["a"]  # not in the output
    # A prompt may end in a forbidden phrase.
    assert sample(HistoryModel(V), [[5]], lexical=[LexicalConstraints(TEXTS, (), ["a"]).after([4])])[0]

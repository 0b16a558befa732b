"""Lexical constraints in beam search, greedy decoding and sampling, compared with exhaustive search and with the text."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import Tokenizer
from regard.decode import (
    SPECIAL,
    DecodeConfig,
    Ensemble,
    LexicalConstraints,
    TokenTexts,
    beam,
    decode_all,
    decode_batch,
    greedy,
    sample,
)
from regard.decode.lexical_constraints import allocate_beam
from regard.errors import RegardError
from tests.decode.helpers import HistoryModel, TableModel, exhaustive_search, log_prob, pack

# Words and parts of words: "ab", "aba", "abab" and so on can be spelled in several ways.
PIECES = ["", "", "", "", " a", " ab", "b", "a", ".", " "]
TEXTS = TokenTexts([piece.encode() for piece in PIECES])
V = len(PIECES)
SENTENCES = [[5, 1, 1, 1], [9, 1], [4, 1, 1], [7], [6, 1, 1, 1, 1, 1]]
PHRASES = ["a", "ab", "aba", "a a", "a ab", "a.", "b.", ".", "ab ab"]
possible = [phrase for phrase in PHRASES if phrase != "b."]


def text_of(ids: list[int], pieces: list[str] = PIECES) -> str:
    return "".join(pieces[i] for i in ids)


def count_phrase(text: str, phrase: str) -> int:
    """Occurrences as whole words, without overlaps: independent of the implementation."""
    pattern = r" +".join(map(re.escape, phrase.split()))
    before = r"(?<![^\W_])" if phrase[0].isalnum() else ""
    after = r"(?![^\W_])" if phrase[-1].isalnum() else ""
    return len(re.findall(f"{before}{pattern}{after}", text))


def satisfies(text: str, required: list[str], forbidden: list[str]) -> bool:
    return all(count_phrase(text, phrase) >= required.count(phrase) for phrase in required) and not any(
        count_phrase(text, phrase) for phrase in forbidden
    )


def constraints(required: list[str] = [], forbidden: list[str] = [], count: int = 1) -> list[LexicalConstraints]:
    return [LexicalConstraints(TEXTS, required, forbidden)] * count


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
    model = HistoryModel(V, seed=len(required))
    source = [[5], [7]]
    results = beam(model, pack(source), config, lexical=constraints(required, forbidden, 2))
    for sentence, n_best in zip(source, results):
        outputs = exhaustive_search(model, sentence, V, config, SPECIAL)
        expected = [pair for pair in outputs if satisfies(text_of(pair[1]), required, forbidden)][:4]
        assert [h.ids for h in n_best] == [ids for _, ids in expected]
        assert [h.score for h in n_best] == pytest.approx([score for score, _ in expected], abs=1e-5)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 5),
    required=st.lists(st.sampled_from(possible), max_size=3),
    forbidden=st.lists(st.sampled_from(PHRASES), max_size=2),
    max_len=st.integers(1, 14),
    sharpness=st.sampled_from([0.3, 2.0, 6.0]),
)
def test_outputs_satisfy_the_constraints(seed, width, required, forbidden, max_len, sharpness):
    model = HistoryModel(V, seed, sharpness)
    try:
        lexical = constraints(required, forbidden, len(SENTENCES))
        config = DecodeConfig(beam=width, n_best=width, max_len=max_len)
        results = beam(model, pack(SENTENCES), config, lexical=lexical)
    except RegardError as error:
        assert re.search("contains a forbidden phrase|maximum output length leaves|found no output", str(error))
        return
    for sentence, n_best in zip(SENTENCES, results):
        assert n_best
        for h in n_best:
            assert satisfies(text_of(h.ids), required, forbidden), text_of(h.ids)
            assert len(h.ids) <= max_len
            assert h.logprob == pytest.approx(log_prob(model, sentence[0], h.ids, SPECIAL), abs=1e-4)

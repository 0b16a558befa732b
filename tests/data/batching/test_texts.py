import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import SpecialTokens, Tokenizer, encode_texts
from regard.data.batching.sequences import Sequences
from regard.data.batching.texts import EncodedTexts, LengthGroupedBatches
from regard.errors import RegardError
from tests.data.helpers import rows

BERT, ENDS, BARE = SpecialTokens(begin=2, end=3), SpecialTokens(end=3), SpecialTokens()
ROBERTA = SpecialTokens(begin=2, end=3, between=3)
WORDS = [chr(97 + i) for i in range(26)]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([" ".join(WORDS)], "space")


def encode(tokenizer, texts, special=BERT, max_len=99, segments=True):
    encoded, cut = encode_texts(texts, tokenizer, special, max_len=max_len, segments=segments)
    return [encoded.ids[i].tolist() for i in range(len(encoded))], encoded.segments, cut


def test_texts_and_pairs_have_special_tokens(tokenizer):
    a, b, c = tokenizer.encode("a b c")
    ids, segments, cut = encode(tokenizer, [("a b",), ("a", "b c"), ("", "c"), ("",)])
    assert ids == [[2, a, b, 3], [2, a, 3, b, c, 3], [2, 3, c, 3], [2, 3]]
    assert [segments[i].tolist() for i in range(4)] == [[0] * 4, [0, 0, 0, 1, 1, 1], [0, 0, 1, 1], [0, 0]]
    assert cut == 0
    assert encode(tokenizer, [("a", "b c")], ENDS, segments=False)[:2] == ([[a, 3, b, c, 3]], None)
    ids, segments, _ = encode(tokenizer, [("a", "b c"), ("a",)], ROBERTA)
    assert ids == [[2, a, 3, 3, b, c, 3], [2, a, 3]]
    assert segments.ids.tolist() == [0] * 10
    assert encode(tokenizer, [("a", "b c")], BARE)[0] == [[a, b, c]]


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(6, 20), st.sampled_from([BERT, ROBERTA, ENDS, BARE]))
def test_longer_text_of_a_pair_is_truncated_first(tokenizer, first, second, max_len, special):
    texts = " ".join(WORDS[:first]), " ".join(WORDS[-second:] if second else [])
    [ids], segments, cut = encode(tokenizer, [texts], special, max_len)
    frame = len(special.add_special_tokens([])) + (special.end is not None) + (special.between is not None)
    assert cut == (first + second + frame > max_len)
    assert len(ids) == min(first + second + frame, max_len)
    cut_at = ids.index(3) if special is ROBERTA else segments[0].tolist().count(0)
    kept, other = ([one for one in part if one > 3] for part in (ids[:cut_at], ids[cut_at:]))
    assert kept == tokenizer.encode(texts[0])[: len(kept)]
    assert other == tokenizer.encode(texts[1])[: len(other)]
    if len(kept) < first:
        assert len(kept) >= len(other)
    if len(other) < second:
        assert len(other) >= len(kept) - 1


def test_single_text_is_truncated_at_its_end(tokenizer):
    ids, _, cut = encode(tokenizer, [("a b c d",), ("a b",)], max_len=4)
    a, b = tokenizer.encode("a b")
    assert (ids, cut) == ([[2, a, b, 3]] * 2, 1)
    with pytest.raises(RegardError, match="maximum length of 2 tokens leaves no room"):
        encode(tokenizer, [("a",)], max_len=2)
    with pytest.raises(RegardError, match="maximum length of 4 tokens leaves no room"):
        encode(tokenizer, [("a", "b")], max_len=4)


def numbered_texts(lengths):
    """Texts whose ids identify the text."""
    texts = [[10 + i] * length for i, length in enumerate(lengths)]
    return EncodedTexts(
        Sequences.from_lists(texts), Sequences.from_lists([[i % 2] * length for i, length in enumerate(lengths)])
    )


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.booleans(), st.integers(0, 3))
def test_batches_have_the_indices_of_their_texts(lengths, constant_shapes, number):
    batches = LengthGroupedBatches(
        numbered_texts(lengths), budget=40, max_len=20, seed=0, constant_shapes=constant_shapes
    )
    seen = []
    for indices, (packed, segments) in batches.epoch(number):
        found = rows(packed)
        assert found[: len(indices)] == [[10 + i] * lengths[i] for i in indices]
        real = sum(lengths[i] for i in indices)
        assert segments[:real].tolist() == [i % 2 for i in indices for _ in range(lengths[i])]
        assert segments[real:].tolist() == packed.ids[real:].tolist() == [0] * (len(packed.ids) - real)
        assert len(packed.ids) == (40 if constant_shapes else real)
        seen += indices
    assert sorted(seen) == list(range(len(lengths)))


def test_batches_have_similar_lengths():
    lengths = np.random.default_rng(0).integers(1, 60, 2000)
    texts = EncodedTexts(numbered_texts(lengths.tolist()).ids)
    batches = [inputs for _, inputs in LengthGroupedBatches(texts, budget=512, max_len=64, seed=0).epoch(0)]
    cells = sum(len(packed) * packed.max_len for (packed,) in batches)
    assert lengths.sum() / cells > 0.85


def test_texts_longer_than_max_len_are_errors():
    with pytest.raises(ValueError, match="at most max_len = 8 tokens, got 2 of up to 9"):
        LengthGroupedBatches(numbered_texts([9, 2]), budget=16, max_len=8, seed=0)
    with pytest.raises(ValueError, match="got 0 of up to 0"):
        LengthGroupedBatches(numbered_texts([]), budget=16, max_len=8, seed=0)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data import clean, split_validation
from regard.errors import RegardError

pairs_of_letters = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("xyz")), max_size=150)


def test_each_reason_is_counted_once():
    pairs = [
        (" A cat. ", "Un chat."),
        ("", "Vide."),
        ("Empty.", " \t"),
        ("A cat.", "Un chat."),
        ("A cat.", "Une chatte."),
        ("No.", "x" * 33),
        ("Yes.", "x" * 36),
        ("x" * 60, "x" * 60),
    ]
    kept, counts = clean(pairs, max_ratio=4.0, max_chars=50)
    assert kept == [("A cat.", "Un chat."), ("A cat.", "Une chatte."), ("Yes.", "x" * 36)]
    assert (counts.kept, counts.empty, counts.duplicate, counts.mismatched_length, counts.too_long) == (3, 2, 1, 1, 1)
    assert counts.left_out == 5
    assert str(counts) == "3 pairs; left out: 2 empty, 1 duplicate, 1 mismatched length, 1 too long"
    assert str(clean(kept)[1]) == "3 pairs"


def test_short_texts_may_have_long_translations():
    pairs = [("OK", "D'accord, très bien !"), ("값", "k a p̚")]
    assert clean(pairs)[0] == pairs


@given(pairs_of_letters, st.integers(0, 5))
def test_split_shares_no_source(pairs, seed):
    if len({source for source, _ in pairs}) < 2:
        with pytest.raises(RegardError, match="needs at least 2 different source sentences"):
            split_validation(pairs, seed)
        return
    training, validation = split_validation(pairs, seed)
    assert training
    assert validation
    assert not {source for source, _ in training} & {source for source, _ in validation}
    assert sorted(training + validation) == sorted(pairs)
    assert (training, validation) == split_validation(pairs, seed)


def test_validation_targets_are_not_in_training():
    """A third of the sources have a target that another source has: "Thank you." and "Thanks." are both "Merci."."""
    pairs = [(str(i), f"shared {i // 6}" if i % 3 == 0 else f"own {i}") for i in range(3000)]
    training, validation = split_validation([*pairs, ("6", "another")], seed=0)
    assert len(validation) == 100
    assert not {target for _, target in training} & {target for _, target in validation}


def test_labels_are_in_both_splits():
    training, validation = split_validation([(str(i), f"label {i % 5}") for i in range(1000)], seed=0)
    assert {target for _, target in training} == {target for _, target in validation}


@pytest.mark.parametrize(("size", "expected"), [(2, 1), (300, 30), (1500, 100), (10_000, 200), (150_000, 2000)])
def test_split_size(size, expected):
    pairs = [(str(i), str(i)) for i in range(size)]
    training, validation = split_validation(pairs, seed=1)
    assert (len(training), len(validation)) == (size - expected, expected)
    if size > 2:
        assert validation != split_validation(pairs, seed=2)[1]
        assert training == sorted(training, key=lambda pair: int(pair[0]))

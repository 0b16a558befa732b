import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import IGNORED, MaskedBatches, Sequences, Special
from regard.errors import RegardError
from tests.data.helpers import check_epochs, rows

SPECIAL = Special(begin=2, end=3, mask=4)
FIRST, VOCAB = 5, 1000  # the ordinary ids


def texts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return Sequences.of(rng.integers(FIRST, VOCAB, length).tolist() for length in lengths)


def made(corpus, *, seed=0, **options):
    settings = dict(vocab=VOCAB, special=SPECIAL, budget=64, max_len=16) | options
    return MaskedBatches(corpus, seed=seed, **settings)


def restored(batch):
    """The ids before some were hidden."""
    return torch.where(batch.targets == IGNORED, batch.inputs[0].ids, batch.targets)


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.booleans(), st.integers(0, 3))
def test_every_token_comes_once_in_framed_pieces(lengths, constant_shapes, number):
    if not any(lengths):
        return
    corpus = texts(lengths)
    found = []
    for batch in made(corpus, constant_shapes=constant_shapes).epoch(number):
        [packed] = batch.inputs
        assert len(batch.targets) == len(packed.ids)
        assert (batch.targets[batch.tokens :] == IGNORED).all()
        packed.ids.copy_(restored(batch))
        pieces = rows(packed)[: batch.sentences]
        assert sum(map(len, pieces)) == batch.tokens
        for piece in pieces:
            assert (piece[0], piece[-1]) == (2, 3)
            assert 3 <= len(piece) <= 16
            found.append(piece[1:-1])
    whole = [corpus[i].tolist() for i in range(len(corpus))]
    expected = [one[i : i + 14] for one in whole for i in range(0, len(one), 14)]
    assert sorted(found) == sorted(expected)


def test_the_shares_of_what_is_hidden_replaced_and_left():
    """0.15 of the ordinary tokens, and of these 0.8, 0.1, 0.1; the bounds are four standard deviations."""
    corpus = texts([100] * 1000)
    hidden = replaced = left = total = 0
    drawn = []
    for batch in made(corpus, max_len=128, budget=4096).epoch(0):
        ids, chosen = batch.inputs[0].ids, batch.targets != IGNORED
        share = chosen.sum() / (batch.tokens - 2 * batch.sentences)
        assert abs(share - 0.15) < 1e-3
        assert (batch.targets[chosen] >= FIRST).all()  # nothing that frames a text
        total += int(chosen.sum())
        hidden += int((ids[chosen] == 4).sum())
        left += int((ids[chosen] == batch.targets[chosen]).sum())
        other = chosen & (ids != 4) & (ids != batch.targets)
        drawn += ids[other].tolist()
    replaced = len(drawn)
    assert hidden + replaced + left == total
    assert abs(hidden / total - 0.8) < 4 * (0.8 * 0.2 / total) ** 0.5
    assert abs(replaced / total - 0.1) < 4 * (0.1 * 0.9 / total) ** 0.5
    assert min(drawn) >= FIRST
    assert max(drawn) < VOCAB
    assert len(set(drawn)) > 500  # any of them


def test_special_ids_are_neither_chosen_nor_drawn():
    special = Special(pad=9, unk=8, sos=7, eos=6, begin=5, end=3, mask=0, forced=1)
    corpus = Sequences.of([[8, 2, 4, 8, 2, 4, 8]] * 50)
    for batch in made(corpus, special=special, vocab=10, share=1.0).epoch(0):
        ids, chosen = batch.inputs[0].ids, batch.targets != IGNORED
        assert set(batch.targets[chosen].tolist()) == {2, 4}
        assert chosen.sum() == 4 * batch.sentences
        assert set(ids[chosen].tolist()) <= {0, 2, 4}
        assert set(ids[~chosen].tolist()) == {5, 8, 3}


def test_a_short_text_has_one_hidden_token():
    [batch] = made(texts([3])).epoch(0)
    assert (batch.targets != IGNORED).sum() == 1


@pytest.mark.parametrize("constant_shapes", [False, True])
def test_an_epoch_is_a_function_of_seed_and_number(constant_shapes):
    corpus = texts(np.random.default_rng(0).integers(1, 30, 60))
    check_epochs(lambda seed: made(corpus, seed=seed, constant_shapes=constant_shapes))


def test_batches_and_epochs_hide_different_places():
    """Of equal texts, so that only the draw can differ."""
    corpus = Sequences.of([[7] * 14] * 8)
    batches = made(corpus)
    places = [tuple((batch.targets != IGNORED).tolist()) for number in range(4) for batch in batches.epoch(number)]
    assert len(places) == len(set(places)) == 8


def test_refusals():
    with pytest.raises(RegardError, match="no id that hides a token"):
        made(texts([3]), special=Special(begin=2, end=3))
    with pytest.raises(RegardError, match="share of hidden tokens lies between 0 and 1"):
        made(texts([3]), share=0.0)
    with pytest.raises(RegardError, match="Every text is empty"):
        made(texts([0, 0]))
    with pytest.raises(RegardError, match="2 tokens leave no room"):
        made(texts([3]), max_len=2)
    with pytest.raises(RegardError, match="may have 128 tokens, but a batch only 64"):
        made(texts([3]), max_len=128)

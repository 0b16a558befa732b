import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import SpecialTokens
from regard.data.batching.batch import IGNORE_INDEX
from regard.data.batching.sequences import Sequences
from regard.errors import RegardError
from regard.training.tasks.mask import MaskedBatches
from tests.data.helpers import check_epochs, rows

SPECIAL = SpecialTokens(begin=2, end=3, mask=4)
FIRST, VOCAB = 5, 1000  # the ordinary ids


def random_texts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return Sequences.from_lists(rng.integers(FIRST, VOCAB, length).tolist() for length in lengths)


def make_batches(corpus, *, seed=0, **options):
    settings = dict(vocab=VOCAB, special=SPECIAL, budget=64, max_len=16) | options
    return MaskedBatches(corpus, seed=seed, **settings)


def unmask(batch):
    """The ids before masking."""
    return torch.where(batch.targets == IGNORE_INDEX, batch.inputs[0].ids, batch.targets)


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.booleans(), st.integers(0, 3))
def test_every_token_comes_once(lengths, constant_shapes, number):
    if not any(lengths):
        return
    corpus = random_texts(lengths)
    found = []
    for batch in make_batches(corpus, constant_shapes=constant_shapes).epoch(number):
        [packed] = batch.inputs
        assert len(batch.targets) == len(packed.ids)
        assert (batch.targets[batch.tokens :] == IGNORE_INDEX).all()
        packed.ids.copy_(unmask(batch))
        pieces = rows(packed)[: batch.sentences]
        assert sum(map(len, pieces)) == batch.tokens
        for piece in pieces:
            assert (piece[0], piece[-1]) == (2, 3)
            assert 3 <= len(piece) <= 16
            found.append(piece[1:-1])
    originals = [corpus[i].tolist() for i in range(len(corpus))]
    expected = [ids[i : i + 14] for ids in originals for i in range(0, len(ids), 14)]
    assert sorted(found) == sorted(expected)


def test_shares_of_masked_random_and_unchanged_tokens():
    """15% of the ordinary tokens are selected, of these 80%, 10%, 10%; the bounds are four standard deviations."""
    corpus = random_texts([100] * 1000)
    masked = randomized = unchanged = total = 0
    random_ids = []
    for batch in make_batches(corpus, max_len=128, budget=4096).epoch(0):
        ids, chosen = batch.inputs[0].ids, batch.targets != IGNORE_INDEX
        share = chosen.sum() / (batch.tokens - 2 * batch.sentences)
        assert abs(share - 0.15) < 1e-3
        assert (batch.targets[chosen] >= FIRST).all()  # no special tokens
        total += int(chosen.sum())
        masked += int((ids[chosen] == 4).sum())
        unchanged += int((ids[chosen] == batch.targets[chosen]).sum())
        other = chosen & (ids != 4) & (ids != batch.targets)
        random_ids += ids[other].tolist()
    randomized = len(random_ids)
    assert masked + randomized + unchanged == total
    assert abs(masked / total - 0.8) < 4 * (0.8 * 0.2 / total) ** 0.5
    assert abs(randomized / total - 0.1) < 4 * (0.1 * 0.9 / total) ** 0.5
    assert min(random_ids) >= FIRST
    assert max(random_ids) < VOCAB
    assert len(set(random_ids)) > 500  # sampled from the entire vocabulary


def test_special_ids_are_neither_selected_nor_sampled():
    special = SpecialTokens(pad=9, unk=8, sos=7, eos=6, begin=5, end=3, mask=0, forced=1)
    corpus = Sequences.from_lists([[8, 2, 4, 8, 2, 4, 8]] * 50)
    for batch in make_batches(corpus, special=special, vocab=10, mask_fraction=1.0).epoch(0):
        ids, chosen = batch.inputs[0].ids, batch.targets != IGNORE_INDEX
        assert set(batch.targets[chosen].tolist()) == {2, 4}
        assert chosen.sum() == 4 * batch.sentences
        assert set(ids[chosen].tolist()) <= {0, 2, 4}
        assert set(ids[~chosen].tolist()) == {5, 8, 3}


def test_short_text_has_one_masked_token():
    [batch] = make_batches(random_texts([3])).epoch(0)
    assert (batch.targets != IGNORE_INDEX).sum() == 1


@pytest.mark.parametrize("constant_shapes", [False, True])
def test_epoch_depends_on_seed_and_number_alone(constant_shapes):
    corpus = random_texts(np.random.default_rng(0).integers(1, 30, 60))
    check_epochs(lambda seed: make_batches(corpus, seed=seed, constant_shapes=constant_shapes))


def test_batches_and_epochs_mask_different_positions():
    """With equal texts, so that only the masks can differ."""
    corpus = Sequences.from_lists([[7] * 14] * 8)
    batches = make_batches(corpus)
    masks = [tuple((batch.targets != IGNORE_INDEX).tolist()) for number in range(4) for batch in batches.epoch(number)]
    assert len(masks) == len(set(masks)) == 8


def test_invalid_arguments_are_errors():
    with pytest.raises(RegardError, match="no mask token"):
        make_batches(random_texts([3]), special=SpecialTokens(begin=2, end=3))
    with pytest.raises(RegardError, match="mask_fraction must be greater than 0"):
        make_batches(random_texts([3]), mask_fraction=0.0)
    with pytest.raises(RegardError, match="All texts are empty"):
        make_batches(random_texts([0, 0]))
    with pytest.raises(RegardError, match="maximum length of 2 tokens leaves no room"):
        make_batches(random_texts([3]), max_len=2)
    with pytest.raises(RegardError, match="maximum length is 128 tokens, but a batch has only 64"):
        make_batches(random_texts([3]), max_len=128)

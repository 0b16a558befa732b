"""Parts of batches for ranks: every sequence is on one rank, and all ranks get about as many tokens."""

from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regard.data.batching.batch import WHOLE, BatchSampler, RankSlice
from regard.data.batching.images import ImageBatches
from regard.data.batching.pairs import PairBatches
from regard.data.batching.sequences import Sequences
from regard.data.batching.streams import TokenStreamBatches
from regard.data.batching.texts import EncodedTexts
from regard.data.text.labeled_texts import LabeledTextBatches
from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.layers.packed import pack
from regard.training.cuda_graphs import batch_shape
from regard.training.tasks.mask import MaskedBatches


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=80), st.integers(30, 90), st.integers(3, 30), st.booleans())
def test_batches_fit_their_shape(lengths, budget, max_len, constant_shapes):
    """Also for lengths that do not match the mean length: `pack` raises an error if a batch does not fit."""
    assume(min(lengths) <= max_len)
    sampler = BatchSampler(max_len / 2, budget=budget, max_len=max_len, constant_shapes=constant_shapes)
    batches = sampler.sample(np.random.default_rng(0), np.array(lengths))
    assert sorted(row for rows in batches for row in rows) == [i for i, one in enumerate(lengths) if one <= max_len]
    packed = [
        pack([[1] * lengths[i] for i in rows], **sampler.pack_options(np.array(lengths)[rows])) for rows in batches
    ]
    assert all(one.offsets.total <= budget for one in packed)
    assert all(one.max_len <= max_len for one in packed)  # learned positions end there, for padding too
    if constant_shapes:
        assert len({(one.offsets.total, len(one)) for one in packed}) <= 1
        assert {one.max_len for one in packed} <= {16, 32, max_len}


def test_single_sequences_are_batched_like_equal_pairs():
    sampler = BatchSampler(5.0, budget=32, max_len=16)
    lengths = np.random.default_rng(1).integers(1, 16, 200)
    one, both = (list(sampler.sample(np.random.default_rng(0), *sides)) for sides in ((lengths,), (lengths, lengths)))
    assert one == both
    assert len(one) > 30


def test_max_len_above_the_budget_is_an_error():
    with pytest.raises(RegardError, match=r"The maximum length is 64 tokens, but a batch has only 32\. Raise"):
        BatchSampler(5.0, budget=32, max_len=64)


def test_batches_of_short_sequences_are_full():
    """Constant shapes have slots for many short sequences: only the last batch of a pool may be far from full."""
    lengths = np.random.default_rng(0).lognormal(3.2, 0.55, 20_000).round().clip(2, 128).astype(int)
    sampler = BatchSampler(float(lengths.mean()), budget=8192, max_len=128, constant_shapes=True)
    filled = [lengths[rows].sum() / 8192 for rows in sampler.sample(np.random.default_rng(1), lengths)]
    assert min(lengths) < 6
    assert sum(share < 0.9 for share in filled) <= 3  # at both ends of a pool: its shortest and its last
    assert np.mean(filled) > 0.97


@pytest.mark.parametrize("lengths", [[9], [9, 12, 30]])
def test_epoch_without_a_batch_is_an_error(lengths):
    """Otherwise training would loop over empty epochs forever."""
    sampler = BatchSampler(5.0, budget=32, max_len=8)
    with pytest.raises(RegardError, match=f"All {len(lengths)} sequences are longer than max_len .8 tokens"):
        sampler.sample(np.random.default_rng(0), np.array(lengths))
    assert list(sampler.sample(np.random.default_rng(0), np.array([*lengths, 8]))) == [[len(lengths)]]
    assert not len(sampler.sample(np.random.default_rng(0), np.array([], int)))


GENERATOR = np.random.default_rng(0)
TEXTS = Sequences.from_lists(GENERATOR.integers(5, 99, n).tolist() for n in GENERATOR.integers(2, 30, 60))


class Pixels:
    """Images whose only pixel is their number."""

    pixels = np.arange(50, dtype=np.uint8).reshape(50, 1, 1, 1)


MASKED = dict(vocab=99, special=SpecialTokens(begin=2, end=3, mask=4), budget=100, max_len=40, seed=1)
SOURCES = {
    "pairs": PairBatches(TEXTS, TEXTS, budget=100, max_len=40, seed=1),
    "constant shapes": PairBatches(TEXTS, TEXTS, budget=100, max_len=40, seed=1, constant_shapes=True),
    "masked": MaskedBatches(TEXTS, **MASKED),
    "masked, constant shapes": MaskedBatches(TEXTS, **MASKED, constant_shapes=True),
    "labeled": LabeledTextBatches(EncodedTexts(TEXTS), np.arange(60), budget=100, max_len=40, seed=1),
    "windows": TokenStreamBatches(TEXTS.ids, 16, budget=64, seed=1),
    "windows, constant shapes": TokenStreamBatches(TEXTS.ids, 16, budget=64, seed=1, constant_shapes=True),
    "images": ImageBatches(Pixels(), np.arange(50), lambda rows: rows, size=3, seed=1),
}


def sequences(batch):
    """The inputs and targets of each sequence of a batch, in any order, without padding."""
    first = batch.inputs[0]
    if not hasattr(first, "offsets"):
        return sorted(zip(first.flatten().tolist(), batch.targets.tolist()))[: batch.sentences]
    lengths = first.offsets.lengths.tolist()[: batch.sentences]
    ids = [row.tolist() for row in first.ids[: sum(lengths)].split(lengths)]
    if len(batch.targets) == len(first.ids) and len(batch.inputs) == 1:
        targets = [row.tolist() for row in batch.targets[: sum(lengths)].split(lengths)]
    else:
        targets = batch.targets[: batch.sentences].tolist() if len(batch.inputs) == 1 else ids
    return sorted(zip(ids, targets))


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_sequence_is_on_one_rank(name, size):
    source = SOURCES[name]
    parts = [list(source.epoch(3, 1, RankSlice(rank, size))) for rank in range(size)]
    for whole, *ranks in zip_longest(source.epoch(3, 1), *parts):
        assert sorted(sequence for batch in ranks for sequence in sequences(batch)) == sequences(whole)
        assert sum(batch.tokens for batch in ranks) == whole.tokens
        assert sum(batch.sentences for batch in ranks) == whole.sentences


def test_ranks_without_a_sequence_get_one_as_padding():
    batches = list(SOURCES["windows"].epoch(0, 0, RankSlice(4, 5)))
    assert {batch.sentences for batch in batches} == {0}
    assert all(len(batch.inputs[0]) == 1 for batch in batches)


def test_ranks_get_about_as_many_tokens():
    lengths = GENERATOR.integers(1, 60, 300).tolist()
    loads = [sum(lengths[i] for i in RankSlice(rank, 7).select(lengths)[0]) for rank in range(7)]
    assert max(loads) - min(loads) <= 3
    assert WHOLE.select(lengths) == (list(range(300)), 300)


@pytest.mark.parametrize("name", [name for name in SOURCES if "constant" in name])
@pytest.mark.parametrize("size", [2, 5])
def test_constant_shapes_are_the_same_on_all_ranks(name, size):
    """CUDA graphs with an exchange of gradients are captured and replayed by all ranks together."""
    parts = [SOURCES[name].epoch(3, 0, RankSlice(rank, size)) for rank in range(size)]
    shapes = [{batch_shape(batch) for batch in ranks} for ranks in zip(*parts, strict=True)]
    assert all(len(ranks) == 1 for ranks in shapes)
    assert len(set.union(*shapes)) < len(shapes)

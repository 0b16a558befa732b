"""Parts of batches for ranks: every sequence is on one rank, and all ranks get about as many tokens."""

from itertools import zip_longest

import numpy as np
import pytest

from regard.data.batching.image_batches import ImageBatches
from regard.data.batching.masked_batches import MaskedBatches
from regard.data.batching.pair_batches import PairBatches
from regard.data.batching.rank_slice import WHOLE, RankSlice
from regard.data.batching.sequences import Sequences
from regard.data.batching.text_batches import EncodedTexts
from regard.data.batching.token_streams import TokenStreamBatches
from regard.data.text.examples.labeled_texts import LabeledTextBatches
from regard.data.text.special_tokens import SpecialTokens
from regard.training.cuda_graphs import batch_shape

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

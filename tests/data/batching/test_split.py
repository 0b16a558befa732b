"""Splitting of batches: every kind of batch is the concatenation of its parts."""

import numpy as np
import pytest
import torch

from regard.data.batching.batch import Batch
from regard.data.batching.images import ImageBatch, make_ragged_batch
from regard.data.batching.pairs import PairBatches
from regard.data.batching.sequences import Sequences
from regard.data.batching.texts import EncodedTexts
from regard.data.images.augmentation import AugmentConfig
from regard.data.text.labeled_texts import LabeledTextBatches
from regard.data.text.special_tokens import SpecialTokens
from regard.layers.packed import Packed
from regard.training.tasks.mask import MaskedBatches

TEXTS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14], [15, 16]]


def pairs(constant: bool) -> Batch:
    sources, targets = Sequences.from_lists(TEXTS), Sequences.from_lists(TEXTS[::-1])
    batches = PairBatches(sources, targets, budget=32, max_len=16, seed=0, constant_shapes=constant)
    return next(batches.epoch(0))


def masked() -> Batch:
    special = SpecialTokens(begin=2, end=3, mask=4)
    options = dict(vocab=20, special=special, budget=32, max_len=16, seed=0, mask_fraction=0.5)
    return next(MaskedBatches(Sequences.from_lists(TEXTS), **options).epoch(0))


def labeled(targets: np.ndarray, segments: bool, constant: bool = False) -> Batch:
    ids = Sequences.from_lists(TEXTS)
    texts = EncodedTexts(ids, Sequences.from_lists([[1] * len(text) for text in TEXTS]) if segments else None)
    batches = LabeledTextBatches(texts, targets, budget=32, max_len=16, seed=0, constant_shapes=constant)
    return next(batches.epoch(0))


def images(masks: bool) -> Batch:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 255, (5, 4, 4, 3), dtype=torch.uint8, generator=generator)
    targets = torch.arange(5 * 16).view(5, 4, 4) if masks else torch.arange(5)
    return ImageBatch((pixels,), targets, 5, 5, AugmentConfig())


def ragged(masks: bool) -> Batch:
    sizes = [(4, 4), (4, 8), (4, 8), (8, 4), (8, 8)]
    arrays = [np.random.default_rng(i).integers(0, 255, (*size, 3), dtype=np.uint8) for i, size in enumerate(sizes)]
    targets = np.arange(sum(h * w for h, w in sizes)) if masks else np.arange(5)
    return make_ragged_batch(arrays, targets, 4, AugmentConfig())


BATCHES = {
    "pairs": lambda: pairs(False),
    "pairs of constant shapes": lambda: pairs(True),
    "masked": masked,
    "labeled": lambda: labeled(np.arange(5), False),
    "labeled pairs of constant shapes": lambda: labeled(np.arange(5), True, True),
    "spans": lambda: labeled(np.arange(10).reshape(5, 2), True),
    "images": lambda: images(False),
    "masks": lambda: images(True),
    "ragged images": lambda: ragged(False),
    "ragged masks": lambda: ragged(True),
}


@pytest.mark.parametrize("parts", [2, 3, 4, 64])
@pytest.mark.parametrize("name", BATCHES)
def test_parts_concatenate_to_the_batch(name, parts):
    batch = BATCHES[name]()
    pieces = batch.split(parts)
    assert 2 <= len(pieces) <= parts
    assert {type(piece) for piece in pieces} == {type(batch)}
    assert torch.equal(torch.cat([piece.targets for piece in pieces]), batch.targets)
    assert sum(piece.sentences for piece in pieces) == batch.sentences
    for index, whole in enumerate(batch.inputs):
        inputs = [piece.inputs[index] for piece in pieces]
        if isinstance(whole, Packed):
            for field in ("ids", "positions"):
                assert torch.equal(torch.cat([getattr(x, field) for x in inputs]), getattr(whole, field))
            assert torch.equal(torch.cat([x.offsets.lengths for x in inputs]), whole.offsets.lengths)
            assert all(x.offsets.total == len(x.ids) == int(x.offsets.starts[-1]) for x in inputs)
        elif name.startswith("ragged") and index == 1:  # start offsets
            assert torch.equal(torch.cat([x.diff() for x in inputs]), whole.diff())
        else:
            assert torch.equal(torch.cat(inputs), whole)
    if name.startswith("ragged"):
        grids = [piece.augment_and_pack(3, 4, masked="masks" in name)[0].grids for piece in pieces]
        assert sum(grids, ()) == batch.augment_and_pack(3, 4, masked="masks" in name)[0].grids


def test_parts_have_similar_sizes():
    texts = Sequences.from_lists([[5] * 7] * 64)
    batch = next(PairBatches(texts, texts, budget=512, max_len=16, seed=0).epoch(0))
    assert [len(piece.targets) for piece in batch.split(4)] == [128] * 4


def test_one_sequence_is_not_split():
    texts = Sequences.from_lists([[5] * 7])
    batch = next(PairBatches(texts, texts, budget=64, max_len=16, seed=0).epoch(0))
    assert len(batch.split(4)) == 1
    assert batch.split(1) == [batch]

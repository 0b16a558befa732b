"""Batches of pictures of many sizes: every picture once an epoch, as many as there are tokens for."""

import numpy as np
import pytest
import torch

from regard.data import IGNORED, AugmentConfig, RaggedBatches, read_ragged
from regard.errors import RegardError
from regard.layers.patches import pack_images
from tests.data.pictures import some_sizes

PATCH = 4


@pytest.fixture
def images(tmp_path):
    return read_ragged([some_sizes(tmp_path)], patch=PATCH, cache=tmp_path / "cache")


def batches_of(images, rows=None, **changes) -> RaggedBatches:
    rows = np.arange(len(images)) if rows is None else rows
    return RaggedBatches(images, rows, lambda some: some, **({"budget": 33, "prefix": 1, "seed": 3} | changes))


def rows_of(batches) -> list[list[int]]:
    return [batch.targets.tolist() for batch in batches]


def masks_of(images):
    return lambda rows: np.concatenate([images.mask(row).reshape(-1) for row in rows.tolist()])


def test_a_batch_is_what_the_model_packs_itself(images):
    for batch in batches_of(images).epoch(0):
        packed, masks = batch.changed(3, PATCH)
        wanted = pack_images(images.tensors(batch.targets.tolist()), PATCH)
        torch.testing.assert_close(packed.pixels, wanted.pixels)
        for name in ("places", "sizes"):
            assert torch.equal(getattr(packed, name), getattr(wanted, name))
        assert torch.equal(packed.offsets.starts, wanted.offsets.starts)
        assert (packed.offsets.total, packed.offsets.max_len) == (wanted.offsets.total, wanted.offsets.max_len)
        assert packed.grids == wanted.grids
        assert masks == []
        assert (batch.sentences, batch.tokens) == (len(wanted), wanted.offsets.total)


def test_all_pictures_within_the_budget(images):
    lengths = 1 + (images.sizes // PATCH).prod(1)
    batches = batches_of(images)
    for found in (rows_of(batches.epoch(0)), rows_of(batches)):
        assert sorted(row for rows in found for row in rows) == list(range(len(images)))
        assert max(lengths[rows].sum() for rows in found) <= 33
        assert np.mean([lengths[rows].sum() for rows in found]) > 24  # there is not much left in a batch
    assert len(rows_of(batches_of(images, budget=60))) < len(rows_of(batches))


def test_an_epoch_is_a_function_of_its_number_and_the_seed(images):
    batches = batches_of(images)
    first = rows_of(batches.epoch(0))
    assert first == rows_of(batches_of(images).epoch(0))
    assert first != rows_of(batches.epoch(1))
    assert first != rows_of(batches_of(images, seed=4).epoch(0))
    assert rows_of(batches.epoch(0, 2)) == first[2:]


def test_some_of_the_pictures(images):
    rows = np.array([2, 3, 5, 7, 11, 13])
    for found in (batches_of(images, rows).epoch(0), batches_of(images, rows)):
        assert sorted(row for some in rows_of(found) for row in some) == rows.tolist()


def test_pictures_of_one_size_are_changed_together_and_each_in_its_own_way(images):
    [batch] = batches_of(images, budget=10_000, augment=AugmentConfig(flip=0.5)).epoch(0)
    assert len(batch.groups) == len(set(map(tuple, images.sizes.tolist()))) < len(images)
    torch.manual_seed(0)
    packed, _ = batch.changed(3, PATCH)
    starts, mirrored = packed.offsets.starts.tolist(), []
    for place, picture in enumerate(images.tensors(batch.targets.tolist())):
        plain, turned = (pack_images([one], PATCH).pixels for one in (picture, picture.flip(2)))
        found = packed.pixels[starts[place] : starts[place + 1]]
        assert torch.equal(found, plain) != torch.equal(found, turned)
        mirrored.append(torch.equal(found, turned))
    assert 0 < sum(mirrored) < len(images)
    assert all(batch.augment == AugmentConfig() for batch in batches_of(images, augment=AugmentConfig(flip=1.0)))


def test_masks_move_with_their_pictures(images):
    batches = RaggedBatches(
        images,
        np.arange(len(images)),
        masks_of(images),
        budget=10_000,
        prefix=0,
        seed=0,
        augment=AugmentConfig(crop=2, padding="zero"),
    )
    [batch] = batches.epoch(0)
    packed, masks = batch.changed(3, PATCH, masked=True)
    assert [mask.shape for mask in masks] == [tuple(group) for group in batch.groups]
    red = torch.cat([one.flatten() for one in reds(packed)])
    inside = torch.cat([mask.flatten() for mask in masks])
    # What came in from outside is black, and nothing's.
    assert torch.equal(torch.where(inside == IGNORED, 0, 10 * inside), (255 * red).round().long())
    assert (inside == IGNORED).any()


def reds(packed):
    """The first channel of each picture, row by row of pixels."""
    cells = packed.pixels.split([rows * columns for rows, columns in packed.grids])
    for one, (rows, columns) in zip(cells, packed.grids):
        squares = one.view(rows, columns, 3, PATCH, PATCH)[:, :, 0]
        yield squares.transpose(1, 2).reshape(rows * PATCH, columns * PATCH)


def test_grey_pictures_for_a_model_of_colours(tmp_path):
    grey = read_ragged([some_sizes(tmp_path)], patch=PATCH, channels=1)
    batch = next(batches_of(grey).epoch(0))
    packed, _ = batch.changed(3, PATCH)
    red, green, blue = packed.pixels.unflatten(1, (3, -1)).unbind(1)
    assert torch.equal(red, green)
    assert torch.equal(red, blue)
    assert packed.pixels.shape[1] == 3 * PATCH**2


def test_a_picture_that_no_batch_holds(images):
    with pytest.raises(RegardError, match=r"A picture has 16 tokens, but a batch only 15\. Raise train.batch_tokens"):
        batches_of(images, budget=15)
    with pytest.raises(ValueError, match="some pictures"):
        batches_of(images, np.arange(0))


def test_the_smallest_picture_is_tried_first(images):
    batch = batches_of(images, augment=AugmentConfig(crop=4)).smallest()
    with pytest.raises(RegardError, match="crop = 4 moves whole pictures away"):
        batch.changed(3, PATCH)

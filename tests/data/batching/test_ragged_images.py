"""Batches of images of different sizes: every image once per epoch, within the token budget."""

import numpy as np
import pytest
import torch

from regard.data import AugmentConfig, read_ragged_images
from regard.data.batching.batch import IGNORE_INDEX
from regard.data.batching.images import RaggedImageBatches
from regard.errors import RegardError
from regard.layers.patches import pack_images
from tests.data.image_helpers import write_ragged_images

PATCH = 4


@pytest.fixture
def images(tmp_path):
    return read_ragged_images([write_ragged_images(tmp_path)], patch=PATCH, cache=tmp_path / "cache")


def make_batches(images, rows=None, **changes) -> RaggedImageBatches:
    rows = np.arange(len(images)) if rows is None else rows
    return RaggedImageBatches(images, rows, lambda rows: rows, **({"budget": 33, "prefix": 1, "seed": 3} | changes))


def rows_of(batches) -> list[list[int]]:
    return [batch.targets.tolist() for batch in batches]


def masks_of(images):
    return lambda rows: np.concatenate([images.mask(row).reshape(-1) for row in rows.tolist()])


def test_batch_equals_pack_images(images):
    for batch in make_batches(images).epoch(0):
        packed, masks = batch.augment_and_pack(3, PATCH)
        expected = pack_images(images.to_tensors(batch.targets.tolist()), PATCH)
        torch.testing.assert_close(packed.pixels, expected.pixels)
        for name in ("coordinates", "sizes"):
            assert torch.equal(getattr(packed, name), getattr(expected, name))
        assert torch.equal(packed.offsets.starts, expected.offsets.starts)
        assert (packed.offsets.total, packed.offsets.max_len) == (expected.offsets.total, expected.offsets.max_len)
        assert packed.grids == expected.grids
        assert masks == []
        assert (batch.sentences, batch.tokens) == (len(expected), expected.offsets.total)


def test_every_image_comes_once_within_the_budget(images):
    lengths = 1 + (images.sizes // PATCH).prod(1)
    batches = make_batches(images)
    for found in (rows_of(batches.epoch(0)), rows_of(batches)):
        assert sorted(row for rows in found for row in rows) == list(range(len(images)))
        assert max(lengths[rows].sum() for rows in found) <= 33
        assert np.mean([lengths[rows].sum() for rows in found]) > 24  # batches are nearly full
    assert len(rows_of(make_batches(images, budget=60))) < len(rows_of(batches))


def test_epoch_depends_on_seed_and_number_alone(images):
    batches = make_batches(images)
    first = rows_of(batches.epoch(0))
    assert first == rows_of(make_batches(images).epoch(0))
    assert first != rows_of(batches.epoch(1))
    assert first != rows_of(make_batches(images, seed=4).epoch(0))
    assert rows_of(batches.epoch(0, 2)) == first[2:]


def test_subset_of_the_images(images):
    rows = np.array([2, 3, 5, 7, 11, 13])
    for found in (make_batches(images, rows).epoch(0), make_batches(images, rows)):
        assert sorted(row for batch_rows in rows_of(found) for row in batch_rows) == rows.tolist()


def test_each_image_of_a_size_group_is_augmented_independently(images):
    [batch] = make_batches(images, budget=10_000, augment=AugmentConfig(flip=0.5)).epoch(0)
    assert len(batch.groups) == len(set(map(tuple, images.sizes.tolist()))) < len(images)
    torch.manual_seed(0)
    packed, _ = batch.augment_and_pack(3, PATCH)
    starts, is_flipped = packed.offsets.starts.tolist(), []
    for index, image in enumerate(images.to_tensors(batch.targets.tolist())):
        plain, flipped = (pack_images([one], PATCH).pixels for one in (image, image.flip(2)))
        found = packed.pixels[starts[index] : starts[index + 1]]
        assert torch.equal(found, plain) != torch.equal(found, flipped)
        is_flipped.append(torch.equal(found, flipped))
    assert 0 < sum(is_flipped) < len(images)
    assert all(batch.augment == AugmentConfig() for batch in make_batches(images, augment=AugmentConfig(flip=1.0)))


def test_masks_are_augmented_like_their_images(images):
    batches = RaggedImageBatches(
        images,
        np.arange(len(images)),
        masks_of(images),
        budget=10_000,
        prefix=0,
        seed=0,
        augment=AugmentConfig(crop=2, padding="zero"),
    )
    [batch] = batches.epoch(0)
    packed, masks = batch.augment_and_pack(3, PATCH, masked=True)
    assert [mask.shape for mask in masks] == [tuple(group) for group in batch.groups]
    red = torch.cat([one.flatten() for one in reds(packed)])
    inside = torch.cat([mask.flatten() for mask in masks])
    # Pixels from outside of the image are black and ignored.
    assert torch.equal(torch.where(inside == IGNORE_INDEX, 0, 10 * inside), (255 * red).round().long())
    assert (inside == IGNORE_INDEX).any()


def reds(packed):
    """The first channel of each image, by rows of pixels."""
    cells = packed.pixels.split([rows * columns for rows, columns in packed.grids])
    for one, (rows, columns) in zip(cells, packed.grids):
        squares = one.view(rows, columns, 3, PATCH, PATCH)[:, :, 0]
        yield squares.transpose(1, 2).reshape(rows * PATCH, columns * PATCH)


def test_gray_images_for_a_color_model(tmp_path):
    gray = read_ragged_images([write_ragged_images(tmp_path)], patch=PATCH, channels=1)
    batch = next(make_batches(gray).epoch(0))
    packed, _ = batch.augment_and_pack(3, PATCH)
    red, green, blue = packed.pixels.unflatten(1, (3, -1)).unbind(1)
    assert torch.equal(red, green)
    assert torch.equal(red, blue)
    assert packed.pixels.shape[1] == 3 * PATCH**2


def test_image_larger_than_a_batch_is_an_error(images):
    with pytest.raises(
        RegardError, match=r"An image has 16 tokens, but a batch has only 15\. Raise train.batch_tokens"
    ):
        make_batches(images, budget=15)
    with pytest.raises(ValueError, match="expected at least 1 image"):
        make_batches(images, np.arange(0))


def test_smallest_batch_checks_the_augmentation(images):
    batch = make_batches(images, augment=AugmentConfig(crop=4)).smallest_batch()
    with pytest.raises(RegardError, match=r"augment\.crop is 4; it must be smaller than the image"):
        batch.augment_and_pack(3, PATCH)

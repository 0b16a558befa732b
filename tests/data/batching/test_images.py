"""Batches of images: every image once per epoch, in an order that depends on seed and epoch."""

import numpy as np
import pytest
import torch

from regard.data import AugmentConfig, read_images
from regard.data.batching.images import ImageBatches, pixels_to_float


@pytest.fixture
def images(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (23, 4, 6, 3), np.uint8)
    np.savez(tmp_path / "images.npz", x=pixels, y=np.arange(23))
    return read_images([tmp_path / "images.npz"], cache=tmp_path / "cache")


def make_batches(images, rows=None, **changes) -> ImageBatches:
    rows = np.arange(len(images)) if rows is None else rows
    return ImageBatches(images, rows, lambda rows: images.labels[rows], **({"size": 5, "seed": 3} | changes))


def labels_of(batches) -> list[list[int]]:
    return [batch.targets.tolist() for batch in batches]


def test_images_match_their_targets(images):
    batches = make_batches(images, augment=AugmentConfig(flip=0.5))
    for batch in batches.epoch(0):
        assert batch.augment.flip == 0.5
        assert batch.pixels.dtype == torch.uint8
        np.testing.assert_array_equal(batch.pixels, images.pixels[batch.targets.numpy()])
        assert (batch.sentences, batch.tokens) == (5, 5)


def test_epoch_depends_on_seed_and_number_alone(images):
    batches = make_batches(images)
    first = labels_of(batches.epoch(0))
    assert first == labels_of(make_batches(images).epoch(0))
    assert first != labels_of(batches.epoch(1))
    assert first != labels_of(make_batches(images, seed=4).epoch(0))
    assert labels_of(batches.epoch(0, 2)) == first[2:]
    assert labels_of(batches.epoch(0, 4)) == []


def test_left_out_images_differ_between_epochs(images):
    left_out = set()
    for epoch in range(20):
        labels_seen = [label for labels in labels_of(make_batches(images).epoch(epoch)) for label in labels]
        assert len(labels_seen) == len(set(labels_seen)) == 20
        left_out |= set(range(23)) - set(labels_seen)
    assert len(left_out) > 15


def test_subset_of_the_images(images):
    rows = np.array([2, 3, 5, 7, 11, 13])
    batches = make_batches(images, rows)
    assert {label for labels in labels_of(batches.epoch(0)) for label in labels} < set(rows.tolist())
    assert labels_of(batches) == [[2, 3, 5, 7, 11], [13]]
    assert all(batch.augment == AugmentConfig() for batch in make_batches(images, augment=AugmentConfig(flip=1.0)))
    # Fewer images than a batch make one batch.
    assert [sorted(labels) for labels in labels_of(make_batches(images, rows, size=99).epoch(0))] == [sorted(rows)]
    for invalid in ({"rows": rows[:0]}, {"size": 0}):
        with pytest.raises(ValueError, match="expected at least 1 image and a batch size of at least 1"):
            make_batches(images, **invalid)


def test_bytes_are_converted_to_floats():
    pixels = torch.tensor([0, 51, 255, 102], dtype=torch.uint8).view(1, 2, 2, 1)
    floats = torch.tensor([0.0, 0.2, 1.0, 0.4]).view(1, 1, 2, 2)
    torch.testing.assert_close(pixels_to_float(pixels, 1), floats)
    torch.testing.assert_close(pixels_to_float(pixels, 3), floats.expand(1, 3, 2, 2))
    color = torch.arange(24, dtype=torch.uint8).view(1, 2, 4, 3)
    torch.testing.assert_close(pixels_to_float(color, 3)[0, :, 1, 2], torch.tensor([18, 19, 20]) / 255)

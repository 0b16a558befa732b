"""Batches of pictures: every picture once an epoch, in an order that the seed and the epoch decide."""

import numpy as np
import pytest
import torch

from regard.data import AugmentConfig, ImageBatches, as_numbers, read_images


@pytest.fixture
def images(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (23, 4, 6, 3), np.uint8)
    np.savez(tmp_path / "pictures.npz", x=pixels, y=np.arange(23))
    return read_images([tmp_path / "pictures.npz"], cache=tmp_path / "cache")


def batches_of(images, rows=None, **changes) -> ImageBatches:
    rows = np.arange(len(images)) if rows is None else rows
    return ImageBatches(images, rows, lambda some: images.labels[some], **({"size": 5, "seed": 3} | changes))


def labels_of(batches) -> list[list[int]]:
    return [batch.targets.tolist() for batch in batches]


def test_pictures_and_targets_belong_together(images):
    batches = batches_of(images, augment=AugmentConfig(flip=0.5))
    for batch in batches.epoch(0):
        assert batch.augment.flip == 0.5
        assert batch.pixels.dtype == torch.uint8
        np.testing.assert_array_equal(batch.pixels, images.pixels[batch.targets.numpy()])
        assert (batch.sentences, batch.tokens) == (5, 5)


def test_an_epoch_is_a_function_of_its_number_and_the_seed(images):
    batches = batches_of(images)
    first = labels_of(batches.epoch(0))
    assert first == labels_of(batches_of(images).epoch(0))
    assert first != labels_of(batches.epoch(1))
    assert first != labels_of(batches_of(images, seed=4).epoch(0))
    assert labels_of(batches.epoch(0, 2)) == first[2:]
    assert labels_of(batches.epoch(0, 4)) == []


def test_what_does_not_fill_a_batch_is_another_each_time(images):
    left = set()
    for epoch in range(20):
        found = [label for labels in labels_of(batches_of(images).epoch(epoch)) for label in labels]
        assert len(found) == len(set(found)) == 20
        left |= set(range(23)) - set(found)
    assert len(left) > 15


def test_some_of_the_pictures(images):
    rows = np.array([2, 3, 5, 7, 11, 13])
    batches = batches_of(images, rows)
    assert {label for labels in labels_of(batches.epoch(0)) for label in labels} < set(rows.tolist())
    assert labels_of(batches) == [[2, 3, 5, 7, 11], [13]]
    assert all(batch.augment == AugmentConfig() for batch in batches_of(images, augment=AugmentConfig(flip=1.0)))
    # Fewer than a batch are one.
    assert [sorted(labels) for labels in labels_of(batches_of(images, rows, size=99).epoch(0))] == [sorted(rows)]
    for wrong in ({"rows": rows[:0]}, {"size": 0}):
        with pytest.raises(ValueError, match="there must be some"):
            batches_of(images, **wrong)


def test_bytes_as_numbers():
    pixels = torch.tensor([0, 51, 255, 102], dtype=torch.uint8).view(1, 2, 2, 1)
    numbers = torch.tensor([0.0, 0.2, 1.0, 0.4]).view(1, 1, 2, 2)
    torch.testing.assert_close(as_numbers(pixels, 1), numbers)
    torch.testing.assert_close(as_numbers(pixels, 3), numbers.expand(1, 3, 2, 2))
    colours = torch.arange(24, dtype=torch.uint8).view(1, 2, 4, 3)
    torch.testing.assert_close(as_numbers(colours, 3)[0, :, 1, 2], torch.tensor([18, 19, 20]) / 255)

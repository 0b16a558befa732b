"""Batches of images of one size: bytes until they are on the device, where they are converted and augmented."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from regard.data.batching.pair_batches import Batch
from regard.data.batching.rank_slice import WHOLE, RankSlice
from regard.data.images.augmentation import AugmentConfig
from regard.data.images.image_set import ImageSet


@dataclass(frozen=True, eq=False)
class ImageBatch(Batch):
    """Images as bytes (B, H, W, C), random numbers if the task needs some, and targets; `augment` is the augmentation
    to apply on the device.
    """

    augment: AugmentConfig

    @property
    def pixels(self) -> UInt8[Tensor, "B H W C"]:
        return cast(Tensor, self.inputs[0])

    @property
    def noise(self) -> Float[Tensor, "B noise"]:
        return cast(Tensor, self.inputs[1])


class ImageBatches:
    """Batches of `size` images, all of one shape. Epoch e depends on (seed, e) alone.

    `rows` are the indices of the images to use; `targets` returns the targets of given rows: a label per image, or a
    label per pixel. Each image of a batch gets `noise` uniform random numbers, whatever the number of ranks.
    Images that do not fill a batch at the end of an epoch are left out, different ones in each epoch.

    >>> import tempfile
    >>> from regard.data.images.image_set import read_images
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/few.npz", x=np.zeros((5, 4, 4), np.uint8), y=np.arange(5))
    ...     images = read_images([f"{folder}/few.npz"])
    >>> batches = ImageBatches(images, np.arange(5), lambda rows: images.labels[rows], size=2, seed=0)
    >>> [batch.targets.tolist() for batch in batches.epoch(0)], [batch.targets.tolist() for batch in batches]
    ([[2, 4], [3, 0]], [[0, 1], [2, 3], [4]])
    """

    def __init__(
        self,
        images: ImageSet,
        rows: Int[np.ndarray, "M"],
        targets: Callable[[Int[np.ndarray, "B"]], Int[np.ndarray, "B *pixels"]],
        *,
        size: int,
        seed: int,
        augment: AugmentConfig | None = None,
        noise: int = 0,
    ) -> None:
        if size < 1 or not len(rows):
            raise ValueError(f"expected at least 1 image and a batch size of at least 1, got {len(rows)} and {size}")
        self.images, self.rows, self.targets = images, rows, targets
        self.size, self.seed, self.augment = min(size, len(rows)), seed, augment or AugmentConfig()
        self.noise = noise

    def epoch(self, number: int, start: int = 0, part: RankSlice = WHOLE) -> Iterator[ImageBatch]:
        """The batches of an epoch from index `start` on, or a part of each, in random order."""
        selected, count = part.select([1] * self.size)
        order = np.random.default_rng([self.seed, number]).permutation(self.rows)
        for index in range(start, len(order) // self.size):
            rows = order[index * self.size : (index + 1) * self.size]
            # index + 1: NumPy seeds [seed, number, 0] like [seed, number], which ordered the images.
            batch = self._make_batch(rows, self.augment, [self.seed, number, index + 1], selected)
            yield batch if count else replace(batch, sentences=0, tokens=0)

    def __iter__(self) -> Iterator[ImageBatch]:
        """All images in order, without augmentation; the last batch may be smaller."""
        for begin in range(0, len(self.rows), self.size):
            yield self._make_batch(self.rows[begin : begin + self.size], AugmentConfig(), [begin])

    def _make_batch(
        self,
        rows: Int[np.ndarray, "B"],
        augment: AugmentConfig,
        seed: list[int],
        selected: list[int] | slice = slice(None),
    ) -> ImageBatch:
        """The batch of these rows, or of the selected ones; `seed` is that of the noise."""
        inputs = [self.images.pixels[rows[selected]]]
        if self.noise:
            inputs.append(np.random.default_rng(seed).random((len(rows), self.noise), np.float32)[selected])
        targets, count = torch.from_numpy(self.targets(rows[selected])), len(inputs[0])
        return ImageBatch(tuple(map(torch.from_numpy, inputs)), targets, count, count, augment)


def pixels_to_float(pixels: UInt8[Tensor, "B H W C"], channels: int) -> Float[Tensor, "B channels H W"]:
    """Convert bytes to floats from 0 to 1, channels first; gray images are repeated over all channels.

    >>> pixels_to_float(torch.full((1, 2, 2, 1), 255, dtype=torch.uint8), 3).shape
    torch.Size([1, 3, 2, 2])
    """
    floats = (pixels.float() / 255).permute(0, 3, 1, 2)
    return floats.expand(-1, channels, -1, -1).contiguous() if pixels.shape[3] == 1 else floats.contiguous()

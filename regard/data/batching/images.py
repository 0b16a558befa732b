"""Batches of images, of one size or of different sizes: bytes until they are converted and augmented on the device."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import ClassVar, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from regard.attention.offsets import Offsets
from regard.data.batching.batch import WHOLE, Batch, BatchSampler, RankSlice, split_points
from regard.data.images.augmentation import AugmentConfig, Masks, augment
from regard.data.images.sets import ImageSet, RaggedImages
from regard.errors import RegardError
from regard.layers.patches import PackedImages, patch_coordinates, split_patches


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
    >>> from regard.data.images.sets import read_images
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


class SizeGroup(NamedTuple):
    """Consecutive images of one size in a batch."""

    images: int
    height: int
    width: int


@dataclass(frozen=True, eq=False)
class RaggedImageBatch(Batch):
    """Images of different sizes: their concatenated bytes, the start of each image in patches, and the coordinates
    and grid size of each patch.

    Images of one size are consecutive and are augmented together; `augment` is the augmentation to apply on the device.
    Targets are labels, or masks concatenated like the images.
    """

    groups: tuple[SizeGroup, ...]
    augment: AugmentConfig
    supports_cuda_graph: ClassVar[bool] = False

    def augment_and_pack(self, channels: int, patch: int, masked: bool = False) -> tuple[PackedImages, list[Masks]]:
        """Augment the images and pack them for a model. With `masked`, also returns the masks of each size group.

        >>> images = [np.zeros((4, width, 3), np.uint8) for width in (4, 8, 8)]
        >>> batch = make_ragged_batch(images, np.arange(3), 4, AugmentConfig(flip=0.5))
        >>> batch.groups, batch.augment_and_pack(3, patch=4)[0].grids
        ((SizeGroup(images=1, height=4, width=4), SizeGroup(images=2, height=4, width=8)), ((1, 1), (1, 2), (1, 2)))
        """
        flat, starts, coordinates, sizes = cast(tuple[Tensor, ...], self.inputs)
        areas = [math.prod(group) for group in self.groups]
        file_channels = len(flat) // sum(areas)
        parts = flat.split([file_channels * area for area in areas])
        targets = self.targets.split(areas) if masked else [None] * len(areas)
        patches, masks = [], []
        for group, part, target in zip(self.groups, parts, targets):
            pixels = pixels_to_float(part.view(*group, file_channels), channels)
            augmented = augment(pixels, None, self.augment, None if target is None else target.view(group))
            patches.append(split_patches(augmented.pixels, patch).flatten(0, 1))
            if augmented.masks is not None:
                masks.append(augmented.masks)
        grids = tuple(
            (group.height // patch, group.width // patch) for group in self.groups for _ in range(group.images)
        )
        max_len = max(rows * columns for rows, columns in grids)
        offsets = Offsets(starts, len(coordinates), max_len)
        return PackedImages(torch.cat(patches), offsets, coordinates, sizes, grids), masks

    def split(self, parts: int) -> list[Batch]:
        """Split the batch between images: see `Batch.split`."""
        if parts == 1:
            return [self]
        flat, starts, coordinates, sizes = (x for x in self.inputs if isinstance(x, Tensor))
        heights = torch.tensor([[group.height, group.width] for group in self.groups for _ in range(group.images)])
        areas = heights.prod(1).cumsum(0).tolist()
        pixels = [0, *areas]
        channels, patches = len(flat) // pixels[-1], starts.tolist()
        has_masks = len(self.targets) != len(heights)
        pieces: list[Batch] = []
        for begin, end in pairwise(split_points(patches, parts)):
            patch_rows, pixel_rows = slice(patches[begin], patches[end]), slice(pixels[begin], pixels[end])
            groups: list[SizeGroup] = []
            for height, width in heights[begin:end].tolist():
                if groups and groups[-1][1:] == (height, width):
                    groups[-1] = groups[-1]._replace(images=groups[-1].images + 1)
                else:
                    groups.append(SizeGroup(1, height, width))
            inputs = (
                flat[channels * pixels[begin] : channels * pixels[end]],
                starts[begin : end + 1] - patches[begin],
                coordinates[patch_rows],
                sizes[patch_rows],
            )
            targets = self.targets[pixel_rows if has_masks else slice(begin, end)]
            sentences = max(0, min(end, self.sentences) - begin)
            pieces.append(RaggedImageBatch(inputs, targets, sentences, len(inputs[2]), tuple(groups), self.augment))
        return pieces


class RaggedImageBatches:
    """Batches of at most `budget` tokens: the patches of the images, plus `prefix` tokens per image.

    Epoch e depends on (seed, e) alone. `rows` are the indices of the images to use; `targets` returns the targets of
    given rows: a label per image, or their concatenated masks. Images with similar numbers of patches share a batch.

    >>> import tempfile
    >>> from PIL import Image
    >>> from regard.data.images.sets import read_ragged_images
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files = [f"{folder}/{i}.png" for i in range(4)]
    ...     for i, file in enumerate(files):
    ...         Image.new("L", (8, 4 + 4 * i)).save(file)
    ...     images = read_ragged_images(files, patch=4)
    >>> batches = RaggedImageBatches(images, np.arange(4), lambda rows: rows, budget=8, prefix=0, seed=0)
    >>> [batch.targets.tolist() for batch in batches.epoch(0)], [batch.targets.tolist() for batch in batches]
    ([[3], [2], [0, 1]], [[0, 1], [2], [3]])
    """

    def __init__(
        self,
        images: RaggedImages,
        rows: Int[np.ndarray, "M"],
        targets: Callable[[Int[np.ndarray, "B"]], Int[np.ndarray, "targets"]],
        *,
        budget: int,
        prefix: int,
        seed: int,
        augment: AugmentConfig | None = None,
    ) -> None:
        if not len(rows):
            raise ValueError("expected at least 1 image, got 0")
        self.images, self.rows, self.targets = images, rows, targets
        self.seed, self.augment = seed, augment or AugmentConfig()
        self._lengths = prefix + (images.sizes[rows] // images.patch).prod(1)
        max_len = int(self._lengths.max())
        if max_len > budget:
            raise RegardError(
                f"An image has {max_len} tokens, but a batch has only {budget}.",
                "Raise train.batch_tokens, or lower data.longest.",
            )
        self.mean_tokens = float(self._lengths.mean())
        """mean number of tokens per image"""
        self._sampler = BatchSampler(self.mean_tokens, budget=budget, max_len=max_len)

    def epoch(self, number: int, start: int = 0, part: RankSlice = WHOLE) -> Iterator[RaggedImageBatch]:
        """The batches of an epoch from index `start` on, or a part of each. Skipped batches are not built."""
        for indices in self._sampler.sample(np.random.default_rng([self.seed, number]), self._lengths)[start:]:
            selected, count = part.select(self._lengths[indices].tolist())
            batch = self._make_batch([indices[i] for i in selected], self.augment)
            yield batch if count else replace(batch, sentences=0, tokens=0)

    def __iter__(self) -> Iterator[RaggedImageBatch]:
        """All images by increasing size, without augmentation."""
        order = np.argsort(self._lengths, kind="stable")
        ends = np.cumsum(self._lengths[order])
        while len(order):
            count = int(np.searchsorted(ends, self._sampler.budget, side="right"))
            yield self._make_batch(order[:count].tolist(), AugmentConfig())
            order, ends = order[count:], ends[count:] - ends[count - 1]

    def smallest_batch(self) -> RaggedImageBatch:
        """A batch of the image with the shortest side, to check that the augmentation works for all sizes."""
        return self._make_batch([int(self.images.sizes[self.rows].min(1).argmin())], self.augment)

    def _make_batch(self, indices: list[int], augment: AugmentConfig) -> RaggedImageBatch:
        rows = self.rows[indices]
        rows = rows[np.lexsort(self.images.sizes[rows].T)]  # images of one size together
        return make_ragged_batch(self.images.select(rows), self.targets(rows), self.images.patch, augment)


def make_ragged_batch(
    images: list[UInt8[np.ndarray, "_ _ C"]], targets: Int[np.ndarray, "targets"], patch: int, augment: AugmentConfig
) -> RaggedImageBatch:
    """Make a batch of images whose sides are multiples of `patch`; images of one size must be consecutive."""
    sizes = [image.shape[:2] for image in images]
    groups = tuple(SizeGroup(len(list(group)), *size) for size, group in groupby(sizes))
    patches = [_cached_coordinates(height // patch, width // patch) for height, width in sizes]
    lengths = np.array([0, *(len(coordinates) for coordinates, _ in patches)], np.int32)
    inputs = (
        torch.from_numpy(np.concatenate([image.reshape(-1) for image in images])),
        torch.from_numpy(lengths.cumsum(dtype=np.int32)),
        torch.cat([coordinates for coordinates, _ in patches]),
        torch.cat([grid_sizes for _, grid_sizes in patches]),
    )
    return RaggedImageBatch(inputs, torch.from_numpy(targets), len(images), len(inputs[2]), groups, augment)


@lru_cache(maxsize=4096)
def _cached_coordinates(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return patch_coordinates((rows, columns))

"""Pictures of many sizes in batches: as many as a number of tokens allows, packed, without any padding."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import ClassVar, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from regard.attention.offsets import Offsets
from regard.data.batching.batch_sampler import Planner
from regard.data.batching.image_batches import as_numbers
from regard.data.batching.pair_batches import Batch
from regard.data.images.augmentation import AugmentConfig, augment
from regard.data.images.image_ops import Masks
from regard.data.images.image_set import RaggedImages
from regard.errors import RegardError
from regard.layers.patches import PackedImages, cut, whereabouts


class Group(NamedTuple):
    """Pictures of one size that follow each other in a batch."""

    pictures: int
    height: int
    width: int


@dataclass(frozen=True, eq=False)
class RaggedBatch(Batch):
    """Pictures of many sizes: their bytes, one after the other; where each begins; where each patch lies in which grid.

    Pictures of one size stand together, and are changed together: `augment` is what is done to them. Targets are labels
    or masks; these lie one after the other, like the pictures.
    """

    groups: tuple[Group, ...]
    augment: AugmentConfig
    repeats: ClassVar[bool] = False

    def changed(self, channels: int, patch: int, masked: bool = False) -> tuple[PackedImages, list[Masks]]:
        """The pictures as a model takes them, changed at random; and, if targets are masks, those of each group.

        >>> pictures = [np.zeros((4, width, 3), np.uint8) for width in (4, 8, 8)]
        >>> batch = batch_of(pictures, np.arange(3), 4, AugmentConfig(flip=0.5))
        >>> batch.groups, batch.changed(3, patch=4)[0].grids
        ((Group(pictures=1, height=4, width=4), Group(pictures=2, height=4, width=8)), ((1, 1), (1, 2), (1, 2)))
        """
        flat, starts, places, sizes = cast(tuple[Tensor, ...], self.inputs)
        areas = [math.prod(group) for group in self.groups]
        own = len(flat) // sum(areas)  # channels of the files
        parts = flat.split([own * area for area in areas])
        targets = self.targets.split(areas) if masked else [None] * len(areas)
        patches, masks = [], []
        for group, part, target in zip(self.groups, parts, targets):
            pixels = as_numbers(part.view(*group, own), channels)
            changed = augment(pixels, None, self.augment, None if target is None else target.view(group))
            patches.append(cut(changed.pixels, patch).flatten(0, 1))
            if changed.masks is not None:
                masks.append(changed.masks)
        grids = tuple((one.height // patch, one.width // patch) for one in self.groups for _ in range(one.pictures))
        longest = max(rows * columns for rows, columns in grids)
        return PackedImages(torch.cat(patches), Offsets(starts, len(places), longest), places, sizes, grids), masks


class RaggedBatches:
    """Batches of at most `budget` tokens: the patches of pictures and, of each, `prefix` more.

    Epoch e is a function of (seed, e) alone. `rows` are the pictures that there are, and `targets` gives what should
    come out for some of these: a label each, or their masks, one after the other. Pictures that have about as many
    patches come together.

    >>> import tempfile
    >>> from PIL import Image
    >>> from regard.data.images.image_set import read_ragged
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files = [f"{folder}/{i}.png" for i in range(4)]
    ...     for i, file in enumerate(files):
    ...         Image.new("L", (8, 4 + 4 * i)).save(file)
    ...     images = read_ragged(files, patch=4)
    >>> batches = RaggedBatches(images, np.arange(4), lambda rows: rows, budget=8, prefix=0, seed=0)
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
            raise ValueError("there must be some pictures")
        self.images, self.rows, self.targets = images, rows, targets
        self.seed, self.augment = seed, augment or AugmentConfig()
        self._lengths = prefix + (images.sizes[rows] // images.patch).prod(1)
        most = int(self._lengths.max())
        if most > budget:
            raise RegardError(
                f"A picture has {most} tokens, but a batch only {budget}.",
                "Raise train.batch_tokens, or lower data.longest.",
            )
        self.usual = float(self._lengths.mean())
        """tokens of a picture, on average"""
        self._planner = Planner(self.usual, budget=budget, max_len=most)

    def epoch(self, number: int, start: int = 0) -> Iterator[RaggedBatch]:
        """The batches of an epoch, from number `start` on: those before it cost nothing but the plan."""
        for chosen in self._planner.plan(np.random.default_rng([self.seed, number]), self._lengths)[start:]:
            yield self._batch(chosen, self.augment)

    def __iter__(self) -> Iterator[RaggedBatch]:
        """All pictures as they are, the small ones first."""
        order = np.argsort(self._lengths, kind="stable")
        ends = np.cumsum(self._lengths[order])
        while len(order):
            count = int(np.searchsorted(ends, self._planner.budget, side="right"))
            yield self._batch(order[:count].tolist(), AugmentConfig())
            order, ends = order[count:], ends[count:] - ends[count - 1]

    def smallest(self) -> RaggedBatch:
        """A batch of the picture with the shortest side, which is the first to be too small for something."""
        return self._batch([int(self.images.sizes[self.rows].min(1).argmin())], self.augment)

    def _batch(self, chosen: list[int], augment: AugmentConfig) -> RaggedBatch:
        rows = self.rows[chosen]
        rows = rows[np.lexsort(self.images.sizes[rows].T)]  # those of one size together
        return batch_of(self.images.some(rows), self.targets(rows), self.images.patch, augment)


def batch_of(
    pictures: list[UInt8[np.ndarray, "_ _ C"]], targets: Int[np.ndarray, "targets"], patch: int, augment: AugmentConfig
) -> RaggedBatch:
    """A batch of pictures whose sides are whole patches; those of one size stand together."""
    sizes = [one.shape[:2] for one in pictures]
    groups = tuple(Group(len(list(alike)), *size) for size, alike in groupby(sizes))
    where = [_whereabouts(height // patch, width // patch) for height, width in sizes]
    lengths = np.array([0, *(len(places) for places, _ in where)], np.int32)
    inputs = (
        torch.from_numpy(np.concatenate([one.reshape(-1) for one in pictures])),
        torch.from_numpy(lengths.cumsum(dtype=np.int32)),
        torch.cat([places for places, _ in where]),
        torch.cat([sizes for _, sizes in where]),
    )
    return RaggedBatch(inputs, torch.from_numpy(targets), len(pictures), len(inputs[2]), groups, augment)


@lru_cache(maxsize=4096)
def _whereabouts(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return whereabouts((rows, columns))

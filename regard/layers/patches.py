"""Images to tokens: squares of pixels, cut, flattened and projected (D1); batches of one size, and of many sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.offsets import Offsets
from regard.errors import RegardError

PatchKind = Literal["linear", "convolution", "stem"]
Grid = tuple[int, int]


@dataclass(frozen=True, eq=False)
class PackedImages:
    """B images of any sizes as one flat run of patches: their pixels, where each image begins, where each patch was.

    >>> batch = pack_images([torch.zeros(3, 8, 12), torch.zeros(3, 4, 4)], patch=4)
    >>> batch.grids, batch.pixels.shape, batch.places[:4].tolist()
    (((2, 3), (1, 1)), torch.Size([7, 48]), [[0, 0], [0, 1], [0, 2], [1, 0]])
    """

    pixels: Float[Tensor, "N P"]
    offsets: Offsets
    places: Int[Tensor, "N 2"]
    """row and column of each patch in its image"""
    sizes: Int[Tensor, "N 2"]
    """rows and columns of the image that each patch belongs to"""
    grids: tuple[Grid, ...]
    """rows and columns of each image: plain numbers, so that nobody has to wait for a GPU to learn them"""

    def __len__(self) -> int:
        return len(self.grids)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PackedImages":
        """The same batch on another device."""
        return self._each(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedImages":
        """The same batch in page-locked memory, from where a GPU can fetch it while the CPU goes on."""
        return self._each(Tensor.pin_memory)

    def _each(self, change) -> "PackedImages":
        offsets = Offsets(change(self.offsets.starts), self.offsets.total, self.offsets.max_len)
        return PackedImages(change(self.pixels), offsets, change(self.places), change(self.sizes), self.grids)


def pack_images(images: Sequence[Float[Tensor, "C _ _"]], patch: int) -> PackedImages:
    """Cut images of any sizes into patches and lay these end to end, row by row.

    >>> len(pack_images([torch.zeros(1, 4, 8), torch.zeros(1, 4, 4)], patch=4))
    2
    """
    grids = tuple(grid_of(image.shape[-2:], patch) for image in images)
    lengths = torch.tensor([0, *(rows * columns for rows, columns in grids)])
    starts = lengths.cumsum(0)
    places, sizes = zip(*map(whereabouts, grids))
    return PackedImages(
        torch.cat([cut(image[None], patch)[0] for image in images]),
        Offsets(starts.int(), int(starts[-1]), int(lengths.max())),
        torch.cat(places),
        torch.cat(sizes),
        grids,
    )


def grid_of(size: Sequence[int], patch: int) -> Grid:
    """How many rows and columns of patches an image of this height and width has.

    >>> grid_of((32, 48), 16)
    (2, 3)
    """
    height, width = size
    if patch < 1:
        raise RegardError(f"A patch of {patch}×{patch} pixels has none.", "Let model.patch be at least 1.")
    if height % patch or width % patch or not height or not width:
        raise RegardError(
            f"An image of {height}×{width} pixels does not divide into patches of {patch}×{patch}.",
            f"Resize it so that both sides are multiples of {patch}, or change model.patch.",
        )
    return height // patch, width // patch


def whereabouts(grid: Grid, device: torch.device | None = None) -> tuple[Int[Tensor, "T 2"], Int[Tensor, "T 2"]]:
    """For each patch, row by row, its row and column; and how many of these there are.

    >>> places, sizes = whereabouts((1, 2))
    >>> places.tolist(), sizes.tolist()
    ([[0, 0], [0, 1]], [[1, 2], [1, 2]])
    """
    rows, columns = (torch.arange(count, dtype=torch.int32, device=device) for count in grid)
    places = torch.stack((rows[:, None].expand(grid), columns.expand(grid)), dim=-1).flatten(0, 1)
    return places, torch.stack([torch.full_like(places[:, 0], count) for count in grid], dim=-1)


def cut(images: Float[Tensor, "B C H W"], patch: int) -> Float[Tensor, "B T P"]:
    """Patches row by row; the pixels of each, channel by channel, row by row.

    >>> cut(torch.arange(8.0).view(1, 1, 2, 4), 2)[0]
    tensor([[0., 1., 4., 5.],
            [2., 3., 6., 7.]])
    """
    rows, columns = grid_of(images.shape[-2:], patch)
    split = images.unflatten(3, (columns, patch)).unflatten(2, (rows, patch))  # B C R p K p
    return split.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def joined(patches: Float[Tensor, "B T P"], grid: Grid, patch: int) -> Float[Tensor, "B C H W"]:
    """The images that were cut.

    >>> image = torch.randn(1, 3, 4, 6)
    >>> torch.equal(joined(cut(image, 2), (2, 3), 2), image)
    True
    """
    rows, columns = grid
    split = patches.unflatten(2, (-1, patch, patch)).unflatten(1, (rows, columns))  # B R K C p p
    return split.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def rows_of(x: Float[Tensor, "B T E"], chosen: Int[Tensor, "B S"]) -> Float[Tensor, "B S E"]:
    """Some rows of each sequence, by their numbers.

    >>> rows_of(torch.arange(6.0).view(2, 3, 1), torch.tensor([[2], [0]])).flatten()
    tensor([2., 3.])
    """
    return x.gather(1, chosen[:, :, None].expand(-1, -1, x.shape[2]))


class Patches(nn.Module):
    """A token of each patch: its pixels through a linear map, which is also a convolution whose steps are patches.

    The two give the same numbers. The third kind is a stem, convolutions of 3×3 that halve the sides until a patch is
    one cell (Xiao et al. 2021): there a token knows of its neighbours' pixels.

    >>> Patches(3, 16, 4)(torch.zeros(2, 3, 8, 12)).shape
    torch.Size([2, 6, 16])
    """

    def __init__(self, channels: int, width: int, patch: int, kind: PatchKind = "linear") -> None:
        super().__init__()
        self.patch, self.channels, self.kind = patch, channels, kind
        self.project: nn.Module
        if kind == "linear":
            self.project = nn.Linear(channels * patch * patch, width)
        elif kind == "convolution":
            self.project = nn.Conv2d(channels, width, patch, stride=patch)
        else:
            self.project = _stem(channels, width, patch)

    def forward(self, images: Float[Tensor, "B C H W"] | PackedImages) -> Float[Tensor, "*n E"]:
        """(B, T, E) of images of one size, (N, E) of packed ones."""
        if isinstance(images, PackedImages):
            return self._packed(images)
        if self.kind == "linear":
            return self.project(cut(images, self.patch))
        grid_of(images.shape[-2:], self.patch)  # a convolution would pass over what is left at the border
        return self.project(images).flatten(2).mT

    def of_pixels(self, pixels: Float[Tensor, "*n P"]) -> Float[Tensor, "*n E"]:
        """Tokens of patches that were cut already; a stem, which looks at neighbours, cannot."""
        if self.kind == "linear":
            return self.project(pixels)
        cells = pixels.flatten(0, -2).unflatten(1, (self.channels, self.patch, self.patch))
        return self.project(cells).view(*pixels.shape[:-1], -1)

    def _packed(self, images: PackedImages) -> Float[Tensor, "N E"]:
        if self.kind != "stem":
            return self.of_pixels(images.pixels)
        # Each as the picture that it was; those of one size that follow each other at once.
        groups = [(grid, len(list(alike))) for grid, alike in groupby(images.grids)]
        parts = images.pixels.split([count * rows * columns for (rows, columns), count in groups])
        pictures = (
            joined(part.unflatten(0, (count, -1)), grid, self.patch) for part, (grid, count) in zip(parts, groups)
        )
        return torch.cat([self(some).flatten(0, 1) for some in pictures])


def _stem(channels: int, width: int, patch: int) -> nn.Sequential:
    halvings = patch.bit_length() - 1
    if patch != 1 << halvings:
        raise RegardError(
            f"A stem of convolutions halves the sides, and cannot make patches of {patch}×{patch}.",
            "Let model.patch be a power of 2, or model.patches linear.",
        )
    layers: list[nn.Module] = []
    for left in reversed(range(halvings)):
        wide = max(8, width >> left)
        # Normed image by image, so that an image's tokens do not depend on what else is in the batch.
        layers += [nn.Conv2d(channels, wide, 3, stride=2, padding=1), nn.GroupNorm(1, wide), nn.GELU()]
        channels = wide
    return nn.Sequential(*layers, nn.Conv2d(channels, width, 1))


def put_before(
    first: Float[Tensor, "K E"] | Int[Tensor, "K E"],
    x: Float[Tensor, "*n E"] | Int[Tensor, "*n E"],
    offsets: Offsets | None,
) -> tuple[Float[Tensor, "*m E"] | Int[Tensor, "*m E"], Offsets | None]:
    """The same K rows before each sequence of (B, T, E) or, with offsets, of a packed run; and the new offsets.

    >>> x, offsets = put_before(torch.zeros(1, 1), torch.ones(5, 1), Offsets.of(torch.tensor([0, 2, 5])))
    >>> x[:, 0], offsets.starts
    (tensor([0., 1., 1., 0., 1., 1., 1.]), tensor([0, 3, 7]))
    """
    first, count = first.to(x.dtype), len(first)
    if offsets is None:
        return torch.cat((first.expand(x.shape[0], -1, -1), x), dim=1), None
    wide, rows = widened(offsets, count), _rows_after(offsets, count)
    own = (wide.starts[:-1, None] + torch.arange(count, device=x.device)).flatten()
    # Every row is written once, so that the way back is a plain choice of rows.
    both = torch.cat((first.repeat(len(offsets.starts) - 1, 1), x))
    return x.new_empty(wide.total, x.shape[1]).index_copy(0, torch.cat((own.long(), rows)), both), wide


def take_away(x: Float[Tensor, "*n E"], count: int, offsets: Offsets | None) -> Float[Tensor, "*m E"]:
    """Each sequence without the `count` rows that were put before it; `offsets` are those without them.

    >>> take_away(torch.arange(7.0)[:, None], 1, Offsets.of(torch.tensor([0, 2, 5])))[:, 0]
    tensor([1., 2., 4., 5., 6.])
    """
    if not count:
        return x
    return x[:, count:] if offsets is None else x.index_select(0, _rows_after(offsets, count))


def widened(offsets: Offsets, count: int) -> Offsets:
    """The offsets of sequences that have `count` rows more.

    >>> widened(Offsets.of(torch.tensor([0, 2, 5])), 1).starts
    tensor([0, 3, 7])
    """
    starts, sequences = offsets.starts, len(offsets.starts) - 1
    starts = starts + torch.arange(sequences + 1, device=starts.device, dtype=starts.dtype) * count
    return Offsets(starts, offsets.total + sequences * count, offsets.max_len + count)


def _rows_after(offsets: Offsets, count: int) -> Int[Tensor, "N"]:
    """Where each row comes to lie when `count` rows are put before each sequence."""
    return torch.arange(offsets.total, device=offsets.starts.device) + (offsets.sequences + 1) * count

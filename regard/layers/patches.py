"""Patch embedding of images (Dosovitskiy et al. 2021, section 3.1), for batches of one size or of many sizes."""

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
    """B images of any sizes as one packed sequence of patches, with start offsets and patch coordinates.

    >>> batch = pack_images([torch.zeros(3, 8, 12), torch.zeros(3, 4, 4)], patch=4)
    >>> batch.grids, batch.pixels.shape, batch.coordinates[:4].tolist()
    (((2, 3), (1, 1)), torch.Size([7, 48]), [[0, 0], [0, 1], [0, 2], [1, 0]])
    """

    pixels: Float[Tensor, "N P"]
    offsets: Offsets
    coordinates: Int[Tensor, "N 2"]
    """row and column of each patch in its image"""
    sizes: Int[Tensor, "N 2"]
    """for each patch, the rows and columns of its image"""
    grids: tuple[Grid, ...]
    """rows and columns of each image, as Python integers: no device synchronization to read them"""

    def __len__(self) -> int:
        return len(self.grids)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PackedImages":
        """The same batch on another device."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedImages":
        """The same batch in pinned memory, for asynchronous copies to a GPU."""
        return self._map(Tensor.pin_memory)

    def _map(self, function) -> "PackedImages":
        offsets = Offsets(function(self.offsets.starts), self.offsets.total, self.offsets.max_len)
        return PackedImages(
            function(self.pixels), offsets, function(self.coordinates), function(self.sizes), self.grids
        )


def pack_images(images: Sequence[Float[Tensor, "C _ _"]], patch: int) -> PackedImages:
    """Split images of any sizes into patches, row by row, and concatenate them.

    >>> len(pack_images([torch.zeros(1, 4, 8), torch.zeros(1, 4, 4)], patch=4))
    2
    """
    grids = tuple(compute_grid(image.shape[-2:], patch) for image in images)
    lengths = torch.tensor([0, *(rows * columns for rows, columns in grids)])
    starts = lengths.cumsum(0)
    coordinates, sizes = zip(*map(patch_coordinates, grids))
    return PackedImages(
        torch.cat([split_patches(image[None], patch)[0] for image in images]),
        Offsets(starts.int(), int(starts[-1]), int(lengths.max())),
        torch.cat(coordinates),
        torch.cat(sizes),
        grids,
    )


def compute_grid(size: Sequence[int], patch: int) -> Grid:
    """Number of rows and columns of patches in an image of this (height, width).

    >>> compute_grid((32, 48), 16)
    (2, 3)
    """
    height, width = size
    if patch < 1:
        raise RegardError(f"The patch size must be at least 1 (got {patch}).", "Change model.patch.")
    if height % patch or width % patch or not height or not width:
        raise RegardError(
            f"An image of {height}×{width} pixels does not divide into patches of {patch}×{patch}.",
            f"Resize it so that both sides are multiples of {patch}, or change model.patch.",
        )
    return height // patch, width // patch


def patch_coordinates(grid: Grid, device: torch.device | None = None) -> tuple[Int[Tensor, "T 2"], Int[Tensor, "T 2"]]:
    """Row and column of each patch of a grid, row by row, and the size of the grid repeated for each patch.

    >>> coordinates, sizes = patch_coordinates((1, 2))
    >>> coordinates.tolist(), sizes.tolist()
    ([[0, 0], [0, 1]], [[1, 2], [1, 2]])
    """
    rows, columns = (torch.arange(count, dtype=torch.int32, device=device) for count in grid)
    coordinates = torch.stack((rows[:, None].expand(grid), columns.expand(grid)), dim=-1).flatten(0, 1)
    return coordinates, torch.stack([torch.full_like(coordinates[:, 0], count) for count in grid], dim=-1)


def split_patches(images: Float[Tensor, "B C H W"], patch: int) -> Float[Tensor, "B T P"]:
    """Split images into flattened patches: patches in row-major order, the values of each ordered C, H, W.

    >>> split_patches(torch.arange(8.0).view(1, 1, 2, 4), 2)[0]
    tensor([[0., 1., 4., 5.],
            [2., 3., 6., 7.]])
    """
    rows, columns = compute_grid(images.shape[-2:], patch)
    split = images.unflatten(3, (columns, patch)).unflatten(2, (rows, patch))  # B C R p K p
    return split.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def join_patches(patches: Float[Tensor, "B T P"], grid: Grid, patch: int) -> Float[Tensor, "B C H W"]:
    """Inverse of `split_patches`: images from their patches.

    >>> image = torch.randn(1, 3, 4, 6)
    >>> torch.equal(join_patches(split_patches(image, 2), (2, 3), 2), image)
    True
    """
    rows, columns = grid
    split = patches.unflatten(2, (-1, patch, patch)).unflatten(1, (rows, columns))  # B R K C p p
    return split.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def gather_rows(x: Float[Tensor, "B T E"], indices: Int[Tensor, "B S"]) -> Float[Tensor, "B S E"]:
    """Select rows of each sequence by their indices.

    >>> gather_rows(torch.arange(6.0).view(2, 3, 1), torch.tensor([[2], [0]])).flatten()
    tensor([2., 3.])
    """
    return x.gather(1, indices[:, :, None].expand(-1, -1, x.shape[2]))


class PatchEmbedding(nn.Module):
    """Project each patch to a token: by a linear layer on its pixels, by a convolution, or by a convolutional stem.

    A convolution whose kernel and stride are the patch size equals the linear layer. The stem is a stack of 3×3
    convolutions with stride 2 (Xiao et al. 2021), so that a token also depends on pixels of neighboring patches.

    >>> PatchEmbedding(3, 16, 4)(torch.zeros(2, 3, 8, 12)).shape
    torch.Size([2, 6, 16])
    """

    def __init__(self, channels: int, width: int, patch: int, kind: PatchKind = "linear", bias: bool = True) -> None:
        super().__init__()
        self.patch, self.channels, self.kind = patch, channels, kind
        self.project: nn.Module
        if kind == "linear":
            self.project = nn.Linear(channels * patch * patch, width, bias=bias)
        elif kind == "convolution":
            self.project = nn.Conv2d(channels, width, patch, stride=patch, bias=bias)
        else:
            self.project = _make_stem(channels, width, patch)

    def forward(self, images: Float[Tensor, "B C H W"] | PackedImages) -> Float[Tensor, "*n E"]:
        """(B, T, E) for images of one size, (N, E) for packed images."""
        if isinstance(images, PackedImages):
            return self._embed_packed(images)
        if self.kind == "linear":
            return self.project(split_patches(images, self.patch))
        # Raise if the size is not a multiple of the patch size: a convolution would silently drop the remainder.
        compute_grid(images.shape[-2:], self.patch)
        return self.project(images).flatten(2).mT

    def project_patches(self, pixels: Float[Tensor, "*n P"]) -> Float[Tensor, "*n E"]:
        """Project flattened patches; not for a stem, which needs the neighboring patches."""
        if self.kind == "linear":
            return self.project(pixels)
        cells = pixels.flatten(0, -2).unflatten(1, (self.channels, self.patch, self.patch))
        return self.project(cells).view(*pixels.shape[:-1], -1)

    def _embed_packed(self, images: PackedImages) -> Float[Tensor, "N E"]:
        if self.kind != "stem":
            return self.project_patches(images.pixels)
        # Rebuild the images; consecutive images of one size form one batch.
        groups = [(grid, len(list(group))) for grid, group in groupby(images.grids)]
        parts = images.pixels.split([count * rows * columns for (rows, columns), count in groups])
        batches = (
            join_patches(part.unflatten(0, (count, -1)), grid, self.patch) for part, (grid, count) in zip(parts, groups)
        )
        return torch.cat([self(batch).flatten(0, 1) for batch in batches])


def _make_stem(channels: int, width: int, patch: int) -> nn.Sequential:
    halvings = patch.bit_length() - 1
    if patch != 1 << halvings:
        raise RegardError(
            f"A convolutional stem needs a patch size that is a power of 2 (got {patch}).",
            "Change model.patch, or set model.patches to linear.",
        )
    layers: list[nn.Module] = []
    for remaining in reversed(range(halvings)):
        hidden = max(8, width >> remaining)
        # GroupNorm, not BatchNorm: the tokens of an image must not depend on the rest of the batch.
        layers += [nn.Conv2d(channels, hidden, 3, stride=2, padding=1), nn.GroupNorm(1, hidden), nn.GELU()]
        channels = hidden
    return nn.Sequential(*layers, nn.Conv2d(channels, width, 1))


def prepend_prefix(
    prefix: Float[Tensor, "K E"] | Int[Tensor, "K E"],
    x: Float[Tensor, "*n E"] | Int[Tensor, "*n E"],
    offsets: Offsets | None,
) -> tuple[Float[Tensor, "*m E"] | Int[Tensor, "*m E"], Offsets | None]:
    """Prepend the same K rows to each sequence of (B, T, E) or, with offsets, to each packed sequence.

    Returns the longer sequences and their offsets.

    >>> x, offsets = prepend_prefix(torch.zeros(1, 1), torch.ones(5, 1), Offsets.from_starts(torch.tensor([0, 2, 5])))
    >>> x[:, 0], offsets.starts
    (tensor([0., 1., 1., 0., 1., 1., 1.]), tensor([0, 3, 7]))
    """
    prefix, count = prefix.to(x.dtype), len(prefix)
    if offsets is None:
        return torch.cat((prefix.expand(x.shape[0], -1, -1), x), dim=1), None
    new_offsets, rows = extend_offsets(offsets, count), _shift_rows(offsets, count)
    prefix_rows = (new_offsets.starts[:-1, None] + torch.arange(count, device=x.device)).flatten()
    # Every row is written once, so that the backward pass is a plain index_select.
    values = torch.cat((prefix.repeat(len(offsets.starts) - 1, 1), x))
    output = x.new_empty(new_offsets.total, x.shape[1])
    return output.index_copy(0, torch.cat((prefix_rows.long(), rows)), values), new_offsets


def remove_prefix(x: Float[Tensor, "*n E"], count: int, offsets: Offsets | None) -> Float[Tensor, "*m E"]:
    """Remove the first `count` rows of each sequence; `offsets` are those of the result.

    >>> remove_prefix(torch.arange(7.0)[:, None], 1, Offsets.from_starts(torch.tensor([0, 2, 5])))[:, 0]
    tensor([1., 2., 4., 5., 6.])
    """
    if not count:
        return x
    return x[:, count:] if offsets is None else x.index_select(0, _shift_rows(offsets, count))


def extend_offsets(offsets: Offsets, count: int) -> Offsets:
    """Offsets of sequences that are `count` rows longer.

    >>> extend_offsets(Offsets.from_starts(torch.tensor([0, 2, 5])), 1).starts
    tensor([0, 3, 7])
    """
    starts, sequences = offsets.starts, len(offsets.starts) - 1
    starts = starts + torch.arange(sequences + 1, device=starts.device, dtype=starts.dtype) * count
    return Offsets(starts, offsets.total + sequences * count, offsets.max_len + count)


def _shift_rows(offsets: Offsets, count: int) -> Int[Tensor, "N"]:
    """New index of each row after `count` rows are prepended to each sequence."""
    return torch.arange(offsets.total, device=offsets.starts.device) + (offsets.sequences + 1) * count

"""Images to tokens: squares of pixels, cut, flattened and projected (D1); batches of one size, and of many sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    places = [places_of(grid) for grid in grids]
    sizes = [torch.tensor(grid, dtype=torch.int32).expand(len(place), 2) for grid, place in zip(grids, places)]
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
    if height % patch or width % patch or not height or not width:
        raise RegardError(
            f"An image of {height}×{width} pixels does not divide into patches of {patch}×{patch}.",
            f"Resize it so that both sides are multiples of {patch}, or change model.patch.",
        )
    return height // patch, width // patch


def places_of(grid: Grid, device: torch.device | None = None) -> Int[Tensor, "T 2"]:
    """Row and column of each patch, row by row."""
    rows, columns = (torch.arange(count, dtype=torch.int32, device=device) for count in grid)
    return torch.stack((rows[:, None].expand(grid), columns.expand(grid)), dim=-1).flatten(0, 1)


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


class Patches(nn.Module):
    """A token of each patch: its pixels through a linear map, which is also a convolution whose steps are patches.

    >>> Patches(3, 16, 4)(torch.zeros(2, 3, 8, 12)).shape
    torch.Size([2, 6, 16])
    """

    def __init__(self, channels: int, width: int, patch: int, kind: PatchKind = "linear") -> None:
        super().__init__()
        self.patch, self.channels, self.kind = patch, channels, kind
        self.project: nn.Module
        if kind == "linear":
            self.project = nn.Linear(channels * patch * patch, width)
        else:
            self.project = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B T E"]:
        if self.kind == "linear":
            return self.project(cut(images, self.patch))
        grid_of(images.shape[-2:], self.patch)  # a convolution would pass over what is left at the border
        return self.project(images).flatten(2).mT

"""Tokens to vectors: the same token, the same vector; positions added; one place for the scale. Images likewise."""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.offsets import Offsets
from regard.errors import RegardError
from regard.layers.dropout import Dropout
from regard.layers.patches import (
    Grid,
    PackedImages,
    Patches,
    PatchKind,
    cut,
    grid_of,
    joined,
    put_before,
    rows_of,
    whereabouts,
)
from regard.layers.positions import (
    LearnedGrid,
    PositionKind,
    RotaryGrid,
    RotaryTables,
    SinusoidalGrid,
    make_positions,
)

Images = Float[Tensor, "B C H W"] | PackedImages
GridPositionKind = Literal["learned", "sinusoidal", "rotary", "none"]


class Embedding(nn.Module):
    """A learned vector a token, times the root of the width, plus the code of its position (C1, C2).

    Families differ in what else there is: no scale (`scaled=False`), a vector for each of several `segments` (BERT's
    first and second text), a norm after the sum. Under autocast the sums that blocks add to are float32 or, if
    `narrow`, as narrow as its products. That is safe where every sum is normed, so that no rounding outlives its layer.

    >>> Embedding(100, 16)(torch.tensor([4, 5]), torch.tensor([0, 1])).shape
    torch.Size([2, 16])
    """

    def __init__(
        self,
        vocab: int,
        width: int,
        positions: PositionKind = "sinusoidal",
        max_len: int = 256,
        dropout: float = 0.0,
        tokens: nn.Embedding | None = None,
        *,
        scaled: bool = True,
        offset: int = 0,
        segments: int = 0,
        norm: nn.Module | None = None,
        narrow: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = tokens if tokens is not None else nn.Embedding(vocab, width)
        # So that the scaled input has unit variance and a tied output layer begins with small logits.
        std = width**-0.5 if scaled else 0.02
        if tokens is None:
            nn.init.normal_(self.tokens.weight, std=std)
        self.positions = make_positions(positions, width, max_len, offset)
        self.segments = nn.Embedding(segments, width) if segments else None
        if self.segments is not None:
            nn.init.normal_(self.segments.weight, std=std)
        self.norm = norm if norm is not None else nn.Identity()
        self.scale = width**0.5 if scaled else 1.0
        self.dropout = Dropout(dropout)
        self.narrow = narrow

    def forward(
        self,
        ids: Int[Tensor, "*n"],
        positions: Int[Tensor, "*n"],
        longest: int | torch.SymInt | None = None,
        segments: Int[Tensor, "*n"] | None = None,
    ) -> Float[Tensor, "*n E"]:
        """`longest` bounds the positions where the caller knows it, which spares asking the device."""
        x = self.tokens(ids) * self.scale
        if self.segments is not None:
            x = x + self.segments(segments if segments is not None else torch.zeros_like(ids))
        if self.positions is not None:
            self.positions.reserve(longest if longest is not None else int(positions.max()) + 1)
            x = x + self.positions(positions).to(x.dtype)
        x = self.dropout(self.norm(x))
        if self.narrow and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return x


class ImageTokens(NamedTuple):
    """The tokens of images: (B, T, E) if these are of one size; packed, (N, E), and where each image begins."""

    x: Float[Tensor, "*n E"]
    offsets: Offsets | None
    rotary: RotaryTables | None
    """cos and sin for q and k, where positions are rotary"""


class ImageEmbedding(nn.Module):
    """A token of each patch plus the code of its position, and before them `prefix` learned tokens (D1, D2).

    Pixels lie between 0 and 1: `mean` and `std` are applied here and nowhere else. `grid` is that of the images that
    the model is for; others are as welcome.

    >>> embedding = ImageEmbedding(3, 16, patch=4, grid=(2, 3), prefix=1, head_width=8)
    >>> embedding(torch.rand(5, 3, 8, 12)).x.shape
    torch.Size([5, 7, 16])
    """

    mean: Tensor
    std: Tensor
    codes: Tensor | None
    rotary_tables: Tensor | None

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        patch: int,
        grid: Grid,
        prefix: int,
        head_width: int,
        kind: PatchKind = "linear",
        positions: GridPositionKind = "learned",
        prefix_positions: bool = True,
        mean: tuple[float, ...] = (0.5,),
        std: tuple[float, ...] = (0.5,),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.channels, self.patch, self.grid, self.count = channels, patch, grid, prefix
        self.register_buffer("mean", torch.tensor(mean)[:, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None], persistent=False)
        self.patches = Patches(channels, width, patch, kind)
        self.prefix = nn.Parameter(torch.empty(prefix, width)) if prefix else None
        if self.prefix is not None:
            nn.init.normal_(self.prefix, std=0.02)
        self.learned = LearnedGrid(width, grid, prefix if prefix_positions else 0) if positions == "learned" else None
        self.sinusoidal = SinusoidalGrid(width) if positions == "sinusoidal" else None
        self.rotary = RotaryGrid(head_width) if positions == "rotary" else None
        # What is computed of positions is computed once for the usual grid.
        places, _ = whereabouts(grid)
        codes = None if self.sinusoidal is None else self.sinusoidal(places)
        tables = None if self.rotary is None else torch.stack(self.rotary(self._nowhere_first(places)))
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("rotary_tables", tables, persistent=False)
        self.dropout = Dropout(dropout)

    def forward(self, images: Images) -> ImageTokens:
        x, offsets = self.patches(self.normalised(images)), None
        codes = self._codes(images)
        if codes is not None:
            x = x + codes.to(x.dtype)
        if isinstance(images, PackedImages):
            offsets = images.offsets
        return self._finished(x, offsets, self._rotary_tables(images))

    def shown(self, pixels: Float[Tensor, "B C H W"], shown: Int[Tensor, "B S"]) -> ImageTokens:
        """The tokens of a few patches of each image, whose `pixels` are normalised already."""
        grid, patches = grid_of(pixels.shape[-2:], self.patch), cut(pixels, self.patch)
        if self.patches.kind == "stem":
            # A stem looks at neighbours: what is hidden is grey to it.
            visible = torch.zeros_like(patches[:, :, :1]).scatter(1, shown[:, :, None], 1.0)
            x = rows_of(self.patches(joined(patches * visible, grid, self.patch)), shown)
        else:
            x = self.patches.of_pixels(rows_of(patches, shown))
        codes, rotary = self._codes(pixels), self._rotary_tables(pixels)
        if codes is not None:
            x = x + nn.functional.embedding(shown, codes).to(x.dtype)
        if rotary is not None:
            first = torch.arange(self.count, device=shown.device).expand(len(shown), -1)
            rows = torch.cat((first, shown + self.count), dim=1)
            rotary = rotary[0][rows], rotary[1][rows]
        return self._finished(x, None, rotary)

    def normalised(self, images: Images) -> Any:
        """Pixels minus the mean, divided by the standard deviation, channel by channel."""
        channels, patch = self.channels, self.patch
        if isinstance(images, PackedImages):
            if images.pixels.shape[1] != channels * patch**2:
                raise RegardError(
                    f"Patches of {images.pixels.shape[1]} numbers, where the model's have {channels * patch**2}.",
                    f"Pack images of {channels} channels in patches of {patch}×{patch}.",
                )
            pixels = images.pixels.unflatten(1, (channels, -1))
            return replace(images, pixels=((pixels - self.mean) / self.std).flatten(1))
        if images.shape[1] != channels:
            raise RegardError(
                f"Images of {images.shape[1]} channels, where the model's have {channels}.",
                "Convert them to grey or to RGB.",
            )
        return (images - self.mean[..., None]) / self.std[..., None]

    def _finished(self, x: Float[Tensor, "*n E"], offsets: Offsets | None, rotary: RotaryTables | None) -> ImageTokens:
        if self.prefix is not None:
            first: Tensor = self.prefix
            if self.learned is not None and self.learned.prefix:
                first = first + self.learned.weight[: self.learned.prefix]
            x, offsets = put_before(first, x, offsets)
        return ImageTokens(self.dropout(x), offsets, rotary)

    def _codes(self, images: Images) -> Float[Tensor, "T E"] | None:
        """What patches get added for their positions: for one image if all are of one size."""
        code = self.learned if self.learned is not None else self.sinusoidal
        if code is None:
            return None
        if isinstance(images, PackedImages):
            return code(images.places, images.sizes)
        grid = grid_of(images.shape[-2:], self.patch)
        if grid != self.grid:
            return code(*whereabouts(grid, images.device))
        return self.codes if self.learned is None else self.learned.weight[self.learned.prefix :]

    def _rotary_tables(self, images: Images) -> RotaryTables | None:
        if self.rotary is None or self.rotary_tables is None:
            return None
        if isinstance(images, PackedImages):
            nowhere = images.places.new_zeros(self.count, 2)
            return self.rotary(put_before(nowhere, images.places, images.offsets)[0])
        grid = grid_of(images.shape[-2:], self.patch)
        if grid != self.grid:
            return self.rotary(self._nowhere_first(whereabouts(grid, images.device)[0]))
        return self.rotary_tables[0], self.rotary_tables[1]

    def _nowhere_first(self, places: Int[Tensor, "T 2"]) -> Int[Tensor, "K 2"]:
        """With the places of the tokens before the patches: at 0, 0 nothing is rotated."""
        return nn.functional.pad(places, (0, 0, self.count, 0))

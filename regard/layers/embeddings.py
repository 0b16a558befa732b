"""Embeddings of tokens and of images, with positional encodings added."""

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
    PatchEmbedding,
    PatchKind,
    compute_grid,
    gather_rows,
    join_patches,
    patch_coordinates,
    prepend_prefix,
    split_patches,
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
    """Token embedding times √width, plus positional encoding (Vaswani et al. 2017, sections 3.4 and 3.5).

    Options for other families: no scale (`scaled=False`), an embedding per segment (BERT's first and second text), a
    norm after the sum. Under autocast the output, which starts the residual stream, is float32 or, with
    `low_precision`, has the dtype of autocast. That is safe in post-norm models: every residual sum is normalized, so
    rounding errors do not accumulate over layers.

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
        low_precision: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = tokens if tokens is not None else nn.Embedding(vocab, width)
        # The scaled input then has unit variance, and a tied output layer starts with small logits.
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
        self.low_precision = low_precision

    def forward(
        self,
        ids: Int[Tensor, "*n"],
        positions: Int[Tensor, "*n"],
        max_len: int | torch.SymInt | None = None,
        segments: Int[Tensor, "*n"] | None = None,
    ) -> Float[Tensor, "*n E"]:
        """`max_len` is an upper bound on positions + 1; passing it avoids a device synchronization."""
        x = self.tokens(ids) * self.scale
        if self.segments is not None:
            x = x + self.segments(segments if segments is not None else torch.zeros_like(ids))
        if self.positions is not None:
            self.positions.reserve(max_len if max_len is not None else int(positions.max()) + 1)
            x = x + self.positions(positions).to(x.dtype)
        x = self.dropout(self.norm(x))
        if self.low_precision and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return x


class ImageTokens(NamedTuple):
    """Embedded image tokens: (B, T, E) for images of one size; (N, E) with offsets for packed images."""

    x: Float[Tensor, "*n E"]
    offsets: Offsets | None
    rotary: RotaryTables | None
    """cos and sin of rotary positions"""


class ImageEmbedding(nn.Module):
    """Patch embeddings plus positional encodings, with `prefix` learned tokens prepended (Dosovitskiy et al. 2021).

    Input pixels are between 0 and 1; normalization by `mean` and `std` happens here only. `grid` is the patch grid of
    the default image size; images of other sizes work too. The first `prefix_positions` tokens of the prefix (None:
    all) have learned positions too.

    >>> embedding = ImageEmbedding(3, 16, patch=4, grid=(2, 3), prefix=1, head_width=8)
    >>> embedding(torch.rand(5, 3, 8, 12)).x.shape
    torch.Size([5, 7, 16])
    """

    mean: Tensor
    std: Tensor
    encodings: Tensor | None
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
        prefix_positions: int | None = None,
        patch_bias: bool = True,
        norm: nn.Module | None = None,
        mean: tuple[float, ...] = (0.5,),
        std: tuple[float, ...] = (0.5,),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.channels, self.patch, self.grid, self.prefix_count = channels, patch, grid, prefix
        self.register_buffer("mean", torch.tensor(mean)[:, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None], persistent=False)
        self.patches = PatchEmbedding(channels, width, patch, kind, patch_bias)
        self.prefix = nn.Parameter(torch.empty(prefix, width)) if prefix else None
        if self.prefix is not None:
            nn.init.normal_(self.prefix, std=0.02)
        count = prefix if prefix_positions is None else prefix_positions
        self.learned = LearnedGrid(width, grid, count) if positions == "learned" else None
        self.sinusoidal = SinusoidalGrid(width) if positions == "sinusoidal" else None
        self.rotary = RotaryGrid(head_width) if positions == "rotary" else None
        # Precomputed for the default grid.
        coordinates, _ = patch_coordinates(grid)
        encodings = None if self.sinusoidal is None else self.sinusoidal(coordinates)
        tables = None if self.rotary is None else torch.stack(self.rotary(self._pad_prefix(coordinates)))
        self.register_buffer("encodings", encodings, persistent=False)
        self.register_buffer("rotary_tables", tables, persistent=False)
        self.norm = norm if norm is not None else nn.Identity()
        self.dropout = Dropout(dropout)

    def forward(self, images: Images) -> ImageTokens:
        x, offsets = self.patches(self.normalize(images)), None
        encodings = self._compute_encodings(images)
        if encodings is not None:
            x = x + encodings.to(x.dtype)
        if isinstance(images, PackedImages):
            offsets = images.offsets
        return self._finish(x, offsets, self._compute_rotary_tables(images))

    def embed_visible(self, pixels: Float[Tensor, "B C H W"], visible: Int[Tensor, "B S"]) -> ImageTokens:
        """Embed only the patches at the indices `visible` of each image; `pixels` are already normalized."""
        grid, patches = compute_grid(pixels.shape[-2:], self.patch), split_patches(pixels, self.patch)
        if self.patches.kind == "stem":
            # The receptive field of a stem includes neighboring patches: masked patches are set to gray (0).
            keep = torch.zeros_like(patches[:, :, :1]).scatter(1, visible[:, :, None], 1.0)
            x = gather_rows(self.patches(join_patches(patches * keep, grid, self.patch)), visible)
        else:
            x = self.patches.project_patches(gather_rows(patches, visible))
        encodings, rotary = self._compute_encodings(pixels), self._compute_rotary_tables(pixels)
        if encodings is not None:
            x = x + nn.functional.embedding(visible, encodings).to(x.dtype)
        if rotary is not None:
            prefix = torch.arange(self.prefix_count, device=visible.device).expand(len(visible), -1)
            rows = torch.cat((prefix, visible + self.prefix_count), dim=1)
            rotary = rotary[0][rows], rotary[1][rows]
        return self._finish(x, None, rotary)

    def normalize(self, images: Images) -> Any:
        """Subtract the mean and divide by the standard deviation of each channel."""
        channels, patch = self.channels, self.patch
        if isinstance(images, PackedImages):
            if images.pixels.shape[1] != channels * patch**2:
                raise RegardError(
                    f"Patches have {images.pixels.shape[1]} values; the model expects {channels * patch**2}.",
                    f"Pack images of {channels} channels with patch={patch}.",
                )
            pixels = images.pixels.unflatten(1, (channels, -1))
            return replace(images, pixels=((pixels - self.mean) / self.std).flatten(1))
        if images.shape[1] != channels:
            raise RegardError(
                f"Images of {images.shape[1]} channels are not supported: the model expects {channels}.",
                "Convert them to grayscale or RGB.",
            )
        return (images - self.mean[..., None]) / self.std[..., None]

    def _finish(self, x: Float[Tensor, "*n E"], offsets: Offsets | None, rotary: RotaryTables | None) -> ImageTokens:
        if self.prefix is not None:
            prefix: Tensor = self.prefix
            if self.learned is not None and self.learned.prefix:
                positions = self.learned.weight[: self.learned.prefix]
                missing = self.prefix_count - self.learned.prefix
                prefix = prefix + (nn.functional.pad(positions, (0, 0, 0, missing)) if missing else positions)
            x, offsets = prepend_prefix(prefix, x, offsets)
        return ImageTokens(self.dropout(self.norm(x)), offsets, rotary)

    def _compute_encodings(self, images: Images) -> Float[Tensor, "T E"] | None:
        """Additive positional encodings of the patches; for one image if all images have one size."""
        encode = self.learned if self.learned is not None else self.sinusoidal
        if encode is None:
            return None
        if isinstance(images, PackedImages):
            return encode(images.coordinates, images.sizes)
        grid = compute_grid(images.shape[-2:], self.patch)
        if grid != self.grid:
            return encode(*patch_coordinates(grid, images.device))
        return self.encodings if self.learned is None else self.learned.weight[self.learned.prefix :]

    def _compute_rotary_tables(self, images: Images) -> RotaryTables | None:
        if self.rotary is None or self.rotary_tables is None:
            return None
        if isinstance(images, PackedImages):
            origin = images.coordinates.new_zeros(self.prefix_count, 2)
            return self.rotary(prepend_prefix(origin, images.coordinates, images.offsets)[0])
        grid = compute_grid(images.shape[-2:], self.patch)
        if grid != self.grid:
            return self.rotary(self._pad_prefix(patch_coordinates(grid, images.device)[0]))
        return self.rotary_tables[0], self.rotary_tables[1]

    def _pad_prefix(self, coordinates: Int[Tensor, "T 2"]) -> Int[Tensor, "K 2"]:
        """Prepend coordinates (0, 0) for the prefix tokens, which are not rotated."""
        return nn.functional.pad(coordinates, (0, 0, self.prefix_count, 0))

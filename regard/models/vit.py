"""Vision Transformers: an image as a sequence of patches, and the encoder of texts over it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.offsets import Offsets
from regard.attention.scores import ScoreName
from regard.errors import RegardError
from regard.layers.blocks import BlockConfig, EncoderBlock, NormPlacement, first_tokens
from regard.layers.embeddings import GridPositionKind, ImageEmbedding, Images
from regard.layers.feedforward import Activation
from regard.layers.heads import ClassQueries, Painter, QueryPool
from regard.layers.norms import NormKind
from regard.layers.patches import Grid, PackedImages, PatchKind, cut, grid_of, rows_of, take_away, widened
from regard.models.config_checks import check_heads
from regard.ranges import Count, Epsilon, Layers, Natural, NonNegative, OptionalSide, Positive, Rate, Side, check_ranges

MOST_PATCHES = 2**20
VisionHead = Literal["none", "classify", "segment", "pixels"]
DECODER_HEAD = 32
"""how wide the heads of the blocks are that paint hidden patches"""


@dataclass(frozen=True)
class ViTConfig:
    """Sizes and choices of a Vision Transformer, and what its head is for."""

    width: Count = 192
    heads: Count = 3
    layers: Layers = 12
    feedforward: Count = 768
    dropout: Rate = 0.0
    drop_path: Rate = 0.0
    """how often a block's sublayers are left out for an image: 0 in the first block, growing to this in the last"""
    layer_scale: NonNegative = 0.0
    """what each channel of a sublayer's output is multiplied by before training, which learns it; 0: no such factor"""
    norm: NormPlacement = "pre"
    norm_kind: NormKind = "layer"
    norm_eps: Epsilon = 1e-6
    activation: Activation = "gelu"
    score: ScoreName = "scaled_dot"
    qk_norm: bool = False
    """normalise queries and keys, as norm_kind says"""
    qkv_bias: bool = True
    """the maps to queries, keys and values have a bias"""
    channels: Count = 3
    """1: grey, 3: red, green, blue"""
    image_height: Side = 224
    """in pixels; other sizes work too, and learned positions are then interpolated"""
    image_width: Side = 224
    longest_side: OptionalSide = 0
    """images keep their own size and proportions, no side longer than this; 0: they are brought to the size above"""
    patch: Side = 16
    """side of a patch in pixels"""
    patches: PatchKind = "linear"
    """pixels to tokens: linear and convolution give the same numbers, stem is a few small convolutions"""
    positions: GridPositionKind = "learned"
    """where a patch was, row and column"""
    prefix_positions: bool = True
    """learned positions also have a row for each token before the patches (timm's no_embed_class: false)"""
    registers: Natural = 0
    """tokens before the patches that stand for nothing and are read by nobody but the encoder"""
    pooling: Literal["class", "mean", "query"] = "class"
    """the whole image: a token of its own, the patches' mean, or what a learned question finds in them"""
    pooled_norm: bool = False
    """the last norm comes after pooling, not before (timm's fc_norm)"""
    pooled_map: bool = False
    """what was pooled goes through a linear map and tanh before anybody sees it (the pooler of transformers)"""
    distilled: bool = False
    """a second class token with an output layer of its own, for a teacher's labels; the outputs' mean counts (DeiT)"""
    head: VisionHead = "classify"
    """what the output says: nothing more, the image's label, each pixel's label, the pixels of hidden patches (MAE)"""
    segmenter: Literal["linear", "queries"] = "linear"
    """labels of pixels: a linear map of each patch, or a query for each label that regards the patches"""
    segmenter_layers: Layers = 2
    """blocks in which the queries and the patches regard each other"""
    decoder_width: Count = 96
    """of the blocks that paint hidden patches"""
    decoder_layers: Layers = 2
    labels: tuple[str, ...] = ()
    """filled in from the data"""
    mean: tuple[float, ...] = (0.5,)
    """subtracted from pixels, which lie between 0 and 1: a number, or one for each channel"""
    std: tuple[Positive, ...] = (0.5,)
    """what pixels are divided by then"""

    def __post_init__(self) -> None:
        check_ranges(self, "model.")

    @property
    def grid(self) -> Grid:
        """Rows and columns of patches."""
        return grid_of((self.image_height, self.image_width), self.patch)

    @property
    def prefix(self) -> int:
        """The number of tokens before the patches: class, distillation, registers."""
        return (self.pooling == "class") + self.distilled + self.registers

    @property
    def max_len(self) -> int:
        """The tokens of an image of the given size."""
        rows, columns = self.grid
        return self.prefix + rows * columns

    def block(self) -> BlockConfig:
        return BlockConfig(
            width=self.width,
            heads=self.heads,
            feedforward=self.feedforward,
            dropout=self.dropout,
            norm=self.norm,
            norm_kind=self.norm_kind,
            norm_eps=self.norm_eps,
            activation=self.activation,
            qk_norm_eps=self.norm_eps if self.qk_norm else None,
            qk_norm_kind=self.norm_kind,
            bias="all" if self.qkv_bias else "not_qkv",
            max_len=self.max_len,
            layer_scale=self.layer_scale,
        )

    def check(self) -> None:
        """Refuse values that do not fit each other."""
        check_heads(self.width, self.heads)
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise RegardError(
                    f"model.{name} has {len(values)} values for images of {self.channels} channels.",
                    "Give one number, or one for each channel.",
                )
        if self.positions == "sinusoidal" and self.width % 4:
            raise RegardError(
                f"model.width is {self.width}; sinusoidal positions of rows and columns need a multiple of 4.",
                "Change model.width or model.positions.",
            )
        if self.positions == "rotary" and self.width // self.heads % 4:
            raise RegardError(
                f"A head is {self.width // self.heads} wide (model.width / model.heads); rotary positions of rows and "
                "columns need a multiple of 4.",
                "Change model.width, model.heads or model.positions.",
            )
        if self.patches == "stem" and self.patch & (self.patch - 1):
            raise RegardError(
                f"model.patch is {self.patch}; a stem of convolutions halves the sides and needs a power of 2.",
                "Change model.patch, or set model.patches to linear.",
            )
        rows, columns = self.grid
        if rows * columns > MOST_PATCHES:
            raise RegardError(
                f"An image of {self.image_height}×{self.image_width} pixels has {rows * columns:,} patches of "
                f"{self.patch}×{self.patch}; at most {MOST_PATCHES:,} are supported.",
                "Use smaller images, or a larger model.patch.",
            )
        if self.distilled and self.pooling != "class":
            raise RegardError("A distilled model reads its label off class tokens.", "Let model.pooling be class.")
        if self.head == "segment" and not self.labels:
            raise RegardError("A model that segments needs labels.", "Name them in labels.")
        if self.head == "pixels" and self.decoder_width % DECODER_HEAD:
            raise RegardError(
                f"model.decoder_width is {self.decoder_width}, but a head is {DECODER_HEAD} wide there.",
                f"Let it be a multiple of {DECODER_HEAD}.",
            )


def vit_pico(**changes) -> ViTConfig:
    """6 layers of width 128 over 8×8 patches of 4: for pictures of 32×32 pixels."""
    sizes: dict[str, Any] = dict(width=128, heads=4, layers=6, feedforward=512, patch=4, pooling="mean")
    return ViTConfig(**(sizes | dict(image_height=32, image_width=32) | changes))


def vit_tiny(**changes) -> ViTConfig:
    """12 layers of width 192, patches of 16: DeiT-Ti (Touvron et al. 2021)."""
    return ViTConfig(**changes)


def vit_small(**changes) -> ViTConfig:
    """12 layers of width 384, patches of 16: DeiT-S."""
    return ViTConfig(**(dict(width=384, heads=6, feedforward=1536) | changes))


def vit_base(**changes) -> ViTConfig:
    """12 layers of width 768, patches of 16, as published in 2020."""
    return ViTConfig(**(dict(width=768, heads=12, feedforward=3072) | changes))


class Painted(NamedTuple):
    """Masked patches (MAE): the prediction, the target (mean 0 and variance 1 per patch), and their indices."""

    painted: Float[Tensor, "B M P"]
    wanted: Float[Tensor, "B M P"]
    hidden: Int[Tensor, "B M"]


class ViT(nn.Module):
    """Vision Transformer. Pixels lie between 0 and 1; images have one size, or are packed.

    >>> model = ViT(ViTConfig(layers=2, image_height=32, image_width=48, labels=("cat", "dog")))
    >>> model(torch.rand(5, 3, 32, 48)).shape
    torch.Size([5, 2])
    """

    blocks: Sequence[EncoderBlock]  # a ModuleList

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.embedding = ImageEmbedding(
            config.channels,
            config.width,
            patch=config.patch,
            grid=config.grid,
            prefix=config.prefix,
            head_width=config.width // config.heads,
            kind=config.patches,
            positions=config.positions,
            prefix_positions=config.prefix_positions,
            mean=config.mean,
            std=config.std,
            dropout=config.dropout,
        )
        block = config.block()
        rates: list[float | None] = [config.drop_path * i / max(1, config.layers - 1) for i in range(config.layers)]
        rates = rates if config.drop_path else [None] * config.layers
        blocks = (EncoderBlock(replace(block, drop_path=rate), config.score) for rate in rates)
        self.blocks = nn.ModuleList(blocks)  # type: ignore[assignment]
        # Post-norm blocks end in a norm already.
        self.norm = block.make_norm() if config.norm == "pre" else nn.Identity()
        self.norm_is_last = config.pooled_norm and config.head in ("none", "classify")
        self._make_head(config, block)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif name.startswith(("output.", "distilled.")):
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(".weight") and parameter.dim() in (2, 4) and ".learned." not in name:
                nn.init.xavier_uniform_(parameter.flatten(1))  # a convolution as the linear map that it is

    def _make_head(self, config: ViTConfig, block: BlockConfig) -> None:
        self.pooler: QueryPool | None = None
        self.segmenter: ClassQueries | None = None
        self.painter: Painter | None = None
        self.output: nn.Linear | None = None
        self.distilled: nn.Linear | None = None
        labels = len(config.labels)
        self.pooled_map: nn.Linear | None = None
        if config.head in ("none", "classify"):
            self.pooler = QueryPool(block, config.score) if config.pooling == "query" else None
            self.pooled_map = nn.Linear(config.width, config.width) if config.pooled_map else None
        if config.head == "classify" and labels:
            self.output = nn.Linear(config.width, labels)
            self.distilled = nn.Linear(config.width, labels) if config.distilled else None
        elif config.head == "segment" and config.segmenter == "linear":
            self.output = nn.Linear(config.width, labels)
        elif config.head == "segment":
            self.segmenter = ClassQueries(labels, block, config.score, config.segmenter_layers)
        elif config.head == "pixels":
            width = config.decoder_width
            narrow = replace(block, width=width, heads=width // DECODER_HEAD, feedforward=4 * width)
            self.painter = Painter(config.width, narrow, config.score, config.decoder_layers)
            self.output = nn.Linear(width, config.channels * config.patch**2)

    def tokens(self, images: Images) -> Float[Tensor, "*n E"]:
        """The input of the encoder: (B, T, E), or (N, E) for packed images."""
        return self.embedding(images).x

    def encode(self, images: Images) -> Float[Tensor, "*n E"]:
        """The output of the encoder, one row per token. The first `config.prefix` tokens of an image are no patches.

        Where the last norm comes after pooling, this is the output of the last block.
        """
        x, offsets, rotary = self.embedding(images)
        for block in self.blocks:
            x = block(x, offsets, rotary=rotary)
        return x if self.norm_is_last else self.norm(x)

    def features(self, images: Images) -> Float[Tensor, "*n E"]:
        """The input of the output layer: one row per image (distilled: two), or for segmentation one row per patch."""
        if self.config.head == "segment":
            return take_away(self.encode(images), self.config.prefix, _offsets(images))
        if self.config.pooling != "class":
            return self.pooled(self.encode(images), images)
        # Only the class tokens are needed, so the last block computes no others.
        x, offsets, rotary = self.embedding(images)
        *earlier, last = self.blocks
        for block in earlier:
            x = block(x, offsets, rotary=rotary)
        x = self.norm(last.forward_first(x, offsets, 1 + self.config.distilled, rotary))
        return self._mapped(x if self.config.distilled else x[:, 0])

    def pooled(self, encoded: Float[Tensor, "*n E"], images: Images) -> Float[Tensor, "B *two E"]:
        """The `features` of whole images, from the output of `encode`."""
        config, offsets = self.config, _offsets(images)
        if config.pooling == "class":
            wide = None if offsets is None else widened(offsets, config.prefix)
            x = first_tokens(encoded, wide, 1 + config.distilled).reshape(-1, 1 + config.distilled, config.width)
            x = x if config.distilled else x[:, 0]
        else:
            x = take_away(encoded, config.prefix, offsets)
            x = self.pooler(x, offsets) if self.pooler is not None else _mean(x, offsets)
        return self._mapped(self.norm(x) if self.norm_is_last else x)

    def _mapped(self, pooled: Float[Tensor, "B *two E"]) -> Float[Tensor, "B *two E"]:
        return pooled if self.pooled_map is None else self.pooled_map(pooled).tanh()

    def logits(self, features: Float[Tensor, "B *two E"]) -> Float[Tensor, "B V"]:
        """Logits of the labels, from the features."""
        if self.output is None or self.config.head != "classify":
            return features
        if self.distilled is None:
            return self.output(features)
        return (self.output(features[:, 0]) + self.distilled(features[:, 1])) / 2

    def masks(
        self, features: Float[Tensor, "*n E"], images: Images
    ) -> Float[Tensor, "B V H W"] | list[Float[Tensor, "V _ _"]]:
        """Logits of each pixel from the features of the patches, interpolated bilinearly between patch centers."""
        head = self.output if self.segmenter is None else partial(self.segmenter, offsets=_offsets(images))
        assert head is not None
        labels = head(features)
        if not isinstance(images, PackedImages):
            return self._widened(labels, grid_of(images.shape[-2:], self.config.patch))
        parts = labels.split([rows * columns for rows, columns in images.grids])
        return [self._widened(one[None], grid)[0] for one, grid in zip(parts, images.grids)]

    def forward(self, images: Images) -> Float[Tensor, "..."] | list[Float[Tensor, "V _ _"]]:
        """By the head: logits per image (B, V), per pixel (B, V, H, W) or for packed images a list; or features."""
        features = self.features(images)
        return self.masks(features, images) if self.config.head == "segment" else self.logits(features)

    def masked_loss(self, images: Float[Tensor, "B C H W"], share: float = 0.75) -> Float[Tensor, ""]:
        """Mean squared error over the masked patches (MAE)."""
        painted, wanted, _ = self.paint(images, share)
        return (painted.float() - wanted).square().mean()

    def paint(self, images: Float[Tensor, "B C H W"], share: float = 0.75) -> Painted:
        """Mask a random share of the patches of each image; predict them from the others, which alone are encoded."""
        if self.painter is None or self.output is None:
            raise RegardError(f"A model with the head {self.config.head} does not paint.", "Let model.head be pixels.")
        if isinstance(images, PackedImages):
            raise RegardError("Patches are hidden in images of one size only.", "Resize the images.")
        grid = grid_of(images.shape[-2:], self.config.patch)
        count = grid[0] * grid[1]
        seen = round(count * (1 - share))
        if not 0 < seen < count:
            raise RegardError(
                f"Of {count} patches {seen} would be shown.", "Hide a share between 0 and 1, and not of a single patch."
            )
        order = torch.rand(len(images), count, device=images.device).argsort(dim=1)
        shown, hidden = order[:, :seen], order[:, seen:]
        pixels = self.embedding.normalised(images)
        x, offsets, rotary = self.embedding.shown(pixels, shown)
        for block in self.blocks:
            x = block(x, offsets, rotary=rotary)
        painted = self.output(self.painter(self.norm(x), shown, hidden, grid, self.config.prefix))
        wanted = rows_of(cut(pixels, self.config.patch).float(), hidden)
        return Painted(painted, nn.functional.layer_norm(wanted, wanted.shape[-1:], eps=1e-6), hidden)

    def _widened(self, labels: Float[Tensor, "B T V"], grid: Grid) -> Float[Tensor, "B V H W"]:
        size = [side * self.config.patch for side in grid]
        return nn.functional.interpolate(labels.mT.unflatten(2, grid), size, mode="bilinear")


def _offsets(images: Images) -> Offsets | None:
    """The offsets of the patches, without prefix tokens."""
    return images.offsets if isinstance(images, PackedImages) else None


def _mean(x: Float[Tensor, "*n E"], offsets: Offsets | None) -> Float[Tensor, "B E"]:
    if offsets is None:
        return x.mean(1)
    sums = torch.zeros(len(offsets.starts) - 1, x.shape[1], device=x.device)
    return (sums.index_add(0, offsets.sequences, x.float()) / offsets.lengths[:, None]).to(x.dtype)

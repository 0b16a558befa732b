"""Vision Transformers: an image as a sequence of patches, and the encoder of texts over it (D1-D4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention.scores import ScoreName
from regard.layers.blocks import BlockConfig, EncoderBlock, NormPlace
from regard.layers.dropout import Dropout
from regard.layers.feedforward import Activation
from regard.layers.norms import NormKind, make_norm
from regard.layers.patches import Grid, Patches, PatchKind, grid_of

VisionHead = Literal["none", "classify", "segment", "pixels"]


@dataclass(frozen=True)
class ViTConfig:
    """Sizes and choices of a Vision Transformer, and what its head is for."""

    width: int = 192
    heads: int = 3
    layers: int = 12
    feedforward: int = 768
    dropout: float = 0.0
    drop_path: float = 0.0
    """how often a block's sublayers are left out for an image: 0 in the first block, growing to this in the last"""
    layer_scale: float = 0.0
    """what each channel of a sublayer's output is multiplied by before training, which learns it; 0: no such factor"""
    norm: NormPlace = "pre"
    norm_kind: NormKind = "layer"
    norm_eps: float = 1e-6
    activation: Activation = "gelu"
    score: ScoreName = "scaled_dot"
    qk_norm: bool = False
    """normalise queries and keys, as norm_kind says"""
    qkv_bias: bool = True
    """the maps to queries, keys and values have a bias"""
    channels: int = 3
    """1: grey, 3: red, green, blue"""
    image_height: int = 224
    """in pixels; other sizes work too, and learned positions are then interpolated"""
    image_width: int = 224
    patch: int = 16
    """side of a patch in pixels"""
    patches: PatchKind = "linear"
    """pixels to tokens: linear and convolution give the same numbers, stem is a few small convolutions"""
    positions: Literal["learned", "sinusoidal", "rotary", "none"] = "learned"
    """where a patch was, row and column"""
    prefix_positions: bool = True
    """learned positions also have a row for each token before the patches (timm's no_embed_class: false)"""
    registers: int = 0
    """tokens before the patches that stand for nothing and are read by nobody but the encoder"""
    pooling: Literal["class", "mean", "query"] = "class"
    """the whole image: a token of its own, the patches' mean, or what a learned question finds in them"""
    pooled_norm: bool = False
    """the last norm comes after pooling, not before (timm's fc_norm)"""
    distilled: bool = False
    """a second class token with an output layer of its own, for a teacher's labels; the outputs' mean counts (DeiT)"""
    head: VisionHead = "classify"
    """what the output says: nothing more, the image's label, each pixel's label, the pixels of hidden patches (MAE)"""
    segmenter: Literal["linear", "queries"] = "linear"
    """labels of pixels: a linear map of each patch, or a query for each label that regards the patches"""
    segmenter_layers: int = 2
    """blocks in which the queries and the patches regard each other"""
    decoder_width: int = 96
    """of the blocks that paint hidden patches"""
    decoder_layers: int = 2
    labels: tuple[str, ...] = ()
    """filled in from the data"""
    mean: tuple[float, ...] = (0.5,)
    """subtracted from pixels, which lie between 0 and 1: a number, or one for each channel"""
    std: tuple[float, ...] = (0.5,)
    """what pixels are divided by then"""

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
            max_len=self.max_len,
        )


class ViT(nn.Module):
    """Every patch of an image regards every other.

    >>> model = ViT(ViTConfig(layers=2, image_height=32, image_width=48, labels=("cat", "dog")))
    >>> model(torch.rand(5, 3, 32, 48)).shape
    torch.Size([5, 2])
    """

    blocks: Sequence[EncoderBlock]  # a ModuleList, which does not tell the type of what it holds
    mean: Tensor
    std: Tensor

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        rows, columns = config.grid
        self.register_buffer("mean", torch.tensor(config.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.std).view(-1, 1, 1), persistent=False)
        self.patches = Patches(config.channels, config.width, config.patch, config.patches)
        self.prefix = nn.Parameter(torch.empty(config.prefix, config.width)) if config.prefix else None
        self.positions = nn.Parameter(torch.empty(config.prefix + rows * columns, config.width))
        self.dropout = Dropout(config.dropout)
        block = config.block()
        self.blocks = nn.ModuleList(EncoderBlock(block, config.score) for _ in range(config.layers))  # type: ignore[assignment]
        self.norm = make_norm(config.norm_kind, config.width, config.norm_eps)
        self.output = nn.Linear(config.width, len(config.labels)) if config.labels else None
        for name, parameter in self.named_parameters():
            if name in ("prefix", "positions"):
                nn.init.normal_(parameter, std=0.02)
            elif parameter.dim() == 2 and ".score." not in name:
                nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias") and ".score." not in name:
                nn.init.zeros_(parameter)

    def tokens(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B T E"]:
        """A token of each patch, and those before the patches, with their positions."""
        x = self.patches((images - self.mean) / self.std)
        if self.prefix is not None:
            x = torch.cat((self.prefix.to(x.dtype).expand(len(x), -1, -1), x), dim=1)
        return self.dropout(x + self.positions.to(x.dtype))

    def encode(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B T E"]:
        """One row a token: what it means where it stands."""
        x = self.tokens(images)
        for block in self.blocks:
            x = block(x, None)
        return self.norm(x)

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B E"]:
        """What the output layer sees."""
        x = self.encode(images)
        return x[:, 0] if self.config.pooling == "class" else x[:, self.config.prefix :].mean(1)

    def logits(self, features: Float[Tensor, "B E"]) -> Float[Tensor, "B V"]:
        """The output layer over what `features` gave."""
        return features if self.output is None else self.output(features)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B V"]:
        """By the head: the image's label."""
        return self.logits(self.features(images))

"""Vision Transformers (ViT, DeiT): a Transformer encoder over image patches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.offsets import Offsets
from regard.attention.scores import ScoreName
from regard.errors import RegardError
from regard.layers.blocks import BlockConfig, NormPlacement, TransformerBlock, first_tokens
from regard.layers.embeddings import GridPositionKind, ImageEmbedding, Images
from regard.layers.feedforward import VisionActivation
from regard.layers.heads import AttentionPooling, PatchDecoder, SegmentationDecoder
from regard.layers.norms import NormKind
from regard.layers.patches import (
    Grid,
    PackedImages,
    PatchKind,
    compute_grid,
    extend_offsets,
    gather_rows,
    remove_prefix,
    split_patches,
)
from regard.models.config_checks import check_heads
from regard.ranges import (
    Count,
    Epsilon,
    ImageSide,
    Layers,
    Natural,
    NonNegative,
    OneOf,
    OptionalImageSide,
    Positive,
    Rate,
    check_ranges,
)

MAX_PATCHES = 2**20
DECODER_HEAD_WIDTH = 32
"""head width of the decoder of masked patches"""


class ImageHead:
    """The head of a Vision Transformer without a task: the output are the features. Base class of the other heads."""

    name = "none"
    """of the head and its subclasses in the page of a model"""
    runs_on_page = True
    """whether the page of a model can compute the output for new images"""
    label_axis = 1
    """axis of the logits over which probabilities sum to 1; those of pixels follow"""
    method = ""
    """method of the pipeline that runs the head"""
    is_pooled = True
    """whether the output layer reads the pooled features of an image"""
    is_per_pixel = False
    """whether the output has a label for every pixel"""
    has_labels = False
    """whether `config.labels` are the labels of the output"""
    fields: tuple[str, ...] = ()
    """fields of the config that only this head reads"""

    def check(self, config: "ViTConfig") -> None:
        """Raise if values of the config are inconsistent with the head."""

    def layer_fields(self, config: "ViTConfig") -> tuple[str, ...]:
        """Fields of the config with the numbers of layers of the head."""
        return ()

    def add_layers(self, model: "ViT", block: BlockConfig) -> None:
        """Set the layers between the features and the output."""

    def output(self, model: "ViT", features: Tensor, images: Images) -> Any:
        """The output of the model, from its features."""
        return model.logits(features)

    def output_of_tokens(self, model: "ViT", encoded: Tensor, images: Images) -> Any:
        """The output of the model, from all tokens of the encoder."""
        return model.logits(model.pool(encoded, images))


class ImageLabelHead(ImageHead):
    """Classification: a label for every image."""

    name = "classify"
    method = "classify"
    has_labels = True

    def add_layers(self, model: "ViT", block: BlockConfig) -> None:
        config, labels = model.config, len(model.config.labels)
        if labels:
            model.output = nn.Linear(config.width * (1 + (config.pooling == "class_mean")), labels)
            model.distilled = nn.Linear(config.width, labels) if config.distilled else None


class PixelLabelHead(ImageHead):
    """Segmentation: a label for every pixel."""

    name = "segment"
    method = "segment"
    is_pooled, is_per_pixel, has_labels = False, True, True
    fields = ("segmenter", "segmenter_layers")

    def check(self, config: "ViTConfig") -> None:
        if not config.labels:
            raise RegardError("model.labels is empty; segmentation needs labels.", "Pass the labels.")

    def layer_fields(self, config: "ViTConfig") -> tuple[str, ...]:
        return () if config.segmenter == "linear" else ("segmenter_layers",)

    def add_layers(self, model: "ViT", block: BlockConfig) -> None:
        config, labels = model.config, len(model.config.labels)
        if config.segmenter == "linear":
            model.output = nn.Linear(config.width, labels)
        else:
            model.segmenter = SegmentationDecoder(labels, block, config.score, config.segmenter_layers)

    def output(self, model: "ViT", features: Tensor, images: Images) -> Any:
        return model.masks(features, images)

    def output_of_tokens(self, model: "ViT", encoded: Tensor, images: Images) -> Any:
        return model.masks(remove_prefix(encoded, model.config.prefix, _offsets(images)), images)


class PatchPixelHead(ImageHead):
    """Reconstruction of the pixels of masked patches (MAE); `ViT.reconstruct` runs it."""

    name = "pixels"
    runs_on_page = False
    is_pooled = False
    fields = ("decoder_width", "decoder_layers")

    def check(self, config: "ViTConfig") -> None:
        if config.decoder_width % DECODER_HEAD_WIDTH:
            raise RegardError(
                f"model.decoder_width is {config.decoder_width}; it must be a multiple of {DECODER_HEAD_WIDTH}.",
                "Change model.decoder_width.",
            )

    def layer_fields(self, config: "ViTConfig") -> tuple[str, ...]:
        return ("decoder_layers",)

    def add_layers(self, model: "ViT", block: BlockConfig) -> None:
        config, width = model.config, model.config.decoder_width
        decoder_block = replace(block, width=width, heads=width // DECODER_HEAD_WIDTH, feedforward=4 * width)
        model.mae_decoder = PatchDecoder(config.width, decoder_block, config.score, config.decoder_layers)
        model.output = nn.Linear(width, config.channels * config.patch**2)

    def output_of_tokens(self, model: "ViT", encoded: Tensor, images: Images) -> Any:
        return encoded


IMAGE_HEADS: dict[str, ImageHead] = {
    "none": ImageHead(),
    "classify": ImageLabelHead(),
    "segment": PixelLabelHead(),
    "pixels": PatchPixelHead(),
}
VisionHead = Annotated[str, OneOf(IMAGE_HEADS)]


@dataclass(frozen=True)
class ViTConfig:
    """Configuration of a Vision Transformer and its task head."""

    width: Count = 192
    heads: Count = 3
    layers: Layers = 12
    feedforward: Count = 768
    dropout: Rate = 0.0
    drop_path: Rate = 0.0
    """stochastic depth rate of the last block; grows linearly from 0 in the first"""
    layer_scale: NonNegative = 0.0
    """initial value of LayerScale, a learned factor per channel of a sublayer's output; 0: no LayerScale"""
    norm: NormPlacement = "pre"
    norm_kind: NormKind = "layer"
    norm_eps: Epsilon = 1e-6
    activation: VisionActivation = "gelu"
    score: ScoreName = "scaled_dot"
    qk_norm: bool = False
    """normalize queries and keys with norm_kind"""
    qkv_bias: bool = True
    """bias in the projections to queries, keys and values"""
    channels: Count = 3
    """1: grayscale, 3: RGB"""
    image_height: ImageSide = 224
    """in pixels; images of other sizes work too, with interpolated learned positions"""
    image_width: ImageSide = 224
    longest_side: OptionalImageSide = 0
    """maximum side of images that keep their aspect ratio; 0: images are resized to image_height × image_width"""
    patch: ImageSide = 16
    """side of a patch in pixels"""
    patches: PatchKind = "linear"
    """patch embedding: linear or convolution (equal results), or a convolutional stem"""
    patch_bias: bool = True
    """bias in the patch embedding (CLIP: false); a convolutional stem has one"""
    embedding_norm: bool = False
    """norm of the tokens before the first block (CLIP)"""
    positions: GridPositionKind = "learned"
    """positional encoding of row and column"""
    prefix_positions: bool = True
    """learned positions also for class, distillation and register tokens (timm's no_embed_class: false)"""
    registers: Natural = 0
    """number of register tokens (Darcet et al. 2024)"""
    register_positions: bool = True
    """learned positions also for register tokens, if prefix_positions is set (DINOv2: false)"""
    pooling: Literal["class", "mean", "query", "class_mean"] = "class"
    """image features: the class token, the mean of the patches, attention pooling with a learned query, or class token
    and mean of the patches side by side (DINOv2)"""
    pooling_feedforward: bool = False
    """feed-forward layer after attention pooling (SigLIP)"""
    pooled_norm: bool = False
    """final norm after pooling instead of before (timm's fc_norm)"""
    pooled_map: bool = False
    """linear layer and tanh after pooling (the pooler of transformers)"""
    distilled: bool = False
    """distillation token with a separate output layer; the logits are the mean of both (DeiT)"""
    head: VisionHead = "classify"
    """output: features (none), a label per image (classify) or pixel (segment), pixels of masked patches (pixels)"""
    segmenter: Literal["linear", "queries"] = "linear"
    """segmentation head: a linear layer per patch, or a learned query per label (Segmenter)"""
    segmenter_layers: Layers = 2
    """number of blocks of the segmentation head with queries"""
    decoder_width: Count = 96
    """width of the decoder of masked patches"""
    decoder_layers: Layers = 2
    """number of blocks of the decoder of masked patches"""
    labels: tuple[str, ...] = ()
    """set from the data"""
    mean: tuple[float, ...] = (0.5,)
    """mean of pixels (between 0 and 1), subtracted: one value, or one per channel"""
    std: tuple[Positive, ...] = (0.5,)
    """standard deviation of pixels, divided by: one value, or one per channel"""

    def __post_init__(self) -> None:
        check_ranges(self, "model.")

    @property
    def grid(self) -> Grid:
        """Rows and columns of patches."""
        return compute_grid((self.image_height, self.image_width), self.patch)

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches: class, distillation, registers."""
        return self.has_class_token + self.distilled + self.registers

    @property
    def has_class_token(self) -> bool:
        return self.pooling in ("class", "class_mean")

    @property
    def layer_fields(self) -> tuple[str, ...]:
        """Fields with numbers of layers."""
        return ("layers", *IMAGE_HEADS[self.head].layer_fields(self))

    @property
    def reads_class_token(self) -> bool:
        """Whether the output is predicted from the class token, not from the patches."""
        return self.has_class_token and not IMAGE_HEADS[self.head].is_per_pixel

    @property
    def unused_head_fields(self) -> set[str]:
        """Fields that only other heads read."""
        own = IMAGE_HEADS[self.head].fields
        return {name for head in IMAGE_HEADS.values() for name in head.fields if name not in own}

    @property
    def max_len(self) -> int:
        """Number of tokens of an image of the default size."""
        rows, columns = self.grid
        return self.prefix + rows * columns

    def block_config(self) -> BlockConfig:
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
        """Raise if values are inconsistent."""
        check_heads(self.width, self.heads)
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise RegardError(
                    f"model.{name} has {len(values)} values for images of {self.channels} channels.",
                    "Pass one value, or one per channel.",
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
                f"model.patch is {self.patch}; a convolutional stem needs a power of 2.",
                "Change model.patch, or set model.patches to linear.",
            )
        rows, columns = self.grid
        if rows * columns > MAX_PATCHES:
            raise RegardError(
                f"An image of {self.image_height}×{self.image_width} pixels has {rows * columns:,} patches of "
                f"{self.patch}×{self.patch}; at most {MAX_PATCHES:,} are supported.",
                "Use smaller images, or a larger model.patch.",
            )
        if self.distilled and self.pooling != "class":
            raise RegardError(
                f"model.pooling is {self.pooling}; a distilled model needs class.", "Set model.pooling to class."
            )
        if self.pooling == "class_mean" and (self.pooled_norm or self.pooled_map):
            raise RegardError(
                "model.pooling is class_mean; pooled_norm and pooled_map are not supported with it.",
                "Set them to false, or model.pooling to class.",
            )
        IMAGE_HEADS[self.head].check(self)


def vit_pico(**changes) -> ViTConfig:
    """6 layers of width 128, patches of 4, for images of 32×32 pixels."""
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


class Reconstruction(NamedTuple):
    """Reconstructed masked patches (MAE)."""

    predicted: Float[Tensor, "B M P"]
    target: Float[Tensor, "B M P"]
    """pixels, normalized to mean 0 and variance 1 per patch"""
    masked: Int[Tensor, "B M"]
    """indices of the masked patches"""


class ViT(nn.Module):
    """Vision Transformer. Pixels lie between 0 and 1; images have one size, or are packed.

    >>> model = ViT(ViTConfig(layers=2, image_height=32, image_width=48, labels=("cat", "dog")))
    >>> model(torch.rand(5, 3, 32, 48)).shape
    torch.Size([5, 2])
    """

    blocks: Sequence[TransformerBlock]  # a ModuleList

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        block = config.block_config()
        self.embedding = ImageEmbedding(
            config.channels,
            config.width,
            patch=config.patch,
            grid=config.grid,
            prefix=config.prefix,
            head_width=config.width // config.heads,
            kind=config.patches,
            positions=config.positions,
            prefix_positions=config.prefix_positions
            * (config.prefix - config.registers * (not config.register_positions)),
            patch_bias=config.patch_bias,
            norm=block.make_norm() if config.embedding_norm else None,
            mean=config.mean,
            std=config.std,
            dropout=config.dropout,
        )
        rates: list[float | None] = [config.drop_path * i / max(1, config.layers - 1) for i in range(config.layers)]
        rates = rates if config.drop_path else [None] * config.layers
        blocks = (replace(block, drop_path=rate).make_block(config.score) for rate in rates)
        self.blocks = nn.ModuleList(blocks)  # type: ignore[assignment]
        # Post-norm blocks end in a norm already.
        self.norm = block.make_norm() if config.norm == "pre" else nn.Identity()
        self.norm_is_last = config.pooled_norm and IMAGE_HEADS[config.head].is_pooled
        self._make_head(config, block)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif name.startswith(("output.", "distilled.")):
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(".weight") and parameter.dim() in (2, 4) and ".learned." not in name:
                nn.init.xavier_uniform_(parameter.flatten(1))  # a convolution as the equivalent linear layer

    def _make_head(self, config: ViTConfig, block: BlockConfig) -> None:
        self.pooler: AttentionPooling | None = None
        self.segmenter: SegmentationDecoder | None = None
        self.mae_decoder: PatchDecoder | None = None  # decoder of masked patches
        self.output: nn.Linear | None = None
        self.distilled: nn.Linear | None = None
        self.pooled_map: nn.Linear | None = None
        head = IMAGE_HEADS[config.head]
        if head.is_pooled:
            if config.pooling == "query":
                self.pooler = AttentionPooling(block, config.score, config.pooling_feedforward)
            self.pooled_map = nn.Linear(config.width, config.width) if config.pooled_map else None
        head.add_layers(self, block)

    def tokens(self, images: Images) -> Float[Tensor, "*n E"]:
        """The input of the encoder: (B, T, E), or (N, E) for packed images."""
        return self.embedding(images).x

    def encode(self, images: Images) -> Float[Tensor, "*n E"]:
        """The output of the encoder, one row per token. The first `config.prefix` tokens of an image are not patches.

        With `pooled_norm` this is the output of the last block, before the final norm.
        """
        x, offsets, rotary = self.embedding(images)
        for block in self.blocks:
            x = block(x, offsets, rotary=rotary)
        return x if self.norm_is_last else self.norm(x)

    def features(self, images: Images) -> Float[Tensor, "*n E"]:
        """The input of the output layer: one row per image (distilled: two), or for segmentation one row per patch."""
        if IMAGE_HEADS[self.config.head].is_per_pixel:
            return remove_prefix(self.encode(images), self.config.prefix, _offsets(images))
        if self.config.pooling != "class":
            return self.pool(self.encode(images), images)
        # Only the class tokens are needed, so the last block computes no others.
        x, offsets, rotary = self.embedding(images)
        *earlier, last = self.blocks
        for block in earlier:
            x = block(x, offsets, rotary=rotary)
        x = self.norm(last.forward_first(x, offsets, 1 + self.config.distilled, rotary))
        return self._apply_pooled_map(x if self.config.distilled else x[:, 0])

    def pool(self, encoded: Float[Tensor, "*n E"], images: Images) -> Float[Tensor, "B *two E"]:
        """The `features` of images (not of patches), from the output of `encode`."""
        config, offsets = self.config, _offsets(images)
        if config.pooling == "class":
            extended_offsets = None if offsets is None else extend_offsets(offsets, config.prefix)
            count = 1 + config.distilled
            x = first_tokens(encoded, extended_offsets, count).reshape(-1, count, config.width)
            x = x if config.distilled else x[:, 0]
        else:
            x = remove_prefix(encoded, config.prefix, offsets)
            x = self.pooler(x, offsets) if self.pooler is not None else _mean(x, offsets)
        if config.pooling == "class_mean":
            extended_offsets = None if offsets is None else extend_offsets(offsets, config.prefix)
            x = torch.cat((first_tokens(encoded, extended_offsets, 1).reshape(-1, config.width), x), dim=-1)
        return self._apply_pooled_map(self.norm(x) if self.norm_is_last else x)

    def _apply_pooled_map(self, pooled: Float[Tensor, "B *two E"]) -> Float[Tensor, "B *two E"]:
        return pooled if self.pooled_map is None else self.pooled_map(pooled).tanh()

    def logits(self, features: Float[Tensor, "B *two E"]) -> Float[Tensor, "B V"]:
        """Logits of the labels, from the features."""
        if self.output is None or not IMAGE_HEADS[self.config.head].is_pooled:
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
        logits = head(features)
        if not isinstance(images, PackedImages):
            return self._upsample(logits, compute_grid(images.shape[-2:], self.config.patch))
        parts = logits.split([rows * columns for rows, columns in images.grids])
        return [self._upsample(part[None], grid)[0] for part, grid in zip(parts, images.grids)]

    def forward(self, images: Images) -> Float[Tensor, "..."] | list[Float[Tensor, "V _ _"]]:
        """By head: logits per image (B, V), logits per pixel (B, V, H, W; packed images: a list), or features."""
        return IMAGE_HEADS[self.config.head].output(self, self.features(images), images)

    def output_of_tokens(self, encoded: Float[Tensor, "*n E"], images: Images) -> Any:
        """The output of `forward` (with the head pixels: the tokens), from all tokens of the encoder."""
        return IMAGE_HEADS[self.config.head].output_of_tokens(self, encoded, images)

    def unembed(self, stream: Float[Tensor, "*n E"], inputs: Any) -> Float[Tensor, "rows V"]:
        """The output from the residual stream after any block: final norm, head and output layer."""
        return self.logits(self.pool(stream if self.norm_is_last else self.norm(stream), inputs))

    def masked_loss(
        self, images: Float[Tensor, "B C H W"], mask_ratio: float = 0.75, noise: Float[Tensor, "B S"] | None = None
    ) -> Float[Tensor, ""]:
        """Mean squared error of the reconstructed patches (MAE)."""
        predicted, target, _ = self.reconstruct(images, mask_ratio, noise)
        return (predicted.float() - target).square().mean()

    def reconstruct(
        self, images: Float[Tensor, "B C H W"], mask_ratio: float = 0.75, noise: Float[Tensor, "B S"] | None = None
    ) -> Reconstruction:
        """Mask random patches of each image and predict them; only the visible patches are encoded.

        The patches with the largest `noise` are masked, random numbers by default.
        """
        if self.mae_decoder is None or self.output is None:
            raise RegardError(
                f"A model with the head {self.config.head} does not reconstruct patches.", "Set model.head to pixels."
            )
        if isinstance(images, PackedImages):
            raise RegardError("Masked patches need images of one size (got packed images).", "Resize the images.")
        grid = compute_grid(images.shape[-2:], self.config.patch)
        count = grid[0] * grid[1]
        visible_count = round(count * (1 - mask_ratio))
        if not 0 < visible_count < count:
            raise RegardError(
                f"A mask ratio of {mask_ratio} leaves {visible_count} of {count} patches visible.",
                "Choose a ratio that leaves some patches visible and masks some.",
            )
        noise = torch.rand(len(images), count, device=images.device) if noise is None else noise
        order = noise.argsort(dim=1)
        visible, masked = order[:, :visible_count], order[:, visible_count:]
        pixels = self.embedding.normalize(images)
        x, offsets, rotary = self.embedding.embed_visible(pixels, visible)
        for block in self.blocks:
            x = block(x, offsets, rotary=rotary)
        predicted = self.output(self.mae_decoder(self.norm(x), visible, masked, grid, self.config.prefix))
        target = gather_rows(split_patches(pixels, self.config.patch).float(), masked)
        return Reconstruction(predicted, nn.functional.layer_norm(target, target.shape[-1:], eps=1e-6), masked)

    def _upsample(self, logits: Float[Tensor, "B T V"], grid: Grid) -> Float[Tensor, "B V H W"]:
        size = [side * self.config.patch for side in grid]
        return nn.functional.interpolate(logits.mT.unflatten(2, grid), size, mode="bilinear")


def _offsets(images: Images) -> Offsets | None:
    """The offsets of the patches, without prefix tokens."""
    return images.offsets if isinstance(images, PackedImages) else None


def _mean(x: Float[Tensor, "*n E"], offsets: Offsets | None) -> Float[Tensor, "B E"]:
    if offsets is None:
        return x.mean(1)
    sums = torch.zeros(len(offsets.starts) - 1, x.shape[1], device=x.device)
    return (sums.index_add(0, offsets.sequences, x.float()) / offsets.lengths[:, None]).to(x.dtype)

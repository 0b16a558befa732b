"""Heads over encoded tokens: attention pooling, segmentation, and reconstruction of masked patches."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.offsets import Lengths, Offsets
from regard.layers.attention import CrossAttention, MultiHeadAttention
from regard.layers.blocks import BlockConfig, TransformerBlock, first_tokens
from regard.layers.norms import make_norm
from regard.layers.patches import Grid, gather_rows, patch_coordinates, prepend_prefix, remove_prefix
from regard.layers.positions import SinusoidalGrid


class AttentionPooling(nn.Module):
    """Pool each sequence to one vector: cross-attention from a learned query to its tokens.

    With `feedforward` a feed-forward layer with a norm follows, around which there is a residual (SigLIP).

    >>> AttentionPooling(BlockConfig(16, heads=4, feedforward=32), "scaled_dot")(torch.randn(2, 5, 16), None).shape
    torch.Size([2, 16])
    """

    def __init__(self, config: BlockConfig, score: str, feedforward: bool = False) -> None:
        super().__init__()
        self.question = nn.Parameter(torch.empty(1, config.width))  # the learned query
        nn.init.normal_(self.question, std=config.width**-0.5)
        self.attention: MultiHeadAttention = config.make_attention(score, attention_class=CrossAttention)
        self.norm = config.make_norm() if feedforward else None
        self.feedforward = config.make_feedforward() if feedforward else None

    def forward(self, x: Float[Tensor, "*n E"], offsets: Offsets | Lengths | None) -> Float[Tensor, "B E"]:
        pooled = self._attend(x, offsets)
        if self.norm is None or self.feedforward is None:
            return pooled
        return pooled + self.feedforward(self.norm(pooled))

    def _attend(self, x: Float[Tensor, "*n E"], offsets: Offsets | Lengths | None) -> Float[Tensor, "B E"]:
        if not isinstance(offsets, Offsets):
            query = self.question.to(x.dtype).expand(x.shape[0], 1, -1)
            return self.attention(query, memory=x, memory_offsets=offsets).squeeze(1)
        starts = torch.arange(len(offsets.starts), device=x.device, dtype=torch.int32)
        queries = self.question.to(x.dtype).expand(len(starts) - 1, -1)
        return self.attention(queries, Offsets(starts, len(queries), 1), memory=x, memory_offsets=offsets)


def mean_tokens(x: Float[Tensor, "*n E"], offsets: Offsets | Lengths | None) -> Float[Tensor, "B E"]:
    """The mean of the tokens of each sequence; zeros for a sequence without tokens.

    >>> mean_tokens(torch.tensor([[1.0], [3.0], [5.0]]), Offsets.from_starts(torch.tensor([0, 2, 3])))
    tensor([[2.],
            [5.]])
    """
    if isinstance(offsets, Offsets):
        sums = x.new_zeros(len(offsets.starts) - 1, x.shape[-1]).index_add(0, offsets.sequences, x)
        return sums / offsets.lengths.clamp(min=1)[:, None].to(x.dtype)
    if offsets is None or offsets.lengths is None:
        return x.mean(1)
    is_token = torch.arange(x.shape[1], device=x.device) < offsets.lengths[:, None]
    return (x * is_token[..., None].to(x.dtype)).sum(1) / offsets.lengths.clamp(min=1)[:, None].to(x.dtype)


class SegmentationDecoder(nn.Module):
    """Mask transformer of Segmenter (Strudel et al. 2021): logits of each label for each patch.

    A learned query per label passes through the blocks together with the patches. The logits are scaled dot products
    of projected patches and queries.

    >>> decoder = SegmentationDecoder(3, BlockConfig(16, heads=4, feedforward=32), "scaled_dot", 1)
    >>> decoder(torch.randn(2, 5, 16), None).shape
    torch.Size([2, 5, 3])
    """

    blocks: Sequence[TransformerBlock]  # a ModuleList

    def __init__(self, labels: int, config: BlockConfig, score: str, layers: int) -> None:
        super().__init__()
        config = replace(config, max_len=config.max_len + labels)
        self.queries = nn.Parameter(torch.empty(labels, config.width))
        nn.init.normal_(self.queries, std=0.02)
        self.blocks = nn.ModuleList(config.make_block(score) for _ in range(layers))  # type: ignore[assignment]
        self.norm = make_norm(config.norm_kind, config.width, config.norm_eps)
        # Projections of patches and label queries.
        self.of_patch = nn.Linear(config.width, config.width, bias=False)
        self.of_query = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Float[Tensor, "*n E"], offsets: Offsets | None) -> Float[Tensor, "*n V"]:
        labels = len(self.queries)
        x, extended_offsets = prepend_prefix(self.queries, x, offsets)
        for block in self.blocks:
            x = block(x, extended_offsets)
        x = self.norm(x)
        patches = self.of_patch(remove_prefix(x, labels, offsets))
        queries = self.of_query(first_tokens(x, extended_offsets, labels))
        queries = queries * queries.shape[-1] ** -0.5
        if offsets is None:
            return patches @ queries.mT
        # Multiply each patch with the queries of its image: unpack to a padded batch.
        count, max_len = len(offsets.starts) - 1, offsets.max_len
        cells = offsets.sequences * max_len + offsets.positions
        padded = patches.new_zeros(count * max_len, patches.shape[1]).index_copy(0, cells, patches)
        logits = padded.unflatten(0, (count, max_len)) @ queries.unflatten(0, (count, labels)).mT
        return logits.flatten(0, 1).index_select(0, cells)


class PatchDecoder(nn.Module):
    """Decoder of a masked autoencoder (MAE, He et al. 2022): features of the masked patches from the visible ones.

    Every masked patch enters as the same learned mask token plus its positional encoding.

    >>> decoder = PatchDecoder(16, BlockConfig(8, heads=2, feedforward=16), "scaled_dot", layers=1)
    >>> visible, masked = torch.tensor([[3, 1]]), torch.tensor([[0, 2]])
    >>> decoder(torch.randn(1, 2, 16), visible, masked, (2, 2), prefix=0).shape
    torch.Size([1, 2, 8])
    """

    blocks: Sequence[TransformerBlock]  # a ModuleList

    def __init__(self, width: int, config: BlockConfig, score: str, layers: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(width, config.width)  # from the encoder's width to the decoder's
        self.hidden = nn.Parameter(torch.empty(1, config.width))  # the mask token
        nn.init.normal_(self.hidden, std=0.02)
        self.positions = SinusoidalGrid(config.width)
        self.blocks = nn.ModuleList(config.make_block(score) for _ in range(layers))  # type: ignore[assignment]
        self.norm = make_norm(config.norm_kind, config.width, config.norm_eps)

    def forward(
        self,
        x: Float[Tensor, "B K E"],
        visible: Int[Tensor, "B S"],
        masked: Int[Tensor, "B M"],
        grid: Grid,
        prefix: int,
    ) -> Float[Tensor, "B M W"]:
        """`x`: encoded prefix tokens and visible patches; `visible` and `masked`: indices of the patches."""
        x = self.narrow(x)
        prefix_tokens, patches = x[:, :prefix], x[:, prefix:]
        mask_tokens = self.hidden.to(x.dtype).expand(len(x), visible.shape[1] + masked.shape[1], -1)
        tokens = mask_tokens.scatter(1, visible[:, :, None].expand_as(patches), patches)
        tokens = tokens + self.positions(*patch_coordinates(grid, x.device)).to(x.dtype)
        x = torch.cat((prefix_tokens, tokens), dim=1)
        for block in self.blocks:
            x = block(x, None)
        return self.norm(gather_rows(x, masked + prefix))

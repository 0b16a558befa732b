"""Readouts of encoded tokens: a learned query that pools a sequence, a label per patch, pixels of hidden patches."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.offsets import Lengths, Offsets
from regard.layers.blocks import BlockConfig, EncoderBlock, first_tokens
from regard.layers.multihead import MultiHead
from regard.layers.norms import make_norm
from regard.layers.patches import Grid, put_before, rows_of, take_away, whereabouts
from regard.layers.positions import SinusoidalGrid


class QueryPool(nn.Module):
    """One vector per sequence: the output of cross-attention from one learned query to the tokens of a text or image.

    >>> QueryPool(BlockConfig(16, heads=4, feedforward=32), "scaled_dot")(torch.randn(2, 5, 16), None).shape
    torch.Size([2, 16])
    """

    def __init__(self, config: BlockConfig, score: str) -> None:
        super().__init__()
        self.question = nn.Parameter(torch.empty(1, config.width))
        nn.init.normal_(self.question, std=config.width**-0.5)
        self.attention: MultiHead = config.attention("cross", score)

    def forward(self, x: Float[Tensor, "*n E"], offsets: Offsets | Lengths | None) -> Float[Tensor, "B E"]:
        if not isinstance(offsets, Offsets):
            query = self.question.to(x.dtype).expand(x.shape[0], 1, -1)
            return self.attention(query, memory=x, memory_offsets=offsets).squeeze(1)
        ends = torch.arange(len(offsets.starts), device=x.device, dtype=torch.int32)
        asked = self.question.to(x.dtype).expand(len(ends) - 1, -1)
        return self.attention(asked, Offsets(ends, len(asked), 1), memory=x, memory_offsets=offsets)


class ClassQueries(nn.Module):
    """A query for each label goes through some blocks together with the patches; label and patch then match by their
    product (the mask transformer of Segmenter, Strudel et al. 2021).

    >>> ClassQueries(3, BlockConfig(16, heads=4, feedforward=32), "scaled_dot", 1)(torch.randn(2, 5, 16), None).shape
    torch.Size([2, 5, 3])
    """

    blocks: Sequence[EncoderBlock]  # a ModuleList, which does not tell the type of what it holds

    def __init__(self, labels: int, config: BlockConfig, score: str, layers: int) -> None:
        super().__init__()
        config = replace(config, max_len=config.max_len + labels)
        self.queries = nn.Parameter(torch.empty(labels, config.width))
        nn.init.normal_(self.queries, std=0.02)
        self.blocks = nn.ModuleList(EncoderBlock(config, score) for _ in range(layers))  # type: ignore[assignment]
        self.norm = make_norm(config.norm_kind, config.width, config.norm_eps)
        self.of_patch = nn.Linear(config.width, config.width, bias=False)
        self.of_query = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Float[Tensor, "*n E"], offsets: Offsets | None) -> Float[Tensor, "*n V"]:
        labels = len(self.queries)
        x, wide = put_before(self.queries, x, offsets)
        for block in self.blocks:
            x = block(x, wide)
        x = self.norm(x)
        patches, queries = self.of_patch(take_away(x, labels, offsets)), self.of_query(first_tokens(x, wide, labels))
        queries = queries * queries.shape[-1] ** -0.5
        if offsets is None:
            return patches @ queries.mT
        # Each patch with the queries of its own image.
        count, longest = len(offsets.starts) - 1, offsets.max_len
        cells = offsets.sequences * longest + offsets.places
        padded = patches.new_zeros(count * longest, patches.shape[1]).index_copy(0, cells, patches)
        labelled = padded.unflatten(0, (count, longest)) @ queries.unflatten(0, (count, labels)).mT
        return labelled.flatten(0, 1).index_select(0, cells)


class Painter(nn.Module):
    """From the tokens of the patches that were shown to features of those that were hidden (MAE, He et al. 2022).

    A small decoder: where a patch was hidden stands one and the same learned token, and its position.

    >>> painter = Painter(16, BlockConfig(8, heads=2, feedforward=16), "scaled_dot", layers=1)
    >>> shown, hidden = torch.tensor([[3, 1]]), torch.tensor([[0, 2]])
    >>> painter(torch.randn(1, 2, 16), shown, hidden, (2, 2), prefix=0).shape
    torch.Size([1, 2, 8])
    """

    blocks: Sequence[EncoderBlock]

    def __init__(self, width: int, config: BlockConfig, score: str, layers: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(width, config.width)
        self.hidden = nn.Parameter(torch.empty(1, config.width))
        nn.init.normal_(self.hidden, std=0.02)
        self.positions = SinusoidalGrid(config.width)
        self.blocks = nn.ModuleList(EncoderBlock(config, score) for _ in range(layers))  # type: ignore[assignment]
        self.norm = make_norm(config.norm_kind, config.width, config.norm_eps)

    def forward(
        self,
        x: Float[Tensor, "B K E"],
        shown: Int[Tensor, "B S"],
        hidden: Int[Tensor, "B M"],
        grid: Grid,
        prefix: int,
    ) -> Float[Tensor, "B M W"]:
        """`x` are the encoder's tokens, `prefix` of them no patches; `shown` and `hidden` say which patch is which."""
        x = self.narrow(x)
        first, patches = x[:, :prefix], x[:, prefix:]
        blank = self.hidden.to(x.dtype).expand(len(x), shown.shape[1] + hidden.shape[1], -1)
        whole = blank.scatter(1, shown[:, :, None].expand_as(patches), patches)
        whole = whole + self.positions(*whereabouts(grid, x.device)).to(x.dtype)
        x = torch.cat((first, whole), dim=1)
        for block in self.blocks:
            x = block(x, None)
        return self.norm(rows_of(x, hidden + prefix))

"""Tokens to vectors: the same token, the same vector; positions added; one place for the scale."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.layers.dropout import Dropout
from regard.layers.positions import PositionKind, make_positions


class Embedding(nn.Module):
    """A learned vector a token, times the root of the width, plus the code of its position (C1, C2).

    Families differ in what else there is: no scale (`scaled=False`), a vector for each of several `segments` (BERT's
    first and second text), a norm after the sum.

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

    def forward(
        self,
        ids: Int[Tensor, "*n"],
        positions: Int[Tensor, "*n"],
        longest: int | None = None,
        segments: Int[Tensor, "*n"] | None = None,
    ) -> Float[Tensor, "*n E"]:
        """`longest` bounds the positions where the caller knows it, which spares asking the device."""
        x = self.tokens(ids) * self.scale
        if self.segments is not None:
            x = x + self.segments(segments if segments is not None else torch.zeros_like(ids))
        if self.positions is not None:
            self.positions.reserve(longest if longest is not None else int(positions.max()) + 1)
            x = x + self.positions(positions).to(x.dtype)
        return self.dropout(self.norm(x))

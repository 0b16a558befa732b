"""Encoder and decoder blocks: attention and feed-forward, each with its residual connection and norm (C3, C4)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.offsets import Offsets
from regard.layers.cache import GrowingCache, MemoryCache
from regard.layers.dropout import Dropout
from regard.layers.feedforward import Activation, FeedForward
from regard.layers.multihead import MultiHead
from regard.layers.norms import NormKind, make_norm

NormPlace = Literal["pre", "post"]


@dataclass(frozen=True)
class BlockConfig:
    """What encoder and decoder blocks have in common."""

    width: int
    heads: int
    feedforward: int
    kv_heads: int | None = None
    dropout: float = 0.1
    norm: NormPlace = "pre"
    norm_kind: NormKind = "layer"
    activation: Activation = "relu"
    rotary: bool = False
    qk_norm: bool = False
    bias: bool = True
    max_len: int = 256

    def attention(self, kind: Literal["self", "masked", "cross"], score: str) -> MultiHead:
        return MultiHead(
            self.width,
            self.heads,
            kind=kind,
            score=score,
            kv_heads=self.kv_heads,
            rotary=self.rotary and kind != "cross",
            qk_norm=self.qk_norm,
            bias=self.bias,
            max_keys=self.max_len,
        )


class Residual(nn.Module):
    """x + sublayer(norm(x)) before (pre), or norm(x + sublayer(x)) after (post, as published in 2017).

    >>> Residual(BlockConfig(8, 2, 16, dropout=0.0))(torch.ones(3, 8), lambda x: 0 * x).sum().item()
    24.0
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.place = config.norm
        self.norm = make_norm(config.norm_kind, config.width)
        self.dropout = Dropout(config.dropout)

    def forward(
        self, x: Float[Tensor, "*n E"], sublayer: Callable[[Float[Tensor, "*n E"]], Float[Tensor, "*n E"]]
    ) -> Float[Tensor, "*n E"]:
        if self.place == "pre":
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward.

    >>> block = EncoderBlock(BlockConfig(16, heads=4, feedforward=32), score="scaled_dot")
    >>> block(torch.randn(5, 16), Offsets.of(torch.tensor([0, 2, 5]))).shape
    torch.Size([5, 16])
    """

    def __init__(self, config: BlockConfig, score: str) -> None:
        super().__init__()
        self.attention = config.attention("self", score)
        self.feedforward = FeedForward(config.width, config.feedforward, config.activation, config.bias)
        self.residuals = nn.ModuleList(Residual(config) for _ in range(2))

    def forward(
        self, x: Float[Tensor, "N E"], offsets: Offsets, positions: Int[Tensor, "N"] | None = None
    ) -> Float[Tensor, "N E"]:
        x = self.residuals[0](x, lambda y: self.attention(y, offsets, positions=positions))
        return self.residuals[1](x, self.feedforward)


class DecoderBlock(nn.Module):
    """Masked self-attention, cross-attention over the encoder's output, then feed-forward."""

    def __init__(self, config: BlockConfig, score: str, cross_score: str) -> None:
        super().__init__()
        self.attention = config.attention("masked", score)
        self.cross = config.attention("cross", cross_score)
        self.feedforward = FeedForward(config.width, config.feedforward, config.activation, config.bias)
        self.residuals = nn.ModuleList(Residual(config) for _ in range(3))

    def forward(
        self,
        x: Float[Tensor, "N E"],
        offsets: Offsets,
        memory: Float[Tensor, "M E"],
        memory_offsets: Offsets,
        positions: Int[Tensor, "N"] | None = None,
    ) -> Float[Tensor, "N E"]:
        x = self.residuals[0](x, lambda y: self.attention(y, offsets, positions=positions))
        x = self.residuals[1](x, lambda y: self.cross(y, offsets, memory=memory, memory_offsets=memory_offsets))
        return self.residuals[2](x, self.feedforward)

    def step(
        self, x: Float[Tensor, "B K E"], own: GrowingCache, memory: MemoryCache, positions: Int[Tensor, "B K"]
    ) -> Float[Tensor, "B K E"]:
        """One token for each hypothesis; `own` takes up its keys and values."""
        x = self.residuals[0](x, lambda y: self.attention(y, positions=positions, cache=own))
        x = self.residuals[1](x, lambda y: self.cross(y, cache=memory))
        return self.residuals[2](x, self.feedforward)

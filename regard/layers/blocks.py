"""Encoder and decoder blocks: attention and feed-forward, each with its residual connection and norm (C3, C4)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import Bias, Offsets
from regard.layers import add_norm
from regard.layers.cache import GrowingCache, MemoryCache
from regard.layers.dropout import Dropout, DropPath
from regard.layers.feedforward import Activation, FeedForward
from regard.layers.multihead import BiasPlace, MultiHead
from regard.layers.norms import NormKind, make_norm
from regard.layers.positions import Turns

NormPlace = Literal["pre", "post"]


@dataclass(frozen=True)
class BlockConfig:
    """What encoder and decoder blocks have in common."""

    width: int
    heads: int
    feedforward: int
    kv_heads: int | None = None
    head_width: int | None = None
    dropout: float = 0.1
    norm: NormPlace = "pre"
    norm_kind: NormKind = "layer"
    norm_eps: float = 1e-5
    activation: Activation = "relu"
    rotary_base: float | None = None
    rotary_factor: float = 1.0
    rotary_context: int = 0
    qk_norm_eps: float | None = None
    qk_norm_kind: NormKind = "rms"
    bias: BiasPlace = "all"
    max_len: int = 256
    drop_path: float | None = None
    """None: nothing is left out. A rate of 0 computes as any other does, so that layers share their compiled code"""
    layer_scale: float = 0.0

    def attention(self, kind: Literal["self", "masked", "cross"], score: str) -> MultiHead:
        return MultiHead(
            self.width,
            self.heads,
            kind=kind,
            score=score,
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            rotary_base=self.rotary_base if kind != "cross" else None,
            rotary_factor=self.rotary_factor,
            rotary_context=self.rotary_context,
            qk_norm_eps=self.qk_norm_eps,
            qk_norm_kind=self.qk_norm_kind,
            bias=self.bias,
            max_keys=self.max_len,
        )

    def feed_forward(self) -> FeedForward:
        return FeedForward(
            self.width, self.feedforward, self.activation, self.bias in ("all", "not_qkv", "feedforward")
        )


class Residual(nn.Module):
    """x + sublayer(norm(x)) before (pre), or norm(x + sublayer(x)) after (post, as published in 2017).

    With `layer_scale` what is added has a learned factor a channel, which begins at that (LayerScale, Touvron et al.
    2021); with `drop_path` it is now and then left out for a whole sequence.

    >>> Residual(BlockConfig(8, 2, 16, dropout=0.0))(torch.ones(3, 8), lambda x: 0 * x).sum().item()
    24.0
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.place = config.norm
        self.norm = make_norm(config.norm_kind, config.width, config.norm_eps)
        self.dropout = Dropout(config.dropout)
        self.scale = nn.Parameter(torch.empty(config.width)) if config.layer_scale else None
        if self.scale is not None:
            nn.init.constant_(self.scale, config.layer_scale)
        self.drop_path = DropPath(config.drop_path) if config.drop_path is not None else None

    def forward(
        self,
        x: Float[Tensor, "*n E"],
        sublayer: Callable[[Float[Tensor, "*n E"]], Float[Tensor, "*m E"]],
        offsets: Offsets | None = None,
        first: Callable[[Float[Tensor, "*n E"]], Float[Tensor, "*m E"]] | None = None,
        *,
        ready: Float[Tensor, "*n E"] | None = None,
        following: "Residual | None" = None,
    ) -> Float[Tensor, "*m E"] | tuple[Float[Tensor, "*m E"], Float[Tensor, "*m E"]]:
        """`first` chooses the tokens that the sublayer is about, where these are not all.

        To the connection that is `following` it may give what is that one's `ready`, norm(x), made in the same pass.
        """
        if ready is None:
            ready = self.norm(x) if self.place == "pre" else x
        added = sublayer(ready)
        x = x if first is None else first(x)
        plain = self.scale is None and self.drop_path is None
        p = self.dropout.p if self.training else 0.0
        if self.place == "post":
            narrow = x.dtype == added.dtype and x.dim() == 2
            if plain and narrow and add_norm.takes(x, added, self.norm):
                return add_norm.run(x, added, self.norm, p)[1]
            x = x + self._tamed(added, offsets)
            # Under autocast norms give float32; the sum stays as wide as it came in.
            return self.norm(x).to(x.dtype)
        # Not for single tokens that are written: launching takes longer than computing there.
        if plain and self.training and following is not None and add_norm.takes(x, added, following.norm):
            return add_norm.run(x, added, following.norm, p)
        return x + self._tamed(added, offsets)

    def _tamed(self, added: Float[Tensor, "*m E"], offsets: Offsets | None) -> Float[Tensor, "*m E"]:
        added = self.dropout(added)
        if self.scale is not None:
            added = added * self.scale.to(added.dtype)
        return added if self.drop_path is None else self.drop_path(added, offsets)


def in_turn(
    x: Float[Tensor, "*n E"],
    residuals: Iterable[nn.Module],
    sublayers: Sequence[Callable[[Float[Tensor, "*n E"]], Float[Tensor, "*n E"]]],
    offsets: Offsets | None = None,
) -> Float[Tensor, "*n E"]:
    """Sublayers one after another, each within its residual connection."""
    connections, ready = [*residuals], None
    for one, following, sublayer in zip(connections, [*connections[1:], None], sublayers):
        found = one(x, sublayer, offsets, ready=ready, following=following)
        x, ready = found if isinstance(found, tuple) else (found, None)
    return x


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward: a block of an encoder or, masked, of a decoder that has no encoder.

    >>> block = EncoderBlock(BlockConfig(16, heads=4, feedforward=32), score="scaled_dot")
    >>> block(torch.randn(5, 16), Offsets.of(torch.tensor([0, 2, 5]))).shape
    torch.Size([5, 16])
    """

    def __init__(self, config: BlockConfig, score: str, kind: Literal["self", "masked"] = "self") -> None:
        super().__init__()
        self.attention = config.attention(kind, score)
        self.feedforward = config.feed_forward()
        self.residuals = nn.ModuleList(Residual(config) for _ in range(2))

    def forward(
        self,
        x: Float[Tensor, "*n E"],
        offsets: Offsets | None,
        positions: Int[Tensor, "*n"] | None = None,
        bias: Bias | None = None,
        cache: GrowingCache | None = None,
        turns: Turns | None = None,
    ) -> Float[Tensor, "*n E"]:
        """Whole sequences, packed or (without offsets) all of one length; with a cache and no offsets one token for
        each of the (B, K) hypotheses."""

        sublayers = (
            lambda y: self.attention(y, offsets, positions=positions, bias=bias, cache=cache, turns=turns),
            self.feedforward,
        )
        return in_turn(x, self.residuals, sublayers, offsets)

    def first(
        self, x: Float[Tensor, "*n E"], offsets: Offsets | None, count: int, turns: Turns | None = None
    ) -> Float[Tensor, "B K E"]:
        """What `forward` gives to the first `count` tokens of each sequence, which stand nowhere (no turns of theirs).

        The others are only regarded. Where nobody asks for what becomes of them, the last block is nearly free.
        """
        few = None
        if offsets is not None:
            ends = torch.arange(len(offsets.starts), device=x.device, dtype=torch.int32) * count
            few = Offsets(ends, count * (len(ends) - 1), count)
        chosen = partial(first_tokens, offsets=offsets, count=count)

        def attention(y: Tensor) -> Tensor:
            return self.attention(chosen(y), few, memory=y, memory_offsets=offsets, turns=turns)

        x = self.residuals[1](self.residuals[0](x, attention, few, chosen), self.feedforward, few)
        return x if offsets is None else x.unflatten(0, (-1, count))


def first_tokens(x: Float[Tensor, "*n E"], offsets: Offsets | None, count: int) -> Float[Tensor, "*m E"]:
    """The first tokens of each sequence: (B, count, E) of (B, T, E), (B * count, E) of packed ones.

    >>> first_tokens(torch.arange(5.0)[:, None], Offsets.of(torch.tensor([0, 3, 5])), 2)[:, 0]
    tensor([0., 1., 3., 4.])
    """
    if offsets is None:
        return x[:, :count]
    rows = offsets.starts[:-1, None] + torch.arange(count, device=x.device)
    return x.index_select(0, rows.flatten())


class DecoderBlock(nn.Module):
    """Masked self-attention, cross-attention over the encoder's output, then feed-forward."""

    def __init__(self, config: BlockConfig, score: str, cross_score: str) -> None:
        super().__init__()
        self.attention = config.attention("masked", score)
        self.cross = config.attention("cross", cross_score)
        self.feedforward = config.feed_forward()
        self.residuals = nn.ModuleList(Residual(config) for _ in range(3))

    def forward(
        self,
        x: Float[Tensor, "N E"],
        offsets: Offsets,
        memory: Float[Tensor, "M E"],
        memory_offsets: Offsets,
        positions: Int[Tensor, "N"] | None = None,
        bias: Bias | None = None,
    ) -> Float[Tensor, "N E"]:
        sublayers = (
            lambda y: self.attention(y, offsets, positions=positions, bias=bias),
            lambda y: self.cross(y, offsets, memory=memory, memory_offsets=memory_offsets),
            self.feedforward,
        )
        return in_turn(x, self.residuals, sublayers)

    def step(
        self,
        x: Float[Tensor, "B K E"],
        own: GrowingCache,
        memory: MemoryCache,
        positions: Int[Tensor, "B K"],
        bias: Bias | None = None,
    ) -> Float[Tensor, "B K E"]:
        """One token for each hypothesis; `own` takes up its keys and values."""
        x = self.residuals[0](x, lambda y: self.attention(y, positions=positions, cache=own, bias=bias))
        x = self.residuals[1](x, lambda y: self.cross(y, cache=memory))
        return self.residuals[2](x, self.feedforward)

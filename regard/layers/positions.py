"""How a token says where it stands: sinusoidal (fixed, extrapolates), learned, rotary (applied to q and k)."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import RegardError

PositionKind = Literal["sinusoidal", "learned", "rotary", "none"]


class Sinusoidal(nn.Module):
    """sin and cos of p / 10000^(2i/E) in alternation (Vaswani et al. 2017, section 3.5), computed once and reused.

    The table grows when a longer sequence arrives: the code extrapolates to lengths never seen.

    >>> Sinusoidal(4)(torch.tensor([0]))
    tensor([[0., 1., 0., 1.]])
    """

    table: Tensor

    def __init__(self, width: int, length: int = 256) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("table", self._computed(length), persistent=False)

    def _computed(self, length: int) -> Float[Tensor, "P E"]:
        position = torch.arange(length, dtype=torch.float64)[:, None]
        rate = torch.exp(torch.arange(0, self.width, 2, dtype=torch.float64) * (-math.log(10000.0) / self.width))
        table = torch.zeros(length, self.width, dtype=torch.float64)
        table[:, 0::2] = torch.sin(position * rate)
        table[:, 1::2] = torch.cos(position * rate)[:, : self.width // 2]
        return table.float()

    def reserve(self, length: int) -> None:
        if length > self.table.shape[0]:
            self.table = self._computed(max(length, 2 * self.table.shape[0])).to(self.table)

    def forward(self, positions: Int[Tensor, "..."]) -> Float[Tensor, "... E"]:
        return nn.functional.embedding(positions, self.table)


class Learned(nn.Embedding):
    """One learned vector a position; there is none beyond `length`."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__(length, width)
        nn.init.normal_(self.weight, std=width**-0.5)

    def reserve(self, length: int) -> None:
        if length > self.num_embeddings:
            raise RegardError(
                f"A sequence of {length} tokens is longer than the {self.num_embeddings} learned positions.",
                "Shorten it, or train with a larger model.max_len.",
            )


class Rotary(nn.Module):
    """Turns each pair of channels of q and k by an angle that grows with the position (Su et al. 2021).

    The dot product of two turned vectors depends on their distance alone. Pairs are (i, i + D/2).

    >>> q = torch.randn(3, 1, 8)
    >>> torch.allclose(Rotary(8)(q, torch.tensor([0, 1, 2])).norm(dim=-1), q.norm(dim=-1))
    True
    """

    rates: Tensor

    def __init__(self, head_width: int) -> None:
        super().__init__()
        if head_width % 2:
            raise RegardError(
                f"Rotary positions need an even head width, not {head_width}.", "Change model.width or model.heads."
            )
        rates = 10000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, x: Float[Tensor, "*n H D"], positions: Int[Tensor, "*n"]) -> Float[Tensor, "*n H D"]:
        angle = (positions[..., None].float() * self.rates)[..., None, :]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def make_positions(kind: PositionKind, width: int, max_len: int) -> Sinusoidal | Learned | None:
    """The module whose output is added to the embeddings, if the kind has one.

    >>> make_positions("rotary", 8, 16) is None
    True
    """
    if kind == "sinusoidal":
        return Sinusoidal(width)
    if kind == "learned":
        return Learned(width, max_len)
    return None

"""How a token says where it stands: sinusoidal, which extrapolates; learned; rotary, on q and k; relative, a bias.

Patches of an image stand in a grid: theirs are the same codes for rows and columns.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import RegardError

# Llama 3's: pairs that turn less often over the context are slowed down in full, and those that turn more often not.
FEW_TURNS, MANY_TURNS = 1.0, 4.0
RotaryTables = tuple[Float[Tensor, "*t 1 P"], Float[Tensor, "*t 1 P"]]
"""cos and sin of the rotation angles, for each pair of channels"""
PositionKind = Literal["sinusoidal", "sinusoidal_halves", "learned", "rotary", "relative", "none"]


class Sinusoidal(nn.Module):
    """sin and cos of p / 10000^(2i/E) in alternation (Vaswani et al. 2017, section 3.5), computed once and reused.

    With `halves` all sines come first and all cosines after them (tensor2tensor, Marian): the same numbers in another
    order. The table grows when a longer sequence arrives: the code extrapolates to lengths never seen.

    >>> Sinusoidal(4)(torch.tensor([0]))
    tensor([[0., 1., 0., 1.]])
    """

    table: Tensor

    def __init__(self, width: int, length: int = 256, halves: bool = False) -> None:
        super().__init__()
        self.width, self.halves = width, halves
        self.register_buffer("table", self._computed(length), persistent=False)

    def _computed(self, length: int) -> Float[Tensor, "P E"]:
        position = torch.arange(length, dtype=torch.float64)[:, None]
        rate = self._rates()
        table = torch.zeros(length, self.width, dtype=torch.float64)
        sines = (self.width + 1) // 2
        table[:, slice(sines) if self.halves else slice(0, None, 2)] = torch.sin(position * rate)
        cosines = torch.cos(position * rate)[:, : self.width // 2]
        table[:, slice(sines, None) if self.halves else slice(1, None, 2)] = cosines
        return table.float()

    def reserve(self, length: int | torch.SymInt) -> None:
        if not torch.compiler.is_exporting() and length > self.table.shape[0]:
            self.table = self._computed(max(int(length), 2 * self.table.shape[0])).to(self.table)

    def forward(self, positions: Int[Tensor, "..."]) -> Float[Tensor, "... E"]:
        if torch.compiler.is_exporting():  # an exported program computes the codes: it runs at any length
            angle = positions[..., None].double() * self._rates(positions.device)
            codes = torch.stack((angle.sin(), angle.cos()), dim=-2 if self.halves else -1).flatten(-2)
            return codes[..., : self.width].float()
        return nn.functional.embedding(positions, self.table)

    def _rates(self, device: torch.device | None = None) -> Float[Tensor, "P"]:
        pairs = torch.arange(0, self.width, 2, dtype=torch.float64, device=device)
        return torch.exp(pairs * (-math.log(10000.0) / self.width))


class Learned(nn.Embedding):
    """One learned vector a position; there is none beyond `length`.

    Some models (BART, RoBERTa) leave the first `offset` rows of the table unused.
    """

    def __init__(self, width: int, length: int, offset: int = 0) -> None:
        super().__init__(length + offset, width)
        self.offset = offset
        nn.init.normal_(self.weight, std=width**-0.5)

    def reserve(self, length: int | torch.SymInt) -> None:
        places = self.num_embeddings - self.offset
        if not torch.compiler.is_exporting() and length > places:
            raise RegardError(
                f"A sequence of {length} tokens is longer than the {places} learned positions.",
                "Shorten it, or train with a larger model.max_len.",
            )

    def forward(self, positions: Int[Tensor, "..."]) -> Float[Tensor, "... E"]:
        return super().forward(positions + self.offset if self.offset else positions)


class Rotary(nn.Module):
    """Turns each pair of channels of q and k by an angle that grows with the position (Su et al. 2021).

    The dot product of two turned vectors depends on their distance alone. Pairs are (i, i + D/2); pair i turns by
    base^(-2i/D) from one position to the next. With a `factor` all turn so many times slower; with a `context` too only
    those that turn less than once over it, those that turn four times and more as ever, and those between in between
    (Llama 3, which learned from texts of that length first).

    >>> q = torch.randn(3, 1, 8)
    >>> torch.allclose(Rotary(8)(q, torch.tensor([0, 1, 2])).norm(dim=-1), q.norm(dim=-1))
    True
    """

    rates: Tensor

    def __init__(self, head_width: int, base: float = 10000.0, factor: float = 1.0, context: int = 0) -> None:
        super().__init__()
        if head_width % 2:
            raise RegardError(
                f"Rotary positions need an even head width, not {head_width}.", "Change model.width or model.heads."
            )
        if not factor >= 1:
            raise RegardError(
                f"Rotary positions {factor} times slower cannot be.", "Let model.rotary_factor be 1 or more."
            )
        rates = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
        over_context = rates * context / (2 * math.pi)
        kept = ((over_context - FEW_TURNS) / (MANY_TURNS - FEW_TURNS)).clamp(0, 1)
        self.register_buffer("rates", rates * (kept + (1 - kept) / factor), persistent=False)

    def forward(self, x: Float[Tensor, "*n H D"], positions: Int[Tensor, "*n"]) -> Float[Tensor, "*n H D"]:
        angle = (positions[..., None].float() * self.rates)[..., None, :]
        return apply_rotary(x, angle.cos(), angle.sin())


def apply_rotary(
    x: Float[Tensor, "*n H D"], cos: Float[Tensor, "*t 1 P"], sin: Float[Tensor, "*t 1 P"]
) -> Float[Tensor, "*n H D"]:
    """Rotate the pairs (i, i + D/2) of channels by angles whose cosines and sines are given.

    >>> apply_rotary(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    tensor([[0., 1.]])
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class SinusoidalGrid(nn.Module):
    """Half of the channels are the sinusoidal code of a patch's row, half that of its column.

    >>> SinusoidalGrid(8)(torch.tensor([[0, 0]]))
    tensor([[0., 0., 1., 1., 0., 0., 1., 1.]])
    """

    rates: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        if width % 4:
            raise RegardError(
                f"Sinusoidal positions of rows and columns need a width that is a multiple of 4, not {width}.",
                "Change model.width.",
            )
        rates = 10000.0 ** (-torch.arange(0, width // 2, 2, dtype=torch.float32) / (width // 2))
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, places: Int[Tensor, "*n 2"], sizes: Int[Tensor, "*n 2"] | None = None) -> Float[Tensor, "*n E"]:
        angle = places[..., None].float() * self.rates
        return torch.cat((angle.sin(), angle.cos()), dim=-1).flatten(-2)


class LearnedGrid(nn.Module):
    """One learned vector for each place of a grid; images of another grid get values between them (bicubic).

    `prefix` is how many rows the table has before those, for tokens that stand outside of the grid.

    >>> table = LearnedGrid(4, (2, 3), prefix=1)
    >>> table.weight.shape, table(torch.tensor([[5, 5]]), torch.tensor([[6, 6]])).shape
    (torch.Size([7, 4]), torch.Size([1, 4]))
    """

    def __init__(self, width: int, grid: tuple[int, int], prefix: int = 0) -> None:
        super().__init__()
        self.grid, self.prefix = grid, prefix
        self.weight = nn.Parameter(torch.empty(prefix + grid[0] * grid[1], width))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, places: Int[Tensor, "N 2"], sizes: Int[Tensor, "N 2"]) -> Float[Tensor, "N E"]:
        """Of patches at these places (row, column), in images of these sizes (rows, columns)."""
        rows, columns = (cubic(places[:, i], sizes[:, i], self.grid[i]) for i in range(2))
        shares = (rows[:, :, None] * columns[:, None, :]).flatten(1)
        return shares @ self.weight[self.prefix :]


def cubic(places: Int[Tensor, "N"], sizes: Int[Tensor, "N"], count: int) -> Float[Tensor, "N G"]:
    """The shares that `count` known values have in value number p of `size` over the same length (Keys 1981).

    The two on either side count, what would lie beyond an end is the value at that end: as torch's bicubic does it
    (a = −0.75), but as a matrix, whose gradient is a sum in a fixed order.

    >>> cubic(torch.tensor([1]), torch.tensor([3]), 3)
    tensor([[0., 1., 0.]])
    """
    at = (places + 0.5) * (count / sizes) - 0.5
    gap = (at[:, None] - torch.arange(-2, count + 2, device=at.device)).abs()
    near = (1.25 * gap - 2.25) * gap * gap + 1
    far = ((-0.75 * gap + 3.75) * gap - 6) * gap + 3
    shares = torch.where(gap <= 1, near, torch.where(gap < 2, far, 0.0))
    before, inner, after = shares.split((2, count, 2), dim=1)
    known = torch.arange(count, device=at.device)
    return inner + before.sum(1, keepdim=True) * (known == 0) + after.sum(1, keepdim=True) * (known == count - 1)


class RotaryGrid(nn.Module):
    """The turns of q and k by a patch's place: half of the pairs of channels by its row, half by its column.

    >>> cos, sin = RotaryGrid(8)(torch.tensor([[0, 0], [0, 1]]))
    >>> sin.shape  # of 4 pairs of channels, the same for each head
    torch.Size([2, 1, 4])
    """

    rates: Tensor

    def __init__(self, head_width: int, base: float = 100.0) -> None:
        super().__init__()
        if head_width % 4:
            raise RegardError(
                f"Rotary positions of rows and columns need a head width that is a multiple of 4, not {head_width}.",
                "Change model.width or model.heads.",
            )
        # An image has far fewer rows than a text has tokens: a smaller base (Heo et al. 2024).
        rates = base ** (-torch.arange(0, head_width // 2, 2, dtype=torch.float32) / (head_width // 2))
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, places: Int[Tensor, "*t 2"]) -> RotaryTables:
        angle = (places[..., None].float() * self.rates).flatten(-2)[..., None, :]
        return angle.cos(), angle.sin()


class RelativeBias(nn.Module):
    """A learned number for each head and distance between query and key, added to their score (T5, Raffel et al. 2020).

    Near distances have a bucket each; farther ones share buckets that widen with the logarithm, and all from `distance`
    on share the last. With `both` half of the buckets are for keys to the right; otherwise there are none there.

    >>> bias = RelativeBias(heads=2, both=False)
    >>> bias(torch.tensor([5]), torch.arange(6)).shape
    torch.Size([2, 1, 6])
    """

    def __init__(self, heads: int, both: bool, buckets: int = 32, distance: int = 128) -> None:
        super().__init__()
        self.both, self.distance = both, distance
        self.table = nn.Embedding(buckets, heads)
        nn.init.normal_(self.table.weight, std=0.1)

    def buckets(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Int[Tensor, "t s"]:
        """The bucket of each query's position and key's position."""
        gap = s - p[:, None]
        count = self.table.num_embeddings
        first = torch.zeros_like(gap)
        if self.both:
            count //= 2
            first = (gap > 0) * count
            gap = gap.abs()
        else:
            gap = (-gap).clamp(min=0)
        single = count // 2
        share = (gap.clamp(min=1).float() / single).log() / math.log(self.distance / single)
        wide = (single + (share * (count - single)).long()).clamp(max=count - 1)
        return first + torch.where(gap < single, gap, wide)

    def forward(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Float[Tensor, "H t s"]:
        return self.table(self.buckets(p, s)).permute(2, 0, 1)


def make_positions(kind: PositionKind, width: int, max_len: int, offset: int = 0) -> Sinusoidal | Learned | None:
    """The module whose output is added to the embeddings, if the kind has one.

    >>> make_positions("rotary", 8, 16) is None
    True
    """
    if kind in ("sinusoidal", "sinusoidal_halves"):
        return Sinusoidal(width, halves=kind == "sinusoidal_halves")
    if kind == "learned":
        return Learned(width, max_len, offset)
    return None

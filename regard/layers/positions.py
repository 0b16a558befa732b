"""Positional encodings: sinusoidal, learned, rotary, relative; and their two-dimensional forms for image patches."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.offsets import Lengths, Offsets
from regard.attention.scores import check_constructor
from regard.errors import RegardError
from regard.kernels.derivatives import is_exporting
from regard.ranges import OneOf, register

# Llama 3: channel pairs with fewer rotations over the context are scaled in full, with more rotations not at all.
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR = 1.0, 4.0
# The same limits in YaRN.
YARN_ROTATIONS = 1.0, 32.0
RotaryScaling = Literal["interpolate", "yarn", "dynamic"]
Texts = Offsets | Lengths | Int[Tensor, "*n"] | None
"""the sequences of tokens, or the length of the text of each token"""
RotaryTables = tuple[Float[Tensor, "*t 1 P"], Float[Tensor, "*t 1 P"]]
"""cos and sin of the rotation angle of each pair of channels"""


class PositionalEncoding(nn.Module):
    """Base class of positional encodings, which are added to the embeddings of the tokens.

    >>> class Ramp(PositionalEncoding):
    ...     def forward(self, positions):
    ...         return positions[..., None] / 100 * torch.ones(4)
    >>> Ramp()(torch.tensor([7])).shape
    torch.Size([1, 4])
    """

    extrapolates = True
    """whether the encoding is defined at any position, or only below the `max_len` of the model"""

    @classmethod
    def build(cls, width: int, *, max_len: int) -> "PositionalEncoding":
        """The encoding for a model's sizes. Override it if the constructor has other arguments than `width`."""
        check_constructor(cls, width)
        return cls(width)

    def reserve(self, length: int | torch.SymInt) -> None:
        """Called before `forward` with a bound of all positions + 1, for encodings with a table."""

    def forward(self, positions: Int[Tensor, "..."]) -> Float[Tensor, "... E"]:
        """The encodings of these positions."""
        raise NotImplementedError


class Sinusoidal(PositionalEncoding):
    """Interleaved sin and cos of p / 10000^(2i/E) (Vaswani et al. 2017, section 3.5), from a cached table.

    With `split_halves` all sines come first, then all cosines (tensor2tensor, Marian). The table grows when a longer
    sequence arrives: the encoding is defined at any length.

    >>> Sinusoidal(4)(torch.tensor([0]))
    tensor([[0., 1., 0., 1.]])
    """

    table: Tensor

    def __init__(self, width: int, length: int = 256, split_halves: bool = False) -> None:
        super().__init__()
        self.width, self.split_halves = width, split_halves
        self.register_buffer("table", self._compute_table(length), persistent=False)

    def _compute_table(self, length: int) -> Float[Tensor, "P E"]:
        position = torch.arange(length, dtype=torch.float64)[:, None]
        rate = self._rates()
        table = torch.zeros(length, self.width, dtype=torch.float64)
        sines = (self.width + 1) // 2
        table[:, slice(sines) if self.split_halves else slice(0, None, 2)] = torch.sin(position * rate)
        cosines = torch.cos(position * rate)[:, : self.width // 2]
        table[:, slice(sines, None) if self.split_halves else slice(1, None, 2)] = cosines
        return table.float()

    def reserve(self, length: int | torch.SymInt) -> None:
        if not is_exporting() and length > self.table.shape[0]:
            self.table = self._compute_table(max(int(length), 2 * self.table.shape[0])).to(self.table)

    def forward(self, positions: Int[Tensor, "..."]) -> Float[Tensor, "... E"]:
        if is_exporting():  # an exported program computes the encoding, so that it runs at any length
            angle = positions[..., None].double() * self._rates(positions.device)
            encoding = torch.stack((angle.sin(), angle.cos()), dim=-2 if self.split_halves else -1).flatten(-2)
            return encoding[..., : self.width].float()
        return nn.functional.embedding(positions, self.table)

    def _rates(self, device: torch.device | None = None) -> Float[Tensor, "P"]:
        pairs = torch.arange(0, self.width, 2, dtype=torch.float64, device=device)
        return torch.exp(pairs * (-math.log(10000.0) / self.width))


class Learned(nn.Embedding):
    """Learned embedding of each position, up to `length`.

    The first `offset` rows of the table are unused (BART, RoBERTa).
    """

    extrapolates = False

    def __init__(self, width: int, length: int, offset: int = 0) -> None:
        super().__init__(length + offset, width)
        self.offset = offset
        nn.init.normal_(self.weight, std=width**-0.5)

    def reserve(self, length: int | torch.SymInt) -> None:
        limit = self.num_embeddings - self.offset
        if not is_exporting() and length > limit:
            raise RegardError(
                f"A sequence of {length} tokens is longer than the {limit} learned positions.",
                "Shorten it, or train with a larger model.max_len.",
            )

    def forward(self, positions: Int[Tensor, "..."]) -> Float[Tensor, "... E"]:
        return super().forward(positions + self.offset if self.offset else positions)


class Rotary(nn.Module):
    """Rotary position embedding (RoPE, Su et al. 2021): rotates channel pairs of q and k by position-dependent angles.

    The dot product of two rotated vectors depends only on their distance. Pairs are (i, i + D/2); pair i rotates by
    base^(-2i/D) per position. With `share` < 1 only the first channels of a head are rotated, and D is their number.

    `factor` and `context`, the length of the original training texts, adapt the rates to longer texts:

    - interpolate: the factor divides all rates (position interpolation, Chen et al. 2023). With a context only slow
      pairs are scaled, as in Llama 3: those with less than one rotation over the context in full, those with four or
      more not at all, with linear interpolation in between.
    - yarn: as in Llama 3, but with limits of 1 and 32 rotations, interpolation between the pairs at these limits, and
      q and k multiplied by 0.1 ln(factor) + 1 (YaRN, Peng et al. 2023, equations 21 and 22).
    - dynamic: the base grows with the length of the text, once it exceeds the context (dynamic NTK).

    >>> q = torch.randn(3, 1, 8)
    >>> torch.allclose(Rotary(8)(q, torch.tensor([0, 1, 2])).norm(dim=-1), q.norm(dim=-1))
    True
    """

    rates: Tensor

    def __init__(
        self,
        head_width: int,
        base: float = 10000.0,
        factor: float = 1.0,
        context: int = 0,
        scaling: RotaryScaling = "interpolate",
        share: float = 1.0,
    ) -> None:
        super().__init__()
        self.width = width = int(head_width * share)
        if width % 2 or not width:
            raise RegardError(
                f"Rotary positions need an even number of rotated channels (got {width}).",
                "Change model.width, model.heads or model.rotary_share.",
            )
        if not factor >= 1:
            raise RegardError(f"rotary_factor must be at least 1 (got {factor}).", "Change model.rotary_factor.")
        if scaling != "interpolate" and not context:
            raise RegardError(
                f"rotary_scaling = {scaling} needs the length of the original training texts.",
                "Set model.rotary_context.",
            )
        self.magnitude = 0.1 * math.log(factor) + 1 if scaling == "yarn" else 1.0
        self.factor, self.context, self.is_dynamic = factor, context, scaling == "dynamic"
        rates = base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        if scaling == "yarn":
            rates = rates * _yarn_factors(width, base, factor, context)
        elif scaling == "interpolate":
            rotations = rates * context / (2 * math.pi)
            unscaled = ((rotations - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)).clamp(0, 1)
            rates = rates * (unscaled + (1 - unscaled) / factor)
        self.register_buffer("rates", rates, persistent=False)

    def tables(self, positions: Int[Tensor, "*n"], texts: Texts = None) -> RotaryTables:
        """cos and sin of the angles at these positions; dynamic scaling depends on the lengths of the texts."""
        rates = self.rates
        if self.is_dynamic:
            lengths = _text_lengths(positions, texts)
            # base' = base · (factor · length / context − factor + 1)^(D / (D − 2)), from the context on
            growth = (self.factor * lengths.float() / self.context - (self.factor - 1)).clamp(min=1)[..., None]
            exponents = torch.arange(0, self.width, 2, device=rates.device) / max(self.width - 2, 1)
            rates = rates * growth ** (-exponents)
        angle = (positions[..., None].float() * rates)[..., None, :]
        cos, sin = angle.cos(), angle.sin()
        return (cos, sin) if self.magnitude == 1.0 else (cos * self.magnitude, sin * self.magnitude)

    def forward(
        self, x: Float[Tensor, "*n H D"], positions: Int[Tensor, "*n"], texts: Texts = None
    ) -> Float[Tensor, "*n H D"]:
        tables = self.tables(positions, texts)
        if self.width == x.shape[-1]:
            return apply_rotary(x, *tables)
        rotated, unchanged = x.split((self.width, x.shape[-1] - self.width), dim=-1)
        return torch.cat((apply_rotary(rotated, *tables), unchanged), dim=-1)


def _text_lengths(positions: Int[Tensor, "*n"], texts: Texts) -> Int[Tensor, "*n"]:
    """The length of each token's text; if nothing is known of the texts, the last token of each row ends one."""
    if isinstance(texts, Tensor):
        return texts
    if isinstance(texts, Offsets):
        return texts.lengths[texts.sequences]
    if isinstance(texts, Lengths):
        if texts.lengths is None:
            return torch.full_like(positions, positions.shape[-1])
        return texts.lengths[:, None].expand_as(positions)
    return (positions[..., -1:] + 1).expand_as(positions)


def _yarn_factors(width: int, base: float, factor: float, context: int) -> Float[Tensor, "P"]:
    """Factors of the rates: 1 for fast pairs, 1 / factor for slow ones, linear in the index of the pair in between."""

    def pair_index(rotations: float) -> float:
        return width * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_index(YARN_ROTATIONS[1])), 0)
    high = min(math.ceil(pair_index(YARN_ROTATIONS[0])), width - 1)
    slow = ((torch.arange(width // 2) - low) / (high - low or 0.001)).clamp(0, 1)
    return 1 - slow + slow / factor


def apply_rotary(
    x: Float[Tensor, "*n H D"], cos: Float[Tensor, "*t 1 P"], sin: Float[Tensor, "*t 1 P"]
) -> Float[Tensor, "*n H D"]:
    """Rotate the channel pairs (i, i + D/2) by the angles with these cosines and sines.

    >>> apply_rotary(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    tensor([[0., 1.]])
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class SinusoidalGrid(nn.Module):
    """Sinusoidal encoding of patches: half of the channels encode the row, half the column.

    >>> SinusoidalGrid(8)(torch.tensor([[0, 0]]))
    tensor([[0., 0., 1., 1., 0., 0., 1., 1.]])
    """

    rates: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        if width % 4:
            raise RegardError(
                f"Sinusoidal positions of patches need a width that is a multiple of 4 (got {width}).",
                "Change model.width.",
            )
        rates = 10000.0 ** (-torch.arange(0, width // 2, 2, dtype=torch.float32) / (width // 2))
        self.register_buffer("rates", rates, persistent=False)

    def forward(
        self, coordinates: Int[Tensor, "*n 2"], sizes: Int[Tensor, "*n 2"] | None = None
    ) -> Float[Tensor, "*n E"]:
        angle = coordinates[..., None].float() * self.rates
        return torch.cat((angle.sin(), angle.cos()), dim=-1).flatten(-2)


class LearnedGrid(nn.Module):
    """Learned embedding of each grid position, interpolated (bicubic) for images with another grid.

    The table starts with `prefix` rows for tokens outside of the grid.

    >>> table = LearnedGrid(4, (2, 3), prefix=1)
    >>> table.weight.shape, table(torch.tensor([[5, 5]]), torch.tensor([[6, 6]])).shape
    (torch.Size([7, 4]), torch.Size([1, 4]))
    """

    def __init__(self, width: int, grid: tuple[int, int], prefix: int = 0) -> None:
        super().__init__()
        self.grid, self.prefix = grid, prefix
        self.weight = nn.Parameter(torch.empty(prefix + grid[0] * grid[1], width))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, coordinates: Int[Tensor, "N 2"], sizes: Int[Tensor, "N 2"]) -> Float[Tensor, "N E"]:
        """`coordinates`: (row, column) of each patch; `sizes`: (rows, columns) of its image."""
        rows, columns = (bicubic_weights(coordinates[:, i], sizes[:, i], self.grid[i]) for i in range(2))
        weights = (rows[:, :, None] * columns[:, None, :]).flatten(1)
        return weights @ self.weight[self.prefix :]


def bicubic_weights(indices: Int[Tensor, "N"], sizes: Int[Tensor, "N"], count: int) -> Float[Tensor, "N G"]:
    """Weights that resample `count` values to `size` values along one axis: a row for each output index (Keys 1981).

    The same kernel as torch's bicubic interpolation (a = −0.75, values repeated beyond the border), but as a matrix,
    so that the gradient is a sum in a fixed order.

    >>> bicubic_weights(torch.tensor([1]), torch.tensor([3]), 3)
    tensor([[0., 1., 0.]])
    """
    center = (indices + 0.5) * (count / sizes) - 0.5
    gap = (center[:, None] - torch.arange(-2, count + 2, device=center.device)).abs()
    near = (1.25 * gap - 2.25) * gap * gap + 1
    far = ((-0.75 * gap + 3.75) * gap - 6) * gap + 3
    weights = torch.where(gap <= 1, near, torch.where(gap < 2, far, 0.0))
    before, inner, after = weights.split((2, count, 2), dim=1)
    index = torch.arange(count, device=center.device)
    return inner + before.sum(1, keepdim=True) * (index == 0) + after.sum(1, keepdim=True) * (index == count - 1)


class RotaryGrid(nn.Module):
    """Rotary tables of patches: half of the channel pairs rotate by the row, half by the column.

    >>> cos, sin = RotaryGrid(8)(torch.tensor([[0, 0], [0, 1]]))
    >>> sin.shape  # 4 channel pairs, the same for each head
    torch.Size([2, 1, 4])
    """

    rates: Tensor

    def __init__(self, head_width: int, base: float = 100.0) -> None:
        super().__init__()
        if head_width % 4:
            raise RegardError(
                f"Rotary positions of patches need a head width that is a multiple of 4 (got {head_width}).",
                "Change model.width or model.heads.",
            )
        # Smaller base than for text: an image has far fewer rows than a text has tokens (Heo et al. 2024).
        rates = base ** (-torch.arange(0, head_width // 2, 2, dtype=torch.float32) / (head_width // 2))
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, coordinates: Int[Tensor, "*t 2"]) -> RotaryTables:
        angle = (coordinates[..., None].float() * self.rates).flatten(-2)[..., None, :]
        return angle.cos(), angle.sin()


class RelativeBias(nn.Module):
    """Relative position bias (T5, Raffel et al. 2020): a learned value per head and distance, added to the scores.

    Short distances have a bucket each; longer ones share buckets of logarithmically growing size, and all from
    `distance` on share the last. If `bidirectional`, half of the buckets are for keys to the right of the query;
    otherwise all are for keys to the left.

    >>> bias = RelativeBias(heads=2, bidirectional=False)
    >>> bias(torch.tensor([5]), torch.arange(6)).shape
    torch.Size([2, 1, 6])
    """

    def __init__(self, heads: int, bidirectional: bool, buckets: int = 32, distance: int = 128) -> None:
        super().__init__()
        self.bidirectional, self.distance = bidirectional, distance
        self.table = nn.Embedding(buckets, heads)
        nn.init.normal_(self.table.weight, std=0.1)

    def buckets(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Int[Tensor, "t s"]:
        """The bucket of each pair of query position `p` and key position `s`."""
        gap = s - p[:, None]
        count = self.table.num_embeddings
        first = torch.zeros_like(gap)
        if self.bidirectional:
            count //= 2
            first = (gap > 0) * count
            gap = gap.abs()
        else:
            gap = (-gap).clamp(min=0)
        exact = count // 2
        ratio = (gap.clamp(min=1).float() / exact).log() / math.log(self.distance / exact)
        logarithmic = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
        return first + torch.where(gap < exact, gap, logarithmic)

    def forward(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Float[Tensor, "H t s"]:
        return self.table(self.buckets(p, s)).permute(2, 0, 1)


@dataclass(frozen=True, eq=False)
class RelativePositions:
    """Embeddings of relative positions, and the row of each pair of a query position and a key position."""

    embeddings: Float[Tensor, "R E"]
    index: Callable[[Int[Tensor, "t"], Int[Tensor, "s"]], Int[Tensor, "t s"]]


class RelativeEmbedding(nn.Module):
    """Embeddings of relative positions (DeBERTa), from which every layer computes keys and queries of its own.

    Half of the `buckets` is for each direction. Without `distance`, each relative position has a bucket. Otherwise
    only the nearer half of them has; farther ones share buckets of logarithmically growing size, up to this distance.
    Positions beyond the last bucket share it.

    >>> embedding = RelativeEmbedding(16, buckets=8)
    >>> embedding().embeddings.shape, embedding.index(torch.tensor([9]), torch.tensor([2, 8, 9, 12, 99]))
    (torch.Size([8, 16]), tensor([[7, 5, 4, 1, 0]]))
    """

    steps: Tensor

    def __init__(self, width: int, buckets: int, distance: int = 0, norm: nn.Module | None = None) -> None:
        super().__init__()
        span = buckets // 2
        if buckets % 2 or (distance and not (span >= 4 and distance - 1 > span // 2)):
            raise RegardError(
                f"relative_buckets is {buckets}, with relative_distance = {distance}.",
                "Choose an even number of buckets: at least 8, and less than four times the distance, or distance 0.",
            )
        self.table = nn.Embedding(buckets, width)
        nn.init.normal_(self.table.weight, std=0.02)
        self.norm = norm if norm is not None else nn.Identity()
        self.register_buffer("steps", _relative_steps(span, distance), persistent=False)

    def forward(self) -> RelativePositions:
        """The normalized embeddings, which all layers share."""
        return RelativePositions(self.norm(self.table.weight), self.index)

    def index(self, p: Int[Tensor, "t"], s: Int[Tensor, "s"]) -> Int[Tensor, "t s"]:
        """The row of each pair of query position `p` and key position `s`."""
        gap = p[:, None] - s
        steps = self.steps[gap.abs().clamp(max=len(self.steps) - 1)]
        span = self.table.num_embeddings // 2
        return (torch.where(gap < 0, -steps, steps) + span).clamp(0, 2 * span - 1)


def _relative_steps(span: int, distance: int) -> Int[Tensor, "P"]:
    """Bucket of each distance from 0 on, until all farther ones have the last bucket."""
    if not distance:
        return torch.arange(span + 1)
    near = span // 2
    gap = torch.arange(2 * distance + 1)
    ratio = (gap.clamp(min=1) / near).log() / torch.tensor((distance - 1) / near).log()
    return torch.where(gap <= near, gap, (ratio * (near - 1)).ceil().long() + near)


POSITIONS: dict[str, type[Any] | None] = {
    "sinusoidal": Sinusoidal,
    "sinusoidal_halves": Sinusoidal,
    "learned": Learned,
    # Not added to the embeddings: models pass them to the attention.
    "rotary": None,
    "relative": None,
    "none": None,
}
PositionKind = Annotated[
    Literal["sinusoidal", "sinusoidal_halves", "learned", "rotary", "relative", "none"] | str, OneOf(POSITIONS)
]
StackPositionKind = Annotated[
    Literal["rotary", "learned", "sinusoidal", "none"] | str,
    OneOf(POSITIONS, excluded=("sinusoidal_halves", "relative")),
]
"""of models with a single stack"""
P = TypeVar("P", bound=type[PositionalEncoding])


def register_positions(name: str) -> Callable[[P], P]:
    """Class decorator that makes a positional encoding available by name, in configs, recipes and model folders.

    >>> @register_positions("zeros")
    ... class Zeros(PositionalEncoding):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.width = width
    ...     def forward(self, positions):
    ...         return torch.zeros(*positions.shape, self.width)
    >>> make_positions("zeros", 8, 16)
    Zeros()
    >>> del POSITIONS["zeros"]
    """

    def decorate(positions: P) -> P:
        register(POSITIONS, "positional encoding", name, positions, lambda entry: entry or PositionalEncoding)
        return positions

    return decorate


def make_positions(kind: str, width: int, max_len: int, offset: int = 0) -> PositionalEncoding | Learned | None:
    """The module whose output is added to the embeddings; None for kinds without one.

    >>> make_positions("rotary", 8, 16) is None
    True
    """
    positions = POSITIONS[kind]
    if positions is Sinusoidal:
        return Sinusoidal(width, split_halves=kind == "sinusoidal_halves")
    if positions is Learned:
        return Learned(width, max_len, offset)
    return None if positions is None else positions.build(width, max_len=max_len)

"""Score functions: how a query and a key become a number.

Every score is two steps. `fold` changes queries and keys, each on its own; `pair` makes a number of each pair of the
results. For five of the six `pair` is the plain dot product, so that one fused kernel serves them all; concat, which
has a tanh between the two, brings its own. `score(q, k)`, both steps over all pairs, is the definition.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import unit_rows
from regard.errors import RegardError
from regard.ranges import OneOf, check_value


class Score(nn.Module):
    """What all scores have in common; a score of your own overrides `pair`, and `fold` where it has parameters.

    >>> class Distance(Score):
    ...     def pair(self, q, k):
    ...         return -torch.cdist(q, k)
    >>> Distance()(torch.zeros(1, 2, 3), torch.ones(1, 4, 3)).shape
    torch.Size([1, 2, 4])
    """

    heads: int | None = None
    one_width = False
    """Whether q and k must be of the same width."""

    @classmethod
    def build(cls, dim_q: int, dim_k: int, *, hidden: int, max_keys: int, heads: int | None) -> "Score":
        """The score for a model's sizes. Override it if the constructor has arguments.

        `hidden` is the width of a hidden layer, `max_keys` the maximum number of keys, and `heads` the number of heads,
        or None if one set of parameters serves all heads.
        """
        return cls()

    def forward(self, q: Float[Tensor, "*b T D"], k: Float[Tensor, "*b S C"]) -> Float[Tensor, "*b T S"]:
        dtype = q.dtype
        if dtype == torch.float16:  # whose largest number, 65504, a product may exceed before it is scaled
            q, k = q.float(), k.float()
        q, k, scale = self.fold(q, k)
        raw = self.pair(q, k)
        scores = raw if scale == 1.0 else raw * scale
        return scores.to(dtype) if dtype == torch.float16 else scores

    def fold(
        self, q: Float[Tensor, "*b T D"], k: Float[Tensor, "*g S C"], positions: Int[Tensor, "..."] | None = None
    ) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."], float]:
        """The q', k' and scale with which score(q, k) = scale * pair(q', k').

        `positions` tells each key's place in its sequence, where that is not simply its row.
        """
        return q, k, 1.0

    def pair(self, q: Float[Tensor, "*b T D"], k: Float[Tensor, "*b S D"]) -> Float[Tensor, "*b T S"]:
        raise NotImplementedError

    def pair_width(self, width: int) -> int:
        """How many numbers `pair` holds in memory for one query and one key: what a block of rows costs."""
        return 1

    def of_heads(self, chosen: Sequence[int]) -> "Score":
        """The same score for a few of its heads."""
        if self.heads is None:
            return self
        few = copy.copy(self)
        few._parameters = {
            name: None if p is None else nn.Parameter(p.detach()[list(chosen)]) for name, p in self._parameters.items()
        }
        few.heads = len(chosen)
        return few


class DotLike(Score):
    """A score that is a dot product once q and k are folded."""

    def pair(self, q: Float[Tensor, "*b T D"], k: Float[Tensor, "*b S D"]) -> Float[Tensor, "*b T S"]:
        return q @ k.mT


class Dot(DotLike):
    """s·h.

    >>> Dot()(torch.ones(1, 1, 4), torch.ones(1, 2, 4))
    tensor([[[4., 4.]]])
    """

    one_width = True


class ScaledDot(DotLike):
    """s·h / √D, D being the width of one head (Vaswani et al. 2017, equation 1).

    >>> ScaledDot()(torch.ones(1, 1, 4), torch.ones(1, 2, 4))
    tensor([[[2., 2.]]])
    """

    one_width = True

    def fold(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, float]:
        return q, k, q.shape[-1] ** -0.5


_TINY = {torch.float16: 1e-4}  # the least length of a vector that has a direction, where not 1e-6


def _units(
    q: Float[Tensor, "*b T D"], k: Float[Tensor, "*g S D"], log_scale: Tensor | None
) -> tuple[Float[Tensor, "*b T D"], Float[Tensor, "*g S D"]]:
    """Every row brought to length 1, q's then multiplied; a zero vector has no direction, and stays what it is."""
    if unit_rows.takes(q, k):
        return unit_rows.unit_rows(q, k, log_scale, _TINY.get(q.dtype, 1e-6))
    # A length may exceed float16's largest number where no component does.
    q, k = (
        nn.functional.normalize(x.float() if x.dtype == torch.float16 else x, dim=-1, eps=_TINY.get(x.dtype, 1e-6)).to(
            x.dtype
        )
        for x in (q, k)
    )
    return q if log_scale is None else q * log_scale.exp().to(q.dtype), k


class Cosine(DotLike):
    """scale · s·h / (|s| |h|).

    With scale 1 all scores lie between -1 and 1, and among many keys none can win: models learn the scale, from 10.

    >>> Cosine()(torch.ones(1, 1, 4), 7 * torch.ones(1, 2, 4))
    tensor([[[1., 1.]]])
    """

    one_width = True

    @classmethod
    def build(cls, dim_q: int, dim_k: int, *, hidden: int, max_keys: int, heads: int | None) -> "Cosine":
        return cls(scale=10.0, learned=True, heads=heads)

    def __init__(self, scale: float = 1.0, learned: bool = False, heads: int | None = None) -> None:
        super().__init__()
        if scale <= 0:
            raise RegardError(f"Cosine: the scale is {scale}.", "Give a scale above 0.")
        self.heads = heads
        self.scale = scale
        # Learned as a logarithm, so that it stays positive and a step means the same at every size.
        start = torch.full((1,) if heads is None else (heads, 1, 1), math.log(scale))
        self.log_scale = nn.Parameter(start) if learned else None

    def fold(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, float]:
        q, k = _units(q, k, self.log_scale)
        return q, k, self.scale if self.log_scale is None else 1.0


class General(DotLike):
    """sᵀ W_a h (Luong et al. 2015).

    >>> General(4, 6)(torch.ones(1, 1, 4), torch.ones(1, 2, 6)).shape
    torch.Size([1, 1, 2])
    """

    @classmethod
    def build(cls, dim_q: int, dim_k: int, *, hidden: int, max_keys: int, heads: int | None) -> "General":
        return cls(dim_q, dim_k, heads=heads)

    def __init__(self, dim_q: int, dim_k: int, heads: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        # Variance 1 / (dim_q dim_k) gives scores of about unit variance to q and k of unit variance.
        self.weight = _matrix(heads, dim_q, dim_k, std=(dim_q * dim_k) ** -0.5)

    def fold(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, float]:
        return q @ self.weight.to(q.dtype), k, 1.0


class Concat(Score):
    """w_aᵀ tanh(W_b s + W_c h) (Bahdanau et al. 2015); with `joint`, w_aᵀ tanh(W_b [s; h]): one matrix, same numbers.

    >>> Concat(4, 6, hidden=8)(torch.ones(1, 1, 4), torch.ones(1, 2, 6)).shape
    torch.Size([1, 1, 2])
    """

    @classmethod
    def build(cls, dim_q: int, dim_k: int, *, hidden: int, max_keys: int, heads: int | None) -> "Concat":
        return cls(dim_q, dim_k, hidden=hidden, heads=heads)

    def __init__(self, dim_q: int, dim_k: int, hidden: int, joint: bool = False, heads: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.dim_q = dim_q
        self.joint = joint
        if joint:
            self.weight = _matrix(heads, dim_q + dim_k, hidden, std=(dim_q + dim_k) ** -0.5)
        else:
            # As in the joint form, the two halves together have unit variance before the tanh.
            self.weight_q = _matrix(heads, dim_q, hidden, std=(dim_q + dim_k) ** -0.5)
            self.weight_k = _matrix(heads, dim_k, hidden, std=(dim_q + dim_k) ** -0.5)
        self.weight_a = _matrix(heads, hidden, 1, std=hidden**-0.5)

    def fold(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, float]:
        weight_q, weight_k = self.matrices
        return q @ weight_q.to(q.dtype), k @ weight_k.to(k.dtype), 1.0

    @property
    def matrices(self) -> tuple[Float[Tensor, "*H D C"], Float[Tensor, "*H E C"]]:
        """What q and k are multiplied by."""
        # [s; h] W = s W[:dim_q] + h W[dim_q:]: the joint form never needs the concatenation of each pair.
        if self.joint:
            return self.weight[..., : self.dim_q, :], self.weight[..., self.dim_q :, :]
        return self.weight_q, self.weight_k

    def pair(self, q: Float[Tensor, "*b T C"], k: Float[Tensor, "*b S C"]) -> Float[Tensor, "*b T S"]:
        tanh = (q.unsqueeze(-2) + k.unsqueeze(-3)).tanh_()
        T, S = tanh.shape[-3:-1]
        return (tanh.flatten(-3, -2) @ self.weight_a.to(tanh.dtype)).reshape(*tanh.shape[:-3], T, S)

    def pair_width(self, width: int) -> int:
        return width


class Location(DotLike):
    """W_a s: the weight of a place, whatever stands there (Luong et al. 2015). The keys tell only how many they are.

    As a dot product: row i of W_a is the key of place i.

    >>> Location(4, max_keys=10)(torch.ones(1, 1, 4), torch.ones(1, 2, 6)).shape
    torch.Size([1, 1, 2])
    """

    @classmethod
    def build(cls, dim_q: int, dim_k: int, *, hidden: int, max_keys: int, heads: int | None) -> "Location":
        return cls(dim_q, max_keys=max_keys, heads=heads)

    def __init__(self, dim_q: int, max_keys: int, heads: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.max_keys = max_keys
        self.weight = _matrix(heads, max_keys, dim_q, std=dim_q**-0.5)

    def fold(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, float]:
        if torch.compiler.is_exporting():  # rows by their numbers: no assumption about how many keys there are
            places = self.weight.index_select(-2, torch.arange(k.shape[-2], device=k.device))
        elif positions is None:
            if k.shape[-2] > self.max_keys:
                raise too_many_keys(k.shape[-2], self.max_keys)
            places = self.weight[..., : k.shape[-2], :]
        else:
            # The padded end of a rectangle may lie beyond the last place; it is masked, so any row will do there.
            places = self.weight[..., positions.clamp(max=self.max_keys - 1), :]
        return q, places.to(q.dtype).expand(*q.shape[:-2], -1, -1), 1.0


def too_many_keys(keys: int, max_keys: int) -> RegardError:
    return RegardError(f"Location: {keys} keys, but W_a has {max_keys} rows.", "Give Location a larger max_keys.")


def _matrix(heads: int | None, rows: int, columns: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*(() if heads is None else (heads,)), rows, columns) * std)


SCORES: dict[str, type[Score]] = {
    "dot": Dot,
    "scaled_dot": ScaledDot,
    "cosine": Cosine,
    "general": General,
    "concat": Concat,
    "location": Location,
}
ScoreName = Annotated[str, OneOf(SCORES)]
S = TypeVar("S", bound=type[Score])


def register_score(name: str) -> Callable[[S], S]:
    """Class decorator that makes a score available by name, in configs, recipes and model folders.

    >>> @register_score("negative_distance")
    ... class NegativeDistance(Score):
    ...     def pair(self, q, k):
    ...         return -torch.cdist(q, k)
    >>> make_score("negative_distance", 8, 8)
    NegativeDistance()
    >>> del SCORES["negative_distance"]
    """

    def register(score: S) -> S:
        if SCORES.get(name, score) is not score:
            raise RegardError(f"The score {name!r} is already registered.", "Choose another name.")
        SCORES[name] = score
        return score

    return register


def make_score(
    name: str, dim_q: int, dim_k: int, *, hidden: int = 128, max_keys: int = 1024, heads: int | None = None
) -> Score:
    """Create a score by name for a model's sizes; see `Score.build`.

    >>> make_score("concat", 32, 32, hidden=16)
    Concat()
    """
    check_value(ScoreName, name, "score")
    if SCORES[name].one_width and dim_q != dim_k:
        raise RegardError(f"{name}: queries have width {dim_q} and keys {dim_k}.", "Use general or concat.")
    return SCORES[name].build(dim_q, dim_k, hidden=hidden, max_keys=max_keys, heads=heads)

"""Score functions of attention: six of them, and the base class.

Every score has two steps. `transform` changes queries and keys independently of each other; `pair_scores` computes the
score of each pair of the results. For five of the six scores `pair_scores` is the plain dot product, so that one fused
kernel serves them all; concat, with a tanh of the sum, has separate kernels. `score(q, k)`, both steps over all pairs,
is the definition.
"""

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import RegardError
from regard.kernels.derivatives import is_exporting
from regard.kernels.triton import l2_normalize
from regard.ranges import OneOf, check_value, register


class Score(nn.Module):
    """Base class of scores. A custom score overrides `pair_scores`, and `transform` if queries or keys change first.

    >>> class Distance(Score):
    ...     def pair_scores(self, q, k):
    ...         return -torch.cdist(q, k)
    >>> Distance()(torch.zeros(1, 2, 3), torch.ones(1, 4, 3)).shape
    torch.Size([1, 2, 4])
    """

    heads: int | None = None
    """number of heads with separate parameters; None: no parameters, or all heads share them"""
    needs_equal_widths = False
    """whether q and k must have the same width"""

    def __init_subclass__(cls) -> None:
        if "forward" in cls.__dict__:
            raise RegardError(
                f"{cls.__name__} overrides forward, which backends do not call.", "Override pair_scores or transform."
            )

    @classmethod
    def build(cls, dim_q: int, dim_k: int, *, hidden: int, max_keys: int, heads: int | None) -> "Score":
        """The score for a model's sizes. Override it if the constructor has arguments.

        `hidden` is the width of a hidden layer, `max_keys` the maximum number of keys, and `heads` the number of heads,
        or None if one set of parameters serves all heads.
        """
        check_constructor(cls)
        return cls()

    def forward(self, q: Float[Tensor, "*b T D"], k: Float[Tensor, "*b S C"]) -> Float[Tensor, "*b T S"]:
        dtype = q.dtype
        if dtype == torch.float16:  # an unscaled product may exceed its maximum, 65504
            q, k = q.float(), k.float()
        T, S = q.shape[-2], k.shape[-2]
        q, k, scale = self.transform(q, k)
        scores = self.pair_scores_at(q, k, torch.arange(T, device=q.device) + (S - T), torch.arange(S, device=q.device))
        scores = scores if scale == 1.0 else scores * scale
        return scores.to(dtype) if dtype == torch.float16 else scores

    def transform(
        self, q: Float[Tensor, "*b T D"], k: Float[Tensor, "*g S C"], positions: Int[Tensor, "..."] | None = None
    ) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."], float]:
        """q', k' and scale such that score(q, k) = scale * pair_scores(q', k').

        `positions` are the positions of the keys in their sequences, where they differ from the row indices.
        """
        return q, k, 1.0

    def pair_scores(self, q: Float[Tensor, "*b T D"], k: Float[Tensor, "*b S D"]) -> Float[Tensor, "*b T S"]:
        """The scores of all pairs of transformed queries and keys, before scaling."""
        raise RegardError(f"The score {type(self).__name__} has no formula.", "Define its method pair_scores(q, k).")

    def pair_scores_at(
        self,
        q: Float[Tensor, "*b T D"],
        k: Float[Tensor, "*b S D"],
        p: Int[Tensor, "T"],
        s: Int[Tensor, "S"],
    ) -> Float[Tensor, "*b T S"]:
        """`pair_scores` of queries at positions p and keys at positions s; for scores that depend on positions."""
        return self.pair_scores(q, k)

    def pair_elements(self, width: int) -> int:
        """Elements that `pair_scores` holds in memory per pair of q and k of this width; determines the block size."""
        return 1

    def select_heads(self, heads: Sequence[int]) -> "Score":
        """The score with the parameters of some heads only."""
        if self.heads is None:
            return self
        subset = copy.copy(self)
        subset._parameters = {
            name: None if p is None else nn.Parameter(p.detach()[list(heads)]) for name, p in self._parameters.items()
        }
        subset.heads = len(heads)
        return subset


class DotLike(Score):
    """A score that is a dot product once q and k are transformed."""

    def pair_scores(self, q: Float[Tensor, "*b T D"], k: Float[Tensor, "*b S D"]) -> Float[Tensor, "*b T S"]:
        return q @ k.mT


def is_computed_as(score: Score, *kinds: type[Score]) -> bool:
    """Whether a score is of one of these classes and pairs as that class does: kernels do not call `pair_scores`.

    >>> class Doubled(Dot):
    ...     def pair_scores(self, q, k):
    ...         return 2 * super().pair_scores(q, k)
    >>> is_computed_as(Dot(), DotLike), is_computed_as(Doubled(), DotLike)
    (True, False)
    """
    cls = type(score)
    methods = cls.pair_scores, cls.pair_scores_at
    return any(issubclass(cls, kind) and methods == (kind.pair_scores, kind.pair_scores_at) for kind in kinds)


class Dot(DotLike):
    """Dot product, s·h.

    >>> Dot()(torch.ones(1, 1, 4), torch.ones(1, 2, 4))
    tensor([[[4., 4.]]])
    """

    needs_equal_widths = True


class ScaledDot(DotLike):
    """Scaled dot product, s·h / √D, where D is the width of one head (Vaswani et al. 2017, equation 1).

    `width` replaces the width of the head in the scale.

    >>> ScaledDot()(torch.ones(1, 1, 4), torch.ones(1, 2, 4))
    tensor([[[2., 2.]]])
    """

    needs_equal_widths = True

    def __init__(self, width: float = 0.0) -> None:
        super().__init__()
        self.width = width

    def scale(self, head_width: int) -> float:
        """The factor of the dot product for heads of this width."""
        return (self.width or head_width) ** -0.5

    def transform(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, float]:
        return q, k, self.scale(q.shape[-1])


_MIN_NORM = {torch.float16: 1e-4}  # vectors with a smaller norm are divided by this instead; 1e-6 for other dtypes


def _normalize_rows(
    q: Float[Tensor, "*b T D"], k: Float[Tensor, "*g S D"], log_scale: Tensor | None
) -> tuple[Float[Tensor, "*b T D"], Float[Tensor, "*g S D"]]:
    """L2-normalize the rows of q and k, and scale q; a zero vector stays zero."""
    eps = _MIN_NORM.get(q.dtype, 1e-6)
    if l2_normalize.supports(q, k):
        return l2_normalize.l2_normalize(q, k, log_scale, eps)
    # In float16 a norm may overflow where no element does.
    q, k = (
        nn.functional.normalize(
            x.float() if x.dtype == torch.float16 else x, dim=-1, eps=_MIN_NORM.get(x.dtype, 1e-6)
        ).to(x.dtype)
        for x in (q, k)
    )
    return q if log_scale is None else q * log_scale.exp().to(q.dtype), k


class Cosine(DotLike):
    """Cosine similarity, scale · s·h / (|s| |h|).

    With scale 1 all scores are between -1 and 1, and the softmax over many keys is nearly uniform: models learn the
    scale, starting at 10.

    >>> Cosine()(torch.ones(1, 1, 4), 7 * torch.ones(1, 2, 4))
    tensor([[[1., 1.]]])
    """

    needs_equal_widths = True

    @classmethod
    def build(cls, dim_q: int, dim_k: int, *, hidden: int, max_keys: int, heads: int | None) -> "Cosine":
        return cls(scale=10.0, learned=True, heads=heads)

    def __init__(self, scale: float = 1.0, learned: bool = False, heads: int | None = None) -> None:
        super().__init__()
        if scale <= 0:
            raise RegardError(f"Cosine: the scale must be positive (got {scale}).", "Pass a scale above 0.")
        self.heads = heads
        self.scale = scale
        # Learned as a logarithm: it stays positive, and updates are relative to its size.
        start = torch.full((1,) if heads is None else (heads, 1, 1), math.log(scale))
        self.log_scale = nn.Parameter(start) if learned else None

    def transform(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, float]:
        q, k = _normalize_rows(q, k, self.log_scale)
        return q, k, self.scale if self.log_scale is None else 1.0


class General(DotLike):
    """Bilinear score, sᵀ W_a h (Luong et al. 2015).

    >>> General(4, 6)(torch.ones(1, 1, 4), torch.ones(1, 2, 6)).shape
    torch.Size([1, 1, 2])
    """

    @classmethod
    def build(cls, dim_q: int, dim_k: int, *, hidden: int, max_keys: int, heads: int | None) -> "General":
        return cls(dim_q, dim_k, heads=heads)

    def __init__(self, dim_q: int, dim_k: int, heads: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        # With variance 1 / (dim_q dim_k), q and k of unit variance have scores of about unit variance.
        self.weight = _matrix(heads, dim_q, dim_k, std=(dim_q * dim_k) ** -0.5)

    def transform(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, float]:
        return q @ self.weight.to(q.dtype), k, 1.0


class Concat(Score):
    """Additive score, w_aᵀ tanh(W_b s + W_c h) (Bahdanau et al. 2015).

    With `joint` it has one matrix, w_aᵀ tanh(W_b [s; h]), and computes the same.

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
            # As in the joint form, the sum before the tanh has unit variance.
            self.weight_q = _matrix(heads, dim_q, hidden, std=(dim_q + dim_k) ** -0.5)
            self.weight_k = _matrix(heads, dim_k, hidden, std=(dim_q + dim_k) ** -0.5)
        self.weight_a = _matrix(heads, hidden, 1, std=hidden**-0.5)

    def transform(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, float]:
        weight_q, weight_k = self.matrices
        return q @ weight_q.to(q.dtype), k @ weight_k.to(k.dtype), 1.0

    @property
    def matrices(self) -> tuple[Float[Tensor, "*H D C"], Float[Tensor, "*H E C"]]:
        """The matrices by which q and k are multiplied."""
        # [s; h] W = s W[:dim_q] + h W[dim_q:]: pairs are never concatenated.
        if self.joint:
            return self.weight[..., : self.dim_q, :], self.weight[..., self.dim_q :, :]
        return self.weight_q, self.weight_k

    def pair_scores(self, q: Float[Tensor, "*b T C"], k: Float[Tensor, "*b S C"]) -> Float[Tensor, "*b T S"]:
        tanh = (q.unsqueeze(-2) + k.unsqueeze(-3)).tanh_()
        T, S = tanh.shape[-3:-1]
        return (tanh.flatten(-3, -2) @ self.weight_a.to(tanh.dtype)).reshape(*tanh.shape[:-3], T, S)

    def pair_elements(self, width: int) -> int:
        return width


class JointConcat(Concat):
    """The name of the joint form in models: builds `Concat` with one matrix.

    >>> JointConcat.build(4, 6, hidden=8, max_keys=9, heads=None).weight.shape
    torch.Size([10, 8])
    """

    @classmethod
    def build(cls, dim_q: int, dim_k: int, *, hidden: int, max_keys: int, heads: int | None) -> "Concat":
        return Concat(dim_q, dim_k, hidden=hidden, joint=True, heads=heads)


class Location(DotLike):
    """Location-based score, W_a s: depends on the position of a key, not on its content (Luong et al. 2015).

    As a dot product: row i of W_a is the key of position i.

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

    def transform(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, float]:
        if is_exporting():  # index_select does not specialize the number of keys
            keys = self.weight.index_select(-2, torch.arange(k.shape[-2], device=k.device))
        elif positions is None:
            if k.shape[-2] > self.max_keys:
                raise too_many_keys_error(k.shape[-2], self.max_keys)
            keys = self.weight[..., : k.shape[-2], :]
        else:
            # Padding may exceed max_keys. It is masked, so that any row will do.
            keys = self.weight[..., positions.clamp(max=self.max_keys - 1), :]
        return q, keys.to(q.dtype).expand(*q.shape[:-2], -1, -1), 1.0


class SoftCap(Score):
    """Soft-capped score, cap · tanh(score / cap), of a score that is a dot product (Gemma 2).

    >>> SoftCap(Dot(), 2.0)(torch.ones(1, 1, 100), torch.ones(1, 2, 100))
    tensor([[[2., 2.]]])
    """

    def __init__(self, inner: Score, cap: float) -> None:
        super().__init__()
        if not is_computed_as(inner, DotLike):
            raise RegardError(
                f"Soft-capping needs a score that is a dot product (got {type(inner).__name__}).",
                "Use scaled_dot, or set model.score_cap to 0.",
            )
        if cap <= 0:
            raise RegardError(f"SoftCap: the cap must be positive (got {cap}).", "Pass a cap above 0.")
        self.inner, self.cap = inner, cap
        self.heads, self.needs_equal_widths = inner.heads, inner.needs_equal_widths

    def transform(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, float]:
        q, k, scale = self.inner.transform(q, k, positions)
        return q if scale == 1.0 else q * scale, k, 1.0

    def pair_scores(self, q: Float[Tensor, "*b T D"], k: Float[Tensor, "*b S D"]) -> Float[Tensor, "*b T S"]:
        return (self.inner.pair_scores(q, k) / self.cap).tanh() * self.cap

    def select_heads(self, heads: Sequence[int]) -> "SoftCap":
        return SoftCap(self.inner.select_heads(heads), self.cap)


class Disentangled(Score):
    """Disentangled score of content and relative position (DeBERTa, He et al. 2021, equations 4 and 5).

    (s·h + s·K[i] + Q[i]·h) / √(3D), where K and Q are keys and queries of relative positions, (H, R, D), and i is the
    index of the relative position of s and h: `index(p, s)` computes it for positions of queries and keys.

    >>> positions = torch.zeros(1, 3, 4)
    >>> score = Disentangled(positions, positions, lambda p, s: (p[:, None] - s).clamp(-1, 1) + 1)
    >>> score(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4)).shape
    torch.Size([1, 1, 2, 2])
    """

    needs_equal_widths = True

    def __init__(
        self,
        keys: Float[Tensor, "H R D"],
        queries: Float[Tensor, "H R D"],
        index: Callable[[Int[Tensor, "t"], Int[Tensor, "s"]], Int[Tensor, "t s"]],
    ) -> None:
        super().__init__()
        # Activations of a layer, not parameters of the score.
        self.keys, self.queries, self.index, self.heads = keys, queries, index, len(keys)

    def transform(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, float]:
        # Appended to each query and key: its products with all relative positions; `pair_scores_at` selects one.
        products = q @ self.keys.mT.to(q.dtype), k @ self.queries.mT.to(k.dtype)
        q, k = (torch.cat((x, product), dim=-1) for x, product in zip((q, k), products))
        return q, k, self.scale

    @property
    def scale(self) -> float:
        """The factor of the sum of the three products."""
        return (3 * self.keys.shape[-1]) ** -0.5

    def pair_scores_at(self, q: Tensor, k: Tensor, p: Tensor, s: Tensor) -> Float[Tensor, "*b T S"]:
        width = self.keys.shape[-1]
        of_query, of_key = self.select_positions(q[..., width:], k[..., width:], p, s)
        return q[..., :width] @ k[..., :width].mT + of_query + of_key

    def select_positions(
        self, of_query: Float[Tensor, "*b T R"], of_key: Float[Tensor, "*b S R"], p: Tensor, s: Tensor
    ) -> tuple[Float[Tensor, "*b T S"], Float[Tensor, "*b T S"]]:
        """Of the products of queries and keys with all relative positions, those with the position of each pair."""
        index = self.index(p, s)
        rows = of_query.gather(-1, index.expand(*of_query.shape[:-2], *index.shape))
        columns = of_key.gather(-1, index.mT.expand(*of_key.shape[:-2], *index.mT.shape))
        return rows, columns.mT

    def pair_elements(self, width: int) -> int:
        return 6

    def select_heads(self, heads: Sequence[int]) -> "Disentangled":
        return Disentangled(self.keys[list(heads)], self.queries[list(heads)], self.index)


def check_constructor(cls: type[nn.Module], *arguments: Any) -> None:
    """Raise an error unless a class can be constructed from these arguments, as its inherited `build` does."""
    try:
        inspect.signature(cls).bind(*arguments)
    except TypeError as error:
        raise RegardError(
            f"{cls.__name__} cannot be built for a model: its constructor does not fit ({error}).",
            "Define the class method build, which receives the sizes of the model.",
        ) from None


def too_many_keys_error(keys: int, max_keys: int) -> RegardError:
    return RegardError(f"Location: {keys} keys, but W_a has {max_keys} rows.", "Pass a larger max_keys to Location.")


def _matrix(heads: int | None, rows: int, columns: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*(() if heads is None else (heads,)), rows, columns) * std)


SCORES: dict[str, type[Score]] = {
    "dot": Dot,
    "scaled_dot": ScaledDot,
    "cosine": Cosine,
    "general": General,
    "concat": Concat,
    "concat_joint": JointConcat,
    "location": Location,
}
ScoreName = Annotated[str, OneOf(SCORES)]
S = TypeVar("S", bound=type[Score])


def register_score(name: str) -> Callable[[S], S]:
    """Class decorator that makes a score available by name, in configs, recipes and model folders.

    A class of the same module and name replaces the earlier one, so that a cell of a notebook can run again.

    >>> @register_score("negative_distance")
    ... class NegativeDistance(Score):
    ...     def pair_scores(self, q, k):
    ...         return -torch.cdist(q, k)
    >>> make_score("negative_distance", 8, 8)
    NegativeDistance()
    >>> del SCORES["negative_distance"]
    """

    def add(score: S) -> S:
        register(SCORES, "score", name, score, lambda entry: entry)
        return score

    return add


def make_score(
    name: str, dim_q: int, dim_k: int, *, hidden: int = 128, max_keys: int = 1024, heads: int | None = None
) -> Score:
    """Create a score by name for a model's sizes; see `Score.build`.

    >>> make_score("concat", 32, 32, hidden=16)
    Concat()
    """
    check_value(ScoreName, name, "score")
    if SCORES[name].needs_equal_widths and dim_q != dim_k:
        raise RegardError(
            f"{name}: queries and keys must have the same width (got {dim_q} and {dim_k}).", "Use general or concat."
        )
    return SCORES[name].build(dim_q, dim_k, hidden=hidden, max_keys=max_keys, heads=heads)

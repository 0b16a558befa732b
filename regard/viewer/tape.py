"""A tape: a computation that is written down while it is done, so that somebody else can do it again.

Each step is one of a few operations (`OPERATIONS`) on the outputs of steps before it and on parameters. It is computed
here in plain NumPy, float64 from float32 parameters: the models' own code has no part in it. A page has the same
operations (web/tape.js), and finds the same numbers.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

import regard
from regard.viewer.image_tape import PICTURE_OPERATIONS

Array = Float[np.ndarray, "..."]
Options = dict[str, Any]


class Value(NamedTuple):
    """What a step gave: its number on the tape (None while the tape does not write), its numbers, names of its axes."""

    number: int | None
    x: Array
    axes: tuple[str, ...]


class Param(NamedTuple):
    """A parameter, or a part of one, by its sign in the formula and its name in the model."""

    sign: str
    x: Array
    name: str


# The operations. Inputs and parameters come in the order in which the step names them.


def _take(inputs: Sequence[Array], params: Sequence[Array], rows: Sequence[int]) -> Array:
    """Rows of a table, or of an input."""
    return np.concatenate([*inputs, *params])[list(rows)]


def _stack(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    """Rows, one below the other."""
    return np.concatenate(list(inputs))


def _beside(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    """[a; b]: the channels of one after those of the other."""
    return np.concatenate(list(inputs), axis=-1)


def _part(inputs: Sequence[Array], params: Sequence[Array], start: int, end: int) -> Array:
    """Some of the channels."""
    return inputs[0][..., start:end]


def _add(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    return sum([*inputs[1:], *params], start=inputs[0])


def _multiply(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    return math.prod([*inputs[1:], *params], start=inputs[0])


def _scale(inputs: Sequence[Array], params: Sequence[Array], by: float) -> Array:
    return inputs[0] * by


def _scale_heads(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    """(H, T, S) by a number for each head, or one for all, learned as its logarithm."""
    return inputs[0] * np.exp(params[0]).reshape(-1, 1, 1)


def _linear(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    """x Wᵀ + b, as layers keep W: a row for each output."""
    return inputs[0] @ params[0].T + (params[1] if len(params) > 1 else 0.0)


def _linear_heads(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    """(T, G, D) by a matrix (D, C) for each of H heads, which G heads of x serve: (T, H, C); or by one for all."""
    x, weight = inputs[0], params[0]
    heads = max(x.shape[1], len(weight))
    return np.einsum("thd,hdc->thc", _served(x, heads), np.broadcast_to(weight, (heads, *weight.shape[1:])))


def _split(inputs: Sequence[Array], params: Sequence[Array], heads: int) -> Array:
    return inputs[0].reshape(len(inputs[0]), heads, -1)


def _join(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    return inputs[0].reshape(len(inputs[0]), -1)


def _turn(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    """Rows and columns change places."""
    return inputs[0].T


def _rotate(inputs: Sequence[Array], params: Sequence[Array], positions: Sequence[int | Sequence[int]]) -> Array:
    """Pair (i, i + D/2) of each head turns by position · rate_i; of places in a grid, half of them by the row, half by
    the column."""
    places = np.array(positions, float).reshape(len(positions), 1, -1, 1)
    angle = (places * params[0]).reshape(len(positions), 1, -1)
    a, b = np.split(inputs[0], 2, axis=-1)
    return np.concatenate((a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)), axis=-1)


def _normalise(inputs: Sequence[Array], params: Sequence[Array], eps: float) -> Array:
    return inputs[0] / np.maximum(np.linalg.norm(inputs[0], axis=-1, keepdims=True), eps)


def _norm(inputs: Sequence[Array], params: Sequence[Array], kind: str, eps: float) -> Array:
    x = inputs[0]
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    x = x * params[0] if params else x
    return x + params[1] if len(params) > 1 else x


def _dot(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    q, k = inputs
    return np.einsum("thd,shd->hts", q, _served(k, q.shape[1]))


def _concat(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    q, k = inputs
    return np.einsum("tshd,hd->hts", np.tanh(q[:, None] + _served(k, q.shape[1])[None]), params[0])


def _relative(inputs: Sequence[Array], params: Sequence[Array], buckets: Sequence[int], rows: int) -> Array:
    """A number for each head and distance: that of query t and key s is in bucket number s - t + T - 1."""
    columns = len(buckets) + 1 - rows
    t, s = np.arange(rows)[:, None], np.arange(columns)
    return params[0][np.array(buckets)[s - t + rows - 1]].transpose(2, 0, 1)


def _mask(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    """Causal: what a query may not look at is −∞."""
    T, S = inputs[0].shape[1:]
    return np.where(np.arange(S) <= np.arange(T)[:, None] + (S - T), inputs[0], -np.inf)


def _softmax(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    """Over the last axis. A second input, a number a row, is the logarithm of what others add to the sum."""
    x, *others = inputs
    most = x.max(-1, keepdims=True)
    most = np.where(np.isfinite(most), most, 0.0)
    e = np.exp(x - most)
    total = e.sum(-1, keepdims=True) + sum(np.exp(other - most) for other in others)
    return e / np.where(total > 0, total, 1.0)


def _weigh(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    a, v = inputs
    return np.einsum("hts,shd->thd", a, _served(v, len(a)))


def _mean(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    """Of the rows: one row."""
    return inputs[0].mean(0, keepdims=True)


def _activate(inputs: Sequence[Array], params: Sequence[Array], function: str) -> Array:
    return FUNCTIONS[function](inputs[0])


def _gate(
    inputs: Sequence[Array], params: Sequence[Array], function: str, part: int, parts: int, reset: bool = False
) -> Array:
    """One gate of a recurrent cell: f(a + b), a being its part of W x and b that of W h; or f(a + r · b)."""
    a, b = (np.split(x, parts, axis=-1)[part] for x in inputs[:2])
    return FUNCTIONS[function](a + (inputs[2] * b if reset else b))


def _between(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    """(1 − z) n + z h."""
    n, h, z = inputs
    return (1 - z) * n + z * h


def _given(inputs: Sequence[Array], params: Sequence[Array]) -> Array:
    """Numbers that are carried as they are."""
    return params[0]


def _served(x: Array, heads: int) -> Array:
    """Grouped heads: each head of x serves H / G heads, side by side."""
    return np.repeat(x, heads // x.shape[1], axis=1)


_erf = np.vectorize(math.erf, otypes=[float])
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "relu2": lambda x: np.maximum(x, 0.0) ** 2,
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x * FUNCTIONS["sigmoid"](x),
    "tanh": np.tanh,
    "sigmoid": lambda x: 0.5 * (1 + np.tanh(0.5 * x)),
}
OPERATIONS: dict[str, Callable[..., Array]] = {
    "given": _given,
    "take": _take,
    "stack": _stack,
    "beside": _beside,
    "part": _part,
    "add": _add,
    "multiply": _multiply,
    "scale": _scale,
    "scale_heads": _scale_heads,
    "linear": _linear,
    "linear_heads": _linear_heads,
    "split": _split,
    "join": _join,
    "turn": _turn,
    "rotate": _rotate,
    "normalise": _normalise,
    "norm": _norm,
    "dot": _dot,
    "concat": _concat,
    "relative": _relative,
    "mask": _mask,
    "softmax": _softmax,
    "weigh": _weigh,
    "mean": _mean,
    "activate": _activate,
    "gate": _gate,
    "between": _between,
}
# Their output is their input in another shape, and is not carried twice.
RESHAPED = ("split", "join")


@dataclass
class Tape:
    """Steps, the parameters that they use and the numbers that they gave.

    >>> tape = Tape()
    >>> _ = tape.section("Sums")
    >>> x = tape.do("given", "x", "Some numbers", "x", np.add, params=[Param("x", np.ones((1, 2)), "")], axes=("text",))
    >>> tape.do("scale", "y", "Twice", "y = 2 x", np.add, [x], by=2.0).x
    array([[2., 2.]])
    >>> [step["id"] for step in tape.steps]
    ['x', 'y']
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    sections: list[dict[str, Any]] = field(default_factory=list)
    writes: bool = True
    _params: list[bytes] = field(default_factory=list)
    _outputs: list[bytes] = field(default_factory=list)
    _places: dict[Any, int] = field(default_factory=dict)
    _values: dict[str, Array] = field(default_factory=dict)
    _ends: list[int] = field(default_factory=lambda: [0, 0])

    def section(self, title: str, **says: Any) -> int:
        """What follows belongs to a section of this title: an attention of a layer, a step of a decoder…"""
        if self.writes:
            self.sections.append({"title": title, **says})
        return len(self.sections) - 1

    @contextmanager
    def silent(self, on: bool = True) -> Iterator[None]:
        """What is done inside is computed and not written down."""
        before, self.writes = self.writes, self.writes and not on
        try:
            yield
        finally:
            self.writes = before

    def do(
        self,
        op: str,
        name: str,
        title: str,
        formula: str,
        where: Callable[..., Any],
        inputs: Sequence[Value] = (),
        params: Sequence[Param] = (),
        *,
        axes: tuple[str, ...] | None = None,
        **options: Any,
    ) -> Value:
        """Does a step and writes it down. `where` is the function of Regard that does the same."""
        does = OPERATIONS[op] if op in OPERATIONS else PICTURE_OPERATIONS[op]
        x = does([one.x for one in inputs], [np.asarray(one.x, np.float64) for one in params], **options)
        axes = inputs[0].axes if axes is None else axes
        if not self.writes:
            return Value(None, x, axes)
        while name in self._values:  # the same again, in layers that share their weights
            name += "'"
        numbers = [one.number for one in inputs]
        if None in numbers:
            raise ValueError(f"{name} is made of what is not on the tape.")
        first = numbers[0] if op in RESHAPED else None
        offset = self._put(x) if first is None else self.steps[first]["output"]["offset"]
        self.steps.append(
            {
                "id": name,
                "section": len(self.sections) - 1,
                "title": title,
                "formula": formula,
                "where": location(where),
                "op": op,
                "inputs": numbers,
                "params": [] if op == "given" else [self._param(one) for one in params],
                "options": options,
                "output": {"offset": offset, "shape": list(x.shape), "axes": list(axes)},
                "differs": None,
            }
        )
        self._values[name] = x
        return Value(len(self.steps) - 1, x, axes)

    def give(self, value: Value, name: str, title: str, where: Callable[..., Any]) -> Value:
        """Writes down what was computed in silence, as numbers that are given."""
        return self.do("given", name, title, "given", where, params=[Param("", value.x, "")], axes=value.axes)

    def compare(self, value: Value, own: Array) -> Value:
        """Says how far a value is from what the model itself made of it, which goes no further than this."""
        if self.writes and value.number is not None:
            self.steps[value.number]["differs"] = difference(value.x, own.reshape(value.x.shape))
        return value

    def __getitem__(self, name: str) -> Array:
        """What the step of this name gave."""
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def params(self) -> bytes:
        """All parameters one after the other, float32, little-endian."""
        return b"".join(self._params)

    @property
    def outputs(self) -> bytes:
        """All outputs one after the other, float32, little-endian."""
        return b"".join(self._outputs)

    @property
    def size(self) -> int:
        """Bytes of both."""
        return 4 * sum(self._ends)

    def _param(self, param: Param) -> dict[str, Any]:
        raw = np.ascontiguousarray(param.x, "<f4").tobytes()
        if raw not in self._places:
            self._places[raw] = self._ends[0]
            self._params.append(raw)
            self._ends[0] += len(raw) // 4
        return {"sign": param.sign, "name": param.name, "offset": self._places[raw], "shape": list(param.x.shape)}

    def _put(self, x: Array) -> int:
        at = self._ends[1]
        self._outputs.append(np.ascontiguousarray(x, "<f4").tobytes())
        self._ends[1] += x.size
        return at


def difference(x: Array, other: Array) -> float:
    """The largest difference of two arrays, in parts of their largest number where that is above 1. −∞ equals −∞.

    >>> difference(np.array([1.0, 200.0]), np.array([1.0, 202.0]))
    0.01
    """
    finite = np.isfinite(x)
    if not np.array_equal(finite, np.isfinite(other)):
        return math.inf
    x, other = x[finite], other[finite]
    return float(np.abs(x - other).max(initial=0.0) / max(1.0, np.abs(x).max(initial=0.0)))


@cache
def location(function: Callable[..., Any]) -> str:
    """The file and the name of a function of Regard, as they are now.

    >>> location(Tape.do)
    'regard/viewer/tape.py · Tape.do'
    """
    function = inspect.unwrap(function)
    file = inspect.getsourcefile(function) if inspect.isroutine(function) and hasattr(function, "__code__") else None
    if file is None:
        return getattr(function, "__name__", str(function))
    path = Path(file).resolve()
    root = Path(regard.__file__).resolve().parent.parent
    named = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    return f"{named} · {function.__qualname__}"

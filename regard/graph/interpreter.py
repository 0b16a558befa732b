"""Reference interpreter of graphs in NumPy, in float64."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped
from torch import Tensor, nn

from regard.errors import RegardError
from regard.graph.steps import Graph, Step

Array = Shaped[np.ndarray, "..."]


def run(graph: Graph, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """Run a graph and return the value of every step by name. Steps inside a scan are named `name[3]` at index 3.

    >>> import torch
    >>> from regard.graph import capture
    >>> layer, x = nn.Linear(2, 3), torch.ones(4, 2)
    >>> graph = capture(layer, lambda layer, x: layer(x), {"x": x}, {"x": ("T", None)})
    >>> run(graph, layer, {"x": torch.ones(7, 2)})[graph.outputs[0]].shape
    (7, 3)
    """
    arrays = {name: _array(value) for name, value in inputs.items()}
    values = Values(collect_tensors(graph, model))
    values.update(arrays)
    for step in graph.resolve(graph.sizes(arrays)):
        execute(step, values)
    return values


def collect_tensors(graph: Graph, model: nn.Module) -> dict[str, Tensor]:
    """Tensors that steps read in addition to inputs: parameters and buffers of the model, and constants."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named) | dict(graph.constants)


class Values(dict[str, Array]):
    """Arrays by name; parameters are converted when first read."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.parameters = parameters

    def __missing__(self, name: str) -> Array:
        self[name] = _array(self.parameters[name])
        return self[name]


def execute(step: Step, values: dict[str, Array]) -> None:
    """Compute one step from the values of earlier steps."""
    inputs = [None if name is None else values[name] for name in step.inputs]
    if step.body is not None:
        values[step.name] = _scan(step, inputs, values)
        return
    if step.op not in OPERATIONS:
        raise RegardError(
            f"Unsupported operation {step.op} (in {step.module or 'the model'}).",
            "Add the operation to regard/graph/interpreter.py.",
        )
    values[step.name] = np.asarray(OPERATIONS[step.op](*inputs, **step.attributes))


def _scan(step: Step, inputs: Sequence[Any], values: dict[str, Array]) -> Array:
    body = step.body
    assert body is not None
    (state, xs), outputs = inputs, []
    for index, x in enumerate(xs):
        values[body.inputs[0]], values[body.inputs[1]] = state, x
        for inner in body:
            execute(inner, values)
            values[f"{inner.name}[{index}]"] = values[inner.name]
        state, output = (values[name] for name in body.outputs)
        outputs.append(output)
    return np.stack(outputs)


def _array(value: Any) -> Array:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.double().numpy() if value.is_floating_point() else value.numpy()
    return np.asarray(value)


# -- operations --------------------------------------------------------------------------------------------------------


def _softmax(x: Array, dim: int) -> Array:
    e = np.exp(x - x.max(dim, keepdims=True))
    return e / e.sum(dim, keepdims=True)


def _layer_norm(
    x: Array, weight: Array | None = None, bias: Array | None = None, *, normalized_shape: list[int], eps: float = 1e-5
) -> Array:
    axes = tuple(range(-len(normalized_shape), 0))
    centered = x - x.mean(axes, keepdims=True)
    normalized = centered / np.sqrt((centered**2).mean(axes, keepdims=True) + eps)
    return normalized * (1 if weight is None else weight) + (0 if bias is None else bias)


def _rms_norm(x: Array, weight: Array | None = None, *, normalized_shape: list[int], eps: float | None = None) -> Array:
    eps = float(np.finfo(np.float32).eps) if eps is None else eps
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (1 if weight is None else weight)


def _group_norm(
    x: Array, weight: Array | None = None, bias: Array | None = None, *, num_groups: int, eps: float = 1e-5
) -> Array:
    grouped = x.reshape(len(x), num_groups, -1)
    grouped = grouped - grouped.mean(-1, keepdims=True)
    normalized = (grouped / np.sqrt((grouped**2).mean(-1, keepdims=True) + eps)).reshape(x.shape)
    shape = (1, -1) + (1,) * (x.ndim - 2)
    return normalized * (1 if weight is None else weight.reshape(shape)) + (0 if bias is None else bias.reshape(shape))


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    return x @ weight.T + (0 if bias is None else bias)


def _conv2d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    **_: Any,
) -> Array:
    (pad_h, pad_w), (stride_h, stride_w) = padding, stride if len(stride) == 2 else (stride[0], stride[0])
    x = np.pad(x, ((0, 0), (0, 0), (pad_h, pad_h), (pad_w, pad_w)))
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], axis=(2, 3))[:, :, ::stride_h, ::stride_w]
    y = np.einsum("bchwij,ocij->bohw", windows, weight)
    return y + (0 if bias is None else bias[:, None, None])


_erf = np.vectorize(math.erf, otypes=[float])


def _gelu(x: Array, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def _slice(x: Array, dim: int, start: int, end: int, step: int = 1) -> Array:
    index = [slice(None)] * x.ndim
    index[dim] = slice(start, end, step)
    return x[tuple(index)]


def _pad(x: Array, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Array:
    """`pad` holds the padding before and after each axis, the last axis first."""
    assert mode == "constant"
    sides = [(0, 0)] * (x.ndim - len(pad) // 2) + [*zip(pad[::2], pad[1::2])][::-1]
    return np.pad(x, sides, constant_values=value or 0)


def _cast(x: Array, to: str) -> Array:
    return np.trunc(x).astype(np.int64) if to == "int" else x.astype(bool if to == "bool" else np.float64)


def _index(x: Array, *indices: Array | None) -> Array:
    return x[tuple(slice(None) if index is None else index for index in indices)]


def _binary(function: Callable[..., Array]) -> Callable[..., Array]:
    """A binary operation of two tensors, or of a tensor and a scalar."""

    def compute(x: Array, other: Array | None = None, *, alpha: float = 1, **scalar: float) -> Array:
        y = next(iter(scalar.values())) if other is None else other
        return function(x, y if alpha == 1 else alpha * y)

    return compute


def _clamp(x: Array, min: float | None = None, max: float | None = None) -> Array:
    return np.clip(x, min, max)


def _mean(x: Array, dim: Sequence[int] | int | None = None, keepdim: bool = False) -> Array:
    return x.mean(tuple(dim) if isinstance(dim, list) else dim, keepdims=keepdim)


def _sum(x: Array, dim: Sequence[int] | int | None = None, keepdim: bool = False) -> Array:
    return x.sum(tuple(dim) if isinstance(dim, list) else dim, keepdims=keepdim)


def _vector_norm(x: Array, ord: float = 2, dim: Sequence[int] | None = None, keepdim: bool = False) -> Array:
    assert ord == 2
    return np.sqrt((x * x).sum(tuple(dim) if dim is not None else None, keepdims=keepdim))


def _interpolate(
    x: Array, output_size: Sequence[int] | None = None, align_corners: bool = False, scale_factors: Any = None
) -> Array:
    """Bilinear interpolation over the last two axes."""
    assert output_size is not None
    assert not align_corners
    for axis, size in zip((-2, -1), output_size):
        x = np.moveaxis(np.moveaxis(x, axis, -1) @ _bilinear_weights(x.shape[axis], size).T, -1, axis)
    return x


def _bilinear_weights(count: int, size: int) -> Array:
    """Weights that resample `count` values to `size` values along one axis."""
    center = np.clip((np.arange(size) + 0.5) * count / size - 0.5, 0, None)
    low = np.floor(center).astype(int)
    high = np.minimum(low + 1, count - 1)
    weights = np.zeros((size, count))
    np.add.at(weights, (np.arange(size), low), 1 - (center - low))
    np.add.at(weights, (np.arange(size), high), center - low)
    return weights


OPERATIONS: dict[str, Callable[..., Any]] = {
    # constants
    "arange": lambda start, end, step: np.arange(start, end, step),
    "full": lambda shape, value: np.full(shape, value),
    # shapes
    "reshape": lambda x, shape: x.reshape(shape),
    "permute": lambda x, dims: x.transpose(dims),
    "expand": lambda x, shape: np.broadcast_to(x, shape),
    "slice": _slice,
    "select": lambda x, dim, index: x.take(index, dim),
    "flip": lambda x, dims: np.flip(x, dims),
    "cat": lambda *xs, dim=0: np.concatenate(xs, dim),
    "stack": lambda *xs, dim=0: np.stack(xs, dim),
    "repeat_interleave": lambda x, repeats, dim: np.repeat(x, repeats, dim),
    "pad": _pad,
    "cast": _cast,
    # rows by index
    "embedding": lambda weight, ids, **_: weight[ids],
    "gather_rows": lambda x, rows, dim: x.take(rows, dim),
    "gather": lambda x, rows, dim, **_: np.take_along_axis(x, rows, dim),
    "index": _index,
    # arithmetic
    "add": _binary(np.add),
    "sub": _binary(np.subtract),
    "rsub": _binary(lambda x, y: y - x),
    "mul": _binary(np.multiply),
    "div": _binary(np.divide),
    "pow": _binary(np.power),
    "maximum": np.maximum,
    "neg": np.negative,
    "reciprocal": lambda x: 1 / x,
    "abs": np.abs,
    "exp": np.exp,
    "log": np.log,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "square": np.square,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "lerp": lambda x, end, weight: x + weight * (end - x),
    # comparisons
    "lt": _binary(np.less),
    "le": _binary(np.less_equal),
    "gt": _binary(np.greater),
    "ge": _binary(np.greater_equal),
    "eq": _binary(np.equal),
    "logical_not": np.logical_not,
    "logical_and": _binary(np.logical_and),
    "logical_or": _binary(np.logical_or),
    "where": lambda condition, x, other=None, **scalar: np.where(
        condition, x, next(iter(scalar.values())) if other is None else other
    ),
    "masked_fill": lambda x, mask, value: np.where(mask, value, x),
    # layers
    "linear": _linear,
    "matmul": np.matmul,
    "conv2d": _conv2d,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "softmax": _softmax,
    "linalg_vector_norm": _vector_norm,
    "mean": _mean,
    "sum": _sum,
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": _gelu,
    "silu": lambda x: x * _sigmoid(x),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "upsample_bilinear2d": _interpolate,
}

"""Graphs in ONNX format: one or a few nodes per operation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import sympy
from torch import nn

from regard.errors import RegardError
from regard.graph import Graph, Step
from regard.graph.interpreter import collect_tensors

OPSET = 20  # the first version with Gelu
_TYPES = {"float": np.float32, "double": np.float64, "int": np.int64, "bool": np.bool_}
# Operations that are a single node with the same inputs and no attributes.
_SINGLE_NODE = {
    "maximum": "Max",
    "neg": "Neg",
    "reciprocal": "Reciprocal",
    "abs": "Abs",
    "exp": "Exp",
    "log": "Log",
    "sin": "Sin",
    "cos": "Cos",
    "sqrt": "Sqrt",
    "relu": "Relu",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "matmul": "MatMul",
    "logical_not": "Not",
}
# Operations on two tensors, or on a tensor and a scalar.
_BINARY = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "pow": "Pow",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "eq": "Equal",
    "logical_and": "And",
    "logical_or": "Or",
}


def onnx_model(onnx: Any, graph: Graph, model: nn.Module, name: str, outputs: Sequence[str]) -> Any:
    """A graph as an ONNX ModelProto, with the parameters of the model in float32."""
    writer = _Writer(onnx, graph, collect_tensors(graph, model))
    helper = onnx.helper
    onnx_graph = helper.make_graph(
        writer.nodes(graph, dict(zip(graph.outputs, outputs))),
        name,
        [writer.value_info(key, graph.kinds[key], graph.shapes[key]) for key in graph.inputs],
        [writer.value_info(key, *writer.signatures[step]) for step, key in zip(graph.outputs, outputs)],
        [onnx.numpy_helper.from_array(array, key) for key, array in writer.weights.items()],
    )
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(onnx_graph, opset_imports=[opset], ir_version=9, producer_name="regard")


class _Writer:
    """Collects nodes and weights; tensors keep their names in the graph."""

    def __init__(self, onnx: Any, graph: Graph, tensors: Mapping[str, Any]) -> None:
        self.onnx, self.tensors = onnx, tensors
        self.weights: dict[str, np.ndarray] = {}
        self.written: list[Any] = []
        self.signatures: dict[str, tuple[str, tuple]] = {
            name: (graph.kinds[name], graph.shapes[name]) for name in graph.inputs
        }
        self.count = 0
        # An input and axis for each dynamic size.
        self.sizes = {
            str(size): (name, axis)
            for name in reversed(graph.inputs)
            for axis, size in enumerate(graph.shapes[name])
            if isinstance(size, sympy.Symbol)
        }

    def nodes(self, graph: Graph, output_names: Mapping[str, str]) -> list[Any]:
        """Convert all steps to nodes; the outputs are renamed at the end."""
        outer, self.written = self.written, []
        for step in graph:
            self.signatures[step.name] = step.kind, step.shape
            self.write(step)
        for step_name, name in output_names.items():
            self.node("Identity", [self.input(step_name)], name)
        nodes, self.written = self.written, outer
        return nodes

    def value_info(self, name: str, kind: str, shape: Sequence[Any]) -> Any:
        sizes = [size if isinstance(size, int) else str(size) for size in shape]
        return self.onnx.helper.make_tensor_value_info(name, self.type(kind), sizes)

    def type(self, kind: str) -> int:
        return self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(_TYPES[kind]))

    # -- building blocks

    def node(self, op: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        if not output:
            self.count += 1
            output = f"{op.lower()}.{self.count}"
        self.written.append(self.onnx.helper.make_node(op, inputs, [output], **attributes))
        return output

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        array = np.asarray(value, dtype)
        name = f"constant.{array.dtype}.{array.shape}.{array.tobytes().hex()[:64]}.{len(array.tobytes())}"
        self.weights.setdefault(name, array)
        return name

    def input(self, name: str) -> str:
        """A tensor by its name in the graph; a parameter is added to the weights on first use."""
        if name not in self.signatures and name not in self.weights:
            array = self.tensors[name].detach().cpu().numpy()
            self.weights[name] = array.astype(np.float32) if array.dtype.kind == "f" else array
        return name

    def kind(self, name: str) -> str:
        if name in self.signatures:
            return self.signatures[name][0]
        return {"f": "float", "b": "bool"}.get(self.weights[self.input(name)].dtype.kind, "int")  # weights are float32

    def size(self, size: Any) -> str:
        """A size as a tensor of one element; dynamic sizes are computed from the shapes of inputs."""
        if isinstance(size, int):
            return self.constant([size])
        if isinstance(size, sympy.Symbol):
            name, axis = self.sizes[str(size)]
            return self.node("Shape", [name], start=axis, end=axis + 1)
        if isinstance(size, sympy.Integer):
            return self.constant([int(size)])
        if not isinstance(size, sympy.Add | sympy.Mul):
            raise RegardError(
                f"ONNX: unsupported size expression {size}.", "Use only sums and products of sizes in the layer."
            )
        result, *rest = map(self.size, size.args)
        for other in rest:
            result = self.node("Add" if isinstance(size, sympy.Add) else "Mul", [result, other])
        return result

    def scalar(self, value: Any, kind: str) -> str:
        """A number or a dynamic size as a scalar tensor."""
        if not isinstance(value, sympy.Expr):
            return self.constant(value, _TYPES[kind])
        size = self.node("Squeeze", [self.size(value)])
        return size if kind == "int" else self.node("Cast", [size], to=self.type(kind))

    def shape(self, sizes: Sequence[Any]) -> str:
        if all(isinstance(size, int) for size in sizes):
            return self.constant(sizes)
        return self.node("Concat", [self.size(size) for size in sizes], axis=0)

    # -- operations

    def write(self, step: Step) -> None:
        inputs = ["" if name is None else self.input(name) for name in step.inputs]
        if step.body is not None:
            self.write_scan(step)
        elif step.op in _SINGLE_NODE:
            self.node(_SINGLE_NODE[step.op], inputs, step.name)
        elif step.op in _BINARY:
            self._binary(step, inputs)
        else:
            method: Callable[..., None] | None = getattr(self, f"_{step.op}", None)
            if method is None:
                raise RegardError(
                    f"ONNX: unsupported operation {step.op} (in {step.module or 'the model'}).",
                    "Add it to regard/interop/onnx_writer.py.",
                )
            method(step.name, *inputs, **step.attributes)

    def _binary(self, step: Step, inputs: list[str]) -> None:
        attributes = dict(step.attributes)
        alpha = attributes.pop("alpha", 1)
        kinds = [self.kind(name) for name in step.inputs if name is not None]
        # Arithmetic and comparisons need inputs of one type: the widest of them.
        ranks = ["bool", "int", "float", "double"]
        narrowest = "bool" if step.op.startswith("logical") else "int"
        kind = max([*kinds, narrowest], key=ranks.index)
        if kind == "int" and (step.op == "div" or any(isinstance(value, float) for value in attributes.values())):
            kind = "float"
        operands = [self._cast_to(kind, name) for name in inputs]
        operands += [self.scalar(value, kind) for value in attributes.values()]
        if alpha != 1:
            operands[1] = self.node("Mul", [operands[1], self.constant(alpha, _TYPES[kind])])
        self.node(_BINARY[step.op], operands, step.name)

    def _cast_to(self, kind: str, name: str, output: str = "") -> str:
        if not output and self.kind(name) == kind:
            return name
        return self.node("Cast", [name], output, to=self.type(kind))

    def _rsub(self, name: str, x: str, other: str = "", **attributes: Any) -> None:
        self.node("Sub", [other or self.constant(attributes["other"], _TYPES[self.kind(x)]), x], name)

    def _cast(self, name: str, x: str, to: str) -> None:
        self._cast_to(to, x, name)

    def _arange(self, name: str, start: Any, end: Any, step: Any) -> None:
        kind = self.signatures[name][0]
        bounds = [self.scalar(value, kind) for value in (start, end, step)]
        self.node("Range", bounds, name)

    def _full(self, name: str, shape: Sequence[Any], value: Any) -> None:
        kind = self.signatures[name][0]
        self.node("Expand", [self.scalar(value, kind), self.shape(shape)], name)

    def _reshape(self, name: str, x: str, shape: Sequence[Any]) -> None:
        self.node("Reshape", [x, self.shape(shape)], name)

    def _expand(self, name: str, x: str, shape: Sequence[Any]) -> None:
        self.node("Expand", [x, self.shape(shape)], name)

    def _permute(self, name: str, x: str, dims: Sequence[int]) -> None:
        self.node("Transpose", [x], name, perm=[dim % len(dims) for dim in dims])

    def _slice(self, name: str, x: str, dim: int, start: Any, end: Any, step: int) -> None:
        bounds = [self.size(start), self.size(end), self.constant([dim]), self.constant([step])]
        self.node("Slice", [x, *bounds], name)

    def _select(self, name: str, x: str, dim: int, index: Any) -> None:
        self.node("Gather", [x, self.scalar(index, "int")], name, axis=dim)

    def _flip(self, name: str, x: str, dims: Sequence[int]) -> None:
        bounds = [self.constant([value] * len(dims)) for value in (-1, np.iinfo(np.int64).min)]
        self.node("Slice", [x, *bounds, self.constant(dims), self.constant([-1] * len(dims))], name)

    def _cat(self, name: str, *xs: str, dim: int = 0) -> None:
        self.node("Concat", [self._cast_to(self.signatures[name][0], x) for x in xs], name, axis=dim)

    def _stack(self, name: str, *xs: str, dim: int = 0) -> None:
        self.node("Concat", [self.node("Unsqueeze", [x, self.constant([dim])]) for x in xs], name, axis=dim)

    def _repeat_interleave(self, name: str, x: str, repeats: int, dim: int, **_: Any) -> None:
        shape = self.signatures[x][1] if x in self.signatures else self.weights[x].shape
        dim %= len(shape)
        unsqueezed = self.node("Unsqueeze", [x, self.constant([dim + 1])])
        expanded = self.node("Expand", [unsqueezed, self.shape([*shape[: dim + 1], repeats, *shape[dim + 1 :]])])
        self.node("Reshape", [expanded, self.shape(self.signatures[name][1])], name)

    def _pad(self, name: str, x: str, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> None:
        rank = len(self.signatures[name][1])
        before, after = [0] * rank, [0] * rank
        for axis, (low, high) in enumerate(zip(pad[::2], pad[1::2])):
            before[rank - 1 - axis], after[rank - 1 - axis] = low, high
        fill_value = self.constant(value or 0, _TYPES[self.kind(x)])
        self.node("Pad", [x, self.constant([*before, *after]), fill_value], name)

    def _embedding(self, name: str, weight: str, ids: str, **_: Any) -> None:
        self.node("Gather", [weight, ids], name)

    def _gather_rows(self, name: str, x: str, rows: str, dim: int) -> None:
        self.node("Gather", [x, rows], name, axis=dim)

    def _gather(self, name: str, x: str, rows: str, dim: int, **_: Any) -> None:
        self.node("GatherElements", [x, rows], name, axis=dim)

    def _index(self, name: str, x: str, *rows: str) -> None:
        (axis,) = [axis for axis, indices in enumerate(rows) if indices]
        self.node("Gather", [x, rows[axis]], name, axis=axis)

    def _square(self, name: str, x: str) -> None:
        self.node("Mul", [x, x], name)

    def _clamp(self, name: str, x: str, min: Any = None, max: Any = None) -> None:
        dtype = _TYPES[self.kind(x)]
        self.node("Clip", [x, *("" if bound is None else self.constant(bound, dtype) for bound in (min, max))], name)

    _clamp_min = _clamp

    def _lerp(self, name: str, x: str, end: str, weight: str) -> None:
        self.node("Add", [x, self.node("Mul", [weight, self.node("Sub", [end, x])])], name)

    def _where(self, name: str, condition: str, *xs: str, **scalars: Any) -> None:
        kind = self.signatures[name][0]
        branches = [self._cast_to(kind, x) for x in xs]
        branches += [self.constant(value, _TYPES[kind]) for value in scalars.values()]
        self.node("Where", [condition, *branches], name)

    def _masked_fill(self, name: str, x: str, mask: str, value: Any) -> None:
        self.node("Where", [mask, self.constant(value, _TYPES[self.kind(x)]), x], name)

    def _linear(self, name: str, x: str, weight: str, bias: str = "") -> None:
        product = self.node("MatMul", [x, self.node("Transpose", [weight], perm=[1, 0])], "" if bias else name)
        if bias:
            self.node("Add", [product, bias], name)

    def _conv2d(self, name: str, x: str, weight: str, bias: str = "", **attributes: Any) -> None:
        stride, padding = ([*attributes.get(key, default)] * 2 for key, default in (("stride", [1]), ("padding", [0])))
        inputs = [x, weight, bias] if bias else [x, weight]
        self.node("Conv", inputs, name, strides=stride[:2], pads=(padding[:2]) * 2)

    def _layer_norm(self, name: str, x: str, weight: str = "", bias: str = "", **attributes: Any) -> None:
        gain = weight or self.constant(np.ones(attributes["normalized_shape"]), np.float32)
        inputs = [x, gain, bias] if bias else [x, gain]
        axis = -len(attributes["normalized_shape"])
        self.node("LayerNormalization", inputs, name, axis=axis, epsilon=attributes.get("eps", 1e-5))

    def _rms_norm(self, name: str, x: str, weight: str = "", **attributes: Any) -> None:
        eps = attributes.get("eps")
        eps = float(np.finfo(np.float32).eps) if eps is None else eps
        mean_square = self.node("ReduceMean", [self.node("Mul", [x, x]), self.constant([-1])])
        rms = self.node("Sqrt", [self.node("Add", [mean_square, self.constant(eps, np.float32)])])
        normalized = self.node("Div", [x, rms], "" if weight else name)
        if weight:
            self.node("Mul", [normalized, weight], name)

    def _group_norm(self, name: str, x: str, weight: str = "", bias: str = "", **attributes: Any) -> None:
        shape = self.signatures[x][1]
        groups = self.node("Reshape", [x, self.constant([0, attributes["num_groups"], -1])])
        mean = self.node("ReduceMean", [groups, self.constant([-1])])
        centered = self.node("Sub", [groups, mean])
        variance = self.node("ReduceMean", [self.node("Mul", [centered, centered]), self.constant([-1])])
        std = self.node("Sqrt", [self.node("Add", [variance, self.constant(attributes.get("eps", 1e-5), np.float32)])])
        normalized = self.node("Reshape", [self.node("Div", [centered, std]), self.shape(shape)])
        per_channel = self.constant([-1] + [1] * (len(shape) - 2))
        gain = self.node("Reshape", [weight, per_channel]) if weight else self.constant(np.ones(1), np.float32)
        scaled = self.node("Mul", [normalized, gain], "" if bias else name)
        if bias:
            self.node("Add", [scaled, self.node("Reshape", [bias, per_channel])], name)

    def _softmax(self, name: str, x: str, dim: int) -> None:
        self.node("Softmax", [x], name, axis=dim)

    def _linalg_vector_norm(self, name: str, x: str, dim: Any = None, keepdim: bool = False, **_: Any) -> None:
        self.node("ReduceL2", [x, self.constant(dim)], name, keepdims=int(keepdim))

    def _mean(self, name: str, x: str, dim: Any = None, keepdim: bool = False) -> None:
        self.node("ReduceMean", [x, self.constant(np.atleast_1d(dim))], name, keepdims=int(keepdim))

    def _sum(self, name: str, x: str, dim: Any = None, keepdim: bool = False) -> None:
        x = self._cast_to("int", x) if self.kind(x) == "bool" else x
        self.node("ReduceSum", [x, self.constant(np.atleast_1d(dim))], name, keepdims=int(keepdim))

    def _gelu(self, name: str, x: str, approximate: str = "none") -> None:
        self.node("Gelu", [x], name, approximate=approximate)

    def _silu(self, name: str, x: str) -> None:
        self.node("Mul", [x, self.node("Sigmoid", [x])], name)

    def _upsample_bilinear2d(self, name: str, x: str, output_size: Sequence[int], **_: Any) -> None:
        size = self.node("Concat", [self.node("Shape", [x], start=0, end=2), self.constant(output_size)], axis=0)
        self.node("Resize", [x, "", "", size], name, mode="linear", coordinate_transformation_mode="half_pixel")

    def write_scan(self, step: Step) -> None:
        """Convert a scan; its body is a subgraph with access to the tensors of the outer graph."""
        body = step.body
        assert body is not None
        init, xs = (self.input(name) for name in step.inputs if name is not None)
        for inner, outer in zip(body.inputs, (init, xs)):
            kind, shape = self.signatures[outer]
            self.signatures[inner] = kind, shape if outer == init else shape[1:]
        last, outputs = f"{step.name}.state", [f"{step.name}.next", f"{step.name}.output"]
        nodes = self.nodes(body, dict(zip(body.outputs, outputs)))
        state, element = (self.value_info(name, *self.signatures[name]) for name in body.inputs)
        output_infos = [self.value_info(name, *self.signatures[inner]) for inner, name in zip(body.outputs, outputs)]
        graph = self.onnx.helper.make_graph(nodes, f"{step.name}.body", [state, element], output_infos)
        node = self.onnx.helper.make_node("Scan", [init, xs], [last, step.name], body=graph, num_scan_inputs=1)
        self.written.append(node)

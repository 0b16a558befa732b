"""A model as a list of primitive operations over named tensors, translated from an exported `forward`.

Each step names its operation, its inputs and its module. The step-by-step view, the JavaScript engine of a page and the
ONNX export interpret programs; `regard.program.numpy_interpreter` defines the operations.
"""

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from regard import version
from regard.errors import RegardError
from regard.program.capture import CapturedCall

Size = Any  # int | sympy.Expr
"""an integer, or an expression of dynamic sizes: T, S + 1"""


@dataclass(frozen=True)
class Step:
    """One operation: `name = op(*inputs, **attributes)`."""

    name: str
    op: str
    inputs: tuple[str | None, ...]
    attributes: Mapping[str, Any]
    shape: tuple[Size, ...]
    kind: str
    """element type: float (the dtype of the parameters), double, int or bool"""
    module: str
    """path of the module whose forward contains it"""
    source: str
    """file and function of that forward: regard/layers/multihead.py · forward"""
    body: "Program | None" = None
    """of a scan: the program of one iteration, from (state, element, *shared) to (state, output)"""


@dataclass(frozen=True)
class Program:
    """Steps in order. They read inputs, parameters (by their names in the model), constants, and outputs of steps."""

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    constants: Mapping[str, Tensor] = field(repr=False)
    outputs: tuple[str, ...]
    shapes: Mapping[str, tuple[Size, ...]] = field(repr=False)
    """shape of each input"""
    kinds: Mapping[str, str] = field(repr=False)
    """element type of each input"""

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def sizes(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        """Dynamic sizes by name, from the shapes of inputs."""
        pairs = [(name, *pair) for name, shape in self.shapes.items() for pair in zip(shape, inputs[name].shape)]
        sizes = {str(size): int(actual) for _, size, actual in pairs if isinstance(size, sympy.Symbol)}
        for name, size, actual in pairs:
            if _resolve(size, sizes) != actual:
                raise RegardError(
                    f"{name} has shape {tuple(inputs[name].shape)}; expected {tuple(map(str, self.shapes[name]))}.",
                    "Pass an input of that shape, or capture the program with inputs of the actual shape.",
                )
        return sizes

    def resolve(self, sizes: Mapping[str, int]) -> "Program":
        """The same program with integers in place of dynamic sizes."""

        steps = tuple(
            replace(
                step,
                attributes={key: _resolve(value, sizes) for key, value in step.attributes.items()},
                shape=tuple(_resolve(step.shape, sizes)),
                body=None if step.body is None else step.body.resolve(sizes),
            )
            for step in self.steps
        )
        return replace(
            self, steps=steps, shapes={key: tuple(_resolve(shape, sizes)) for key, shape in self.shapes.items()}
        )


def _resolve(value: Any, sizes: Mapping[str, int]) -> Any:
    """Replace dynamic sizes in an attribute or shape."""
    if isinstance(value, sympy.Expr):
        return int(value.subs(sizes))
    return [_resolve(item, sizes) for item in value] if isinstance(value, list | tuple) else value


def build_program(captured: CapturedCall) -> Program:
    """Translate a captured call of a model to a program.

    >>> from regard.program.capture import capture
    >>> layer = torch.nn.Linear(2, 3)
    >>> program = build_program(capture(layer, lambda layer, x: layer(x), {"x": torch.zeros(4, 2)}, {"x": ("T", None)}))
    >>> [(step.op, step.module, step.shape) for step in program]
    [('linear', '', (T, 3))]
    """
    exported, input_names, sizes = captured
    names, constants, inputs = {}, {}, iter(input_names)
    for spec in exported.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind == InputKind.USER_INPUT:
            names[name] = next(inputs)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target is not None:
            names[name] = spec.target.removeprefix("model.")
        elif spec.target is not None:
            names[name] = name
            constants[name] = exported.constants[spec.target]
    program = _GraphTranslator(exported.graph_module, sizes, names).program()
    shapes = {name: program.shapes[name] for name in input_names}
    return replace(program, inputs=input_names, constants=constants, shapes=shapes)


# Operations without effect on values.
_IDENTITIES = ("assert_tensor_metadata", "contiguous", "clone", "detach", "alias", "dropout", "lift_fresh_copy")
# Operations that only change the shape; all are translated to `reshape`.
_RESHAPES = ("view", "reshape", "unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
_RENAMED = {
    "bitwise_not": "logical_not",
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "and": "logical_and",
    "or": "logical_or",
    "index_select": "gather_rows",
}
_KINDS = {torch.bool: "bool", torch.int64: "int", torch.int32: "int", torch.uint8: "int", torch.float64: "double"}


class _GraphTranslator:
    """Translates the nodes of one graph to steps."""

    def __init__(
        self, graph: fx.GraphModule, sizes: Mapping[str, str], names: dict[str, str], prefix: str = ""
    ) -> None:
        self.graph, self.sizes, self.prefix = graph, sizes, prefix
        # Node name → name of its output tensor, or a list of names if it has several.
        self.names: dict[str, Any] = dict(names)
        self.steps: list[Step] = []

    def program(self) -> Program:
        inputs, shapes, kinds, outputs = [], {}, {}, []
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                name = self.names.setdefault(node.name, self.prefix + node.name)
                inputs.append(name)
                shapes[name], kinds[name] = self.shape(node), _kind(node)
            elif node.op == "output":
                outputs = [self.names[output.name] for output in node.args[0]]
            elif node.op == "call_function":
                self.visit(node)
        return Program(tuple(self.steps), tuple(inputs), {}, tuple(outputs), shapes, kinds)

    def visit(self, node: fx.Node) -> None:
        if node.target is not operator.getitem and not isinstance(node.meta.get("val"), Tensor | tuple | list):
            return  # a size, which is an expression in attributes, or a size check
        if node.target is operator.getitem:
            source, index = node.args
            self.names[node.name] = self.names[source.name][index]  # type: ignore[union-attr,index]
            return
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            if str(node.target) != "scan":
                raise RegardError(f"Unsupported operation {node.target}.", "Write the layer without it.")
            self.scan(node)
            return
        schema = node.target._schema  # type: ignore[union-attr]
        op = schema.name.removeprefix("aten::").strip("_")
        arguments = {argument.name: value for argument, value in zip(schema.arguments, node.args)} | node.kwargs
        getattr(self, f"_{op}", self._default)(node, _RENAMED.get(op, op), arguments)

    # A method for each operation that needs a translation; `_default` copies all others.

    def _default(self, node: fx.Node, op: str, arguments: dict[str, Any]) -> None:
        if op in _IDENTITIES:
            first = next(iter(arguments.values()))
            self.names[node.name] = self.names[first.name]
            return
        if op in _RESHAPES:
            self.emit(node, "reshape", [arguments["self"]], {"shape": list(self.shape(node))})
            return
        tensors: list[fx.Node | None] = []
        attributes: dict[str, Any] = {}
        for key, value in arguments.items():
            if isinstance(value, fx.Node) and isinstance(value.meta["val"], Tensor):
                tensors.append(value)
            elif (
                isinstance(value, list | tuple)
                and value
                and isinstance(value[0], fx.Node | None)
                and not all(
                    isinstance(item, fx.Node) and isinstance(item.meta["val"], torch.SymInt | int) for item in value
                )
            ):
                tensors += value
            elif key not in (
                "dtype",
                "layout",
                "device",
                "pin_memory",
                "memory_format",
                "out",
                "cudnn_enable",
                "cudnn_enabled",
            ):
                attributes[key] = self.value(value)
        self.emit(node, op, tensors, attributes)

    def _to(self, node: fx.Node, op: str, arguments: dict[str, Any]) -> None:
        before, after = (_kind(value.meta["val"]) for value in (arguments["self"], node))
        if before == after or (before, after) == ("bool", "int"):
            self.names[node.name] = self.names[arguments["self"].name]
        else:
            self.emit(node, "cast", [arguments["self"]], {"to": after})

    def _expand(self, node: fx.Node, op: str, arguments: dict[str, Any]) -> None:
        self.emit(node, "expand", [arguments["self"]], {"shape": list(self.shape(node))})

    _expand_as = _expand

    def _transpose(self, node: fx.Node, op: str, arguments: dict[str, Any]) -> None:
        axes = list(range(arguments["self"].meta["val"].dim()))
        a, b = arguments["dim0"], arguments["dim1"]
        axes[a], axes[b] = axes[b], axes[a]
        self.emit(node, "permute", [arguments["self"]], {"dims": axes})

    def _mT(self, node: fx.Node, op: str, arguments: dict[str, Any]) -> None:
        self._transpose(node, op, arguments | {"dim0": -2, "dim1": -1})

    def _t(self, node: fx.Node, op: str, arguments: dict[str, Any]) -> None:
        self._transpose(node, op, arguments | {"dim0": 0, "dim1": 1})

    def _chunk(self, node: fx.Node, op: str, arguments: dict[str, Any]) -> None:
        """One slice per part."""
        start: Size = 0
        parts = []
        for index, part in enumerate(node.meta["val"]):
            size = self.size(part.shape[arguments["dim"]])
            name = f"{self.prefix}{node.name}_{index}"
            attributes = {"dim": arguments["dim"], "start": start, "end": start + size, "step": 1}
            self.emit(node, "slice", [arguments["self"]], attributes, name=name, value=part)
            parts.append(name)
            start = start + size
        self.names[node.name] = parts

    _split = _split_with_sizes = _chunk

    def _unbind(self, node: fx.Node, op: str, arguments: dict[str, Any]) -> None:
        dim = arguments.get("dim", 0)
        names = [f"{self.prefix}{node.name}_{index}" for index in range(len(node.meta["val"]))]
        for index, part in enumerate(node.meta["val"]):
            attributes = {"dim": dim, "index": index}
            self.emit(node, "select", [arguments["self"]], attributes, name=names[index], value=part)
        self.names[node.name] = names

    def _slice(self, node: fx.Node, op: str, arguments: dict[str, Any]) -> None:
        dim = arguments.get("dim", 0)
        size = self.size(arguments["self"].meta["val"].shape[dim])
        start, end = (self.value(arguments.get(key)) for key in ("start", "end"))
        start = 0 if start is None else start + size if isinstance(start, int) and start < 0 else start
        end = size if end is None or (isinstance(end, int) and end > 2**31) else end
        end = end + size if isinstance(end, int) and end < 0 else end
        if (start, end, arguments.get("step", 1)) == (0, size, 1):
            self.names[node.name] = self.names[arguments["self"].name]
        else:
            attributes = {"dim": dim, "start": start, "end": end, "step": arguments.get("step", 1)}
            self.emit(node, "slice", [arguments["self"]], attributes)

    def _new_zeros(self, node: fx.Node, op: str, arguments: dict[str, Any]) -> None:
        self.emit(node, "full", [], {"shape": list(self.shape(node)), "value": 0})

    _zeros = _zeros_like = _new_zeros

    def _ones(self, node: fx.Node, op: str, arguments: dict[str, Any]) -> None:
        self.emit(node, "full", [], {"shape": list(self.shape(node)), "value": 1})

    _ones_like = _ones

    def _full(self, node: fx.Node, op: str, arguments: dict[str, Any]) -> None:
        self.emit(node, "full", [], {"shape": list(self.shape(node)), "value": self.value(arguments["fill_value"])})

    _new_full = _full_like = _full

    def _arange(self, node: fx.Node, op: str, arguments: dict[str, Any]) -> None:
        start, end, step = (
            self.value(arguments.get(key, default)) for key, default in (("start", 0), ("end", None), ("step", 1))
        )
        self.emit(node, "arange", [], {"start": start, "end": end, "step": step})

    def scan(self, node: fx.Node) -> None:
        body, init, xs, shared = node.args
        graph = getattr(self.graph, body.target)  # type: ignore[union-attr,arg-type]
        placeholders = [child.name for child in graph.graph.nodes if child.op == "placeholder"]
        outer = [self.names[value.name] for value in (*init, *xs, *shared)]  # type: ignore[misc]
        # Tensors shared by all iterations keep their names in the body.
        first = len(init) + len(xs)  # type: ignore[arg-type]
        names = dict(zip(placeholders[first:], outer[first:]))
        prefix = f"{self.prefix}{node.name}."
        inner = _GraphTranslator(graph, self.sizes, names, prefix).program()
        inner = replace(inner, inputs=tuple(inner.inputs[:first]))
        name = prefix + "outputs"
        value = node.meta["val"][1]
        self.emit(node, "scan", [*init, *xs], {}, name=name, value=value, body=inner)  # type: ignore[misc]
        self.names[node.name] = [None, name]

    # Shared helpers

    def emit(
        self,
        node: fx.Node,
        op: str,
        tensors: "list[fx.Node | None]",
        attributes: dict[str, Any],
        *,
        name: str | None = None,
        value: Tensor | None = None,
        body: Program | None = None,
    ) -> None:
        if name is None:
            name = self.names[node.name] = self.prefix + node.name
        value = node.meta["val"] if value is None else value
        inputs = tuple(None if tensor is None else self.names[tensor.name] for tensor in tensors)
        shape = tuple(self.size(size) for size in value.shape)
        source = source_location(node.meta.get("stack_trace") or "", str(Path(version.__file__).parents[1]))
        self.steps.append(Step(name, op, inputs, attributes, shape, _kind(value), _module_path(node), source, body))

    def shape(self, node: fx.Node) -> tuple[Size, ...]:
        return tuple(self.size(size) for size in node.meta["val"].shape)

    def size(self, size: Any) -> Size:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        symbols = {symbol: sympy.Symbol(self.sizes[str(symbol)]) for symbol in expression.free_symbols}
        renamed = expression.xreplace(symbols)
        return int(renamed) if renamed.is_Integer else renamed

    def value(self, value: Any) -> Any:
        """The value of an attribute, with sizes as expressions."""
        if isinstance(value, fx.Node):
            return self.value(value.meta["val"])
        if isinstance(value, torch.SymInt):
            return self.size(value)
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value


def _kind(value: Any) -> str:
    value = value.meta["val"] if isinstance(value, fx.Node) else value
    return _KINDS.get(value.dtype, "float")


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next((path for path, _ in reversed(stack.values()) if "model" in path), "model")
    return re.sub(r"^(_export_root\.)?model\.?", "", path)


def source_location(stack_trace: str, root: str) -> str:
    """File relative to the folder `root` of the package and name of the innermost function of Regard of a stack trace.

    >>> source_location('File "/home/regard/regard/layers/norms.py", line 8, in forward', "/home/regard")
    'regard/layers/norms.py · forward'
    """
    frames = re.findall(rf'File "{re.escape(root)}/(regard/[^"]*\.py)", line \d+, in (\S+)', stack_trace)
    return " · ".join(frames[-1]) if frames else ""

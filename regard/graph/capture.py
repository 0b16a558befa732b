"""Capture a call of a model as a graph: torch.export, with reference attention and dynamic sizes, as steps."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind

from regard import version
from regard.attention.dispatch import use
from regard.errors import RegardError
from regard.graph.steps import Graph, Size, Step


def capture(
    model: nn.Module,
    call: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, Sequence[str | None]],
) -> Graph:
    """The graph of `call(model, *inputs)` in evaluation mode, with reference attention instead of kernels.

    `sizes` names the dynamic axes of each input (None: static); axes with the same name have the same size.

    >>> layer = nn.Linear(2, 3)
    >>> graph = capture(layer, lambda layer, x: layer(x), {"x": torch.zeros(4, 2)}, {"x": ("T", None)})
    >>> [(step.op, step.module, step.shape) for step in graph]
    [('linear', '', (T, 3))]
    """
    exported = _export(model, call, inputs, sizes)
    symbols = _dynamic_sizes(exported, inputs, sizes)
    names, constants, input_names = {}, {}, iter(inputs)
    for spec in exported.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind == InputKind.USER_INPUT:
            names[name] = next(input_names)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target is not None:
            names[name] = spec.target.removeprefix("model.")
        elif spec.target is not None:
            names[name] = name
            constants[name] = exported.constants[spec.target]
    graph = _Translator(exported.graph_module, symbols, names).graph()
    shapes = {name: graph.shapes[name] for name in inputs}
    return replace(graph, inputs=tuple(inputs), constants=constants, shapes=shapes)


class _Call(nn.Module):
    """Wraps a call of a model in a module, as torch.export requires."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.model, *inputs)


def _export(
    model: nn.Module,
    call: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, Sequence[str | None]],
) -> ExportedProgram:
    # torch infers relations between sizes (R = B · K), and which sizes are static, which `_dynamic_sizes` refuses.
    dynamic = tuple(
        {axis: Dim.AUTO for axis, name in enumerate(sizes.get(key, ())) if name is not None} for key in inputs
    )
    training = model.training
    model.eval()
    try:
        from torch._dynamo import config as dynamo_config  # slow to import

        # Comparing symbolic sizes in the cache of fake tensors costs more than the cache saves: 30% of the time.
        without_cache = dynamo_config.patch(fake_tensor_cache_enabled=False)
        with torch.no_grad(), use("reference"), without_cache:
            return export(_Call(model, call), tuple(inputs.values()), dynamic_shapes=(dynamic,), strict=False)
    finally:
        model.train(training)


def _dynamic_sizes(
    exported: ExportedProgram, inputs: Mapping[str, Tensor], sizes: Mapping[str, Sequence[str | None]]
) -> dict[str, str]:
    """The name of each dynamic size, by torch's symbol for it."""
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"][-len(inputs) :]
    symbols: dict[str, str] = {}
    for node, key in zip(nodes, inputs):
        for axis, (size, name) in enumerate(zip(node.meta["val"].shape, sizes.get(key, ()))):
            if name is not None and not isinstance(size, torch.SymInt):
                raise RegardError(
                    f"The size {name} (axis {axis} of input {key}) was specialized to {size} by the model.",
                    "Change the layer so that it does not convert the size to a Python integer.",
                )
            if name is not None and size.node.expr.is_Symbol:
                symbols.setdefault(str(size.node.expr), name)
    return symbols


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


class _Translator:
    """Translates the nodes of an exported module to steps."""

    def __init__(
        self, module: fx.GraphModule, sizes: Mapping[str, str], names: dict[str, str], prefix: str = ""
    ) -> None:
        self.module, self.sizes, self.prefix = module, sizes, prefix
        # Node name → name of its output tensor, or a list of names if it has several.
        self.names: dict[str, Any] = dict(names)
        self.steps: list[Step] = []

    def graph(self) -> Graph:
        inputs, shapes, kinds, outputs = [], {}, {}, []
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                name = self.names.setdefault(node.name, self.prefix + node.name)
                inputs.append(name)
                shapes[name], kinds[name] = self.shape(node), _kind(node)
            elif node.op == "output":
                outputs = [self.names[output.name] for output in node.args[0]]
            elif node.op == "call_function":
                self.visit(node)
        return Graph(tuple(self.steps), tuple(inputs), {}, tuple(outputs), shapes, kinds)

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
        module = getattr(self.module, body.target)  # type: ignore[union-attr,arg-type]
        placeholders = [child.name for child in module.graph.nodes if child.op == "placeholder"]
        outer = [self.names[value.name] for value in (*init, *xs, *shared)]  # type: ignore[misc]
        # Tensors shared by all iterations keep their names in the body.
        first = len(init) + len(xs)  # type: ignore[arg-type]
        names = dict(zip(placeholders[first:], outer[first:]))
        prefix = f"{self.prefix}{node.name}."
        inner = _Translator(module, self.sizes, names, prefix).graph()
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
        body: Graph | None = None,
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

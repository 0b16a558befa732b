"""A model as a list of primitive operations over named tensors, read off an exported `forward`.

Each step names its operation, its inputs and the module that it is part of. The walk of a page, a page's own engine and
tests interpret it; `regard.program.numpy_interpreter` defines what each operation does.
"""

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from regard.errors import RegardError
from regard.program.capture import Captured

Size = Any  # int | sympy.Expr
"""A number, or an expression of sizes that vary: T, S + 1…"""


@dataclass(frozen=True)
class Step:
    """One operation: `name = op(*inputs, **attributes)`."""

    name: str
    op: str
    inputs: tuple[str | None, ...]
    attributes: Mapping[str, Any]
    shape: tuple[Size, ...]
    kind: str
    """of its numbers: float (as wide as the parameters), double, int or bool"""
    module: str
    """path of the module whose forward it is part of"""
    source: str
    """file and function of that forward: regard/layers/multihead.py · forward"""
    body: "Program | None" = None
    """of a scan: what is done at each position, from (state, element, *shared) to (state, output)"""


@dataclass(frozen=True)
class Program:
    """Steps in order. They read inputs, parameters (by their names in the model), constants, and what steps gave."""

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    constants: Mapping[str, Tensor] = field(repr=False)
    outputs: tuple[str, ...]
    shapes: Mapping[str, tuple[Size, ...]] = field(repr=False)
    """of inputs"""
    kinds: Mapping[str, str] = field(repr=False)
    """of inputs"""

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def sizes(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        """The sizes that vary, as given by the shapes of inputs."""
        pairs = [(name, *pair) for name, shape in self.shapes.items() for pair in zip(shape, inputs[name].shape)]
        found = {str(size): int(given) for _, size, given in pairs if isinstance(size, sympy.Symbol)}
        for name, size, given in pairs:
            if _number(size, found) != given:
                raise RegardError(
                    f"{name} is {tuple(inputs[name].shape)}; the program takes {tuple(map(str, self.shapes[name]))}.",
                    "Pass inputs of that shape, or capture the program with inputs of this one.",
                )
        return found

    def resolve(self, sizes: Mapping[str, int]) -> "Program":
        """The same program with numbers in place of sizes that vary."""

        steps = tuple(
            replace(
                step,
                attributes={key: _number(value, sizes) for key, value in step.attributes.items()},
                shape=tuple(_number(step.shape, sizes)),
                body=None if step.body is None else step.body.resolve(sizes),
            )
            for step in self.steps
        )
        return replace(
            self, steps=steps, shapes={key: tuple(_number(shape, sizes)) for key, shape in self.shapes.items()}
        )


def _number(value: Any, sizes: Mapping[str, int]) -> Any:
    """An attribute with numbers in place of sizes that vary."""
    if isinstance(value, sympy.Expr):
        return int(value.subs(sizes))
    return [_number(one, sizes) for one in value] if isinstance(value, list | tuple) else value


def program_of(captured: Captured) -> Program:
    """Translate what was captured of a model.

    >>> from regard.program.capture import capture
    >>> layer = torch.nn.Linear(2, 3)
    >>> program = program_of(capture(layer, lambda layer, x: layer(x), {"x": torch.zeros(4, 2)}, {"x": ("T", None)}))
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
    program = _Translation(exported.graph_module, sizes, names).program()
    shapes = {name: program.shapes[name] for name in input_names}
    return replace(program, inputs=input_names, constants=constants, shapes=shapes)


# Operations that leave their input as it is, where numbers have one precision.
_IDENTITIES = ("assert_tensor_metadata", "contiguous", "clone", "detach", "alias", "dropout", "lift_fresh_copy")
# Operations that only give their input another shape: the shape is all that is said of them.
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


class _Translation:
    """Follows the nodes of one graph and writes down steps."""

    def __init__(
        self, graph: fx.GraphModule, sizes: Mapping[str, str], names: dict[str, str], prefix: str = ""
    ) -> None:
        self.graph, self.sizes, self.prefix = graph, sizes, prefix
        # Of each node the name of what it gives; of one that gives several tensors, all of them.
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
                outputs = [self.names[one.name] for one in node.args[0]]
            elif node.op == "call_function":
                self.follow(node)
        return Program(tuple(self.steps), tuple(inputs), {}, tuple(outputs), shapes, kinds)

    def follow(self, node: fx.Node) -> None:
        if node.target is not operator.getitem and not isinstance(node.meta.get("val"), Tensor | tuple | list):
            return  # a size, which attributes state as an expression, or a check of sizes
        if node.target is operator.getitem:
            of, index = node.args
            self.names[node.name] = self.names[of.name][index]  # type: ignore[union-attr,index]
            return
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            if str(node.target) != "scan":
                raise RegardError(f"A program has no operation {node.target}.", "Write the layer without it.")
            self.scan(node)
            return
        schema = node.target._schema  # type: ignore[union-attr]
        op = schema.name.removeprefix("aten::").strip("_")
        given = {argument.name: value for argument, value in zip(schema.arguments, node.args)} | node.kwargs
        getattr(self, f"_{op}", self._plain)(node, _RENAMED.get(op, op), given)

    # One method for each operation that is not written down as it stands; others are.

    def _plain(self, node: fx.Node, op: str, given: dict[str, Any]) -> None:
        if op in _IDENTITIES:
            first = next(iter(given.values()))
            self.names[node.name] = self.names[first.name]
            return
        if op in _RESHAPES:
            self.write(node, "reshape", [given["self"]], {"shape": list(self.shape(node))})
            return
        tensors: list[fx.Node | None] = []
        attributes: dict[str, Any] = {}
        for key, value in given.items():
            if isinstance(value, fx.Node) and isinstance(value.meta["val"], Tensor):
                tensors.append(value)
            elif (
                isinstance(value, list | tuple)
                and value
                and isinstance(value[0], fx.Node | None)
                and not all(
                    isinstance(one, fx.Node) and isinstance(one.meta["val"], torch.SymInt | int) for one in value
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
        self.write(node, op, tensors, attributes)

    def _to(self, node: fx.Node, op: str, given: dict[str, Any]) -> None:
        before, after = (_kind(one.meta["val"]) for one in (given["self"], node))
        if before == after or (before, after) == ("bool", "int"):
            self.names[node.name] = self.names[given["self"].name]
        else:
            self.write(node, "cast", [given["self"]], {"to": after})

    def _expand(self, node: fx.Node, op: str, given: dict[str, Any]) -> None:
        self.write(node, "expand", [given["self"]], {"shape": list(self.shape(node))})

    _expand_as = _expand

    def _transpose(self, node: fx.Node, op: str, given: dict[str, Any]) -> None:
        axes = list(range(given["self"].meta["val"].dim()))
        a, b = given["dim0"], given["dim1"]
        axes[a], axes[b] = axes[b], axes[a]
        self.write(node, "permute", [given["self"]], {"dims": axes})

    def _mT(self, node: fx.Node, op: str, given: dict[str, Any]) -> None:
        self._transpose(node, op, given | {"dim0": -2, "dim1": -1})

    def _t(self, node: fx.Node, op: str, given: dict[str, Any]) -> None:
        self._transpose(node, op, given | {"dim0": 0, "dim1": 1})

    def _chunk(self, node: fx.Node, op: str, given: dict[str, Any]) -> None:
        """Its parts, each as a slice."""
        start: Size = 0
        parts = []
        for number, part in enumerate(node.meta["val"]):
            size = self.size(part.shape[given["dim"]])
            name = f"{self.prefix}{node.name}_{number}"
            attributes = {"dim": given["dim"], "start": start, "end": start + size, "step": 1}
            self.write(node, "slice", [given["self"]], attributes, name=name, value=part)
            parts.append(name)
            start = start + size
        self.names[node.name] = parts

    _split = _split_with_sizes = _chunk

    def _unbind(self, node: fx.Node, op: str, given: dict[str, Any]) -> None:
        dim = given.get("dim", 0)
        names = [f"{self.prefix}{node.name}_{number}" for number in range(len(node.meta["val"]))]
        for number, part in enumerate(node.meta["val"]):
            attributes = {"dim": dim, "index": number}
            self.write(node, "select", [given["self"]], attributes, name=names[number], value=part)
        self.names[node.name] = names

    def _slice(self, node: fx.Node, op: str, given: dict[str, Any]) -> None:
        dim = given.get("dim", 0)
        size = self.size(given["self"].meta["val"].shape[dim])
        start, end = (self.value(given.get(key)) for key in ("start", "end"))
        start = 0 if start is None else start + size if isinstance(start, int) and start < 0 else start
        end = size if end is None or (isinstance(end, int) and end > 2**31) else end
        end = end + size if isinstance(end, int) and end < 0 else end
        if (start, end, given.get("step", 1)) == (0, size, 1):
            self.names[node.name] = self.names[given["self"].name]
        else:
            attributes = {"dim": dim, "start": start, "end": end, "step": given.get("step", 1)}
            self.write(node, "slice", [given["self"]], attributes)

    def _new_zeros(self, node: fx.Node, op: str, given: dict[str, Any]) -> None:
        self.write(node, "full", [], {"shape": list(self.shape(node)), "value": 0})

    _zeros = _zeros_like = _new_zeros

    def _ones(self, node: fx.Node, op: str, given: dict[str, Any]) -> None:
        self.write(node, "full", [], {"shape": list(self.shape(node)), "value": 1})

    _ones_like = _ones

    def _full(self, node: fx.Node, op: str, given: dict[str, Any]) -> None:
        self.write(node, "full", [], {"shape": list(self.shape(node)), "value": self.value(given["fill_value"])})

    _new_full = _full_like = _full

    def _arange(self, node: fx.Node, op: str, given: dict[str, Any]) -> None:
        start, end, step = (
            self.value(given.get(key, usual)) for key, usual in (("start", 0), ("end", None), ("step", 1))
        )
        self.write(node, "arange", [], {"start": start, "end": end, "step": step})

    def scan(self, node: fx.Node) -> None:
        body, init, xs, shared = node.args
        graph = getattr(self.graph, body.target)  # type: ignore[union-attr,arg-type]
        placeholders = [one.name for one in graph.graph.nodes if one.op == "placeholder"]
        outer = [self.names[one.name] for one in (*init, *xs, *shared)]  # type: ignore[misc]
        # What all positions share keeps its name inside.
        first = len(init) + len(xs)  # type: ignore[arg-type]
        names = dict(zip(placeholders[first:], outer[first:]))
        prefix = f"{self.prefix}{node.name}."
        inner = _Translation(graph, self.sizes, names, prefix).program()
        inner = replace(inner, inputs=tuple(inner.inputs[:first]))
        name = prefix + "outputs"
        value = node.meta["val"][1]
        self.write(node, "scan", [*init, *xs], {}, name=name, value=value, body=inner)  # type: ignore[misc]
        self.names[node.name] = [None, name]

    # What all of them use

    def write(
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
        inputs = tuple(None if one is None else self.names[one.name] for one in tensors)
        shape = tuple(self.size(one) for one in value.shape)
        where = _module_of(node), _source_of(node)
        self.steps.append(Step(name, op, inputs, attributes, shape, _kind(value), *where, body))

    def shape(self, node: fx.Node) -> tuple[Size, ...]:
        return tuple(self.size(one) for one in node.meta["val"].shape)

    def size(self, size: Any) -> Size:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        found = expression.xreplace({one: sympy.Symbol(self.sizes[str(one)]) for one in expression.free_symbols})
        return int(found) if found.is_Integer else found

    def value(self, value: Any) -> Any:
        """An attribute: numbers and words, sizes as expressions."""
        if isinstance(value, fx.Node):
            return self.value(value.meta["val"])
        if isinstance(value, torch.SymInt):
            return self.size(value)
        if isinstance(value, list | tuple):
            return [self.value(one) for one in value]
        return value


def _kind(value: Any) -> str:
    value = value.meta["val"] if isinstance(value, fx.Node) else value
    return _KINDS.get(value.dtype, "float")


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next((path for path, _ in reversed(stack.values()) if "model" in path), "model")
    return re.sub(r"^(_export_root\.)?model\.?", "", path)


def _source_of(node: fx.Node) -> str:
    """The innermost function of Regard on the way to an operation."""
    found = re.findall(r'File ".*?(regard/[^"]*\.py)", line \d+, in (\S+)', node.meta.get("stack_trace") or "")
    return " · ".join(found[-1]) if found else ""

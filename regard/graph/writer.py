"""Graphs as JSON, for engines in other languages.

Every tensor of a graph has a slot: inputs, parameters and outputs of steps. Dynamic sizes are expressions:
`{"size": ["-", "source", "target"]}`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

from regard.errors import RegardError
from regard.graph.steps import Graph, Step, all_steps

_OPERATORS: dict[type, str] = {sympy.Add: "+", sympy.Mul: "*", sympy.Max: "max", sympy.Min: "min"}
_OPERATORS |= {FloorDiv: "//", Mod: "%"}
# Attributes that only describe how PyTorch computes an operation.
_IGNORED = {"padding_idx", "scale_grad_by_freq", "sparse", "sparse_grad", "half_to_float", "inplace"}


class GraphWriter:
    """Writes a graph as JSON, without the steps that neither its outputs nor `keep` need.

    `tensors` maps the names of parameters and constants to their indices in the engine's table of tensors.

    >>> import torch
    >>> from regard.graph import capture
    >>> layer = torch.nn.Linear(2, 3)
    >>> graph = capture(layer, lambda layer, x: layer(x), {"x": torch.ones(4, 2)}, {"x": ("T", None)})
    >>> writer = GraphWriter(graph, {"weight": 0, "bias": 1})
    >>> writer.write()["steps"]
    [{'op': 'linear', 'in': [0, 1, 2], 'out': 3}]
    """

    def __init__(self, graph: Graph, tensors: Mapping[str, int], keep: Iterable[str] = ()) -> None:
        self.graph, self.tensors = graph, tensors
        self.needed = _needed_steps(graph, keep)
        self.slots: dict[str, int] = {}
        self.tensor_slots: list[list[int]] = []

    def write(self, outputs: Iterable[str] = ("output",)) -> dict[str, Any]:
        """The graph as JSON; `outputs` names its outputs."""
        inputs = [
            {"name": name, "slot": self.slot(name), "shape": [_expression(size) for size in self.graph.shapes[name]]}
            for name in self.graph.inputs
        ]
        steps = self._steps(self.graph)
        return {
            "inputs": inputs,
            "tensors": self.tensor_slots,
            "steps": steps,
            "outputs": {name: self.slot(value) for name, value in zip(outputs, self.graph.outputs)},
            "slots": len(self.slots),
        }

    def slot(self, name: str) -> int:
        if name not in self.slots:
            self.slots[name] = len(self.slots)
            if name in self.tensors:
                self.tensor_slots.append([self.slots[name], self.tensors[name]])
        return self.slots[name]

    def _steps(self, graph: Graph) -> list[dict[str, Any]]:
        return [self._step(step) for step in graph.steps if step.name in self.needed]

    def _step(self, step: Step) -> dict[str, Any]:
        inputs = [None if name is None else self.slot(name) for name in step.inputs]
        options = {key: attribute_json(value) for key, value in step.attributes.items() if key not in _IGNORED}
        written: dict[str, Any] = {"op": step.op, "in": inputs, "out": self.slot(step.name)}
        if options:
            written["options"] = options
        if step.kind == "double":
            written["kind"] = step.kind
        if step.body is not None:
            body = step.body
            written["body"] = {
                "inputs": [self.slot(name) for name in body.inputs],
                "steps": self._steps(body),
                "outputs": [self.slot(name) for name in body.outputs],
            }
        return written


def _needed_steps(graph: Graph, keep: Iterable[str]) -> set[str]:
    steps = {step.name: step for step in all_steps(graph)}
    needed: set[str] = set()
    waiting = [*graph.outputs, *keep]
    while waiting:
        name = waiting.pop()
        if name in steps and name not in needed:
            needed.add(name)
            waiting += [value for value in steps[name].inputs if value is not None]
            if (body := steps[name].body) is not None:
                waiting += body.outputs
    return needed


def attribute_json(value: Any) -> Any:
    """An attribute of a step as JSON."""
    if isinstance(value, sympy.Expr):
        return {"size": _expression(value)}
    if isinstance(value, list | tuple):
        return [attribute_json(item) for item in value]
    return value


def _expression(size: Any) -> Any:
    """A size as JSON: a number, a name, or a list of an operator and its operands."""
    if isinstance(size, int):
        return size
    if isinstance(size, sympy.Integer):
        return int(size)
    if isinstance(size, sympy.Symbol):
        return str(size)
    if isinstance(size, sympy.Pow) and size.exp.is_Integer and size.exp > 0:
        return ["*", *[_expression(size.base)] * int(size.exp)]
    operator = next((name for kind, name in _OPERATORS.items() if isinstance(size, kind)), None)
    if operator is not None:
        return [operator, *(_expression(operand) for operand in size.args)]
    raise RegardError(f"Unsupported size {size}.", "Add its operator to regard/graph/writer.py.")

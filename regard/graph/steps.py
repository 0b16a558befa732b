"""A graph: a list of primitive operations over named tensors. Each step names its operation, its inputs and its module.

The step-by-step view, the JavaScript engine of a page and the ONNX export interpret graphs; `regard.graph.interpreter`
defines the operations.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from torch import Tensor

from regard.errors import RegardError

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
    """file and function of that forward: regard/layers/attention.py · forward"""
    body: "Graph | None" = None
    """of a scan: the graph of one iteration, from (state, element, *shared) to (state, output)"""


@dataclass(frozen=True)
class Graph:
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
                    "Pass an input of that shape, or capture the graph with inputs of the actual shape.",
                )
        return sizes

    def resolve(self, sizes: Mapping[str, int]) -> "Graph":
        """The same graph with integers in place of dynamic sizes."""

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


def all_steps(graph: Graph) -> Iterator[Step]:
    """The steps of a graph and of its loops."""
    for step in graph.steps:
        yield step
        if step.body is not None:
            yield from all_steps(step.body)

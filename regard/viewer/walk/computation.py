"""A program for one input: its steps with loops unrolled, their values, and steps that are added to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import sympy
from jaxtyping import Shaped
from torch import Tensor, nn

from regard.program import Program, Step
from regard.program.numpy_interpreter import Values, execute, tensors_of
from regard.viewer.walk import limits
from regard.viewer.walk.wording import ACTIVATIONS, PROBABILITIES, Entry, Words

Array = Shaped[np.ndarray, "..."]

# Operations that only move numbers.
LAYOUT = {"reshape", "permute", "expand", "slice", "select", "flip", "cat", "stack", "repeat_interleave", "cast"}
LAYOUT |= {"gather_rows", "gather", "index", "pad"}
# Operations on each number by itself.
ELEMENTWISE = {"add", "sub", "rsub", "mul", "div", "pow", "maximum", "neg", "reciprocal", "abs", "exp", "log", "sin"}
ELEMENTWISE |= {"cos", "sqrt", "square", "clamp", "clamp_min", "lerp", "where", "masked_fill", *ACTIVATIONS}
FLOATS = ("float", "double")
NORMS = ("layer_norm", "rms_norm", "group_norm")
TABLES = ("embedding", "gather_rows")


class SectionKey(NamedTuple):
    """What the steps of a section have in common."""

    path: str = ""
    call: int = 0
    token: int | None = None
    run: int = 0
    """number of the section, of those that are never resumed"""


@dataclass(eq=False)
class Node:
    """A step of a program whose loops are unrolled, and what is found out about it."""

    step: Step
    sizes: tuple[str | None, ...]
    """names of the sizes that vary, axis by axis"""
    module: str
    token: int | None = None
    """in a loop over a sequence: the position that it belongs to"""
    side: str = "one"
    """name of that sequence"""
    words: Entry = None
    """of a step that is shown"""
    prefix: str = ""
    """what its name begins with"""
    is_between: bool = False
    """belongs to a block and to none of its sublayers: a norm, a residual connection"""
    section: SectionKey = field(default_factory=SectionKey)
    axes: tuple[str, ...] = ()
    """names of its axes, where they are known"""
    differs: float | None = None

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def op(self) -> str:
        return self.step.op


def unroll(program: Program, sizes: Mapping[str, int]) -> list[Node]:
    """The steps of a program for inputs of these sizes, with a copy of a loop's body for each position."""
    nodes: list[Node] = []
    _unroll(program, program.resolve(sizes), {}, nodes)
    return nodes


def _unroll(
    program: Program,
    resolved: Program,
    names: dict[str, str],
    nodes: list[Node],
    module: str = "",
    token: int | None = None,
    side: str = "one",
) -> None:
    suffix = "" if token is None else f"[{token}]"
    current = module
    for step, real in zip(program.steps, resolved.steps):
        inputs = tuple(None if one is None else names.get(one, one) for one in real.inputs)
        # A cell that is called step by step is no call of a module: its parameters say whose it is.
        owner = next((one.split(".rnn.")[0] for one in real.inputs if one and ".rnn." in one), None)
        if step.module or token is None:
            path, current = owner or step.module, module
        else:
            path = current = owner or current
        if real.body is not None and step.body is not None:
            _unroll_loop(step, replace(real, inputs=inputs), names, nodes)
            continue
        names[step.name] = step.name + suffix
        made = replace(real, name=names[step.name], inputs=inputs, module=path)
        nodes.append(Node(made, tuple(_side(size) for size in step.shape), path, token, side))


def _unroll_loop(step: Step, real: Step, names: dict[str, str], nodes: list[Node]) -> None:
    assert step.body is not None
    assert real.body is not None
    state, xs = real.inputs
    outputs, sides = [], tuple(_side(size) for size in step.shape)
    count, body, side = int(real.shape[0]), step.body, sides[0] or "one"
    backward = _is_flipped(str(xs), {node.name: node for node in nodes})
    for position in range(count):
        token = count - 1 - position if backward else position
        element = f"{step.name}.element[{token}]"
        shape = tuple(real.body.shapes[body.inputs[1]])
        attributes = {"dim": 0, "index": position}
        selected = Step(element, "select", (xs,), attributes, shape, "float", real.module, real.source)
        nodes.append(Node(selected, tuple(map(_side, body.shapes[body.inputs[1]])), real.module, token, side))
        inner = names | {body.inputs[0]: str(state), body.inputs[1]: element}
        _unroll(body, real.body, inner, nodes, real.module, token, side)
        state, output = (inner[name] for name in body.outputs)
        outputs.append(output)
    names[step.name] = step.name
    stacked = replace(real, op="stack", inputs=tuple(outputs), attributes={"dim": 0}, body=None)
    nodes.append(Node(stacked, sides, real.module))


def _is_flipped(name: str, nodes: Mapping[str, Node]) -> bool:
    """Whether a sequence is read from its end."""
    while name in nodes and nodes[name].op in ("linear", "permute", "reshape"):
        name = str(nodes[name].step.inputs[0])
    return name in nodes and nodes[name].op == "flip"


def _side(size: Any) -> str | None:
    """The name of a size that varies: of `source`, and of an expression that always equals it."""
    if not isinstance(size, sympy.Expr) or size.is_Integer:
        return None
    symbols = sorted(size.free_symbols, key=str)
    at = {symbol: 1009 + 14 * number for number, symbol in enumerate(symbols)}
    return next((str(symbol) for symbol in symbols if size.subs(at) == at[symbol]), None)


def evaluate(tensors: Mapping[str, Tensor], nodes: Sequence[Node], inputs: Mapping[str, Array]) -> Values:
    """The values of all steps, float64, from parameters and inputs."""
    values = Values(tensors)
    values.update(inputs)
    for node in nodes:
        execute(node.step, values)
    return values


class Computation:
    """The unrolled program of one input with its values, to which steps can be added."""

    def __init__(self, model: nn.Module, program: Program, inputs: dict[str, Array]) -> None:
        self.model, self.inputs = model, inputs
        self.nodes = unroll(program, program.sizes(inputs))
        self.values: Values = evaluate(tensors_of(program, model), self.nodes, inputs)
        self.output = next(node for node in reversed(self.nodes) if node.name == program.outputs[0])
        self.words: dict[str, Words | None] = {}

    def add(
        self, name: str, op: str, inputs: Sequence[str], axes: tuple[str, ...], words: Words | None, **options: Any
    ) -> str:
        """Add a step after the program's own."""
        step = Step(name, op, tuple(inputs), options, (), "float", "", "")
        execute(step, self.values)
        shape = self.values[name].shape
        step = Step(name, op, tuple(inputs), options, shape, "float", "", "")
        self.nodes.append(Node(step, (None,) * len(shape), "", axes=axes))
        self.words[name] = words
        return name

    def give(self, name: str, x: Array, axes: tuple[str, ...], words: Words) -> str:
        """Add a value that is given."""
        self.values[name] = x
        self.nodes.append(Node(Step(name, "given", (), {}, x.shape, "float", "", ""), (None,) * x.ndim, "", axes=axes))
        self.words[name] = words
        return name

    def likeliest(self, x: Array) -> list[int]:
        """The columns that are among the ten largest of a row."""
        return sorted(set(np.argsort(-x, axis=-1, kind="stable")[..., : limits.NAMED].flatten().tolist()))

    def end_with_probabilities(self, axes: tuple[str, ...], called: str = "token") -> list[int | None]:
        """Add the softmax over the columns; of a large output layer, with the likeliest columns alone and the sum of
        the others as a given logarithm. Returns the number of each column, None for the others together."""
        node, scores = self.output, self.values[self.output.name]
        weight = self.values[str(node.step.inputs[1])] if node.op == "linear" else None
        columns: list[int | None] = list(range(scores.shape[-1]))
        logits = node.name
        if weight is not None and 4 * (weight.size + 2 * scores.size) > limits.WHOLE_OUTPUT:
            some = self.likeliest(scores)
            self._restrict(node, some)
            rest = np.delete(scores, some, axis=-1)
            others = np.logaddexp.reduce(rest, axis=-1, keepdims=True)
            title = f"Sum over the other {rest.shape[-1]} {called}s, given as a logarithm"
            given = self.give("rest", others, (*axes[:-1], "channels"), Words("rest", title, "log Σ exp(l)"))
            logits = self.add("logits", "cat", [node.name, given], (), None, dim=-1)
            columns = [*some, None]
        self.add("probabilities", "softmax", [logits], axes, PROBABILITIES, dim=-1)
        return columns

    def _restrict(self, node: Node, some: list[int]) -> None:
        """Leave some of a linear layer's outputs."""
        inputs = [node.step.inputs[0]]
        for name in node.step.inputs[1:]:
            assert name is not None
            inputs.append(f"{name}[{len(some)} rows]")
            self.values[str(inputs[-1])] = self.values[name][some]
        node.step = replace(node.step, inputs=tuple(inputs), shape=(*node.step.shape[:-1], len(some)))
        self.values[node.name] = self.values[node.name][..., some]

"""The computation of one input: the steps of a graph with unrolled loops, their values, and additional steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import sympy
from jaxtyping import Shaped
from torch import Tensor, nn

from regard.graph import Graph, Step
from regard.graph.interpreter import Values, collect_tensors, execute
from regard.viewer.trace.labels import ACTIVATIONS, PROBABILITIES, OptionalLabel, StepLabel

Array = Shaped[np.ndarray, "..."]

# Bytes up to which a trace contains the full output layer; named output tokens per position.
MAX_OUTPUT_BYTES, TOP_TOKENS = 4 << 20, 10

# Operations that only rearrange numbers.
LAYOUT = {"reshape", "permute", "expand", "slice", "select", "flip", "cat", "stack", "repeat_interleave", "cast"}
LAYOUT |= {"gather_rows", "gather", "index", "pad"}
# Elementwise operations.
ELEMENTWISE = {"add", "sub", "rsub", "mul", "div", "pow", "maximum", "neg", "reciprocal", "abs", "exp", "log", "sin"}
ELEMENTWISE |= {"cos", "sqrt", "square", "clamp", "clamp_min", "lerp", "where", "masked_fill", *ACTIVATIONS}
FLOATS = ("float", "double")
NORMS = ("layer_norm", "rms_norm", "group_norm")
TABLES = ("embedding", "gather_rows")


class PageTensor(NamedTuple):
    """A parameter in the model of a page: its index, and the numbers that the page computes with."""

    slot: int
    rounded: Tensor


class SectionKey(NamedTuple):
    """Identifies the section of a step."""

    path: str = ""
    call: int = 0
    token: int | None = None
    run: int = 0
    """counts sections that are never resumed"""


@dataclass(eq=False)
class Loop:
    """An unrolled loop over a sequence: names of the steps that compute its state and output, per position."""

    side: str
    """name of the sequence"""
    is_backward: bool
    states: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    @property
    def first_token(self) -> int:
        return len(self.outputs) - 1 if self.is_backward else 0


@dataclass(eq=False)
class Node:
    """A step of an unrolled graph, with its label, section and axes."""

    step: Step
    sizes: tuple[str | None, ...]
    """per axis: the name of a dynamic size, None for a static one"""
    module: str
    token: int | None = None
    """position in the sequence, for a step of a loop"""
    side: str = "one"
    """name of that sequence"""
    label: OptionalLabel = None
    """label of a step that is shown"""
    prefix: str = ""
    """prefix of its name"""
    is_between_sublayers: bool = False
    """belongs to a block but to none of its sublayers: a norm, a residual connection"""
    section: SectionKey = field(default_factory=SectionKey)
    axes: tuple[str, ...] = ()
    """names of its axes, if known"""
    difference: float | None = None
    """largest difference from the model's own forward"""
    symbolic: Mapping[str, Any] | None = None
    """attributes of the step with dynamic sizes as expressions"""
    loop: Loop | None = None
    """the loop of a step with a token; of the step that stacks the outputs of a loop, that loop"""
    carried: tuple[int, ...] = ()
    """indices of the inputs that are the state before this position"""

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def op(self) -> str:
        return self.step.op


def unroll(graph: Graph, sizes: Mapping[str, int]) -> list[Node]:
    """The steps of a graph for inputs of these sizes, with a copy of a loop body per position."""
    nodes: list[Node] = []
    _unroll(graph, graph.resolve(sizes), {}, nodes)
    return nodes


def _unroll(
    graph: Graph,
    resolved: Graph,
    names: dict[str, str],
    nodes: list[Node],
    module: str = "",
    token: int | None = None,
    loop: Loop | None = None,
) -> None:
    suffix = "" if token is None else f"[{token}]"
    current = module
    for step, real in zip(graph.steps, resolved.steps):
        inputs = tuple(None if value is None else names.get(value, value) for value in real.inputs)
        # A recurrent cell inside a loop is not a module call: its parameters identify the module.
        owner = next((value.split(".rnn.")[0] for value in real.inputs if value and ".rnn." in value), None)
        if step.module or token is None:
            path, current = owner or step.module, module
        else:
            path = current = owner or current
        if real.body is not None and step.body is not None:
            _unroll_loop(step, replace(real, inputs=inputs), names, nodes)
            continue
        names[step.name] = step.name + suffix
        unrolled = replace(real, name=names[step.name], inputs=inputs, module=path)
        node = Node(unrolled, tuple(_size_name(size) for size in step.shape), path, token)
        node.symbolic = step.attributes
        if loop is not None:
            node.side, node.loop = loop.side, loop
            node.carried = tuple(i for i, value in enumerate(real.inputs) if value == graph.inputs[0])
        nodes.append(node)


def _unroll_loop(step: Step, real: Step, names: dict[str, str], nodes: list[Node]) -> None:
    assert step.body is not None
    assert real.body is not None
    state, xs = map(str, real.inputs)
    sides = tuple(_size_name(size) for size in step.shape)
    count, body = int(real.shape[0]), step.body
    loop = Loop(sides[0] or "one", _is_flipped(xs, {node.name: node for node in nodes}))
    for position in range(count):
        token = count - 1 - position if loop.is_backward else position
        element = f"{step.name}.element[{token}]"
        shape = tuple(real.body.shapes[body.inputs[1]])
        attributes = {"dim": 0, "index": position}
        selected = Step(element, "select", (xs,), attributes, shape, "float", real.module, real.source)
        sizes = tuple(map(_size_name, body.shapes[body.inputs[1]]))
        symbolic = {"dim": 0, "index": sympy.Symbol("position")}
        nodes.append(Node(selected, sizes, real.module, token, loop.side, symbolic=symbolic, loop=loop))
        inner = names | {body.inputs[0]: state, body.inputs[1]: element}
        _unroll(body, real.body, inner, nodes, real.module, token, loop)
        state, output = (inner[name] for name in body.outputs)
        loop.states.append(state)
        loop.outputs.append(output)
    names[step.name] = step.name
    stacked = replace(real, op="stack", inputs=tuple(loop.outputs), attributes={"dim": 0}, body=None)
    nodes.append(Node(stacked, sides, real.module, loop=loop))


def _is_flipped(name: str, nodes: Mapping[str, Node]) -> bool:
    """Whether a sequence is reversed."""
    while name in nodes and nodes[name].op in ("linear", "permute", "reshape"):
        name = str(nodes[name].step.inputs[0])
    return name in nodes and nodes[name].op == "flip"


def _size_name(size: Any) -> str | None:
    """The symbol that a dynamic size always equals, such as `source`; None for a static size."""
    if not isinstance(size, sympy.Expr) or size.is_Integer:
        return None
    symbols = sorted(size.free_symbols, key=str)
    sample = {symbol: 1009 + 14 * index for index, symbol in enumerate(symbols)}
    return next((str(symbol) for symbol in symbols if size.subs(sample) == sample[symbol]), None)


def evaluate(tensors: Mapping[str, Tensor], nodes: Sequence[Node], inputs: Mapping[str, Array]) -> Values:
    """The values of all steps in float64."""
    values = Values(tensors)
    values.update(inputs)
    for node in nodes:
        execute(node.step, values)
    return values


class Computation:
    """The unrolled graph of one input with its values. Steps can be added.

    With `tensors`, the values are those of the model in a page, whose weights are rounded.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        inputs: dict[str, Array],
        tensors: Mapping[str, PageTensor] | None = None,
    ) -> None:
        self.model, self.inputs = model, inputs
        self.nodes = unroll(graph, graph.sizes(inputs))
        self.values: Values = evaluate(
            collect_tensors(graph, model) | {name: one.rounded for name, one in (tensors or {}).items()},
            self.nodes,
            inputs,
        )
        self.output = next(node for node in reversed(self.nodes) if node.name == graph.outputs[0])
        self.labels: dict[str, OptionalLabel] = {}

    def add(
        self, name: str, op: str, inputs: Sequence[str], axes: tuple[str, ...], label: OptionalLabel, **options: Any
    ) -> str:
        """Append a step to the graph; returns its name."""
        step = Step(name, op, tuple(inputs), options, (), "float", "", "")
        execute(step, self.values)
        shape = self.values[name].shape
        step = Step(name, op, tuple(inputs), options, shape, "float", "", "")
        self.nodes.append(Node(step, (None,) * len(shape), "", axes=axes))
        self.labels[name] = label
        return name

    def add_constant(self, name: str, x: Array, axes: tuple[str, ...], label: StepLabel) -> str:
        """Append a precomputed value; returns its name."""
        self.values[name] = x
        self.nodes.append(Node(Step(name, "given", (), {}, x.shape, "float", "", ""), (None,) * x.ndim, "", axes=axes))
        self.labels[name] = label
        return name

    def top_columns(self, x: Array) -> list[int]:
        """The columns that are among the largest of any row."""
        return sorted(set(np.argsort(-x, axis=-1, kind="stable")[..., :TOP_TOKENS].flatten().tolist()))

    def add_softmax(self, axes: tuple[str, ...], item: str = "token") -> list[int | None]:
        """Append the softmax over the columns of the output.

        A large output layer is restricted to the most likely columns and the log-sum-exp of the others. Returns the
        original index of each column, None for the others.
        """
        chain, scores = self._output_chain(), self.values[self.output.name]
        node = chain[-1]
        weight = self.values[str(node.step.inputs[1])] if node.op == "linear" else None
        columns: list[int | None] = list(range(scores.shape[-1]))
        logits = self.output.name
        if weight is not None and 4 * (weight.size + 2 * scores.size) > MAX_OUTPUT_BYTES:
            top = self.top_columns(scores)
            self._select_outputs(node, top)
            for one in chain[:-1]:
                one.step = replace(one.step, shape=(*one.step.shape[:-1], len(top)))
                self.values[one.name] = self.values[one.name][..., top]
            others = np.delete(scores, top, axis=-1)
            log_sum = np.logaddexp.reduce(others, axis=-1, keepdims=True)
            title = f"Log-sum-exp of the other {others.shape[-1]} {item}s (precomputed)"
            label = StepLabel("rest", title, "log Σ exp(l)")
            rest = self.add_constant("rest", log_sum, (*axes[:-1], "channels"), label)
            logits = self.add("logits", "cat", [self.output.name, rest], (), None, dim=-1)
            columns = [*top, None]
        self.add("probabilities", "softmax", [logits], axes, PROBABILITIES, dim=-1)
        return columns

    def _output_chain(self) -> list[Node]:
        """The output, and the steps before it up to a linear layer: soft-capping has steps for each logit alone."""
        nodes = {node.name: node for node in self.nodes}
        chain = [self.output]
        while chain[-1].op in ("mul", "div", "tanh") and len(chain[-1].step.inputs) == 1:
            name = str(chain[-1].step.inputs[0])
            if name not in nodes:
                break
            chain.append(nodes[name])
        return chain if chain[-1].op == "linear" else [self.output]

    def _select_outputs(self, node: Node, selected: list[int]) -> None:
        """Restrict a linear layer to some of its outputs."""
        inputs = [node.step.inputs[0]]
        for name in node.step.inputs[1:]:
            assert name is not None
            inputs.append(f"{name}[{len(selected)} rows]")
            self.values[str(inputs[-1])] = self.values[name][selected]
        node.step = replace(node.step, inputs=tuple(inputs), shape=(*node.step.shape[:-1], len(selected)))
        self.values[node.name] = self.values[node.name][..., selected]

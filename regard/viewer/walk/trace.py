"""A trace: the steps of a model's program with their values, titles and formulas, in sections, as a page shows them.

Nothing here depends on a model family: steps come from the program, names and titles from `wording`, sections from the
paths of modules. A page computes every step again (web/program.js).
"""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import regard
from regard.program import Step
from regard.program.numpy_interpreter import Values
from regard.viewer.walk.computation import LAYOUT, NORMS, TABLES, Array, Node, SectionKey
from regard.viewer.walk.module_calls import ModuleCalls, ancestors
from regard.viewer.walk.module_outputs import ModuleOutputs
from regard.viewer.walk.sections import Sections
from regard.viewer.walk.step_words import StepWords
from regard.viewer.walk.wording import Entry, Words


@dataclass(frozen=True)
class Extent:
    """What a trace shows of a program, and titles and names that the program does not have."""

    axes: Mapping[int, str] = field(default_factory=dict)
    """names of axes by their sizes, where these do not vary: tokens of an image"""
    block: str | None = None
    """the path of the one block whose steps are kept, of a large model; "": none of them"""
    words: Mapping[str, Entry] = field(default_factory=dict)
    """of steps that were added to the program, by their names; None: hidden"""
    output: str = "Output"
    """title of the last section"""
    given: Mapping[str, str] = field(default_factory=dict)
    """titles of values that are given instead of computed, by the names of their steps"""


class Trace:
    """Steps and sections of a walk, the parameters that they use and the values that they give.

    >>> from torch import ones
    >>> from regard.program import capture, program_of
    >>> from regard.program.numpy_interpreter import tensors_of
    >>> from regard.viewer.walk.computation import evaluate, unroll
    >>> model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), ones(5, 2)
    >>> program = program_of(capture(model, lambda model, x: model(x), {"x": ones(4, 2)}, {"x": ("text", None)}))
    >>> nodes, inputs = unroll(program, {"text": 5}), {"x": x.numpy()}
    >>> values = evaluate(tensors_of(program, model), nodes, inputs)
    >>> trace = Trace(model, nodes, inputs, ModuleOutputs(model, [x]), values)
    >>> [step["id"] for step in trace.steps if step["title"]]
    ['0.given', '0', '1']
    >>> trace["1"].shape
    (5, 3)
    """

    def __init__(
        self,
        model: nn.Module,
        nodes: Sequence[Node],
        inputs: Mapping[str, Array],
        own: ModuleOutputs,
        values: Values,
        extent: Extent | None = None,
    ) -> None:
        self.own, self.extent, self.values = own, extent or Extent(), values
        given = [_input(name, x) for name, x in inputs.items() if x.dtype.kind == "f"]
        counts = {path: len(outputs) for path, outputs in own.outputs.items()}
        self.calls = ModuleCalls(model, [*given, *nodes], counts)
        StepWords(self.calls, self.extent.words).find()
        called = {path: len(calls) for path, calls in own.calls.items()}
        self._sections = Sections(self.calls, called, self.extent.output)
        self._sections.find()
        self.steps: list[dict[str, Any]] = []
        self.sections: list[dict[str, Any]] = []
        self._numbers: dict[SectionKey, int] = {}
        self._params, self._outputs = _Blob(), _Blob()
        self._found: dict[str, Array] = {}
        self._compare()
        self._emit()
        # A walk is kept without the model and its parameters in float64.
        del self.values, self.calls, self.own, self._sections

    def __getitem__(self, name: str) -> Array:
        """The value of the step of this name."""
        return self._found[name]

    def __contains__(self, name: str) -> bool:
        return name in self._found

    @property
    def params(self) -> bytes:
        """All parameters one after the other, float32, little-endian."""
        return self._params.bytes

    @property
    def outputs(self) -> bytes:
        """All values that are shown, one after the other, float32, little-endian."""
        return self._outputs.bytes

    @property
    def size(self) -> int:
        """Bytes of both."""
        return 4 * (self._params.end + self._outputs.end)

    # Comparison with the model's own numbers

    def _compare(self) -> None:
        for path, calls in self.calls.calls.items():
            own = self.own.outputs.get(path, [])
            if len(own) != len(calls):
                continue
            for some, wanted in zip(calls, own):
                node = self.calls.leaving(some)
                if node is not None and self.values[node.name].size == wanted.size:
                    self._note(node, wanted)
        for node in self.calls.nodes.values():
            if node.op == "softmax" and (attention := self.calls.attention(node.module)) is not None:
                call = node.token if node.token is not None else self.calls.call_of(node, attention)
                weights = self.own.weights(attention, call)
                if weights is not None and weights.size == self.values[node.name].size:
                    self._note(node, weights)

    def _note(self, node: Node, own: Array) -> None:
        """The difference is noted at the step that is shown."""
        gap = difference(self.values[node.name], own.reshape(self.values[node.name].shape))
        while node.words is None and node.op in LAYOUT and node.step.inputs[0] in self.calls.nodes:
            node = self.calls.nodes[str(node.step.inputs[0])]
        node.differs = max(gap, node.differs or 0.0)

    # What a page is given

    def _is_kept(self, node: Node) -> bool:
        """Of a large model only one block is carried."""
        if self.extent.block is None:
            return True
        block = self.calls.block(node.section.path) or self.calls.block(node.module)
        return block is None or block == self.extent.block

    def _emit(self) -> None:
        nodes = self.calls.nodes
        kept = {node.name for node in nodes.values() if self._is_kept(node)}
        given = dict(self.extent.given)
        for name in given:
            # What comes before it in its section is left out.
            before = list(nodes)[: list(nodes).index(name)]
            kept -= {one for one in before if nodes[one].section.path == nodes[name].section.path}
        for name in kept:
            left_out = {one for one in nodes[name].step.inputs if one in nodes and one not in kept}
            given |= dict.fromkeys(map(str, left_out), "Output of this layer, given")
        needed: set[str | None] = {name for name in kept if nodes[name].words is not None}
        for node in reversed(nodes.values()):
            if node.name in needed and node.name not in given:
                needed |= set(node.step.inputs)
        numbers: dict[str, int] = {}
        for node in nodes.values():
            if node.name in given and node.name in needed:
                numbers[node.name] = self._give(node, given[node.name])
            elif node.name in needed:
                numbers[node.name] = self._write(node, numbers)

    def _section_number(self, node: Node) -> int:
        if node.section not in self._numbers:
            self._numbers[node.section] = len(self.sections)
            self.sections.append(self._sections.describe(node, node.section))
        section = self.sections[self._numbers[node.section]]
        axes = self._axes(node)[1]
        if "side" not in section and (side := next((one for one in axes if one not in _PLAIN), None)):
            section["side"] = side
        if node.op == "softmax" and "attention" in section:
            section |= {"keys": axes[-1], "heads": node.step.shape[1]}
            if "token" not in section and len(axes) > 1:
                section["side"] = axes[-2]
        return self._numbers[node.section]

    def _give(self, node: Node, title: str) -> int:
        if node.name not in self.extent.given:
            block = self.calls.block(node.section.path) or self.calls.block(node.module) or node.section.path
            node.section = SectionKey(block, self.calls.call_of(node, block), None, 0)
        number = self._section_number(node)
        if node.name not in self.extent.given:
            self.sections[number]["part"] = "given"
        words = node.words or Words("out", title, "")
        node.words = words._replace(title=title, formula="given")
        node.prefix = node.prefix or f"{node.module}."
        step = replace(node.step, op="given", inputs=(), attributes={})
        return self._write(replace(node, step=step), {})

    def _write(self, node: Node, numbers: Mapping[str, int]) -> int:
        x, step = self.values[node.name], node.step
        inputs: list[Any] = []
        remapped = self._remapped(step) if step.op in TABLES else {}
        for place, name in enumerate(step.inputs):
            if name is None:
                inputs.append(None)
            elif place in remapped:
                inputs.append(self._param(name if remapped[place].dtype.kind == "f" else "", remapped[place], node))
            elif name in numbers:
                inputs.append(numbers[name])
            else:
                inputs.append(self._param(name, self.values[name], node))
        options = {"shape": list(x.shape)} if step.op == "given" else _finite(step.attributes)
        written: dict[str, Any] = {"op": step.op, "inputs": inputs, "options": options}
        if node.words is None:
            self.steps.append(written | {"id": "", "title": "", "section": -1, "differs": None})
            return len(self.steps) - 1
        name = f"{node.prefix}{node.words.name}"
        while name in self._found:  # a module that is called again
            name += "'"
        shape, axes = self._axes(node)
        self._found[name] = x.reshape(_without_batch(node)[0])
        self.steps.append(
            written
            | {
                "id": name,
                "section": self._section_number(node),
                "title": node.words.title,
                "formula": node.words.formula,
                "where": self._where(node.module),
                "output": {"offset": self._outputs.put(x), "shape": shape, "axes": axes},
                "differs": node.differs,
            }
        )
        return len(self.steps) - 1

    def _remapped(self, step: Step) -> dict[int, Array]:
        """Of a table only the rows that are used."""
        table, rows = step.inputs[:2]
        if table in self.calls.nodes or rows is None or table is None:
            return {}
        axis = step.attributes.get("dim", 0)
        used, numbers = np.unique(self.values[rows], return_inverse=True)
        return {0: self.values[table].take(used, axis), 1: numbers.reshape(self.values[rows].shape)}

    def _param(self, name: str, x: Array, node: Node) -> dict[str, Any]:
        offset = self._params.put(x, shared=True)
        return {"sign": self._sign(name, node), "name": name, "offset": offset, "shape": list(x.shape)}

    def _sign(self, name: str, node: Node) -> str:
        """The letter of a parameter in the step's formula."""
        formula = node.words.formula if node.words is not None else ""
        tail = re.sub(r"_l0$", "", name.rpartition(".")[2])
        if node.op in NORMS:
            return {"weight": "γ", "bias": "β"}.get(tail, tail)
        found = re.search(r"(W\S*)(?: \+ (b\S*))?$", formula) if node.op in ("linear", "matmul") else None
        if found is not None:
            return (found[2] or tail) if "bias" in tail else found[1]
        table = re.search(r"= (\w+)\[", formula)
        return table[1] if table is not None and node.op in TABLES and name else tail

    def _axes(self, node: Node) -> tuple[list[int], list[str]]:
        """Shape and names of axes as a page shows them: rows of numbers, for each token and head."""
        shape, sizes = _without_batch(node)
        if node.axes:
            return list(node.step.shape[-len(node.axes) :]), list(node.axes)
        if not shape:
            return [1], ["channels"]
        named = node.words.name if node.words is not None else ""
        last = "vocabulary" if re.fullmatch(r"(output\.)?l(_\w+)?|match", named) else "channels"
        attention = self.calls.attention(node.section.path)
        if len(shape) == 3 and attention is None and not any(sizes):  # channels of an image
            cells = f"cells {shape[1]}×{shape[2]}"
            return [shape[0], shape[1] * shape[2]], ["channels", self.extent.axes.get(shape[1] * shape[2], cells)]
        names = [size or self.extent.axes.get(number, "") for number, size in zip(shape, sizes)]
        if attention is not None and len(shape) == 3:
            heads_first = node.op not in ("select", "cat", "slice", *NORMS)
            names[0 if heads_first else 1] = "heads"
            weights = node.op in ("softmax", "masked_fill") or named in _PAIRS
            names[2] = names[2] if weights else "channels"
        elif not sizes[-1]:
            names[-1] = last
        single = self.extent.axes.get(1, "one")
        return shape, [name or (single if number == 1 else "rows") for name, number in zip(names, shape)]

    def _where(self, path: str) -> str:
        """The nearest module that is not PyTorch's."""
        for one in [*ancestors(path), ""]:
            if not type(self.calls.modules[one]).__module__.startswith("torch."):
                return location(type(self.calls.modules[one]).forward)
        return ""


_PLAIN = ("heads", "channels", "vocabulary", "one", "rows", "pixels")
_PAIRS = ("qk", "e", "cos", "e_bias", "e_masked", "b", "a")


class _Blob:
    """Arrays one after the other; equal ones once, where they are shared."""

    def __init__(self) -> None:
        self.end = 0
        self._raw: list[bytes] = []
        self._offsets: dict[bytes, int] = {}

    def put(self, x: Array, shared: bool = False) -> int:
        raw = np.ascontiguousarray(x, "<f4").tobytes()
        if shared and raw in self._offsets:
            return self._offsets[raw]
        offset = self._offsets[raw] = self.end
        self._raw.append(raw)
        self.end += len(raw) // 4
        return offset

    @property
    def bytes(self) -> bytes:
        return b"".join(self._raw)


def _without_batch(node: Node) -> tuple[list[int], list[str | None]]:
    """Its shape, and the names of sizes that vary, without the axis of the batch: the first whose size is always 1."""
    shape, sizes = list(node.step.shape), list(node.sizes)
    fixed = [axis for axis, size in enumerate(shape) if size == 1 and sizes[axis] is None]
    if fixed and len(shape) > 1:
        del shape[fixed[0]], sizes[fixed[0]]
    return shape, sizes


def _input(name: str, x: Array) -> Node:
    """An input of floats, as a step that is given."""
    step = Step(name, "given", (), {}, tuple(x.shape), "float", "", "")
    return Node(step, (None,) * x.ndim, "")


def _finite(options: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: the largest number of float32 instead."""
    most = float(np.finfo(np.float32).max)
    return {
        name: float(np.clip(x, -most, most)) if isinstance(x, float) and math.isinf(x) else x
        for name, x in options.items()
    }


def difference(x: Array, other: Array) -> float:
    """The largest difference of two arrays, relative to their largest number where that is above 1. −∞ equals −∞.

    >>> difference(np.array([1.0, 200.0]), np.array([1.0, 202.0]))
    0.01
    """
    finite = np.isfinite(x)
    if not np.array_equal(finite, np.isfinite(other)):
        return math.inf
    x, other = x[finite], other[finite]
    return float(np.abs(x - other).max(initial=0.0) / max(1.0, np.abs(x).max(initial=0.0)))


@cache
def location(function: Any) -> str:
    """The file and the name of a function.

    >>> location(difference)
    'regard/viewer/walk/trace.py · difference'
    """
    function = inspect.unwrap(function)
    path = Path(inspect.getsourcefile(function) or "").resolve()
    root = Path(regard.__file__).resolve().parent.parent
    named = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    return f"{named} · {function.__qualname__}"

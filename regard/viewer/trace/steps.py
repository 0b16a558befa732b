"""Traces: the steps of a model's graph with values, titles and formulas, grouped in sections, as a page contains them.

Nothing here depends on the model family: steps come from the graph, labels from labels.py, sections from module
paths. The page computes every step again (web/trace/operations.js)."""

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

from regard import version
from regard.graph import Step
from regard.graph.interpreter import Values
from regard.graph.writer import attribute_json
from regard.viewer.model_run import ModelRun
from regard.viewer.token_axis import TokenAxis
from regard.viewer.trace.computation import LAYOUT, NORMS, TABLES, Array, Loop, Node, PageTensor, SectionKey
from regard.viewer.trace.labels import OptionalLabel, StepLabel
from regard.viewer.trace.modules import ModuleCalls, Sections, StepLabeler, ancestors


@dataclass(frozen=True)
class TraceOptions:
    """The part of a graph that a trace contains, and labels that the graph does not define."""

    axes: Mapping[int, str] = field(default_factory=dict)
    """names of axes by static size: tokens of an image"""
    block: str | None = None
    """of a large model: path of the only block whose steps are included; "": none"""
    labels: Mapping[str, OptionalLabel] = field(default_factory=dict)
    """labels of steps that were added to the graph; None: hidden"""
    output: str = "Output"
    """title of the last section"""
    precomputed: Mapping[str, str] = field(default_factory=dict)
    """titles of steps whose values are stored instead of computed"""
    tensors: Mapping[str, PageTensor] | None = None
    """the parameters of the model of the page, if it contains one"""


class Trace:
    """Steps and sections of a trace, with their parameters and values.

    >>> from torch import ones
    >>> from regard.graph import capture
    >>> from regard.graph.interpreter import collect_tensors
    >>> from regard.viewer.model_run import run_model
    >>> from regard.viewer.trace.computation import evaluate, unroll
    >>> model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), ones(5, 2)
    >>> graph = capture(model, lambda model, x: model(x), {"x": ones(4, 2)}, {"x": ("text", None)})
    >>> nodes, inputs = unroll(graph, {"text": 5}), {"x": x.numpy()}
    >>> values = evaluate(collect_tensors(graph, model), nodes, inputs)
    >>> reference = run_model(model, lambda: model(x), keep_outputs=True)
    >>> trace = Trace(model, nodes, inputs, reference, values)
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
        reference: ModelRun,
        values: Values,
        options: TraceOptions | None = None,
    ) -> None:
        self.reference, self.options, self.values = reference, options or TraceOptions(), values
        input_nodes = [_input_node(name, x) for name, x in inputs.items() if x.dtype.kind == "f"]
        assert reference.outputs is not None
        counts = {path: len(outputs) for path, outputs in reference.outputs.items()}
        self.calls = ModuleCalls(model, [*input_nodes, *nodes], counts)
        StepLabeler(self.calls, self.options.labels).assign()
        attention_calls = {path: len(recorded.calls) for path, recorded in reference.recording.items()}
        self._sections = Sections(self.calls, attention_calls, self.options.output)
        self._sections.assign()
        self.steps: list[dict[str, Any]] = []
        self.template: TraceTemplate | None = None
        """the steps for inputs of any length, if the page contains the model"""
        self.inputs = {name: x.reshape(-1).tolist() for name, x in inputs.items() if x.dtype.kind == "i"}
        """ids that the model reads"""
        self.sections: list[dict[str, Any]] = []
        self._section_indices: dict[SectionKey, int] = {}
        self.sides: dict[str, TokenAxis] = {}
        """the tokens of each axis; this and the following are set by the builder"""
        self.linked: dict[str, tuple[str, list[int]]] = {}
        """axes whose selection follows another axis: its name, and the row for each of its tokens"""
        self.focus: dict[str, Any] = {}
        """attention, head and tokens that are selected initially"""
        self.names: dict[int, str] = {}
        """names of columns of the last step: the most likely ones per row"""
        self.note: str | None = None
        """which values are precomputed, if any"""
        self._params, self._outputs = _ArrayBuffer(), _ArrayBuffer()
        self._shown: dict[str, Array] = {}
        self._compare()
        self._emit()
        # Release the model and its parameters in float64.
        del self.values, self.calls, self.reference, self._sections

    def __getitem__(self, name: str) -> Array:
        """The value of a shown step, by name."""
        return self._shown[name]

    def __contains__(self, name: str) -> bool:
        return name in self._shown

    @property
    def params(self) -> bytes:
        """All parameters, concatenated, little-endian float32."""
        return self._params.bytes

    @property
    def outputs(self) -> bytes:
        """Samples of all shown values, concatenated, little-endian float32."""
        return self._outputs.bytes

    @property
    def size(self) -> int:
        """Bytes of parameters and values."""
        return 4 * (self._params.end + self._outputs.end)

    # Comparison with the model's own forward

    def _compare(self) -> None:
        assert self.reference.outputs is not None
        for path, calls in self.calls.calls.items():
            outputs = self.reference.outputs.get(path, [])
            if len(outputs) != len(calls):
                continue
            for call_nodes, output in zip(calls, outputs):
                node = self.calls.output(call_nodes)
                if node is not None and self.values[node.name].size == output.size:
                    self._set_difference(node, output)
        for node in self.calls.nodes.values():
            if node.op == "softmax" and (attention := self.calls.attention(node.module)) is not None:
                call = node.token if node.token is not None else self.calls.call_index(node, attention)
                weights = self.reference.weights(attention, call)
                if weights is not None and weights.size == self.values[node.name].size:
                    self._set_difference(node, weights)

    def _set_difference(self, node: Node, expected: Array) -> None:
        """Store the difference at the step that is shown."""
        gap = difference(self.values[node.name], expected.reshape(self.values[node.name].shape))
        while node.label is None and node.op in LAYOUT and node.step.inputs[0] in self.calls.nodes:
            node = self.calls.nodes[str(node.step.inputs[0])]
        node.difference = max(gap, node.difference or 0.0)

    # Data of the page

    def _is_included(self, node: Node) -> bool:
        """Whether a step is included: of a large model, only one block is."""
        if self.options.block is None:
            return True
        block = self.calls.block(node.section.path) or self.calls.block(node.module)
        return block is None or block == self.options.block

    def _emit(self) -> None:
        nodes = self.calls.nodes
        included = {node.name for node in nodes.values() if self._is_included(node)}
        precomputed = dict(self.options.precomputed)
        for name in precomputed:
            # Earlier steps of its section are left out.
            before = list(nodes)[: list(nodes).index(name)]
            included -= {one for one in before if nodes[one].section.path == nodes[name].section.path}
        for name in included:
            missing = {value for value in nodes[name].step.inputs if value in nodes and value not in included}
            precomputed |= dict.fromkeys(map(str, missing), "Output of this layer (precomputed)")
        needed: set[str | None] = {name for name in included if nodes[name].label is not None}
        is_fixed = bool(precomputed) or any(
            node.op == "given" or (node.token is not None and node.side == "one") for node in nodes.values()
        )
        if self.options.tensors is not None and not is_fixed:
            self.template = TraceTemplate()
            # The state after the only position of a loop: longer inputs read it.
            needed |= {node.loop.states[0] for node in nodes.values() if node.loop is not None}
        for node in reversed(nodes.values()):
            if node.name in needed and node.name not in precomputed:
                needed |= set(node.step.inputs)
        step_indices: dict[str, int] = {}
        for node in nodes.values():
            if node.name in precomputed and node.name in needed:
                step_indices[node.name] = self._write_precomputed(node, precomputed[node.name])
            elif node.name in needed:
                step_indices[node.name] = self._write(node, step_indices)

    def _section_index(self, node: Node) -> int:
        if node.section not in self._section_indices:
            self._section_indices[node.section] = len(self.sections)
            self.sections.append(self._sections.describe(node, node.section))
        section = self.sections[self._section_indices[node.section]]
        axes = self._axes(node)[1]
        if "side" not in section and (side := next((axis for axis in axes if axis not in _GENERIC_AXES), None)):
            section["side"] = side
        if node.op == "softmax" and "attention" in section:
            section |= {"keys": axes[-1], "heads": node.step.shape[1]}
            if "token" not in section and len(axes) > 1:
                section["side"] = axes[-2]
        return self._section_indices[node.section]

    def _write_precomputed(self, node: Node, title: str) -> int:
        if node.name not in self.options.precomputed:
            block = self.calls.block(node.section.path) or self.calls.block(node.module) or node.section.path
            node.section = SectionKey(block, self.calls.call_index(node, block), None, 0)
        section = self._section_index(node)
        if node.name not in self.options.precomputed:
            self.sections[section]["part"] = "given"
        label = node.label or StepLabel("out", title, "")
        node.label = label._replace(title=title, formula="precomputed")
        node.prefix = node.prefix or f"{node.module}."
        step = replace(node.step, op="given", inputs=(), attributes={})
        return self._write(replace(node, step=step), {})

    def _write(self, node: Node, step_indices: Mapping[str, int]) -> int:
        """Append a step; returns its index."""
        x, step = self.values[node.name], node.step
        inputs: list[Any] = []
        used_rows = self._used_rows(step) if step.op in TABLES and self.template is None else {}
        for index, name in enumerate(step.inputs):
            if name is None:
                inputs.append(None)
            elif index in used_rows:
                is_table = used_rows[index].dtype.kind == "f"
                param = self._param(name if is_table else "", used_rows[index], node)
                inputs.append(param | ({"full_shape": list(self.values[name].shape)} if is_table else {}))
            elif name in step_indices:
                inputs.append(step_indices[name])
            else:
                inputs.append(self._param(name, self.values[name], node))
        options = {"shape": list(x.shape)} if step.op == "given" else _finite(step.attributes)
        header: dict[str, Any] = {"op": step.op, "inputs": inputs, "options": options}
        if node.label is None:
            self._append(node, header | {"id": "", "title": "", "section": -1, "differs": None})
            return len(self.steps) - 1
        name = f"{node.prefix}{node.label.name}"
        while name in self._shown:  # the module is called again
            name += "'"
        shape, axes = self._axes(node)
        self._shown[name] = x.reshape(_without_batch(node)[0])
        output: dict[str, Any] = {"shape": shape, "axes": axes}
        if self.template is None:
            output |= self._outputs.add_sample(x, every=1 if step.op == "given" else _sample_step(x))
        self._append(
            node,
            header
            | {
                "id": name,
                "section": self._section_index(node),
                "title": node.label.title,
                "formula": node.label.formula,
                "where": self._source_location(node.module),
                "output": output,
                "differs": node.difference,
            },
        )
        return len(self.steps) - 1

    def _append(self, node: Node, header: dict[str, Any]) -> None:
        self.steps.append(header)
        if self.template is not None:
            symbolic = node.step.attributes if node.symbolic is None else node.symbolic
            self.template.append(node, header | {"options": _finite(symbolic), "differs": None})

    def _used_rows(self, step: Step) -> dict[int, Array]:
        """Inputs of a lookup with a table of only the rows that are used: table and remapped indices."""
        table, rows = step.inputs[:2]
        if table in self.calls.nodes or rows is None or table is None:
            return {}
        axis = step.attributes.get("dim", 0)
        used, indices = np.unique(self.values[rows], return_inverse=True)
        return {0: self.values[table].take(used, axis), 1: indices.reshape(self.values[rows].shape)}

    def _param(self, name: str, x: Array, node: Node) -> dict[str, Any]:
        header = {"sign": self._symbol(name, node), "name": name, "shape": list(x.shape)}
        if self.template is not None and self.options.tensors is not None:
            if name in self.options.tensors:
                return header | {"tensor": self.options.tensors[name].slot}
            return header | {"name": "", "input": name}  # ids
        return header | {"offset": self._params.add(x, shared=True)}

    def _symbol(self, name: str, node: Node) -> str:
        """The symbol of a parameter in the formula of the step."""
        formula = node.label.formula if node.label is not None else ""
        tail = re.sub(r"_l0$", "", name.rpartition(".")[2])
        if node.op in NORMS:
            return {"weight": "γ", "bias": "β"}.get(tail, tail)
        match = re.search(r"(W\S*)(?: \+ (b\S*))?$", formula) if node.op in ("linear", "matmul") else None
        if match is not None:
            return (match[2] or tail) if "bias" in tail else match[1]
        table = re.search(r"= (\w+)\[", formula)
        return table[1] if table is not None and node.op in TABLES and name else tail

    def _axes(self, node: Node) -> tuple[list[int], list[str]]:
        """Shape and names of axes as the page shows them: rows of numbers per token and head."""
        shape, sizes = _without_batch(node)
        if node.axes:
            return list(node.step.shape[-len(node.axes) :]), list(node.axes)
        if not shape:
            return [1], ["channels"]
        step_name = node.label.name if node.label is not None else ""
        last = "vocabulary" if re.fullmatch(r"(output\.)?l(_\w+)?|match", step_name) else "channels"
        attention = self.calls.attention(node.section.path)
        if len(shape) == 3 and attention is None and not any(sizes):  # channels × height × width
            cells = f"cells {shape[1]}×{shape[2]}"
            return [shape[0], shape[1] * shape[2]], ["channels", self.options.axes.get(shape[1] * shape[2], cells)]
        names = [name or self.options.axes.get(size, "") for size, name in zip(shape, sizes)]
        if attention is not None and len(shape) == 3:
            is_heads_first = node.op not in ("select", "cat", "slice", *NORMS)
            names[0 if is_heads_first else 1] = "heads"
            is_pairwise = node.op in ("softmax", "masked_fill") or step_name in _PAIRWISE_STEPS
            names[2] = names[2] if is_pairwise else "channels"
        elif not sizes[-1]:
            names[-1] = last
        single = self.options.axes.get(1, "one")
        return shape, [name or (single if size == 1 else "rows") for name, size in zip(names, shape)]

    def _source_location(self, path: str) -> str:
        """File and method of the innermost module that is not from PyTorch."""
        for one in [*ancestors(path), ""]:
            if not type(self.calls.modules[one]).__module__.startswith("torch."):
                return location(type(self.calls.modules[one]).forward)
        return ""


_GENERIC_AXES = ("heads", "channels", "vocabulary", "one", "rows", "pixels")
_PAIRWISE_STEPS = ("qk", "e", "cos", "e_bias", "e_masked", "b", "a")


class _ArrayBuffer:
    """Concatenated arrays; equal arrays that are shared are stored once."""

    def __init__(self) -> None:
        self.end = 0
        self._raw: list[bytes] = []
        self._offsets: dict[bytes, int] = {}

    def add(self, x: Array, shared: bool = False) -> int:
        raw = np.ascontiguousarray(x, "<f4").tobytes()
        if shared and raw in self._offsets:
            return self._offsets[raw]
        offset = self._offsets[raw] = self.end
        self._raw.append(raw)
        self.end += len(raw) // 4
        return offset

    def add_sample(self, x: Array, every: int) -> dict[str, int]:
        """Add every n-th number; returns the offset and n, as the header of a step contains them."""
        return {"offset": self.add(x.reshape(-1)[::every]), "every": every}

    @property
    def bytes(self) -> bytes:
        return b"".join(self._raw)


def _sample_step(x: Array) -> int:
    """The distance of the numbers with which a page compares its own: about 100 per step, odd, so that rows differ."""
    return max(1, x.size // 100) | 1


def _without_batch(node: Node) -> tuple[list[int], list[str | None]]:
    """Shape and names of dynamic sizes without the batch axis: the first axis with static size 1."""
    shape, sizes = list(node.step.shape), list(node.sizes)
    fixed = [axis for axis, size in enumerate(shape) if size == 1 and sizes[axis] is None]
    if fixed and len(shape) > 1:
        del shape[fixed[0]], sizes[fixed[0]]
    return shape, sizes


def _input_node(name: str, x: Array) -> Node:
    """A float input as a step."""
    step = Step(name, "given", (), {}, tuple(x.shape), "float", "", "")
    return Node(step, (None,) * x.ndim, "")


def _finite(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the largest float32 number instead of infinity, which JSON does not have."""
    largest = float(np.finfo(np.float32).max)
    return {
        name: float(np.clip(x, -largest, largest)) if isinstance(x, float) and math.isinf(x) else x
        for name, x in options.items()
    }


def difference(x: Array, other: Array) -> float:
    """The largest difference of two arrays, relative to their largest number if that is above 1. −∞ equals −∞.

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
    """File and qualified name of a function.

    >>> location(difference)
    'regard/viewer/trace/steps.py · difference'
    """
    function = inspect.unwrap(function)
    path = Path(inspect.getsourcefile(function) or "").resolve()
    root = Path(version.__file__).resolve().parent.parent
    file = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    return f"{file} · {function.__qualname__}"


# Stands for the token in the names of a loop's steps.
TOKEN = "{token}"


class TraceTemplate:
    """The steps of a trace with dynamic sizes as expressions, and the first position of each loop.

    `web/engine/scenes.js` computes them.

    The inputs of a step are indices of this list, or parameters. In addition, `{"carried": n}` is the state of loop n
    before the current position, and `{"each": n}` stands for step n at every position of its loop.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.loops: list[dict[str, Any]] = []
        """sequence, direction, and the steps that compute the initial state and the next state"""
        self._indices: dict[str, int] = {}
        """index of a step by the name of its node"""
        self._loop_indices: dict[Loop, int] = {}

    def append(self, node: Node, header: dict[str, Any]) -> None:
        """Append the step of a node, unless it belongs to a later position of a loop."""
        loop = node.loop
        header |= {"options": {name: attribute_json(value) for name, value in header["options"].items()}}
        if loop is None:
            header |= {"inputs": self._inputs(node, header)}
        elif node.token is None:
            self.loops[self._loop_indices[loop]]["state"] = self._indices[loop.states[0]]
            header |= {"inputs": [{"each": self._indices[loop.outputs[0]]}]}
        elif node.token == loop.first_token:
            if loop not in self._loop_indices:
                self._loop_indices[loop] = len(self.loops)
                self.loops.append({"side": loop.side, "backward": loop.is_backward})
            tail = header["id"].removeprefix(node.prefix)
            name = node.prefix.removesuffix(f"{node.token}.") + f"{TOKEN}.{tail}" if tail else ""
            header |= {"inputs": self._inputs(node, header), "id": name, "loop": self._loop_indices[loop]}
        else:
            return
        self._indices[node.name] = len(self.steps)
        self.steps.append(header)

    def _inputs(self, node: Node, header: dict[str, Any]) -> list[Any]:
        inputs = []
        for i, (name, written) in enumerate(zip(node.step.inputs, header["inputs"])):
            index = self._indices.get(str(name), written)
            if node.loop is not None and i in node.carried:
                loop = self._loop_indices[node.loop]
                self.loops[loop]["initial"] = index
                index = {"carried": loop}
            inputs.append(index)
        return inputs


def trace_header(trace: Trace, blobs: list[bytes]) -> dict[str, Any]:
    """The header of a trace; appends its numbers to the blobs."""
    arrays: dict[str, Any] = {}
    for name, raw in (("params", trace.params), ("outputs", trace.outputs)):
        if not raw:
            arrays[name] = None
            continue
        blobs.append(raw)
        arrays[name] = {"at": len(blobs) - 1, "shape": [len(raw) // 4], "type": "float32"}
    return {
        "sides": {
            name: {"tokens": axis.tokens, "words": axis.words}
            | (dict(zip(("of", "rows"), trace.linked[name])) if name in trace.linked else {})
            for name, axis in trace.sides.items()
        },
        "focus": trace.focus,
        "names": {str(column): name for column, name in trace.names.items()},
        "note": trace.note,
        "sections": trace.sections,
        "steps": trace.steps,
        "inputs": None if trace.template is None else trace.inputs,
        **arrays,
    }


def trace_template(trace: Trace) -> dict[str, Any] | None:
    """What a page with its model needs to compute another input; None if values are precomputed."""
    template = trace.template
    if template is None:
        return None
    return {"note": trace.note, "sections": trace.sections, "steps": template.steps, "loops": template.loops}


def block_path(attention: str) -> str:
    """The path of the block that contains an attention.

    >>> block_path("decoder.0.cross"), block_path("blocks.1.attention.3"), block_path("decoder.attention")
    ('decoder.0', 'blocks.1', '')
    """
    match = re.match(r"(.*\.\d+)\.(attention|cross)(\.\d+)?$", attention)
    return match[1] if match else ""


def large_model_note(block: str) -> str:
    return f"The model is large: only the steps of {block} are shown. The outputs of other layers are precomputed."

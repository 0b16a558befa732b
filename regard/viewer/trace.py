"""A trace: the steps of a model's program with their values, titles and formulas, in sections, as a page shows them.

Nothing here knows a model family: steps come from the program, names and titles from `walk_wording`, sections from the
paths of modules. A page computes every step again (web/program.js).
"""

import inspect
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sympy
from jaxtyping import Shaped
from torch import Tensor, nn

import regard
from regard.attention.recording import KINDS
from regard.program import Program, Step
from regard.program.numpy_interpreter import Values, execute, tensors_of
from regard.viewer.module_outputs import ModuleOutputs
from regard.viewer.walk_wording import (
    ACTIVATIONS,
    BLOCK_WORDS,
    COLLAPSED,
    DEFAULTS,
    SECTIONS,
    STACKS,
    SUBLAYERS,
    WORDS,
    Entry,
    Words,
)

Array = Shaped[np.ndarray, "..."]

# Operations that only move numbers.
LAYOUT = {"reshape", "permute", "expand", "slice", "select", "flip", "cat", "stack", "repeat_interleave", "cast"}
LAYOUT |= {"gather_rows", "gather", "index", "pad"}
# Operations on each number by itself.
ELEMENTWISE = {"add", "sub", "rsub", "mul", "div", "pow", "maximum", "neg", "reciprocal", "abs", "exp", "log", "sin"}
ELEMENTWISE |= {"cos", "sqrt", "square", "clamp", "clamp_min", "lerp", "where", "masked_fill", *ACTIVATIONS}
FLOATS = ("float", "double")
NORMS = ("layer_norm", "rms_norm", "group_norm")
_TABLES = ("embedding", "gather_rows")


@dataclass(eq=False)
class Node:
    """A step of a program whose loops are unrolled, and what is found out about it."""

    step: Step
    sizes: tuple[str | None, ...]
    """names of the sizes that vary, axis by axis"""
    module: str
    token: int | None = None
    """in a loop: the position that it belongs to"""
    words: Entry = None
    """of a step that is shown"""
    prefix: str = ""
    """what its name begins with"""
    is_between: bool = False
    """belongs to a block and to none of its sublayers: a norm, a residual connection"""
    section: "SectionKey | None" = None
    axes: tuple[str, ...] = ()
    """names of its axes, where they are known"""
    differs: float | None = None

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def op(self) -> str:
        return self.step.op


class SectionKey(NamedTuple):
    """What the steps of a section have in common."""

    path: str
    call: int
    token: int | None
    run: int
    """number of the section, of those that are never resumed"""


def unroll(program: Program, sizes: Mapping[str, int]) -> list[Node]:
    """The steps of a program for inputs of these sizes, with a copy of a loop's body for each position."""
    nodes: list[Node] = []
    _unroll(program, program.resolve(sizes), {}, nodes, "", None)
    return nodes


def _unroll(
    program: Program, resolved: Program, names: dict[str, str], nodes: list[Node], module: str, token: int | None
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
        nodes.append(Node(made, tuple(_side(size) for size in step.shape), path, token))


def _unroll_loop(step: Step, real: Step, names: dict[str, str], nodes: list[Node]) -> None:
    assert step.body is not None
    assert real.body is not None
    state, xs = real.inputs
    outputs, sides = [], tuple(_side(size) for size in step.shape)
    count, body = int(real.shape[0]), step.body
    made = {node.name: node for node in nodes}
    backward = _is_flipped(str(xs), made)
    for position in range(count):
        token = count - 1 - position if backward else position
        element = f"{step.name}.element[{token}]"
        shape = tuple(real.body.shapes[body.inputs[1]])
        attributes = {"dim": 0, "index": position}
        selected = Step(element, "select", (xs,), attributes, shape, "float", real.module, real.source)
        nodes.append(Node(selected, tuple(_side(size) for size in body.shapes[body.inputs[1]]), real.module, token))
        inner = names | {body.inputs[0]: str(state), body.inputs[1]: element}
        _unroll(body, real.body, inner, nodes, real.module, token)
        state, output = (inner[name] for name in body.outputs)
        outputs.append(output)
    names[step.name] = step.name
    stacked = replace(real, op="stack", inputs=tuple(outputs), attributes={"dim": 0}, body=None)
    nodes.append(Node(stacked, sides, real.module))


def _is_flipped(name: str, nodes: Mapping[str, Node]) -> bool:
    """Whether a sequence is read from its end."""
    while name in nodes:
        if nodes[name].op == "flip":
            return True
        name = str(next((one for one in nodes[name].step.inputs if one in nodes), ""))
    return False


def _side(size: Any) -> str | None:
    """The name of a size that varies: of `source`, and of an expression that always equals it."""
    if not isinstance(size, sympy.Expr) or size.is_Integer:
        return None
    symbols = sorted(size.free_symbols, key=str)
    at = {symbol: 1009 + 14 * number for number, symbol in enumerate(symbols)}
    return next((str(symbol) for symbol in symbols if size.subs(at) == at[symbol]), None)


@dataclass(frozen=True)
class Extent:
    """What a trace needs to know besides program and model."""

    axes: Mapping[int, str] = field(default_factory=dict)
    """names of axes by their sizes, where these do not vary: tokens of an image"""
    block: str | None = None
    """the path of the one block whose steps are kept, of a large model; "": none of them"""
    words: Mapping[str, Entry] = field(default_factory=dict)
    """of steps that were added to the program, by their names; None: hidden"""
    output: str = "Output"
    """title of the last section"""
    given: Mapping[str, str] = field(default_factory=dict)
    """titles of values that are given and not computed, by the names of their steps"""


class Trace:
    """Steps and sections of a walk, the parameters that they use and the values that they give.

    >>> from torch import ones
    >>> from regard.program import capture, program_of
    >>> model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), ones(5, 2)
    >>> program = program_of(capture(model, lambda model, x: model(x), {"x": ones(4, 2)}, {"x": ("text", None)}))
    >>> nodes, inputs = unroll(program, {"text": 5}), {"x": x.numpy()}
    >>> values = evaluate(tensors_of(program, model), nodes, inputs)
    >>> trace = Trace(model, nodes, inputs, ModuleOutputs(model, [x]), values)
    >>> [step["id"] for step in trace.steps if step["title"]]
    ['given', '0', '1']
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
        self.model, self.own, self.extent = model, own, extent or Extent()
        self.modules = dict(model.named_modules())
        self.values = values
        given = [_input(name, x) for name, x in inputs.items() if x.dtype.kind == "f"]
        self.nodes = {node.name: node for node in (*given, *nodes)}
        self.steps: list[dict[str, Any]] = []
        self.sections: list[dict[str, Any]] = []
        self._params, self._outputs = _Blob(), _Blob()
        self._found: dict[str, Array] = {}
        self._consumers: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes.values():
            for name in node.step.inputs:
                if name is not None:
                    self._consumers[name].append(node)
        for node in given:
            node.module = self._consumers[node.name][0].module
        self._number_calls()
        self._find_words()
        self._find_sections()
        self._compare()
        self._emit()

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

    # What belongs to which module

    def _number_calls(self) -> None:
        """Modules that are called several times: their steps are as many in each call."""
        self._calls: dict[str, list[list[Node]]] = {}
        self._call_numbers: dict[tuple[str, str], int] = {}
        inside: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes.values():
            for path in _ancestors(node.module):
                inside[path].append(node)
        for path, nodes in inside.items():
            count = max(1, len(self.own.outputs.get(path, ())))
            size = len(nodes) // count if len(nodes) % count == 0 else len(nodes)
            self._calls[path] = [nodes[start : start + size] for start in range(0, len(nodes), size)]
            for call, some in enumerate(self._calls[path]):
                self._call_numbers |= {(path, node.name): call for node in some}

    def _call_of(self, node: Node, path: str) -> int:
        return self._call_numbers.get((path, node.name), 0)

    def _leaving(self, nodes: Sequence[Node]) -> Node | None:
        """Of the steps of one call of a module, the last one that others read."""
        inside = set(map(id, nodes))
        for node in reversed(nodes):
            readers = self._consumers[node.name]
            if node.step.kind in FLOATS and (not readers or any(id(one) not in inside for one in readers)):
                return node
        return None

    def _attention(self, path: str) -> str | None:
        """The attention that a module is a part of."""
        return next((one for one in _ancestors(path) if _is_attention(self.modules.get(one))), None)

    def _block(self, path: str) -> str | None:
        """The element of a list of layers that a module is a part of."""
        for one in reversed(_ancestors(path)):
            above = self.modules.get(one.rpartition(".")[0])
            if isinstance(above, nn.ModuleList) and any(True for _ in self.modules[one].children()):
                return one
        return None

    def _source(self, node: Node) -> Node:
        """What a step that only moves numbers has them from."""
        while node.op in LAYOUT and (made := self.nodes.get(str(node.step.inputs[0]))) is not None:
            node = made
        return node

    # Words

    def _find_words(self) -> None:
        self._depends = self._find_dependent()
        counts: Counter[Any] = Counter()
        found: dict[str, tuple[Entry, str] | None] = {}
        leaving = {
            id(one)
            for path, calls in self._calls.items()
            if _is_collapsed(self.modules.get(path)) or self._is_score(path)
            for some in calls
            if (one := self._leaving(some)) is not None
        }
        for node in self.nodes.values():
            found[node.name] = self._table_entry(node, counts, leaving)
        for node in reversed(self.nodes.values()):
            entry = found[node.name]
            node.words, node.prefix = entry if entry is not None else self._default(node)
            if self._is_score(node.module) and id(node) in leaving and node.words is not None:
                title = node.words.title if node.words != DEFAULTS.get(node.op) else "Scores"
                node.words = node.words._replace(name="e", title=title)
            if node.op not in LAYOUT and self._consumers[node.name]:
                # Split into parts that are shown.
                parts = [self._first_shown(one) for one in self._consumers[node.name]]
                if all(one is not None and one.op in ("select", "slice") for one in parts):
                    node.words = None

    def _first_shown(self, node: Node) -> Node | None:
        while node.op in ("reshape", "permute") and node.words is None and len(self._consumers[node.name]) == 1:
            node = self._consumers[node.name][0]
        kinds = {one.words is None for one in self._consumers[node.name] if one.op in ("select", "slice")}
        if node.words is None and node.op in LAYOUT and kinds == {False}:
            return self._consumers[node.name][0]
        return node if node.words is not None else None

    def _find_dependent(self) -> set[str]:
        """Steps that depend on parameters or inputs; the others are constants."""
        found: set[str] = set()
        for node in self.nodes.values():
            if node.op == "given" or any(
                one is not None and (one in found or (one not in self.nodes)) for one in node.step.inputs
            ):
                found.add(node.name)
        return found

    def _is_score(self, path: str) -> bool:
        above, _, tail = path.rpartition(".")
        return tail == "score" and _is_attention(self.modules.get(above))

    def _table_entry(self, node: Node, counts: Counter, leaving: set[int]) -> tuple[Entry, str] | None:
        """Its words in one of the tables, and the path that they are about."""
        if node.name in self.extent.words:
            return self.extent.words[node.name], "output."
        if node.step.kind not in FLOATS or (node.op == "stack" and node.token is not None):
            return None, ""
        collapsed = next((one for one in _ancestors(node.module) if _is_collapsed(self.modules.get(one))), None)
        if collapsed is not None and id(node) not in leaving:
            return None, ""
        inner = collapsed if collapsed is not None else node.module
        for path in [*_ancestors(inner), ""]:
            tables = [WORDS[name] for name in _class_names(self.modules[path], path) if name in WORDS]
            if not tables:
                continue
            tail = re.sub(r"\b\d+\b", "*", inner.removeprefix(path).removeprefix("."))
            key = path, self._call_of(node, path), node.token, tail, None if collapsed else node.op
            number = counts[key]
            counts[key] += 1
            for table in tables:
                for one in self._keys(node, tail, number, collapsed is not None, path):
                    if one in table:
                        named = path or node.module.split(".")[0]
                        return self._fitted(node, table[one], path), self._prefix(node, named)
        return None if collapsed is None else (None, "")

    def _keys(self, node: Node, tail: str, number: int, collapsed: bool, path: str) -> Iterator[str]:
        """The keys under which a table may have a step: tail.op(origin of an input), tail.op#number, tail.op; and
        `tail` alone for a norm, or for a module that is shown as one step."""
        if collapsed or node.op in NORMS:
            yield f"{tail}#{number}"
            yield tail
        stem = f"{tail}." if tail else ""
        origins = [self._origin(name, path) for name in node.step.inputs if name is not None]
        for op in (node.op, "activation") if node.op in ACTIVATIONS else (node.op,):
            yield from (f"{stem}{op}({origin})" for some in origins for origin in some)
            yield f"{stem}{op}#{number}"
            yield f"{stem}{op}"

    def _origin(self, name: str, path: str) -> list[str]:
        """What an input is: the last part of a parameter's name; or the module that computed it."""
        if name not in self.nodes:
            return [re.sub(r"_l0$", "", name.rpartition(".")[2])]
        made = self._source(self.nodes[name])
        found = [self.nodes[name].op]
        if made.op == "exp" and made.step.inputs[0] not in self.nodes:
            found += self._origin(str(made.step.inputs[0]), path)
        if made.module.startswith(f"{path}.") or not path:
            found.append(made.module.removeprefix(path).removeprefix(".").split(".")[0])
        return found + [type(one).__name__ for p in _ancestors(made.module) if (one := self.modules.get(p)) is not None]

    def _fitted(self, node: Node, words: Entry, path: str) -> Entry:
        """Formulas without a bias that is missing, of keys of another sequence, of the activation that is used."""
        if words is None:
            return None
        if node.op in ("mul", "add") and node.step.attributes.get("other") == {"mul": 1.0, "add": 0.0}[node.op]:
            return None
        formula = words.formula or DEFAULTS[node.op].formula
        made = self._source(node)
        if made.op == "linear" and len([one for one in made.step.inputs if one is not None]) < 3:
            formula = re.sub(r" \+ b\S*$", "", formula)
        if getattr(self.modules[path], "kind", "") == "cross" and words.name in ("k", "v"):
            formula = formula.replace("x", "m", 1)
        if node.op in ACTIVATIONS:
            formula = formula.format(ACTIVATIONS[node.op])
        if node.op in NORMS:
            formula += "".join(f" {sign}" for sign in ("· γ", "+ β")[: len(node.step.inputs) - 1])
        return words._replace(formula=formula)

    def _default(self, node: Node) -> tuple[Entry, str]:
        if not self._is_visible(node):
            return None, ""
        block = self._block(node.module)
        if block is not None and self._sublayer(node.module) is None:
            words = BLOCK_WORDS.get(node.op, DEFAULTS[node.op])
            node.is_between = True
            return self._fitted(node, words, node.module), f"{block}."  # completed by the sublayer
        words = self._fitted(node, DEFAULTS.get(node.op, Words(node.op, node.op, "")), node.module)
        path = node.module
        if words is not None and path and len(self._calls[path][0]) == 1:  # a module that is one step
            path, _, name = path.rpartition(".")
            words = words._replace(name=name)
        return words, self._prefix(node, path)

    def _prefix(self, node: Node, path: str) -> str:
        if self._is_score(path):
            path = path.rpartition(".")[0]
        path = path if node.token is None else f"{path}.{node.token}"
        return f"{path}." if path else ""

    def _is_visible(self, node: Node) -> bool:
        """Whether a step without an entry in a table is shown."""
        step, readers = node.step, self._consumers[node.name]
        if step.kind not in FLOATS or node.name not in self._depends:
            return False
        if node.op in ("cat", "stack"):
            pieces = [self.nodes[name] for name in step.inputs if name in self.nodes]
            return any(one.op in ELEMENTWISE and self._is_piece(one) for one in pieces)
        if node.op in LAYOUT:
            return False
        return not self._is_piece(node)

    def _is_piece(self, node: Node) -> bool:
        """Whether a step is shown as a part of the only one that reads it: an activation, or a concatenation."""
        readers = self._consumers[node.name]
        if node.op not in ELEMENTWISE or len(readers) != 1 or readers[0].module != node.module:
            return False
        (reader,) = readers
        if reader.op in ("cat", "stack") and node.token is None:
            return True
        if reader.op in ACTIVATIONS:
            return node.op not in ACTIVATIONS
        return reader.op in ELEMENTWISE and any(self._is_piece(one) and one.op not in ACTIVATIONS for one in readers)

    # Sections

    def _sublayer(self, path: str) -> str | None:
        """The attention or the other part of a block that a module belongs to; norms and sums have none."""
        if (attention := self._attention(path)) is not None:
            return attention
        block = self._block(path)
        if block is None:
            return None
        if not path.removeprefix(block):
            return block if _is_recurrent(self.modules[block]) else None
        child = f"{block}.{path.removeprefix(block + '.').split('.')[0]}"
        called = {one.__name__ for one in type(self.modules[child]).__mro__}
        if any("Norm" in name or "Residual" in name for name in called) or isinstance(
            self.modules[child], nn.ModuleList
        ):
            return None
        return child

    def _find_sections(self) -> None:
        paths = {node.name: self._sublayer(node.module) for node in self.nodes.values()}
        current: SectionKey | None = None
        run = 0
        for node in self.nodes.values():
            path, block = paths[node.name], self._block(node.module)
            if path is None and block is not None:
                path = paths[node.name] = self._neighbor(node, block, paths, current)
                self._complete(node, path)
            elif path is None and current is not None and self._is_nested(node.module, current.path):
                node.section = current
                continue
            path = path or self._top(node)
            owner = self._block(path) or path
            # The steps of an attention or another sublayer are together; other sections are never resumed.
            resumed = (self._attention(path) or path != owner) and not _is_recurrent(self.modules.get(path))
            if not resumed and (current is None or (path, node.token) != (current.path, current.token)):
                run += 1
            key = SectionKey(path, self._call_of(node, owner), node.token, 0 if resumed else run)
            if node.step.kind in FLOATS or current is None:
                current = key
            node.section = key

    def _neighbor(self, node: Node, block: str, paths: Mapping[str, str | None], current: SectionKey | None) -> str:
        """The sublayer whose section a norm or a residual connection is shown in: the one that alone reads it, or else
        the one before it."""
        readers = {paths.get(one.name) for one in self._consumers[node.name]}
        only = readers.pop() if len(readers) == 1 else None
        if only is not None and only.startswith(f"{block}."):
            return only
        return current.path if current is not None and current.path.startswith(f"{block}.") else block

    def _complete(self, node: Node, path: str) -> None:
        """Name and formula with those of the sublayer."""
        if node.is_between and node.words is not None:
            node.prefix += f"{path.rpartition('.')[2]}_"
            letter = "f" if path.endswith("feedforward") else "o"
            node.words = node.words._replace(formula=node.words.formula.replace("{}", letter))

    def _is_nested(self, path: str, current: str) -> bool:
        """Whether a module outside of the layers is used inside of an attention: a bias that layers share."""
        shared = any(_is_collapsed(self.modules.get(one)) for one in _ancestors(path))
        return shared and self._attention(current) is not None

    def _top(self, node: Node) -> str:
        """The section of a step outside of all layers."""
        if not node.module or node.name in self.extent.words:
            return "output"
        parts = node.module.split(".")
        if parts[0] == "distilled":
            return "output"
        two = ".".join(parts[:2])
        return two if two in SECTIONS else parts[0]

    def _section_number(self, node: Node) -> int:
        assert node.section is not None
        if node.section not in self._numbers:
            self._numbers[node.section] = len(self.sections)
            self.sections.append(self._described(node, node.section))
        section = self.sections[self._numbers[node.section]]
        axes = self._axes(node)[1]
        if "side" not in section and (side := next((one for one in axes if one not in _PLAIN), None)):
            section["side"] = side
        if node.op == "softmax" and "attention" in section:
            section |= {"keys": axes[-1], "heads": node.step.shape[1]}
            if "token" not in section and len(axes) > 1:
                section["side"] = axes[-2]
        return self._numbers[node.section]

    def _described(self, node: Node, key: SectionKey) -> dict[str, Any]:
        """Title of a section, and what it is about."""
        path, module = key.path, self.modules.get(key.path)
        block = self._block(path)
        said: dict[str, Any] = {}
        if _is_attention(module):
            called = self.own.calls.get(path, ())
            several = len(called) > 1 and key.token is None
            said |= {"part": "attention", "attention": f"{path}.{key.call}" if several else path, "heads": 1}
        elif _is_recurrent(module) or key.token is not None:
            said["part"] = "recurrent"
        else:
            kind = path.rpartition(".")[2]
            part = next((one for one in ("embedding", "feedforward", "norm", "output") if one in kind), "layer")
            said["part"] = "output" if path in ("output", "mask_head") else part
        if block is None:
            title = SECTIONS.get(path, path.replace("_", " ").replace(".", ": ").capitalize())
            title = self.extent.output if path == "output" else title
        else:
            said["layer"] = self._layer(block, key.call)
            stack = block.rpartition(".")[0]
            title = f"{STACKS.get(stack, 'Layer')} {said['layer']}"
            if path != block:
                tail = path.removeprefix(f"{block}.")
                tail = SUBLAYERS.get(getattr(module, "kind", ""), SUBLAYERS.get(tail, tail.replace("_", " ")))
                title += f", {tail}" if _is_recurrent(module) else f": {tail}"
        if key.token is not None:
            said |= {"token": key.token, "side": self._loop_side(node)}
            title += ": one step"
        elif _is_recurrent(module):
            title += ": states" if node.op == "stack" else ": inputs"
        return {"title": title, **said}

    def _layer(self, block: str, call: int) -> int:
        """The number of a layer: blocks that are called again are further layers."""
        stack = f"{block.rpartition('.')[0]}."
        before = [
            path
            for path in self._calls
            if path.startswith(stack) and path.removeprefix(stack).isdigit() and path != block
        ]
        number = int(block.removeprefix(stack))
        return sum(len(self._calls[one]) for one in before if int(one.removeprefix(stack)) < number) + call

    def _loop_side(self, node: Node) -> str:
        """The sequence that a loop reads."""
        stacked = (
            one
            for one in self.nodes.values()
            if one.op == "stack" and one.sizes and one.sizes[0] and one.name.split(".")[0] == node.name.split(".")[0]
        )
        return next((str(one.sizes[0]) for one in stacked), "one")

    # Comparison with the model's own numbers

    def _compare(self) -> None:
        for path, calls in self._calls.items():
            own = self.own.outputs.get(path, [])
            if len(own) != len(calls):
                continue
            for some, wanted in zip(calls, own):
                node = self._leaving(some)
                if node is not None and self.values[node.name].size == wanted.size:
                    self._note(node, wanted)
        for node in self.nodes.values():
            if node.op == "softmax" and (path := self._attention(node.module)) is not None:
                call = node.token if node.token is not None else self._call_of(node, path)
                wanted = self.own.weights(path, call)
                if wanted is not None and wanted.size == self.values[node.name].size:
                    self._note(node, wanted)

    def _note(self, node: Node, own: Array) -> None:
        """The difference is noted at the step that is shown."""
        gap = difference(self.values[node.name], own.reshape(self.values[node.name].shape))
        while node.words is None and node.op in LAYOUT and node.step.inputs[0] in self.nodes:
            node = self.nodes[str(node.step.inputs[0])]
        node.differs = max(gap, node.differs or 0.0)

    # What a page is given

    def _is_kept(self, node: Node) -> bool:
        """Of a large model only one block is carried."""
        if self.extent.block is None:
            return True
        assert node.section is not None
        block = self._block(node.section.path) or self._block(node.module)
        return block is None or block == self.extent.block

    def _emit(self) -> None:
        kept = {node.name for node in self.nodes.values() if self._is_kept(node)}
        given = dict(self.extent.given)
        for name in given:
            # What comes before it in its section is left out.
            names, path = list(self.nodes), self.nodes[name].section.path  # type: ignore[union-attr]
            kept -= {one for one in names[: names.index(name)] if self.nodes[one].section.path == path}  # type: ignore[union-attr]
        for name in kept:
            for one in self.nodes[name].step.inputs:
                if one is not None and one in self.nodes and one not in kept:
                    given[one] = "Output of this layer, given"
        needed: set[str] = set()
        for node in reversed(self.nodes.values()):
            shown = node.words is not None and node.name in kept
            if shown or node.name in needed or node.name in given:
                if node.name not in given and (node.name in kept or node.name in needed):
                    needed |= {one for one in node.step.inputs if one is not None}
                if shown:
                    needed.add(node.name)
        self._numbers: dict[SectionKey, int] = {}
        numbers: dict[str, int] = {}
        for node in self.nodes.values():
            if node.name in given and node.name in needed:
                numbers[node.name] = self._give(node, given[node.name])
            elif node.name in needed:
                numbers[node.name] = self._write(node, numbers)

    def _give(self, node: Node, title: str) -> int:
        assert node.section is not None
        if node.name not in self.extent.given:
            block = self._block(node.section.path) or self._block(node.module) or node.section.path
            node.section = SectionKey(block, self._call_of(node, block), None, 0)
        number = self._section_number(node)
        if node.name not in self.extent.given:
            self.sections[number]["part"] = "given"
        words = node.words or Words("out", title, "")
        node.words = words._replace(title=title, formula="given")
        node.prefix = node.prefix or f"{node.module}."
        return self._write(replace_op(node, "given"), {})

    def _write(self, node: Node, numbers: Mapping[str, int]) -> int:
        x, step = self.values[node.name], node.step
        inputs: list[Any] = []
        remapped = self._remapped(step) if step.op in _TABLES else {}
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
        self._found[name] = x.reshape(self._dropped(node))
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
        if table in self.nodes or rows is None or table is None:
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
        return table[1] if table is not None and node.op in _TABLES and name else tail

    def _dropped(self, node: Node) -> tuple[int, ...]:
        """The shape without the axis of the batch."""
        shape = list(node.step.shape)
        fixed = [axis for axis, size in enumerate(shape) if size == 1 and node.sizes[axis] is None]
        if fixed and len(shape) > 1:
            del shape[fixed[0]]
        return tuple(shape)

    def _axes(self, node: Node) -> tuple[list[int], list[str]]:
        """Shape and names of axes as a page shows them: rows of numbers, for each token and head."""
        shape, sizes = list(node.step.shape), list(node.sizes)
        if node.axes:
            return shape[-len(node.axes) :], list(node.axes)
        if not shape:
            return [1], ["channels"]
        fixed = [axis for axis, size in enumerate(shape) if size == 1 and sizes[axis] is None]
        if fixed and len(shape) > 1:
            del shape[fixed[0]], sizes[fixed[0]]
        named = node.words.name if node.words is not None else ""
        last = "vocabulary" if re.fullmatch(r"(output\.)?l(_\w+)?|match", named) else "channels"
        attention = self._attention(node.section.path) if node.section is not None else None
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
        for one in [*_ancestors(path), ""]:
            if not type(self.modules[one]).__module__.startswith("torch."):
                return location(type(self.modules[one]).forward)
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


def evaluate(tensors: Mapping[str, Tensor], nodes: Sequence[Node], inputs: Mapping[str, Array]) -> Values:
    """The values of all steps, float64, from parameters and inputs."""
    values = Values(tensors)
    values.update(inputs)
    for node in nodes:
        execute(node.step, values)
    return values


def _input(name: str, x: Array) -> Node:
    """An input of floats, as a step that is given."""
    step = Step(name, "given", (), {}, tuple(x.shape), "float", "", "")
    return Node(step, (None,) * x.ndim, "")


def replace_op(node: Node, op: str) -> Node:
    step = replace(node.step, op=op, inputs=(), attributes={})
    return replace(node, step=step)


def _finite(options: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: the largest number of float32 instead."""
    most = float(np.finfo(np.float32).max)
    return {
        name: float(np.clip(x, -most, most)) if isinstance(x, float) and math.isinf(x) else x
        for name, x in options.items()
    }


def _ancestors(path: str) -> list[str]:
    """A path and those above it, the longest first, without the model itself.

    >>> _ancestors("encoder.0.attention")
    ['encoder.0.attention', 'encoder.0', 'encoder']
    """
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _class_names(module: nn.Module, path: str) -> list[str]:
    names = [one.__name__ for one in type(module).__mro__]
    if _is_recurrent(module):
        names.insert(0, type(module.rnn).__name__)
    return names if path else ["Model"]


def _is_attention(module: nn.Module | None) -> bool:
    return getattr(module, "kind", None) in KINDS and isinstance(getattr(module, "score", None), nn.Module)


def _is_recurrent(module: nn.Module | None) -> bool:
    return isinstance(getattr(module, "rnn", None), nn.Module)


def _is_collapsed(module: nn.Module | None) -> bool:
    return type(module).__name__ in COLLAPSED


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

    >>> location(evaluate)
    'regard/viewer/trace.py · evaluate'
    """
    function = inspect.unwrap(function)
    path = Path(inspect.getsourcefile(function) or "").resolve()
    root = Path(regard.__file__).resolve().parent.parent
    named = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    return f"{named} · {function.__qualname__}"

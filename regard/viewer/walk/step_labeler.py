"""Labels of steps: which steps are shown, with their names, titles and formulas."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from regard.attention.masks import Local, Window
from regard.viewer.walk.computation import ELEMENTWISE, FLOATS, LAYOUT, NORMS, Node
from regard.viewer.walk.module_calls import ModuleCalls, ancestors, class_names, is_collapsed
from regard.viewer.walk.step_labels import (
    ACTIVATIONS,
    BLOCK_LABELS,
    DEFAULTS,
    GATED_UNITS,
    STEP_LABELS,
    OptionalLabel,
    StepLabel,
)


class StepLabeler:
    """Labels steps by the tables of step_labels.py: by the module of a step, or else by its operation.

    The key of a step in the table of a module is its operation, preceded by the relative path of its submodule
    (`query.linear`). Where that is ambiguous, the origin of an input (`add(positions)`) or the index in graph order
    (`select#1`) follows.
    """

    def __init__(self, calls: ModuleCalls, added: Mapping[str, OptionalLabel]) -> None:
        """`added`: labels of steps that were added to the graph."""
        self.calls, self.added = calls, added

    def assign(self) -> None:
        """Set the label of every step that is shown."""
        self._non_constant = self._find_non_constant()
        counts: Counter[Any] = Counter()
        entries: dict[str, tuple[OptionalLabel, str] | None] = {}
        outputs = {
            id(one)
            for path, calls in self.calls.calls.items()
            if is_collapsed(self.calls.modules.get(path)) or self.calls.is_score(path)
            for call_nodes in calls
            for _, nodes in groupby(call_nodes, lambda node: node.token)
            if (one := self.calls.output(list(nodes))) is not None
        }
        for node in self.calls.nodes.values():
            entries[node.name] = self._table_entry(node, counts, outputs)
        for node in reversed(self.calls.nodes.values()):
            entry = entries[node.name]
            node.label, node.prefix = entry if entry is not None else self._default(node)
            if self.calls.is_score(node.module) and id(node) in outputs:
                self._name_scores(node)
            if node.op not in LAYOUT and self.calls.consumers[node.name]:
                # Its parts are shown instead.
                parts = [self._first_shown(one) for one in self.calls.consumers[node.name]]
                if all(one is not None and one.op in ("select", "slice") for one in parts):
                    node.label = None

    def _name_scores(self, node: Node) -> None:
        """Name the output of a score `e`, whatever computes it."""
        default = DEFAULTS.get(self.calls.source(node).op, StepLabel("", "", ""))
        label = node.label or default
        title = "Scores" if label.title == default.title else label.title
        node.label, node.prefix = label._replace(name="e", title=title), self._prefix(node, node.module)

    def _first_shown(self, node: Node) -> Node | None:
        """The next step that shows a value, or a part of it."""
        while node.op in ("reshape", "permute") and node.label is None and len(self.calls.consumers[node.name]) == 1:
            node = self.calls.consumers[node.name][0]
        hidden = {one.label is None for one in self.calls.consumers[node.name] if one.op in ("select", "slice")}
        if node.label is None and node.op in LAYOUT and hidden == {False}:
            return self.calls.consumers[node.name][0]
        return node if node.label is not None else None

    def _find_non_constant(self) -> set[str]:
        """Steps that depend on parameters or inputs."""
        names: set[str] = set()
        for node in self.calls.nodes.values():
            if node.op == "given" or any(
                one is not None and (one in names or (one not in self.calls.nodes)) for one in node.step.inputs
            ):
                names.add(node.name)
        return names

    def _table_entry(self, node: Node, counts: Counter, outputs: set[int]) -> tuple[OptionalLabel, str] | None:
        """The label of a step in one of the tables, and the prefix of its name."""
        if node.name in self.added:
            return self.added[node.name], "output."
        if node.step.kind not in FLOATS or (node.op == "stack" and node.token is not None):
            return None, ""
        collapsed = next((one for one in ancestors(node.module) if is_collapsed(self.calls.modules.get(one))), None)
        if collapsed is not None and id(node) not in outputs:
            return None, ""
        inner = collapsed if collapsed is not None else node.module
        for path in [*ancestors(inner), ""]:
            tables = [STEP_LABELS[name] for name in class_names(self.calls.modules[path], path) if name in STEP_LABELS]
            if not tables:
                continue
            tail = re.sub(r"\b\d+\b", "*", inner.removeprefix(path).removeprefix("."))
            key = path, self.calls.call_index(node, path), node.token, tail, None if collapsed else node.op
            index = counts[key]
            counts[key] += 1
            for table in tables:
                for one in self._keys(node, tail, index, collapsed is not None, path):
                    if one in table:
                        owner = path or node.module.split(".")[0]
                        return self._specialize(node, table[one], path), self._prefix(node, owner)
        return None if collapsed is None else (None, "")

    def _keys(self, node: Node, tail: str, index: int, collapsed: bool, path: str) -> Iterator[str]:
        """Keys of a step in a table: tail.op(origin of an input), tail.op#index, tail.op; and `tail` alone for norms
        and for modules that are shown as one step."""
        if collapsed or node.op in NORMS:
            yield f"{tail}#{index}"
            yield tail
        stem = f"{tail}." if tail else ""
        origins = [self._origin(name, path) for name in node.step.inputs if name is not None]
        for op in (node.op, "activation") if node.op in ACTIVATIONS else (node.op,):
            yield from (f"{stem}{op}({origin})" for names in origins for origin in names)
            yield f"{stem}{op}#{index}"
            yield f"{stem}{op}"

    def _origin(self, name: str, path: str) -> list[str]:
        """The origin of an input: the last part of a parameter's name, or the module that computed it."""
        if name not in self.calls.nodes:
            return [re.sub(r"_l0$", "", name.rpartition(".")[2])]
        source = self.calls.source(self.calls.nodes[name])
        origins = [self.calls.nodes[name].op]
        if source.op == "exp" and source.step.inputs[0] not in self.calls.nodes:
            origins += self._origin(str(source.step.inputs[0]), path)
        if source.module.startswith(f"{path}.") or not path:
            origins.append(source.module.removeprefix(path).removeprefix(".").split(".")[0])
        return origins + [
            type(one).__name__ for p in ancestors(source.module) if (one := self.calls.modules.get(p)) is not None
        ]

    def _specialize(self, node: Node, label: OptionalLabel, path: str) -> OptionalLabel:
        """Adapt a label to the module: a missing bias, the memory of cross-attention, the mask, the activation."""
        if label is None:
            return None
        if node.op in ("mul", "add") and node.step.attributes.get("other") == {"mul": 1.0, "add": 0.0}[node.op]:
            return None
        title, formula = label.title, label.formula or DEFAULTS[node.op].formula
        source = self.calls.source(node)
        if source.op == "linear" and len([one for one in source.step.inputs if one is not None]) < 3:
            formula = re.sub(r" \+ b\S*$", "", formula)
        if getattr(self.calls.modules[path], "kind", "") == "cross" and label.name in ("k", "v"):
            formula = formula.replace("x", "m", 1)
        if label.name == "e_masked":
            title, formula = _describe_mask(getattr(self.calls.modules[path], "mask", None)) or (title, formula)
        if node.op in ACTIVATIONS:
            formula = formula.format(ACTIVATIONS[node.op])
            title = title.format(GATED_UNITS.get(node.op, "gated linear unit"))
        if node.op in NORMS:
            formula += "".join(f" {term}" for term in ("· γ", "+ β")[: len(node.step.inputs) - 1])
        return label._replace(title=title, formula=formula)

    def _default(self, node: Node) -> tuple[OptionalLabel, str]:
        if not self._is_visible(node):
            return None, ""
        block = self.calls.block(node.module)
        if block is not None and self.calls.sublayer(node.module) is None:
            label = BLOCK_LABELS.get(node.op, DEFAULTS[node.op])
            node.is_between_sublayers = True
            return self._specialize(node, label, node.module), f"{block}."  # completed in `Sections`
        entry = self._specialize(node, DEFAULTS.get(node.op, StepLabel(node.op, node.op, "")), node.module)
        path = node.module
        # The only step of a module has the name of the module.
        is_single = node.op != "given" and len(self.calls.calls.get(path, [[]])[0]) == 1
        if entry is not None and path and is_single:
            path, _, name = path.rpartition(".")
            entry = entry._replace(name=name)
        return entry, self._prefix(node, path)

    def _prefix(self, node: Node, path: str) -> str:
        if self.calls.is_score(path):
            path = path.rpartition(".")[0]
        path = path if node.token is None else f"{path}.{node.token}"
        return f"{path}." if path else ""

    def _is_visible(self, node: Node) -> bool:
        """Whether a step without an entry in a table is shown."""
        step = node.step
        if step.kind not in FLOATS or node.name not in self._non_constant:
            return False
        if node.op in ("cat", "stack"):
            pieces = [self.calls.nodes[name] for name in step.inputs if name in self.calls.nodes]
            return any(one.op in ELEMENTWISE and self._is_piece(one) for one in pieces)
        if node.op in LAYOUT:
            return False
        return not self._is_piece(node)

    def _is_piece(self, node: Node) -> bool:
        """Whether a step is shown as a part of its only reader: an activation or a concatenation."""
        readers = self.calls.consumers[node.name]
        if node.op not in ELEMENTWISE or len(readers) != 1 or readers[0].module != node.module:
            return False
        (reader,) = readers
        if reader.op in ("cat", "stack") and node.token is None:
            return True
        if reader.op in ACTIVATIONS:
            return node.op not in ACTIVATIONS
        return reader.op in ELEMENTWISE and any(self._is_piece(one) and one.op not in ACTIVATIONS for one in readers)


def _describe_mask(mask: Any) -> tuple[str, str] | None:
    """Title and formula of a mask that is not simply causal."""
    match mask:
        case Local(n):
            return "Local attention", f"eₜₛ ← −∞ for |s − t| > {n}"
        case Window(n):
            return "Causal mask with a sliding window", f"eₜₛ ← −∞ for s > t and for s ≤ t − {n}"
    return None

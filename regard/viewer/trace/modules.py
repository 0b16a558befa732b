"""Maps the steps of a graph to the calls of modules, which give each step its label and its section."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import nn

from regard.attention.masks import Local, Window
from regard.attention.recording import KINDS
from regard.viewer.trace.computation import ELEMENTWISE, FLOATS, LAYOUT, NORMS, Node, SectionKey
from regard.viewer.trace.labels import (
    ACTIVATIONS,
    BLOCK_LABELS,
    COLLAPSED,
    DEFAULTS,
    GATED_UNITS,
    SECTIONS,
    STACKS,
    STEP_LABELS,
    SUBLAYERS,
    OptionalLabel,
    StepLabel,
)


class ModuleCalls:
    """The steps of a model, grouped by module path and call."""

    def __init__(self, model: nn.Module, nodes: Iterable[Node], counts: Mapping[str, int]) -> None:
        """`counts`: number of calls per module path."""
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.nodes = {node.name: node for node in nodes}
        self.consumers: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes.values():
            for name in node.step.inputs:
                if name is not None:
                    self.consumers[name].append(node)
        for node in self.nodes.values():
            if node.op == "given" and not node.module and self.consumers[node.name]:
                node.module = self.consumers[node.name][0].module
        self._index_calls(counts)

    def _index_calls(self, counts: Mapping[str, int]) -> None:
        """Split the steps of modules that are called several times; each call has the same number of steps."""
        self.calls: dict[str, list[list[Node]]] = {}
        self._call_indices: dict[tuple[str, str], int] = {}
        inside: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes.values():
            for path in ancestors(node.module) if node.op != "given" else ():
                inside[path].append(node)
        for path, nodes in inside.items():
            count = max(1, counts.get(path, 1))
            size = len(nodes) // count if len(nodes) % count == 0 else len(nodes)
            self.calls[path] = [nodes[start : start + size] for start in range(0, len(nodes), size)]
            for call, call_nodes in enumerate(self.calls[path]):
                self._call_indices |= {(path, node.name): call for node in call_nodes}

    def call_index(self, node: Node, path: str) -> int:
        return self._call_indices.get((path, node.name), 0)

    def output(self, nodes: Sequence[Node]) -> Node | None:
        """The output of a module call: the last of its steps that steps outside read."""
        inside = set(map(id, nodes))
        for node in reversed(nodes):
            readers = self.consumers[node.name]
            if node.step.kind in FLOATS and (not readers or any(id(reader) not in inside for reader in readers)):
                return node
        return None

    def attention(self, path: str) -> str | None:
        """The attention that contains a module."""
        return next((one for one in ancestors(path) if is_attention(self.modules.get(one))), None)

    def block(self, path: str) -> str | None:
        """The element of a ModuleList that contains a module."""
        for one in reversed(ancestors(path)):
            above = self.modules.get(one.rpartition(".")[0])
            if isinstance(above, nn.ModuleList) and any(True for _ in self.modules[one].children()):
                return one
        return None

    def source(self, node: Node) -> Node:
        """The step that computed the numbers which layout operations rearranged."""
        while node.op in LAYOUT and (producer := self.nodes.get(str(node.step.inputs[0]))) is not None:
            node = producer
        return node

    def is_score(self, path: str) -> bool:
        above, _, tail = path.rpartition(".")
        return tail == "score" and is_attention(self.modules.get(above))

    def sublayer(self, path: str) -> str | None:
        """The attention, or other sublayer of a block, that contains a module; None for norms and residual sums."""
        if (attention := self.attention(path)) is not None:
            return attention
        block = self.block(path)
        if block is None:
            return None
        if not path.removeprefix(block):
            return block if is_recurrent(self.modules[block]) else None
        child = f"{block}.{path.removeprefix(block + '.').split('.')[0]}"
        class_names = {one.__name__ for one in type(self.modules[child]).__mro__}
        if any("Norm" in name or "Residual" in name for name in class_names) or isinstance(
            self.modules[child], nn.ModuleList
        ):
            return None
        return child


def ancestors(path: str) -> list[str]:
    """A path and its parents, longest first, without the model itself.

    >>> ancestors("encoder.0.attention")
    ['encoder.0.attention', 'encoder.0', 'encoder']
    """
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def class_names(module: nn.Module, path: str) -> list[str]:
    names = [one.__name__ for one in type(module).__mro__]
    if is_recurrent(module):
        names.insert(0, type(module.rnn).__name__)
    return names if path else [*names, "Model"]


def is_attention(module: nn.Module | None) -> bool:
    return getattr(module, "kind", None) in KINDS and isinstance(getattr(module, "score", None), nn.Module)


def is_recurrent(module: nn.Module | None) -> bool:
    return isinstance(getattr(module, "rnn", None), nn.Module)


def is_collapsed(module: nn.Module | None) -> bool:
    return type(module).__name__ in COLLAPSED


class Sections:
    """Assigns steps to sections and describes the sections."""

    def __init__(self, calls: ModuleCalls, counts: Mapping[str, int], output: str) -> None:
        """`counts`: calls per attention; `output`: title of the last section."""
        self.calls, self.counts, self.output = calls, counts, output

    def assign(self) -> None:
        """Assign each step to a section."""
        paths = {node.name: self.calls.sublayer(node.module) for node in self.calls.nodes.values()}
        current: SectionKey | None = None
        run = 0
        for node in self.calls.nodes.values():
            path, block = paths[node.name], self.calls.block(node.module)
            if path is None and block is not None:
                path = paths[node.name] = self._neighbor(node, block, paths, current)
                self._complete(node, path)
            elif path is None and current is not None and self._is_nested(node.module, current.path):
                node.section = current
                continue
            path = path or self._top(node)
            owner = self.calls.block(path) or path
            # The steps of an attention or another sublayer form one section; other sections are never resumed.
            is_resumable = (self.calls.attention(path) or path != owner) and not is_recurrent(
                self.calls.modules.get(path)
            )
            if not is_resumable and (current is None or (path, node.token) != (current.path, current.token)):
                run += 1
            key = SectionKey(path, self.calls.call_index(node, owner), node.token, 0 if is_resumable else run)
            if node.step.kind in FLOATS or current is None:
                current = key
            node.section = key

    def _neighbor(self, node: Node, block: str, paths: Mapping[str, str | None], current: SectionKey | None) -> str:
        """The sublayer in whose section a norm or residual connection is shown: its only reader, or the one before."""
        readers = {paths.get(consumer.name) for consumer in self.calls.consumers[node.name]}
        reader = readers.pop() if len(readers) == 1 else None
        if reader is not None and reader.startswith(f"{block}."):
            return reader
        return current.path if current is not None and current.path.startswith(f"{block}.") else block

    def _complete(self, node: Node, path: str) -> None:
        """Complete the name and the formula of a step between sublayers."""
        if node.is_between_sublayers and node.label is not None:
            node.prefix += f"{path.rpartition('.')[2]}_"
            symbol = "f" if path.endswith("feedforward") else "o"
            node.label = node.label._replace(formula=node.label.formula.replace("{}", symbol))

    def _is_nested(self, path: str, current: str) -> bool:
        """Whether a module outside the layers runs inside an attention: a bias that layers share."""
        shared = any(is_collapsed(self.calls.modules.get(one)) for one in ancestors(path))
        return shared and self.calls.attention(current) is not None

    def _top(self, node: Node) -> str:
        """The section of a step outside all layers."""
        if not node.module:
            return "output"
        parts = node.module.split(".")
        if parts[0] == "distilled":
            return "output"
        prefix = ".".join(parts[:2])
        return prefix if prefix in SECTIONS else parts[0]

    def describe(self, node: Node, key: SectionKey) -> dict[str, Any]:
        """The header of a section: title, part, and layer, attention or token."""
        path, module = key.path, self.calls.modules.get(key.path)
        block = self.calls.block(path)
        header: dict[str, Any] = {}
        if is_attention(module):
            is_shared = self.counts.get(path, 1) > 1 and key.token is None
            header |= {"part": "attention", "attention": f"{path}.{key.call}" if is_shared else path, "heads": 1}
        elif is_recurrent(module) or key.token is not None:
            header["part"] = "recurrent"
        else:
            kind = path.rpartition(".")[2]
            part = next((one for one in ("embedding", "feedforward", "norm", "output") if one in kind), "layer")
            header["part"] = "output" if path in ("output", "mask_head") else part
        if block is None:
            title = SECTIONS.get(path, path.replace("_", " ").replace(".", ": ").capitalize())
            title = self.output if path == "output" else title
        else:
            header["layer"] = self._layer(block, key.call)
            stack = block.rpartition(".")[0]
            title = f"{STACKS.get(stack, 'Layer')} {header['layer'] + 1}"
            if path != block:
                tail = path.removeprefix(f"{block}.")
                tail = SUBLAYERS.get(getattr(module, "kind", ""), SUBLAYERS.get(tail, tail.replace("_", " ")))
                title += f", {tail}" if is_recurrent(module) else f": {tail}"
        if key.token is not None:
            header |= {"token": key.token, "side": node.side}
            title += ": one step"
        elif is_recurrent(module):
            title += ": states" if node.op == "stack" else ": inputs"
        return {"title": title, **header}

    def _layer(self, block: str, call: int) -> int:
        """The index of a layer. Every call of a shared block counts as a layer."""
        stack = f"{block.rpartition('.')[0]}."
        before = [
            path
            for path in self.calls.calls
            if path.startswith(stack) and path.removeprefix(stack).isdigit() and path != block
        ]
        index = int(block.removeprefix(stack))
        return sum(len(self.calls.calls[one]) for one in before if int(one.removeprefix(stack)) < index) + call


class StepLabeler:
    """Labels steps by the tables of labels.py: by the module of a step, or else by its operation.

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
                parts = [self._first_shown(consumer) for consumer in self.calls.consumers[node.name]]
                if all(part is not None and part.op in ("select", "slice") for part in parts):
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
        hidden = {
            consumer.label is None for consumer in self.calls.consumers[node.name] if consumer.op in ("select", "slice")
        }
        if node.label is None and node.op in LAYOUT and hidden == {False}:
            return self.calls.consumers[node.name][0]
        return node if node.label is not None else None

    def _find_non_constant(self) -> set[str]:
        """Steps that depend on parameters or inputs."""
        names: set[str] = set()
        for node in self.calls.nodes.values():
            if node.op == "given" or any(
                value is not None and (value in names or (value not in self.calls.nodes)) for value in node.step.inputs
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
        if source.op == "linear" and len([value for value in source.step.inputs if value is not None]) < 3:
            formula = re.sub(r" \+ b\S*$", "", formula)
        if getattr(self.calls.modules[path], "kind", "") == "cross" and label.name in ("k", "v"):
            formula = formula.replace("x", "m", 1)
        elif source.op == "linear" and self._source_op(source.step.inputs[0]) in NORMS:
            formula = formula.replace("= x W", "= n W")
        if label.name == "c" and self._source_op(node.step.inputs[1]) == "linear":
            formula = formula.replace("hₛ", "mₛ")
        if not any(type(module).__name__ == "Bidirectional" for module in self.calls.modules.values()):
            formula = formula.replace("[h→; h←]", "h")
        if getattr(self.calls.modules.get(node.module), "split_halves", False):
            formula = formula.replace("p₂ᵢ₊₁", "pᵢ₊d/2").replace("p₂ᵢ", "pᵢ")
        if label.name == "e_masked":
            title, formula = _describe_mask(getattr(self.calls.modules[path], "mask", None)) or (title, formula)
        if node.op in ACTIVATIONS:
            formula = formula.format(ACTIVATIONS[node.op])
            title = title.format(GATED_UNITS.get(node.op, "gated linear unit"))
        if node.op in NORMS:
            formula += "".join(f" {term}" for term in ("· γ", "+ β")[: len(node.step.inputs) - 1])
        return label._replace(title=title, formula=formula)

    def _source_op(self, name: str | None) -> str:
        """The operation that computes an input, before operations that only rearrange numbers."""
        node = self.calls.nodes.get(str(name))
        return "" if node is None else self.calls.source(node).op

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
            return any(piece.op in ELEMENTWISE and self._is_piece(piece) for piece in pieces)
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

"""Which steps are shown, and their names, titles and formulas."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from regard.viewer.walk.computation import ELEMENTWISE, FLOATS, LAYOUT, NORMS, Node
from regard.viewer.walk.module_calls import ModuleCalls, ancestors, class_names, is_collapsed
from regard.viewer.walk.wording import ACTIVATIONS, BLOCK_WORDS, DEFAULTS, WORDS, Entry, Words


class StepWords:
    """Finds the words of steps: in the tables, by the module that a step belongs to, or by its operation.

    A table has a step under its operation, with the path from the table's module to the module of the step before it
    (`query.linear`), and behind it, where there are several, the origin of an input (`add(positions)`) or a number in
    the order of the program (`select#1`).
    """

    def __init__(self, calls: ModuleCalls, added: Mapping[str, Entry]) -> None:
        """`added`: words of steps that were added to the program."""
        self.calls, self.added = calls, added

    def find(self) -> None:
        """Set the words of every step that is shown."""
        self._depends = self._find_dependent()
        counts: Counter[Any] = Counter()
        found: dict[str, tuple[Entry, str] | None] = {}
        leaving = {
            id(one)
            for path, calls in self.calls.calls.items()
            if is_collapsed(self.calls.modules.get(path)) or self.calls.is_score(path)
            for some in calls
            if (one := self.calls.leaving(some)) is not None
        }
        for node in self.calls.nodes.values():
            found[node.name] = self._table_entry(node, counts, leaving)
        for node in reversed(self.calls.nodes.values()):
            entry = found[node.name]
            node.words, node.prefix = entry if entry is not None else self._default(node)
            if self.calls.is_score(node.module) and id(node) in leaving:
                self._name_scores(node)
            if node.op not in LAYOUT and self.calls.consumers[node.name]:
                # Split into parts that are shown.
                parts = [self._first_shown(one) for one in self.calls.consumers[node.name]]
                if all(one is not None and one.op in ("select", "slice") for one in parts):
                    node.words = None

    def _name_scores(self, node: Node) -> None:
        """The output of a score is `e`, whatever computes it."""
        default = DEFAULTS.get(self.calls.source(node).op, Words("", "", ""))
        words = node.words or default
        title = "Scores" if words.title == default.title else words.title
        node.words, node.prefix = words._replace(name="e", title=title), self._prefix(node, node.module)

    def _first_shown(self, node: Node) -> Node | None:
        """The step, or the part of it, in which a value is shown next."""
        while node.op in ("reshape", "permute") and node.words is None and len(self.calls.consumers[node.name]) == 1:
            node = self.calls.consumers[node.name][0]
        kinds = {one.words is None for one in self.calls.consumers[node.name] if one.op in ("select", "slice")}
        if node.words is None and node.op in LAYOUT and kinds == {False}:
            return self.calls.consumers[node.name][0]
        return node if node.words is not None else None

    def _find_dependent(self) -> set[str]:
        """Steps that depend on parameters or inputs; the others are constants."""
        found: set[str] = set()
        for node in self.calls.nodes.values():
            if node.op == "given" or any(
                one is not None and (one in found or (one not in self.calls.nodes)) for one in node.step.inputs
            ):
                found.add(node.name)
        return found

    def _table_entry(self, node: Node, counts: Counter, leaving: set[int]) -> tuple[Entry, str] | None:
        """Its words in one of the tables, and the path that they are about."""
        if node.name in self.added:
            return self.added[node.name], "output."
        if node.step.kind not in FLOATS or (node.op == "stack" and node.token is not None):
            return None, ""
        collapsed = next((one for one in ancestors(node.module) if is_collapsed(self.calls.modules.get(one))), None)
        if collapsed is not None and id(node) not in leaving:
            return None, ""
        inner = collapsed if collapsed is not None else node.module
        for path in [*ancestors(inner), ""]:
            tables = [WORDS[name] for name in class_names(self.calls.modules[path], path) if name in WORDS]
            if not tables:
                continue
            tail = re.sub(r"\b\d+\b", "*", inner.removeprefix(path).removeprefix("."))
            key = path, self.calls.call_of(node, path), node.token, tail, None if collapsed else node.op
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
        if name not in self.calls.nodes:
            return [re.sub(r"_l0$", "", name.rpartition(".")[2])]
        made = self.calls.source(self.calls.nodes[name])
        found = [self.calls.nodes[name].op]
        if made.op == "exp" and made.step.inputs[0] not in self.calls.nodes:
            found += self._origin(str(made.step.inputs[0]), path)
        if made.module.startswith(f"{path}.") or not path:
            found.append(made.module.removeprefix(path).removeprefix(".").split(".")[0])
        return found + [
            type(one).__name__ for p in ancestors(made.module) if (one := self.calls.modules.get(p)) is not None
        ]

    def _fitted(self, node: Node, words: Entry, path: str) -> Entry:
        """Formulas without a bias that is missing, of keys of another sequence, of the activation that is used."""
        if words is None:
            return None
        if node.op in ("mul", "add") and node.step.attributes.get("other") == {"mul": 1.0, "add": 0.0}[node.op]:
            return None
        formula = words.formula or DEFAULTS[node.op].formula
        made = self.calls.source(node)
        if made.op == "linear" and len([one for one in made.step.inputs if one is not None]) < 3:
            formula = re.sub(r" \+ b\S*$", "", formula)
        if getattr(self.calls.modules[path], "kind", "") == "cross" and words.name in ("k", "v"):
            formula = formula.replace("x", "m", 1)
        if node.op in ACTIVATIONS:
            formula = formula.format(ACTIVATIONS[node.op])
        if node.op in NORMS:
            formula += "".join(f" {sign}" for sign in ("· γ", "+ β")[: len(node.step.inputs) - 1])
        return words._replace(formula=formula)

    def _default(self, node: Node) -> tuple[Entry, str]:
        if not self._is_visible(node):
            return None, ""
        block = self.calls.block(node.module)
        if block is not None and self.calls.sublayer(node.module) is None:
            words = BLOCK_WORDS.get(node.op, DEFAULTS[node.op])
            node.is_between = True
            return self._fitted(node, words, node.module), f"{block}."  # completed by the sublayer
        entry = self._fitted(node, DEFAULTS.get(node.op, Words(node.op, node.op, "")), node.module)
        path = node.module
        # A module that is one step gives it its name.
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
        if step.kind not in FLOATS or node.name not in self._depends:
            return False
        if node.op in ("cat", "stack"):
            pieces = [self.calls.nodes[name] for name in step.inputs if name in self.calls.nodes]
            return any(one.op in ELEMENTWISE and self._is_piece(one) for one in pieces)
        if node.op in LAYOUT:
            return False
        return not self._is_piece(node)

    def _is_piece(self, node: Node) -> bool:
        """Whether a step is shown as a part of the only one that reads it: an activation, or a concatenation."""
        readers = self.calls.consumers[node.name]
        if node.op not in ELEMENTWISE or len(readers) != 1 or readers[0].module != node.module:
            return False
        (reader,) = readers
        if reader.op in ("cat", "stack") and node.token is None:
            return True
        if reader.op in ACTIVATIONS:
            return node.op not in ACTIVATIONS
        return reader.op in ELEMENTWISE and any(self._is_piece(one) and one.op not in ACTIVATIONS for one in readers)

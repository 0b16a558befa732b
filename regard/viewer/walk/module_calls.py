"""Maps the steps of a graph to the calls of modules, attentions, blocks and their sublayers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from regard.attention.recording import KINDS
from regard.viewer.walk.computation import FLOATS, LAYOUT, Node
from regard.viewer.walk.step_labels import COLLAPSED


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
            if node.step.kind in FLOATS and (not readers or any(id(one) not in inside for one in readers)):
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

"""Which modules the steps of a program belong to: calls, attentions, blocks and their sublayers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from regard.attention.recording import KINDS
from regard.viewer.walk.computation import FLOATS, LAYOUT, Node
from regard.viewer.walk.wording import COLLAPSED


class ModuleCalls:
    """The steps of a model by the paths of its modules, call by call."""

    def __init__(self, model: nn.Module, nodes: Iterable[Node], counts: Mapping[str, int]) -> None:
        """`counts`: how often each module is called."""
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
        self._number_calls(counts)

    def _number_calls(self, counts: Mapping[str, int]) -> None:
        """Modules that are called several times: their steps are as many in each call."""
        self.calls: dict[str, list[list[Node]]] = {}
        self._call_numbers: dict[tuple[str, str], int] = {}
        inside: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes.values():
            for path in ancestors(node.module) if node.op != "given" else ():
                inside[path].append(node)
        for path, nodes in inside.items():
            count = max(1, counts.get(path, 1))
            size = len(nodes) // count if len(nodes) % count == 0 else len(nodes)
            self.calls[path] = [nodes[start : start + size] for start in range(0, len(nodes), size)]
            for call, some in enumerate(self.calls[path]):
                self._call_numbers |= {(path, node.name): call for node in some}

    def call_of(self, node: Node, path: str) -> int:
        return self._call_numbers.get((path, node.name), 0)

    def leaving(self, nodes: Sequence[Node]) -> Node | None:
        """Of the steps of one call of a module, the last one that others read."""
        inside = set(map(id, nodes))
        for node in reversed(nodes):
            readers = self.consumers[node.name]
            if node.step.kind in FLOATS and (not readers or any(id(one) not in inside for one in readers)):
                return node
        return None

    def attention(self, path: str) -> str | None:
        """The attention that a module is a part of."""
        return next((one for one in ancestors(path) if is_attention(self.modules.get(one))), None)

    def block(self, path: str) -> str | None:
        """The element of a list of layers that a module is a part of."""
        for one in reversed(ancestors(path)):
            above = self.modules.get(one.rpartition(".")[0])
            if isinstance(above, nn.ModuleList) and any(True for _ in self.modules[one].children()):
                return one
        return None

    def source(self, node: Node) -> Node:
        """What a step that only moves numbers has them from."""
        while node.op in LAYOUT and (made := self.nodes.get(str(node.step.inputs[0]))) is not None:
            node = made
        return node

    def is_score(self, path: str) -> bool:
        above, _, tail = path.rpartition(".")
        return tail == "score" and is_attention(self.modules.get(above))

    def sublayer(self, path: str) -> str | None:
        """The attention or the other part of a block that a module belongs to; norms and sums have none."""
        if (attention := self.attention(path)) is not None:
            return attention
        block = self.block(path)
        if block is None:
            return None
        if not path.removeprefix(block):
            return block if is_recurrent(self.modules[block]) else None
        child = f"{block}.{path.removeprefix(block + '.').split('.')[0]}"
        called = {one.__name__ for one in type(self.modules[child]).__mro__}
        if any("Norm" in name or "Residual" in name for name in called) or isinstance(
            self.modules[child], nn.ModuleList
        ):
            return None
        return child


def ancestors(path: str) -> list[str]:
    """A path and those above it, the longest first, without the model itself.

    >>> ancestors("encoder.0.attention")
    ['encoder.0.attention', 'encoder.0', 'encoder']
    """
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def class_names(module: nn.Module, path: str) -> list[str]:
    names = [one.__name__ for one in type(module).__mro__]
    if is_recurrent(module):
        names.insert(0, type(module.rnn).__name__)
    return names if path else ["Model"]


def is_attention(module: nn.Module | None) -> bool:
    return getattr(module, "kind", None) in KINDS and isinstance(getattr(module, "score", None), nn.Module)


def is_recurrent(module: nn.Module | None) -> bool:
    return isinstance(getattr(module, "rnn", None), nn.Module)


def is_collapsed(module: nn.Module | None) -> bool:
    return type(module).__name__ in COLLAPSED

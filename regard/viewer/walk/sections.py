"""Sections of a walk: which steps are shown together, and the titles, derived from the paths of modules."""

from collections.abc import Mapping
from typing import Any

from regard.viewer.walk.computation import FLOATS, Node, SectionKey
from regard.viewer.walk.module_calls import ModuleCalls, ancestors, is_attention, is_collapsed, is_recurrent
from regard.viewer.walk.wording import SECTIONS, STACKS, SUBLAYERS


class Sections:
    """Finds the sections of steps, and describes them."""

    def __init__(self, calls: ModuleCalls, counts: Mapping[str, int], output: str) -> None:
        """`counts`: how often each attention was called; `output`: title of the last section."""
        self.calls, self.counts, self.output = calls, counts, output

    def find(self) -> None:
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
            # The steps of an attention or another sublayer are together; other sections are never resumed.
            resumed = (self.calls.attention(path) or path != owner) and not is_recurrent(self.calls.modules.get(path))
            if not resumed and (current is None or (path, node.token) != (current.path, current.token)):
                run += 1
            key = SectionKey(path, self.calls.call_of(node, owner), node.token, 0 if resumed else run)
            if node.step.kind in FLOATS or current is None:
                current = key
            node.section = key

    def _neighbor(self, node: Node, block: str, paths: Mapping[str, str | None], current: SectionKey | None) -> str:
        """The sublayer whose section a norm or a residual connection is shown in: the one that alone reads it, or else
        the one before it."""
        readers = {paths.get(one.name) for one in self.calls.consumers[node.name]}
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
        shared = any(is_collapsed(self.calls.modules.get(one)) for one in ancestors(path))
        return shared and self.calls.attention(current) is not None

    def _top(self, node: Node) -> str:
        """The section of a step outside of all layers."""
        if not node.module:
            return "output"
        parts = node.module.split(".")
        if parts[0] == "distilled":
            return "output"
        two = ".".join(parts[:2])
        return two if two in SECTIONS else parts[0]

    def describe(self, node: Node, key: SectionKey) -> dict[str, Any]:
        """Title of a section, and what it is about."""
        path, module = key.path, self.calls.modules.get(key.path)
        block = self.calls.block(path)
        said: dict[str, Any] = {}
        if is_attention(module):
            several = self.counts.get(path, 1) > 1 and key.token is None
            said |= {"part": "attention", "attention": f"{path}.{key.call}" if several else path, "heads": 1}
        elif is_recurrent(module) or key.token is not None:
            said["part"] = "recurrent"
        else:
            kind = path.rpartition(".")[2]
            part = next((one for one in ("embedding", "feedforward", "norm", "output") if one in kind), "layer")
            said["part"] = "output" if path in ("output", "mask_head") else part
        if block is None:
            title = SECTIONS.get(path, path.replace("_", " ").replace(".", ": ").capitalize())
            title = self.output if path == "output" else title
        else:
            said["layer"] = self._layer(block, key.call)
            stack = block.rpartition(".")[0]
            title = f"{STACKS.get(stack, 'Layer')} {said['layer']}"
            if path != block:
                tail = path.removeprefix(f"{block}.")
                tail = SUBLAYERS.get(getattr(module, "kind", ""), SUBLAYERS.get(tail, tail.replace("_", " ")))
                title += f", {tail}" if is_recurrent(module) else f": {tail}"
        if key.token is not None:
            said |= {"token": key.token, "side": node.side}
            title += ": one step"
        elif is_recurrent(module):
            title += ": states" if node.op == "stack" else ": inputs"
        return {"title": title, **said}

    def _layer(self, block: str, call: int) -> int:
        """The number of a layer: blocks that are called again are further layers."""
        stack = f"{block.rpartition('.')[0]}."
        before = [
            path
            for path in self.calls.calls
            if path.startswith(stack) and path.removeprefix(stack).isdigit() and path != block
        ]
        number = int(block.removeprefix(stack))
        return sum(len(self.calls.calls[one]) for one in before if int(one.removeprefix(stack)) < number) + call

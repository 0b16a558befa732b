"""Sections of a walk: groups of steps and their titles, derived from module paths."""

from collections.abc import Mapping
from typing import Any

from regard.viewer.walk.computation import FLOATS, Node, SectionKey
from regard.viewer.walk.module_calls import ModuleCalls, ancestors, is_attention, is_collapsed, is_recurrent
from regard.viewer.walk.step_labels import SECTIONS, STACKS, SUBLAYERS


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
        readers = {paths.get(one.name) for one in self.calls.consumers[node.name]}
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
            title = f"{STACKS.get(stack, 'Layer')} {header['layer']}"
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

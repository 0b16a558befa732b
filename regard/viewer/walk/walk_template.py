"""Templates of walks: the steps for inputs of any length, with which a page with its model walks through new input."""

from typing import Any

from regard.graph.writer import attribute_json
from regard.viewer.walk.computation import Loop, Node

# Stands for the token in the names of a loop's steps.
TOKEN = "{token}"


class WalkTemplate:
    """The steps of a walk with dynamic sizes as expressions, and the first position of each loop (web/engine/walks.js).

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
        for i, (name, one) in enumerate(zip(node.step.inputs, header["inputs"])):
            index = self._indices.get(str(name), one)
            if node.loop is not None and i in node.carried:
                loop = self._loop_indices[node.loop]
                self.loops[loop]["initial"] = index
                index = {"carried": loop}
            inputs.append(index)
        return inputs

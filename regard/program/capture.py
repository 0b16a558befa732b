"""Derive the program of a model from its `forward`: torch.export of the plain path, with sizes that may vary."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from regard.attention.dispatch import use
from regard.errors import RegardError


class Captured(NamedTuple):
    """An exported call of a model, and the names of its inputs and of sizes that vary."""

    exported: ExportedProgram
    inputs: tuple[str, ...]
    sizes: dict[str, str]
    """from torch's symbols to the given names"""


class _Call(nn.Module):
    """One entry point of a model as a module, which is what torch.export takes."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.model, *inputs)


def capture(
    model: nn.Module,
    call: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, Sequence[str | None]],
) -> Captured:
    """Export `call(model, *inputs)` in evaluation mode, with the definition of attention in place of its kernels.

    `sizes` names the axes of inputs whose size may vary; axes of one name have one size.

    >>> layer = nn.Linear(2, 3)
    >>> captured = capture(layer, lambda layer, x: layer(x), {"x": torch.zeros(4, 2)}, {"x": ("T", None)})
    >>> captured.exported.module()(torch.zeros(7, 2)).shape
    torch.Size([7, 3])
    """
    # torch infers how sizes depend on each other (R = B · K) and whether one cannot vary, which is an error below.
    dynamic = tuple(
        {axis: Dim.AUTO for axis, name in enumerate(sizes.get(key, ())) if name is not None} for key in inputs
    )
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), use("reference"):
            exported = export(_Call(model, call), tuple(inputs.values()), dynamic_shapes=(dynamic,), strict=False)
    finally:
        model.train(training)
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"][-len(inputs) :]
    symbols: dict[str, str] = {}
    for node, key in zip(nodes, inputs):
        for axis, (size, name) in enumerate(zip(node.meta["val"].shape, sizes.get(key, ()))):
            if name is not None and not isinstance(size, torch.SymInt):
                raise RegardError(
                    f"The size {name} (axis {axis} of {key}) is fixed to {size} by an operation of the model.",
                    "Write the layer so that it does not read the size as a Python number.",
                )
            if name is not None and size.node.expr.is_Symbol:
                symbols.setdefault(str(size.node.expr), name)
    return Captured(exported, tuple(inputs), symbols)

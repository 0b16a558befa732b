"""Capture a call of a model with torch.export: reference attention, dynamic sizes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from regard.attention.dispatch import use
from regard.errors import RegardError


class CapturedCall(NamedTuple):
    """An exported call of a model, with the names of its inputs and dynamic sizes."""

    exported: ExportedProgram
    inputs: tuple[str, ...]
    sizes: dict[str, str]
    """name of each dynamic size, by torch's symbol for it"""


class _Call(nn.Module):
    """Wraps a call of a model in a module, as torch.export requires."""

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
) -> CapturedCall:
    """Export `call(model, *inputs)` in evaluation mode, with reference attention instead of kernels.

    `sizes` names the dynamic axes of each input (None: static); axes with the same name have the same size.

    >>> layer = nn.Linear(2, 3)
    >>> captured = capture(layer, lambda layer, x: layer(x), {"x": torch.zeros(4, 2)}, {"x": ("T", None)})
    >>> captured.exported.module()(torch.zeros(7, 2)).shape
    torch.Size([7, 3])
    """
    # torch infers relations between sizes (R = B · K), and which sizes are static, which raises below.
    dynamic = tuple(
        {axis: Dim.AUTO for axis, name in enumerate(sizes.get(key, ())) if name is not None} for key in inputs
    )
    training = model.training
    model.eval()
    try:
        from torch._dynamo import config as dynamo_config  # slow to import

        # Comparing symbolic sizes in the cache of fake tensors costs more than the cache saves: 30% of the time.
        without_cache = dynamo_config.patch(fake_tensor_cache_enabled=False)
        with torch.no_grad(), use("reference"), without_cache:
            exported = export(_Call(model, call), tuple(inputs.values()), dynamic_shapes=(dynamic,), strict=False)
    finally:
        model.train(training)
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"][-len(inputs) :]
    symbols: dict[str, str] = {}
    for node, key in zip(nodes, inputs):
        for axis, (size, name) in enumerate(zip(node.meta["val"].shape, sizes.get(key, ()))):
            if name is not None and not isinstance(size, torch.SymInt):
                raise RegardError(
                    f"The size {name} (axis {axis} of input {key}) was specialized to {size} by the model.",
                    "Change the layer so that it does not convert the size to a Python integer.",
                )
            if name is not None and size.node.expr.is_Symbol:
                symbols.setdefault(str(size.node.expr), name)
    return CapturedCall(exported, tuple(inputs), symbols)

"""Module outputs of the model's own forward with its fast kernels, with which a trace is compared."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import Recorded, record
from regard.attention.exact_weights import compute_weights
from regard.attention.recording import KINDS


class ModuleOutputs:
    """Outputs of every module and exact weights of every attention, by module path and call.

    >>> layer = nn.Sequential(nn.Identity())
    >>> ModuleOutputs(layer, [torch.ones(2)]).outputs["0"][0].tolist()
    [1.0, 1.0]
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Any], forward: Callable[..., Any] | None = None) -> None:
        """`forward` replaces the forward of the model."""
        self.outputs: dict[str, list[Float[np.ndarray, "..."]]] = {}
        modules = list(model.named_modules(remove_duplicate=False))
        # A module with several paths is left out: its calls cannot be assigned to a path.
        paths = Counter(id(module) for _, module in modules)
        hooks = [module.register_forward_hook(self._hook(path)) for path, module in modules if paths[id(module)] == 1]
        recorded: AbstractContextManager[Mapping[str, Recorded]]
        recorded = record(model) if _has_attention(model) else nullcontext({})
        try:
            with torch.inference_mode(), recorded as recording:
                (forward or model)(*inputs)
        finally:
            for hook in hooks:
                hook.remove()
        self.calls = {name: one.calls for name, one in recording.items()}

    def _hook(self, path: str) -> Callable[..., None]:
        def store(module: nn.Module, inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor):
                self.outputs.setdefault(path, []).append(_to_numpy(output))

        return store

    def weights(self, attention: str, call: int) -> Float[np.ndarray, "H T S"] | None:
        calls = self.calls.get(attention, ())
        if call >= len(calls):
            return None
        with torch.inference_mode():
            return _to_numpy(compute_weights(calls[call])[0])


def _has_attention(model: nn.Module) -> bool:
    return any(getattr(module, "kind", None) in KINDS for module in model.modules())


def _to_numpy(x: Tensor) -> Float[np.ndarray, "..."]:
    return x.detach().float().cpu().numpy()

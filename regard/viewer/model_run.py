"""The forward pass of a look: one run of the model, from which maps, output, explanations and trace are made."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import Recorded, Recording, record
from regard.attention.exact_weights import compute_weights
from regard.attention.recording import KINDS

# Bytes of parameters without embeddings and output layer, tokens of a text and patches of an image up to which the
# outputs of all modules are kept, and a page includes a trace by default.
MAX_MODEL_BYTES, MAX_TOKENS, MAX_PATCHES = 8 << 20, 64, 256


@dataclass(frozen=True, eq=False)
class ModelRun:
    """What one forward pass of a model computed."""

    output: Any
    """what the model returned: logits, or features of a model without a head"""
    recording: Recording
    """the attentions that were called, by name"""
    streams: Sequence[Float[Tensor, "*n E"]] = ()
    """the residual stream: the input of the first block, and the output of every block"""
    outputs: Mapping[str, Sequence[Float[np.ndarray, "..."]]] | None = None
    """the output of every module, by module path and call; None: not kept"""

    def without_model(self) -> "ModelRun | None":
        """What is pickled with a look: nothing, its maps have the recorded calls."""
        return None

    def weights(self, attention: str, call: int) -> Float[np.ndarray, "H T S"] | None:
        """The exact weights of one call of an attention."""
        calls = self.recording[attention].calls if attention in self.recording else ()
        if call >= len(calls):
            return None
        with torch.inference_mode():
            return _to_numpy(compute_weights(calls[call])[0])


def run_model(
    model: nn.Module,
    forward: Callable[[], Any],
    layers: str | Sequence[str] | None = None,
    *,
    keep_outputs: bool = False,
) -> ModelRun:
    """Run a model in evaluation mode and record its attentions, those selected by `layers`, and its residual stream.

    `keep_outputs` also keeps the outputs of all modules. Gradients are as the caller has set them.

    >>> model = nn.Sequential(nn.Identity())
    >>> run_model(model, lambda: model(torch.ones(2)), keep_outputs=True).outputs["0"][0].tolist()
    [1.0, 1.0]
    """
    outputs: dict[str, list[Float[np.ndarray, "..."]]] = {}
    model.eval()
    # Without attention there is nothing to record.
    has_attention = any(getattr(module, "kind", None) in KINDS for module in model.modules())
    recorded: AbstractContextManager[Mapping[str, Recorded]]
    recorded = record(model, layers) if has_attention else nullcontext({})
    with ExitStack() as stack:
        recording = stack.enter_context(recorded)
        streams = stack.enter_context(record_streams(model))
        if keep_outputs:
            stack.enter_context(_record_outputs(model, outputs))
        output = forward()
    called = Recording({name: one for name, one in recording.items() if one.calls})
    return ModelRun(output, called, streams, outputs if keep_outputs else None)


def is_small(model: nn.Module, tokens: int, limit: int | None = None) -> bool:
    """Whether the outputs of all modules are kept, and a page includes a trace by default."""
    return tokens <= (MAX_TOKENS if limit is None else limit) and inner_bytes(model) <= MAX_MODEL_BYTES


def inner_bytes(model: nn.Module) -> int:
    """Bytes of the parameters without embeddings and output layer, of which a trace may need a few rows only."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    output = getattr(model, "output", None)
    tables |= {id(output.weight)} if isinstance(output, nn.Linear) else set()
    return sum(4 * p.numel() for p in model.parameters() if id(p) not in tables)


def blocks_of(model: Any) -> Sequence[nn.Module]:
    """The blocks whose residual stream ends in the output layer; none in a recurrent model."""
    return getattr(getattr(model, "stack", model), "blocks", ())


@contextmanager
def record_streams(model: Any) -> Iterator[list[Float[Tensor, "*n E"]]]:
    """Record the residual stream: the input of the first block, and the output of every block."""
    streams: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not streams:
            streams.append(args[0])

    with ExitStack() as stack:
        for i, block in enumerate(blocks_of(model)):
            if i == 0:
                stack.callback(block.register_forward_pre_hook(enter).remove)
            hook = block.register_forward_hook(lambda module, args, out: streams.append(out))
            stack.callback(hook.remove)
        yield streams


@contextmanager
def _record_outputs(model: nn.Module, outputs: dict[str, list[Float[np.ndarray, "..."]]]) -> Iterator[None]:
    modules = list(model.named_modules(remove_duplicate=False))
    # A module with several paths is left out: its calls cannot be assigned to a path.
    paths = Counter(id(module) for _, module in modules)

    def store(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor):
                outputs.setdefault(path, []).append(_to_numpy(output))

        return hook

    hooks = [module.register_forward_hook(store(path)) for path, module in modules if paths[id(module)] == 1]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def _to_numpy(x: Tensor) -> Float[np.ndarray, "..."]:
    return x.detach().float().cpu().numpy()

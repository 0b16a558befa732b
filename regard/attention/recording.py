"""Recording: store the inputs of `attend` while a model runs, and compute exact weights from them later.

The model needs no changes and runs on its fused kernels. A recording holds references to q and k, or copies of some
heads: its memory is linear in the length, and weights are computed only when they are read.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import dispatch
from regard.attention.backends.call import Call
from regard.attention.exact_weights import Selection, compute_weights, resolve_indices, select_heads, weight_gradients
from regard.errors import RegardError

KINDS = ("self", "masked", "cross")


@dataclass(eq=False)
class Recorded:
    """The inputs of one attention module, call by call (decoding: one call per step)."""

    name: str
    kind: str
    heads: Selection = None
    """the heads to record; None: all"""
    queries: Selection = None
    calls: list[Call] = field(default_factory=list, repr=False)
    outputs: list[Tensor] = field(default_factory=list, repr=False)
    """the output of each call, if gradients are enabled: the autograd graph holds it anyway"""
    head_count: int | None = None
    """number of heads of the module, if not all are recorded"""

    def add_call(self, call: Call, output: Tensor) -> None:
        """Record the inputs of a call: references to all heads, or copies of some, so that the others can be freed."""
        if self.heads is not None:
            self.head_count = call.q.shape[1]
            with torch.no_grad():
                call = select_heads(call, self.recorded_heads)
        self.calls.append(call)
        if output.requires_grad:
            self.outputs.append(output)

    @property
    def recorded_heads(self) -> list[int]:
        """The indices of the recorded heads."""
        return resolve_indices(self.heads, self.head_count or self.calls[0].q.shape[1], "head")

    @torch.no_grad()
    def weights(self, heads: Selection = None, queries: Selection = None) -> Float[Tensor, "B h t S"]:
        """The exact weights of the selected heads and queries (index, slice, several indices; None: as in `record`).

        Several calls, the steps of decoding, give one matrix: their queries are concatenated, and keys that did not
        exist yet have weight 0. `queries` are then indices of the rows of that matrix.
        """
        if not self.calls:
            raise RegardError(f"{self.name} was not called while recording.", "Run the model inside the with block.")
        recorded = self.recorded_heads
        selected = recorded if heads is None else resolve_indices(heads, self.head_count or len(recorded), "head")
        if missing := [head for head in selected if head not in recorded]:
            raise RegardError(
                f"Head {missing[0]} of {self.name} was not recorded.",
                f"Recorded heads: {', '.join(map(str, recorded))}. Pass other heads to record(), or None for all.",
            )
        indices = [recorded.index(head) for head in selected]
        queries = self.queries if queries is None else queries
        if len(self.calls) == 1:
            return compute_weights(self.calls[0], indices, queries)
        weights = self._join_steps([compute_weights(call, indices) for call in self.calls])
        return weights[:, :, resolve_indices(queries, weights.shape[2], "query")]

    def _join_steps(self, steps: Sequence[Float[Tensor, "B h _ _"]]) -> Float[Tensor, "B h t S"]:
        """Concatenate the matrices of several calls along the queries, padding keys with zeros."""
        if len({len(step) for step in steps}) > 1:
            raise RegardError(
                f"{self.name} was called with different batch sizes.", "Compute weights of each of .calls separately."
            )
        keys = max(step.shape[-1] for step in steps)
        return torch.cat([nn.functional.pad(step, (0, keys - step.shape[-1])) for step in steps], dim=2)


class Recording(dict[str, Recorded]):
    """The recorded attention modules of a model by name, in the order of the model."""

    def __missing__(self, name: str) -> Recorded:
        raise RegardError(f"No attention module {name!r} was recorded.", f"Recorded: {', '.join(self)}.")

    @torch.no_grad()
    def gradients(self, scalar: Float[Tensor, ""]) -> dict[str, Float[Tensor, "B h T S"]]:
        """The gradient of a scalar, such as a logit, with respect to each weight of each attention module.

        Each weight is differentiated independently of the others in its row. The model must have run with gradients
        enabled, on any backend (see `weight_gradients`). Modules without influence on the scalar have zeros.

        >>> class SelfAttention(nn.Module):
        ...     kind = "self"
        ...     def forward(self, x):
        ...         return dispatch.attend(x, x, x)
        >>> model = nn.Sequential(SelfAttention())
        >>> with record(model) as recording:
        ...     out = model(torch.tensor([[[1.0], [3.0]]], requires_grad=True))
        >>> recording.gradients(out[0, 1, 0])["0"]
        tensor([[[[0., 0.],
                  [1., 3.]]]])
        """
        called = [recorded for recorded in self.values() if recorded.calls]
        outputs = [output for recorded in called for output in recorded.outputs]
        call_count = sum(len(recorded.calls) for recorded in called)
        if not outputs or len(outputs) < call_count or not scalar.requires_grad:
            raise RegardError(
                "There are no gradients: the model ran with gradients disabled.",
                "Run it outside of torch.no_grad, with inputs or parameters that require gradients.",
            )
        grads = iter(torch.autograd.grad(scalar, outputs, retain_graph=True, materialize_grads=True))
        return {
            recorded.name: recorded._join_steps(
                [weight_gradients(call, next(grads)[:, recorded.recorded_heads]) for call in recorded.calls]
            )
            for recorded in called
        }


@contextmanager
def record(
    model: nn.Module, layers: str | Sequence[str] | None = None, heads: Selection = None, queries: Selection = None
) -> Iterator[Recording]:
    """Record the attention modules of a model while it runs inside the with block; compiled models run eagerly.

    An attention module has an attribute `kind`: "self", "masked" or "cross". `layers` selects modules by name, with *
    and ?; `heads` are the heads to record (all by default), which saves memory for long inputs; `queries` is the
    default of `Recorded.weights`.

    >>> class SelfAttention(nn.Module):
    ...     kind = "self"
    ...     def forward(self, x):
    ...         return dispatch.attend(x, x, x)
    >>> model = nn.Sequential(SelfAttention())
    >>> with record(model) as recording:
    ...     _ = model(torch.zeros(1, 3, 8))
    >>> recording["0"].weights(queries=0)
    tensor([[[[0.3333, 0.3333, 0.3333]]]])
    """
    globs = ["*"] if layers is None else [layers] if isinstance(layers, str) else list(layers)
    modules = {name: module for name, module in model.named_modules() if getattr(module, "kind", None) in KINDS}
    selected = {name: module for name, module in modules.items() if any(fnmatchcase(name, glob) for glob in globs)}
    if not selected:
        hint = f"Its attention modules are {', '.join(modules)}." if modules else "It has no attention modules."
        raise RegardError(f"No attention module of the model matches {', '.join(globs)}.", hint)
    recording = Recording({name: Recorded(name, module.kind, heads, queries) for name, module in selected.items()})

    running: list[str] = []  # names of the attention modules whose forward is running
    thread = threading.get_ident()

    def enter(name: str):
        def hook(*_) -> None:
            if threading.get_ident() == thread:
                running.append(name)

        return hook

    def leave(*_) -> None:
        if threading.get_ident() == thread:
            running.pop()

    def observer(call: Call, output: Tensor) -> None:
        if running:
            recording[running[-1]].add_call(call, output)

    hooks = [module.register_forward_pre_hook(enter(name)) for name, module in selected.items()]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in selected.values()]
    try:
        with dispatch.observe(observer):
            yield recording
    finally:
        for hook in hooks:
            hook.remove()

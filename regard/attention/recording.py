"""Recording: keep the inputs of `attend` while a model runs, compute exact weights afterwards.

The model needs no changes and keeps its fused kernels. A recording holds references to q and k, or copies of a few
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

from regard.attention import dispatch, exact
from regard.attention.exact import Chosen
from regard.attention.kernels import Call
from regard.errors import RegardError

KINDS = ("self", "masked", "cross")


@dataclass(eq=False)
class Recorded:
    """The inputs of one attention of a model, call by call (decoding: one call per step)."""

    name: str
    kind: str
    heads: Chosen = None
    """the heads to keep; None: all"""
    queries: Chosen = None
    calls: list[Call] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    """the output of each call, while gradients are on: the autograd graph holds it anyway"""
    count: int | None = None
    """number of heads of the attention, where not all are kept"""

    def keep(self, call: Call, output: Tensor) -> None:
        """Keep the inputs of a call: references to all heads, or copies of a few, so that the others can be freed."""
        if self.heads is not None:
            self.count = call.q.shape[1]
            with torch.no_grad():
                call = exact.of_heads(call, self.kept)
        self.calls.append(call)
        if output.requires_grad:
            self.outputs.append(output)

    @property
    def kept(self) -> list[int]:
        """The indices of the heads that the calls hold."""
        return exact.indices(self.heads, self.count or self.calls[0].q.shape[1], "head")

    @torch.no_grad()
    def weights(self, heads: Chosen = None, queries: Chosen = None) -> Float[Tensor, "B h t S"]:
        """The exact weights of the chosen heads and queries (an index, several, a slice; None: what `record` chose).

        Several calls, the steps of a decoding, give one matrix: their queries follow one another, and a key that did
        not exist yet has weight 0. `queries` then indexes the rows of that matrix.
        """
        if not self.calls:
            raise RegardError(f"{self.name} was not called while recording.", "Run the model inside the with block.")
        kept = self.kept
        chosen = kept if heads is None else exact.indices(heads, self.count or len(kept), "head")
        if missing := [head for head in chosen if head not in kept]:
            raise RegardError(
                f"Head {missing[0]} of {self.name} was not recorded.",
                f"Recorded: {', '.join(map(str, kept))}. Give record() other heads, or none for all.",
            )
        indices = [kept.index(head) for head in chosen]
        queries = self.queries if queries is None else queries
        if len(self.calls) == 1:
            return exact.weights(self.calls[0], indices, queries)
        whole = self._join([exact.weights(call, indices) for call in self.calls])
        return whole[:, :, exact.indices(queries, whole.shape[2], "query")]

    def _join(self, steps: Sequence[Float[Tensor, "B h _ _"]]) -> Float[Tensor, "B h t S"]:
        if len({len(step) for step in steps}) > 1:
            raise RegardError(f"{self.name} was called with several batch sizes.", "Ask .calls one by one.")
        keys = max(step.shape[-1] for step in steps)
        return torch.cat([nn.functional.pad(step, (0, keys - step.shape[-1])) for step in steps], dim=2)


class Recording(dict[str, Recorded]):
    """The recorded attentions of a model by module name, in the order of the model."""

    def __missing__(self, name: str) -> Recorded:
        raise RegardError(f"No attention called {name!r} was recorded.", f"There are: {', '.join(self)}.")

    @torch.no_grad()
    def gradients(self, scalar: Float[Tensor, ""]) -> dict[str, Float[Tensor, "B h T S"]]:
        """The gradient of a scalar, such as a logit, with respect to each weight of each attention.

        Each weight is differentiated independently of the others in its row. The model must have run with gradients
        enabled; it keeps its kernels (see `exact.gradients`). Attentions without influence on the scalar have zeros.

        >>> class Self(nn.Module):
        ...     kind = "self"
        ...     def forward(self, x):
        ...         return dispatch.attend(x, x, x)
        >>> model = nn.Sequential(Self())
        >>> with record(model) as recording:
        ...     out = model(torch.tensor([[[1.0], [3.0]]], requires_grad=True))
        >>> recording.gradients(out[0, 1, 0])["0"]
        tensor([[[[0., 0.],
                  [1., 3.]]]])
        """
        called = [one for one in self.values() if one.calls]
        outputs = [output for one in called for output in one.outputs]
        if not outputs or len(outputs) < sum(len(one.calls) for one in called) or not scalar.requires_grad:
            raise RegardError(
                "There are no gradients: the model ran without.",
                "Run it outside of torch.no_grad, on inputs or with parameters that require them.",
            )
        found = iter(torch.autograd.grad(scalar, outputs, retain_graph=True, materialize_grads=True))
        return {
            one.name: one._join([exact.gradients(call, next(found)[:, one.kept]) for call in one.calls])
            for one in called
        }


@contextmanager
def record(
    model: nn.Module, layers: str | Sequence[str] | None = None, heads: Chosen = None, queries: Chosen = None
) -> Iterator[Recording]:
    """Record the attentions of a model while it runs inside the with block; compiled models run eagerly.

    An attention is a module whose `kind` is "self", "masked" or "cross". `layers` selects some by name, with * and ?;
    `heads` are the only ones to keep, which saves memory at great lengths; `queries` is the default of `weights`.

    >>> class Self(nn.Module):
    ...     kind = "self"
    ...     def forward(self, x):
    ...         return dispatch.attend(x, x, x)
    >>> model = nn.Sequential(Self())
    >>> with record(model) as recording:
    ...     _ = model(torch.zeros(1, 3, 8))
    >>> recording["0"].weights(queries=0)
    tensor([[[[0.3333, 0.3333, 0.3333]]]])
    """
    globs = ["*"] if layers is None else [layers] if isinstance(layers, str) else list(layers)
    found = {name: module for name, module in model.named_modules() if getattr(module, "kind", None) in KINDS}
    chosen = {name: module for name, module in found.items() if any(fnmatchcase(name, glob) for glob in globs)}
    if not chosen:
        hint = f"Its attentions are {', '.join(found)}." if found else "It has none."
        raise RegardError(f"The model has no attention that matches {', '.join(globs)}.", hint)
    recording = Recording({name: Recorded(name, module.kind, heads, queries) for name, module in chosen.items()})

    running: list[str] = []
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
            recording[running[-1]].keep(call, output)

    hooks = [module.register_forward_pre_hook(enter(name)) for name, module in chosen.items()]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in chosen.values()]
    try:
        with dispatch.observe(observer):
            yield recording
    finally:
        for hook in hooks:
            hook.remove()

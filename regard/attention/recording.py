"""Recording: store the inputs of `attend` while a model runs, and compute exact weights from them later.

The model needs no changes and runs on its fused kernels. A recording holds references to q and k, or copies of some
heads: its memory is linear in the length, and weights are computed only when they are read.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import dispatch
from regard.attention.backends.call import Call
from regard.attention.exact_weights import Selection, compute_weights, resolve_indices, select_heads, weight_gradients
from regard.attention.offsets import Offsets
from regard.errors import RegardError
from regard.ranges import format_value

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
    outputs: list[Tensor | None] = field(default_factory=list, repr=False)
    """the output of each call, None if gradients are disabled: the autograd graph holds it anyway"""
    pass_numbers: list[int] = field(default_factory=list, repr=False)
    """the index of the pass of each call, see `Recording.passes`"""
    hypotheses: list[int] = field(default_factory=list, repr=False)
    """the hypotheses per sentence in each call, more than one in a step of beam search"""
    head_count: int | None = None
    """number of heads of the module, if not all are recorded"""

    def add_call(self, call: Call, output: Tensor, pass_number: int = 0) -> None:
        """Record the inputs of a call: references to all heads, or copies of some, so that the others can be freed."""
        if self.heads is not None:
            self.head_count = call.q.shape[1]
            with torch.no_grad():
                call = select_heads(call, self.recorded_heads)
        self.calls.append(call)
        self.outputs.append(output if output.requires_grad else None)
        self.pass_numbers.append(pass_number)
        self.hypotheses.append(_thread.hypotheses)

    @property
    def title(self) -> str:
        """The name in a sentence: that of the outermost module is empty."""
        return self.name or "the model"

    @property
    def recorded_heads(self) -> list[int]:
        """The indices of the recorded heads."""
        return resolve_indices(self.heads, self.head_count or self.calls[0].q.shape[1], "head")

    @torch.no_grad()
    def weights(self, heads: Selection = None, queries: Selection = None) -> Float[Tensor, "B h t S"]:
        """The exact weights of the selected heads and queries (index, slice, several indices; None: as in `record`).

        Several calls, the steps of decoding, give one matrix: their queries are concatenated, and keys that did not
        exist yet have weight 0. `queries` are then indices of the rows of that matrix. Several inputs have a matrix
        each: see `Recording.passes`.
        """
        if not self.calls:
            raise RegardError(f"{self.title} was not called while recording.", "Run the model inside the with block.")
        recorded = self.recorded_heads
        selected = recorded if heads is None else resolve_indices(heads, self.head_count or len(recorded), "head")
        if missing := [head for head in selected if head not in recorded]:
            raise RegardError(
                f"Head {missing[0]} of {self.title} was not recorded.",
                f"Recorded heads: {', '.join(map(str, recorded))}. Pass other heads to record(), or None for all.",
            )
        indices = [recorded.index(head) for head in selected]
        queries = self.queries if queries is None else queries
        if len(self.calls) == 1:
            return compute_weights(self.calls[0], indices, queries)
        weights = self._join_steps([compute_weights(call, indices) for call in self.calls])
        return weights[:, :, resolve_indices(queries, weights.shape[2], "query")]

    def select_pass(self, number: int) -> "Recorded":
        """The calls of one pass."""
        kept = [i for i, pass_number in enumerate(self.pass_numbers) if pass_number == number]
        return replace(
            self,
            calls=[self.calls[i] for i in kept],
            outputs=[self.outputs[i] for i in kept],
            pass_numbers=[number] * len(kept),
            hypotheses=[self.hypotheses[i] for i in kept],
        )

    def _join_steps(self, steps: Sequence[Float[Tensor, "B h _ _"]]) -> Float[Tensor, "B h t S"]:
        """Concatenate the matrices of the calls of one pass along the queries, padding keys with zeros."""
        if (count := len(set(self.pass_numbers))) > 1:
            raise RegardError(
                f"{self.title} ran on {count} inputs while recording, which have no common matrix.",
                f'Read each pass: recording.passes[0]["{self.name}"].',
            )
        if max(self.hypotheses, default=1) > 1 or len({len(step) for step in steps}) > 1:
            raise RegardError(
                f"{self.title} ran on several hypotheses or sentences, which change places between steps.",
                'Decode one sentence with DecodeConfig(method="greedy"), or look at the output with regard.look.',
            )
        keys = max(step.shape[-1] for step in steps)
        return torch.cat([nn.functional.pad(step, (0, keys - step.shape[-1])) for step in steps], dim=2)


class Recording(dict[str, Recorded]):
    """The recorded attention modules of a model by name, in the order of the model."""

    @property
    def passes(self) -> "list[Recording]":
        """A recording per forward pass of the model, or per text that it generated step by step, in order."""
        count = 1 + max((number for recorded in self.values() for number in recorded.pass_numbers), default=-1)
        return [Recording({name: recorded.select_pass(i) for name, recorded in self.items()}) for i in range(count)]

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
        recorded_outputs = [output for recorded in called for output in recorded.outputs]
        outputs = [output for output in recorded_outputs if output is not None]
        if not outputs or len(outputs) < len(recorded_outputs) or not scalar.requires_grad:
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


class _Thread(threading.local):
    hypotheses = 1


_thread = _Thread()


@contextmanager
def mark_hypotheses(count: int) -> Iterator[None]:
    """Tell recordings how many hypotheses per sentence a step of decoding has."""
    previous, _thread.hypotheses = _thread.hypotheses, count
    try:
        yield
    finally:
        _thread.hypotheses = previous


class _Keys(NamedTuple):
    """What is kept of the latest call of a module: the keys themselves only of cross-attention."""

    axes: int
    length: int
    offsets: Offsets | None
    k: Tensor | None


class _Passes:
    """Counts the passes of a model by its attention calls: a pass is a forward pass, or the steps of one generation."""

    def __init__(self) -> None:
        self.number = -1
        self.forward_count = 0
        self.forward_depth = 0
        self._forward = 0  # the forward pass that the latest call was part of; 0: none
        self._latest: dict[str, _Keys] = {}  # by module, in this pass

    def enter_forward(self) -> None:
        self.forward_count += not self.forward_depth
        self.forward_depth += 1

    def leave_forward(self) -> None:
        self.forward_depth -= 1

    def add_call(self, name: str, kind: str, call: Call) -> int:
        """The number of the pass of a call."""
        forward = self.forward_count if self.forward_depth else 0
        previous = self._latest.get(name)
        if forward != self._forward:
            continues = previous is not None and _extends(previous, call)
        elif forward:
            continues = True  # several calls of a module: layers that share weights
        else:
            continues = previous is None or _continues(previous, call)
        if self.number < 0 or not continues:
            self.number += 1
            self._latest.clear()
        self._forward = forward
        keys = call.k if kind == "cross" and not forward else None
        self._latest[name] = _Keys(call.k.dim(), call.k.shape[-2], call.q_offsets, keys)
        return self.number


def _extends(previous: _Keys, call: Call) -> bool:
    """Whether the keys of a call are those of the previous call and of its own queries: a step with a cache."""
    steps, length = call.q.shape[-2], call.k.shape[-2]
    return call.q_offsets is None and previous.offsets is None and steps < length == previous.length + steps


def _continues(previous: _Keys, call: Call) -> bool:
    """Whether a call outside of a forward pass belongs to the same pass as the previous call of its module."""
    if call.q_offsets is not None:  # layers that share weights
        return call.q_offsets is previous.offsets
    if previous.k is not None:
        return call.k.shape == previous.k.shape and torch.equal(call.k, previous.k)
    return call.q.shape[-2] < call.k.shape[-2]  # a step: the other keys are in a cache


@contextmanager
def record(
    model: Any, layers: str | Sequence[str] | None = None, heads: Selection = None, queries: Selection = None
) -> Iterator[Recording]:
    """Record the attention modules of a model while it runs inside the with block; compiled models run eagerly.

    An attention module has an attribute `kind`: "self", "masked" or "cross". `layers` selects modules by name, with *
    and ?; `heads` are the heads to record (all by default), which saves memory for long inputs; `queries` is the
    default of `Recorded.weights`. `model` may also be a pipeline. Two inputs in one block give two passes:
    `recording.passes`.

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
    module = model if isinstance(model, nn.Module) else getattr(model, "model", model)
    if not hasattr(module, "named_modules"):
        raise RegardError(f"record needs a model (got {format_value(model)}).", "Pass a torch module or a pipeline.")
    globs = ["*"] if layers is None else [layers] if isinstance(layers, str) else list(layers)
    modules = {name: child for name, child in module.named_modules() if getattr(child, "kind", None) in KINDS}
    selected = {name: child for name, child in modules.items() if any(fnmatchcase(name, glob) for glob in globs)}
    if not selected:
        hint = f"Its attention modules are {', '.join(modules)}." if modules else "It has no attention modules."
        raise RegardError(f"No attention module of the model matches {', '.join(globs)}.", hint)
    recording = Recording({name: Recorded(name, child.kind, heads, queries) for name, child in selected.items()})

    running: list[str] = []  # names of the attention modules whose forward is running
    passes = _Passes()
    thread = threading.get_ident()

    def in_this_thread(action: Callable[..., Any], *args: str) -> Callable[..., None]:
        def hook(*_) -> None:
            if threading.get_ident() == thread:
                action(*args)

        return hook

    def observer(call: Call, output: Tensor) -> None:
        if running:
            number = passes.add_call(running[-1], modules[running[-1]].kind, call)
            if (name := next((name for name in reversed(running) if name in recording), None)) is not None:
                recording[name].add_call(call, output, number)

    leave = in_this_thread(running.pop)
    hooks = [module.register_forward_pre_hook(in_this_thread(passes.enter_forward))]
    hooks += [module.register_forward_hook(in_this_thread(passes.leave_forward), always_call=True)]
    hooks += [child.register_forward_pre_hook(in_this_thread(running.append, name)) for name, child in modules.items()]
    hooks += [child.register_forward_hook(leave, always_call=True) for child in modules.values()]
    try:
        with dispatch.observe(observer):
            yield recording
    finally:
        for hook in hooks:
            hook.remove()

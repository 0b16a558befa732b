"""Interventions: ablate heads and layers, remove mask, scale or positions, set rows of attention weights.

They use forward hooks and an interceptor of `attend` (see `dispatch.intercept`), both removed after the with block. The
model itself is not modified.
"""

import difflib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import Dot, ScaledDot, dispatch
from regard.attention.backends.call import Call
from regard.attention.masks import MaskParts
from regard.attention.recording import KINDS
from regard.errors import RegardError
from regard.layers.attention import MultiHeadAttention
from regard.layers.embeddings import Embedding, ImageEmbedding
from regard.layers.feedforward import FeedForward
from regard.layers.kv_cache import CrossAttentionCache, KVCache
from regard.models import Bert, Transformer

# Attributes that hold positional encodings, by class; a module with None there uses no positions.
POSITION_ATTRIBUTES: dict[type[nn.Module], tuple[str, ...]] = {
    Embedding: ("positions",),
    ImageEmbedding: ("learned", "sinusoidal", "rotary"),
    MultiHeadAttention: ("rotary",),
    Transformer: ("encoder_bias", "decoder_bias"),
    Bert: ("relative",),
}


@dataclass(frozen=True)
class AblateHead:
    """Ablate a head: its part of the concatenated heads is zero."""

    attention: str
    head: int


@dataclass(frozen=True)
class AblateLayer:
    """Ablate a layer: an attention or a feed-forward network outputs zeros; in a block or stack, all of them."""

    layer: str


@dataclass(frozen=True)
class RemoveMask:
    """Remove the causal mask: every token attends to all tokens, later ones included."""

    attention: str = "*"
    """names of attentions, with the wildcards * and ?"""


@dataclass(frozen=True)
class RemoveScale:
    """Remove the scale: scores are not divided by √D."""

    attention: str = "*"
    """names of attentions, with the wildcards * and ?"""


@dataclass(frozen=True)
class RemovePositions:
    """Remove positional encodings: nothing is added to embeddings or scores, queries and keys are not rotated."""


@dataclass(frozen=True)
class SetAttentionRow:
    """Set the attention weights of one query of a head. They must sum to 1."""

    attention: str
    head: int
    row: int
    """index of the query"""
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))
        total = sum(self.weights)
        if not all(weight >= 0 for weight in self.weights) or not abs(total - 1) < 1e-4:
            raise RegardError(
                f"The weights of row {self.row} sum to {total:.6g}.", "Pass non-negative weights that sum to 1."
            )


Intervention = AblateHead | AblateLayer | RemoveMask | RemoveScale | RemovePositions | SetAttentionRow
INTERVENTIONS: dict[str, type[Intervention]] = {
    "head": AblateHead,
    "layer": AblateLayer,
    "mask": RemoveMask,
    "scale": RemoveScale,
    "positions": RemovePositions,
    "row": SetAttentionRow,
}
"""interventions by their names in requests of a page"""


@contextmanager
def apply_interventions(model: nn.Module, interventions: Sequence[Intervention]) -> Iterator[None]:
    """Apply interventions to a model inside the with block.

    A module that several layers share is changed in all of them. `SetAttentionRow` needs a forward pass over full
    sequences: in step-by-step decoding the index of a row is unknown, which raises an error. `run_experiment` decodes
    without a cache instead.

    >>> from regard.layers import MultiHeadAttention
    >>> model = nn.Sequential(MultiHeadAttention(8, heads=2))
    >>> with apply_interventions(model, [AblateLayer("0")]):
    ...     model(torch.ones(1, 3, 8)).abs().max().item()
    0.0
    """
    interceptor = AttentionInterceptor(model, interventions)
    with interceptor.installed(), ExitStack() as stack:
        if any(isinstance(intervention, RemovePositions) for intervention in interventions):
            for module, name in _positions(model):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, None)
        stack.enter_context(dispatch.intercept(interceptor))
        yield


class AttentionInterceptor:
    """Changes the attention calls of one model, in the thread that created it."""

    def __init__(self, model: nn.Module, interventions: Sequence[Intervention]) -> None:
        self.model, self.thread = model, threading.get_ident()
        modules = dict(model.named_modules())
        self.attentions = {name: module for name, module in modules.items() if getattr(module, "kind", None) in KINDS}
        self.layers = [
            name for name, module in modules.items() if name in self.attentions or isinstance(module, FeedForward)
        ]
        self.running: list[tuple[str, bool]] = []
        """attentions whose forward is running: name, and whether it was called with a cache"""
        self.model_forwards = 0
        """nesting depth of the model's own forward"""
        self.steps: dict[str, int] = {}
        """calls per attention in the current forward of the model"""
        self.ablated_heads: dict[str, list[int]] = {}
        self.ablated_layers: set[str] = set()
        self.rows: dict[str, list[SetAttentionRow]] = {}
        self.unmasked: set[str] = set()
        self.unscaled: set[str] = set()
        for intervention in interventions:
            self._add(intervention)

    def _add(self, intervention: Intervention) -> None:
        match intervention:
            case AblateHead(attention, head):
                self.ablated_heads.setdefault(self._resolve(attention, head), []).append(head)
            case SetAttentionRow(attention, head):
                self.rows.setdefault(self._resolve(attention, head), []).append(intervention)
            case AblateLayer(layer):
                sublayers = [name for name in self.layers if name == layer or name.startswith(f"{layer}.")]
                if not sublayers:
                    raise _unknown("layer", layer, self.layers)
                self.ablated_layers |= set(sublayers)
            case RemoveMask(attention):
                self.unmasked |= self._select(attention, "causal mask", lambda one: one.kind == "masked")
            case RemoveScale(attention):
                self.unscaled |= self._select(attention, "division by √D", lambda one: isinstance(one.score, ScaledDot))
            case RemovePositions():
                if not _positions(self.model):
                    raise RegardError("This model has no positional encodings to remove.", "Leave out RemovePositions.")

    def _resolve(self, name: str, head: int) -> str:
        """The name of the module, checked. The calls of a shared module are recorded as name.0, name.1, …"""
        stem, _, call = name.rpartition(".")
        name = stem if name not in self.attentions and call.isdecimal() and stem in self.attentions else name
        if name not in self.attentions:
            raise _unknown("attention", name, list(self.attentions))
        heads = getattr(self.attentions[name], "heads", 1)
        if not 0 <= head < heads:
            raise RegardError(f"{name} has no head {head}.", f"Choose a head from 0 to {heads - 1}.")
        return name

    def _select(self, pattern: str, part: str, has_part: Callable[[Any], bool]) -> set[str]:
        matching = [name for name in self.attentions if fnmatchcase(name, pattern)]
        if not matching:
            raise _unknown("attention", pattern, list(self.attentions))
        selected = {name for name in matching if has_part(self.attentions[name])}
        if not selected:
            raise RegardError(f"There is no {part} in {', '.join(matching)}.", "Choose other attentions.")
        return selected

    # Hooks: track which attention is running and whether it decodes step by step

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the hooks inside the with block."""
        with ExitStack() as stack:
            for hook in self.hooks():
                stack.callback(hook.remove)
            yield

    def hooks(self) -> Iterator[Any]:
        yield self.model.register_forward_pre_hook(self._enter_model)
        yield self.model.register_forward_hook(self._leave_model, always_call=True)
        for name, module in self.attentions.items():
            yield module.register_forward_pre_hook(self._enter(name), with_kwargs=True)
            yield module.register_forward_hook(self._leave, always_call=True)
        for name in self.ablated_layers:
            yield self.model.get_submodule(name).register_forward_hook(self._zero_output)

    @property
    def is_own_thread(self) -> bool:
        return threading.get_ident() == self.thread

    def _enter_model(self, *_) -> None:
        if self.is_own_thread:
            self.model_forwards += 1
            self.steps.clear()

    def _leave_model(self, *_) -> None:
        if self.is_own_thread:
            self.model_forwards -= 1

    def _enter(self, name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if self.is_own_thread:
                inputs = (*args, *kwargs.values())
                self.running.append(
                    (name, any(isinstance(argument, KVCache | CrossAttentionCache) for argument in inputs))
                )

        return hook

    def _leave(self, *_) -> None:
        if self.is_own_thread:
            self.running.pop()

    def _zero_output(self, module: nn.Module, args: tuple, out: Tensor) -> Tensor | None:
        return torch.zeros_like(out) if self.is_own_thread else None

    # Called by `attend` (dispatch.intercept)

    def before(self, call: Call) -> Call:
        if not self.running:
            return call
        name, _ = self.running[-1]
        if name in self.unmasked:
            # Padding stays masked.
            call = call._replace(mask_parts=MaskParts(lengths=call.mask_parts.lengths))
        if name in self.unscaled:
            call = call._replace(score=Dot())
        return call

    def after(self, call: Call, out: Tensor) -> Tensor:
        if not self.running:
            return out
        name, cached = self.running[-1]
        if name in self.rows:
            out = self._set_rows(name, call, out, is_step=cached and call.q_offsets is None)
        if name in self.ablated_heads:
            is_ablated = torch.zeros(out.shape[1], dtype=torch.bool, device=out.device)
            is_ablated[self.ablated_heads[name]] = True
            out = out.masked_fill(is_ablated.view(1, -1, *(1 for _ in out.shape[2:])), 0.0)
        return out

    def _set_rows(self, name: str, call: Call, out: Tensor, is_step: bool) -> Tensor:
        first_row = 0
        if is_step:
            if not self.model_forwards:
                raise RegardError(
                    f"{name} runs step by step, where the index of its rows is unknown.",
                    "Use run_experiment, or run the model on full sequences.",
                )
            # The forward of a recurrent decoder calls its attention once per target token.
            first_row = self.steps.get(name, 0)
            self.steps[name] = first_row + 1
        out = out.clone()
        is_packed = call.q_offsets is not None
        for b, (queries, values) in enumerate(_sequences(call)):
            for one in self.rows[name]:
                row = one.row - first_row
                if not 0 <= row < (queries.stop - queries.start):
                    continue
                v = values[one.head * values.shape[0] // out.shape[1]]
                weights = fit_weights(one, len(v), is_growing=self.attentions[name].kind == "masked")
                if weights is None:
                    continue
                attn_output = torch.tensor(weights, dtype=v.dtype, device=v.device) @ v
                index = (queries.start + row, one.head) if is_packed else (b, one.head, row)
                out[index] = attn_output.to(out.dtype)
        return out


def _sequences(call: Call) -> Iterator[tuple[slice, Float[Tensor, "G S Dv"]]]:
    """The slice of queries and the values of each sequence."""
    if call.q_offsets is not None and call.k_offsets is not None:
        q, k = call.q_offsets.starts.tolist(), call.k_offsets.starts.tolist()
        for b in range(len(q) - 1):
            yield slice(q[b], q[b + 1]), call.v[k[b] : k[b + 1]].transpose(0, 1)
    else:
        for b, v in enumerate(call.v):
            length = v.shape[1] if call.mask_parts.lengths is None else int(call.mask_parts.lengths[b])
            yield slice(0, call.q.shape[2]), v[:, :length]


def fit_weights(intervention: SetAttentionRow, keys: int, is_growing: bool) -> list[float] | None:
    """The weights for a number of keys, which grows during decoding (`is_growing`).

    Weights of keys that do not exist yet are distributed over the others; additional keys get 0. None if all weight is
    on keys that do not exist yet.
    """
    weights = list(intervention.weights)
    if len(weights) == keys:
        return weights
    if not is_growing:
        raise wrong_row_length(intervention, keys)
    weights = [*weights[:keys], *[0.0] * (keys - len(weights))]
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else None


def wrong_row_length(intervention: SetAttentionRow, keys: int) -> RegardError:
    return RegardError(
        f"Row {intervention.row} of {intervention.attention} has {keys} keys, but {len(intervention.weights)} weights "
        "were given.",
        "Pass one weight per key.",
    )


def _positions(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules that use positional encodings, and the names of their attributes."""
    return [
        (module, name)
        for module in model.modules()
        for name in POSITION_ATTRIBUTES.get(type(module), ())
        if getattr(module, name) is not None
    ]


def _unknown(part: str, name: str, known: Sequence[str]) -> RegardError:
    message = f"The model has no {part} {name!r}."
    if not known:
        return RegardError(message, f"It has no {part} at all.")
    nearest = max(known, key=lambda one: difflib.SequenceMatcher(None, name, one).ratio())
    return RegardError(message, f"Did you mean {nearest!r}? There are: {', '.join(known)}.")

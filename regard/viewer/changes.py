"""Changes to a model from outside: heads, layers, mask, scale, positions switched off, rows of attention set.

As looking, it is something done to a model: hooks on its modules and a hand at `attend`, which are gone again after the
with block. A model knows nothing of it.
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
from regard.attention.masks import Form
from regard.attention.recording import KINDS
from regard.errors import RegardError
from regard.layers.cache import GrowingCache, MemoryCache
from regard.layers.embeddings import Embedding, ImageEmbedding
from regard.layers.feedforward import FeedForward
from regard.layers.multihead import MultiHead
from regard.models import Transformer

# What says where a token stands, by what the modules that use it call it; where there is None, they do without.
POSITIONS: dict[type[nn.Module], tuple[str, ...]] = {
    Embedding: ("positions",),
    ImageEmbedding: ("learned", "sinusoidal", "rotary"),
    MultiHead: ("rotary",),
    Transformer: ("encoder_bias", "decoder_bias"),
}


@dataclass(frozen=True)
class HeadOff:
    """One head of an attention adds nothing: its part of the joined heads is zero."""

    attention: str
    head: int


@dataclass(frozen=True)
class LayerOff:
    """An attention or a feed-forward network adds nothing to what goes past it; of a block or a stack, all of them."""

    layer: str


@dataclass(frozen=True)
class MaskOff:
    """Every token may look at every other, also at those that come after it; in attentions by name, with * and ?."""

    attention: str = "*"


@dataclass(frozen=True)
class ScaleOff:
    """Scores are not divided by √D; in attentions by name, with * and ?."""

    attention: str = "*"


@dataclass(frozen=True)
class PositionsOff:
    """Nothing says where a token stands: nothing is added to embeddings or scores, no query and key is turned."""


@dataclass(frozen=True)
class RowSet:
    """A head's query number `row` looks at the keys with these weights, which sum to 1."""

    attention: str
    head: int
    row: int
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(float(one) for one in self.weights))
        total = sum(self.weights)
        if not all(one >= 0 for one in self.weights) or not abs(total - 1) < 1e-4:
            raise RegardError(
                f"The weights of row {self.row} sum to {total:.6g}.", "Give weights of 0 and more that sum to 1."
            )


Change = HeadOff | LayerOff | MaskOff | ScaleOff | PositionsOff | RowSet
CHANGES: dict[str, type[Change]] = {
    "head": HeadOff,
    "layer": LayerOff,
    "mask": MaskOff,
    "scale": ScaleOff,
    "positions": PositionsOff,
    "row": RowSet,
}
"""what each kind of change is called in requests"""


@contextmanager
def tried(model: nn.Module, changes: Sequence[Change]) -> Iterator[None]:
    """The model with these changes, inside the with block; after it, the model as it was.

    A module that several layers share is changed in all of them. Whole texts are changed as they are read; rows of a
    text that is written step by step cannot be told apart, so `RowSet` is refused there: `try_it` knows a way.

    >>> from regard.layers.multihead import MultiHead
    >>> model = nn.Sequential(MultiHead(8, heads=2, kind="self"))
    >>> with tried(model, [LayerOff("0")]):
    ...     model(torch.ones(1, 3, 8)).abs().max().item()
    0.0
    """
    hand = _Hand(model, changes)
    with ExitStack() as stack:
        for hook in hand.hooks():
            stack.callback(hook.remove)
        if any(isinstance(one, PositionsOff) for one in changes):
            for module, name in _positions(model):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, None)
        stack.enter_context(dispatch.intervene(hand))
        yield


class _Hand:
    """Changes the calls of one model's attentions, in the thread that began."""

    def __init__(self, model: nn.Module, changes: Sequence[Change]) -> None:
        self.model, self.thread = model, threading.get_ident()
        named = dict(model.named_modules())
        self.attentions = {name: one for name, one in named.items() if getattr(one, "kind", None) in KINDS}
        self.layers = [name for name, one in named.items() if name in self.attentions or isinstance(one, FeedForward)]
        self.running: list[tuple[str, bool]] = []
        self.whole = 0  # forwards of the model that are under way
        self.steps: dict[str, int] = {}
        self.off: dict[str, list[int]] = {}
        self.rows: dict[str, list[RowSet]] = {}
        self.unmasked: set[str] = set()
        self.unscaled: set[str] = set()
        self.without: set[str] = set()
        for change in changes:
            self._take(change)

    def _take(self, change: Change) -> None:
        match change:
            case HeadOff(attention, head):
                self.off.setdefault(self._attention(attention, head), []).append(head)
            case RowSet(attention, head):
                self.rows.setdefault(self._attention(attention, head), []).append(change)
            case LayerOff(layer):
                inside = [name for name in self.layers if name == layer or name.startswith(f"{layer}.")]
                if not inside:
                    raise _unknown("layer", layer, self.layers)
                self.without |= set(inside)
            case MaskOff(attention):
                self.unmasked |= self._some(attention, "mask", lambda one: one.kind == "masked")
            case ScaleOff(attention):
                self.unscaled |= self._some(attention, "division by √D", lambda one: isinstance(one.score, ScaledDot))
            case PositionsOff():
                if not _positions(self.model):
                    raise RegardError("This model has no positions that could be left out.", "Try something else.")

    def _attention(self, name: str, head: int) -> str:
        # The calls of a shared attention are looked at as name.0, name.1 and so on: it is one module.
        first, _, last = name.rpartition(".")
        name = first if name not in self.attentions and last.isdecimal() and first in self.attentions else name
        if name not in self.attentions:
            raise _unknown("attention", name, list(self.attentions))
        heads = getattr(self.attentions[name], "heads", 1)
        if not 0 <= head < heads:
            raise RegardError(f"{name} has no head {head}.", f"There are {heads}, counted from 0.")
        return name

    def _some(self, glob: str, what: str, has: Callable[[Any], bool]) -> set[str]:
        matching = [name for name in self.attentions if fnmatchcase(name, glob)]
        if not matching:
            raise _unknown("attention", glob, list(self.attentions))
        chosen = {name for name in matching if has(self.attentions[name])}
        if not chosen:
            raise RegardError(f"There is no {what} in {', '.join(matching)}.", "Try something else.")
        return chosen

    # What hooks tell: which attention runs, and whether it does so step by step

    def hooks(self) -> Iterator[Any]:
        yield self.model.register_forward_pre_hook(self._begin)
        yield self.model.register_forward_hook(self._end, always_call=True)
        for name, module in self.attentions.items():
            yield module.register_forward_pre_hook(self._enter(name), with_kwargs=True)
            yield module.register_forward_hook(self._leave, always_call=True)
        for name in self.without:
            yield self.model.get_submodule(name).register_forward_hook(self._nothing)

    @property
    def mine(self) -> bool:
        return threading.get_ident() == self.thread

    def _begin(self, *_) -> None:
        if self.mine:
            self.whole += 1
            self.steps.clear()

    def _end(self, *_) -> None:
        if self.mine:
            self.whole -= 1

    def _enter(self, name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if self.mine:
                given = (*args, *kwargs.values())
                self.running.append((name, any(isinstance(one, GrowingCache | MemoryCache) for one in given)))

        return hook

    def _leave(self, *_) -> None:
        if self.mine:
            self.running.pop()

    def _nothing(self, module: nn.Module, args: tuple, out: Tensor) -> Tensor | None:
        return torch.zeros_like(out) if self.mine else None

    # What is done to calls

    def before(self, call: Call) -> Call:
        if not self.running:
            return call
        name, _ = self.running[-1]
        if name in self.unmasked:
            # What is padding is no part of the text, and stays hidden.
            call = call._replace(form=Form(lengths=call.form.lengths))
        if name in self.unscaled:
            call = call._replace(score=Dot())
        return call

    def after(self, call: Call, out: Tensor) -> Tensor:
        if not self.running:
            return out
        name, cached = self.running[-1]
        if name in self.rows:
            out = self._looking_elsewhere(name, call, out, cached and call.q_offsets is None)
        if name in self.off:
            off = torch.zeros(out.shape[1], dtype=torch.bool, device=out.device)
            off[self.off[name]] = True
            out = out.masked_fill(off.view(1, -1, *(1 for _ in out.shape[2:])), 0.0)
        return out

    def _looking_elsewhere(self, name: str, call: Call, out: Tensor, step: bool) -> Tensor:
        first = 0
        if step:
            if not self.whole:
                raise RegardError(
                    f"{name} is asked step by step, where its rows cannot be told apart.",
                    "Use try_it, or read the whole text at once.",
                )
            # A recurrent decoder that is given the whole target calls once for each of its rows.
            first = self.steps.get(name, 0)
            self.steps[name] = first + 1
        out = out.clone()
        packed = call.q_offsets is not None
        for b, (queries, values) in enumerate(_sequences(call)):
            for one in self.rows[name]:
                row = one.row - first
                if not 0 <= row < (queries.stop - queries.start):
                    continue
                v = values[one.head * values.shape[0] // out.shape[1]]
                weights = fitted(one, len(v), growing=self.attentions[name].kind == "masked")
                if weights is None:
                    continue
                regarded = torch.tensor(weights, dtype=v.dtype, device=v.device) @ v
                at = (queries.start + row, one.head) if packed else (b, one.head, row)
                out[at] = regarded.to(out.dtype)
        return out


def _sequences(call: Call) -> Iterator[tuple[slice, Float[Tensor, "G S Dv"]]]:
    """For each sequence where its queries are, and the values that they may regard."""
    if call.q_offsets is not None and call.k_offsets is not None:
        q, k = call.q_offsets.starts.tolist(), call.k_offsets.starts.tolist()
        for b in range(len(q) - 1):
            yield slice(q[b], q[b + 1]), call.v[k[b] : k[b + 1]].transpose(0, 1)
    else:
        for b, v in enumerate(call.v):
            length = v.shape[1] if call.form.lengths is None else int(call.form.lengths[b])
            yield slice(0, call.q.shape[2]), v[:, :length]


def fitted(change: RowSet, keys: int, growing: bool) -> list[float] | None:
    """The weights for so many keys. While a text is written, keys that are not there yet leave their share to the
    others, and new ones have none; None where all weight would be on what is not there.
    """
    weights = list(change.weights)
    if len(weights) == keys:
        return weights
    if not growing:
        raise RegardError(
            f"Row {change.row} of {change.attention} looks at {keys} tokens, and {len(weights)} weights were given.",
            "Give a weight for each.",
        )
    weights = [*weights[:keys], *[0.0] * (keys - len(weights))]
    total = sum(weights)
    return [one / total for one in weights] if total > 0 else None


def _positions(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules that use positions, and what they call them."""
    return [
        (module, name)
        for module in model.modules()
        for name in POSITIONS.get(type(module), ())
        if getattr(module, name) is not None
    ]


def _unknown(what: str, name: str, known: Sequence[str]) -> RegardError:
    if not known:
        return RegardError(f"The model has no {what} {name!r}.", "It has none at all.")
    nearest = max(known, key=lambda one: difflib.SequenceMatcher(None, name, one).ratio())
    return RegardError(f"The model has no {what} {name!r}.", f"The nearest is {nearest!r}, of: {', '.join(known)}.")

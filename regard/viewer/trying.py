"""Trying: what becomes of the output if a part of a model is switched off, or looks elsewhere.

As looking, it is something done to a model from outside: hooks on its modules and a hand at `attend`, which are gone
again after the with block. A model knows nothing of it.
"""

import difflib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import Dot, Recorded, ScaledDot, dispatch, exact
from regard.attention.exact import Chosen
from regard.attention.kernels import Call
from regard.attention.masks import Form
from regard.attention.recording import KINDS
from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.folder import ImageModel, LanguageModel, TextEncoder, Translator
from regard.folder.pictures import Picture
from regard.layers.cache import GrowingCache, MemoryCache
from regard.layers.embeddings import Embedding, ImageEmbedding
from regard.layers.feedforward import FeedForward
from regard.layers.multihead import MultiHead
from regard.layers.packed import Packed, pack
from regard.models import Transformer
from regard.viewer.looking import Look, look
from regard.viewer.overlays import ImageLook

# So many of the likeliest are named.
LIKELIEST = 5
# So many tokens a language model goes on with.
CONTINUED = 12
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
        dispatch.changers.append(hand)
        stack.callback(dispatch.changers.remove, hand)
        # Compiled code would not call back here: tried out, a model runs as it is written.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
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
        if not self.mine or not self.running:
            return call
        name, _ = self.running[-1]
        if name in self.unmasked:
            # What is padding is no part of the text, and stays hidden.
            call = call._replace(form=Form(lengths=call.form.lengths))
        if name in self.unscaled:
            call = call._replace(score=Dot())
        return call

    def after(self, call: Call, out: Tensor) -> Tensor:
        if not self.mine or not self.running:
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
                weights = _fitted(one, len(v), growing=self.attentions[name].kind == "masked")
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


def _fitted(change: RowSet, keys: int, growing: bool) -> list[float] | None:
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


# Before and after


class Step(NamedTuple):
    """A place where a model predicts: what stands there, how likely that is, and what is likeliest there."""

    token: str
    probability: float | None
    likeliest: dict[str, float]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came out: a translation, how a text goes on, a label (nothing of a model that only reads).

    `steps` are the places where something is predicted: tokens of the translation, or of the text and what follows it;
    or the one label. `logprob` is the log-probability of the translation, or of the text.
    """

    text: str
    logprob: float | None
    steps: list[Step] = field(repr=False)
    look: Look | ImageLook = field(repr=False)
    """with the maps of what was regarded"""


class Tried(NamedTuple):
    """What came out of a model as it is, and of the changed one."""

    before: Outcome
    after: Outcome


@torch.no_grad()
def try_it(
    bundle: Translator | LanguageModel | TextEncoder | ImageModel,
    source: str | Picture,
    changes: Sequence[Change] = (),
    target: str | None = None,
    prefix: str = "",
    *,
    instead: str | Picture | None = None,
) -> Tried:
    """What a model makes of a text or a picture as it is, and with changes.

    Of a translation either the target is given, or the changed model writes one of its own, which must begin with
    `prefix`; a language model has the prefix written after its text. `instead` is what the changed model reads.

    >>> tried = try_it(translator, "The cat sleeps.", [HeadOff("decoder.1.cross", 0)])  # doctest: +SKIP
    >>> tried.before.text, tried.after.text  # doctest: +SKIP
    ('Le chat dort.', 'Le chat le chat.')
    """
    writes = isinstance(bundle, Translator | LanguageModel)
    if (prefix and not writes) or (prefix and target is not None):
        raise RegardError("There is nothing here that would begin with a prefix.", "Leave it out.")
    if target is not None and not isinstance(bundle, Translator):
        raise RegardError("Only a translator has a target.", "Leave it out.")
    if isinstance(bundle, Translator) and bundle.partners:
        bundle = replace(bundle, partners=[])  # names are of one model's parts
    before = _outcome(bundle, source, target, "", bundle)
    rows = [one for one in changes if isinstance(one, RowSet)]
    # A model that writes step by step keeps what it has read: with these, what it read before changes too.
    rereads = writes and any(isinstance(one, RowSet | MaskOff) for one in changes)
    writer: Any = replace(bundle, model=_Rereading(bundle.model)) if rereads else bundle  # type: ignore[arg-type]
    with tried(bundle.model, changes):
        _check(rows, before.look if instead is None else None)
        after = _outcome(bundle, source if instead is None else instead, target, prefix, writer)
    return Tried(before, replace(after, look=_with_rows(after.look, rows)) if rows else after)


def _outcome(bundle: Any, source: Any, target: str | None, prefix: str, writer: Any) -> Outcome:
    if isinstance(bundle, ImageModel):
        seen = look(bundle, source)
        return _labelled(seen.probabilities, seen)
    if isinstance(bundle, Translator):
        if target is None:
            target = writer.translate([source], prefixes=[prefix] if prefix else None)[0][0].text
        return _forced(bundle, look(bundle, source, target), source, target)
    if isinstance(bundle, LanguageModel):
        text = source + prefix
        room = min(CONTINUED, bundle.model.config.max_len - len(bundle.prompt_ids(text)))
        config = DecodeConfig(method="greedy", max_len=room)
        written = writer.generate([text], config)[0][0].text if room > 0 else ""
        return _read(bundle, look(bundle, text), bundle.prompt_ids(text), written)
    seen = look(bundle, source)
    if bundle.model.config.head == "classify":
        return _labelled(bundle.classify([source])[0].probabilities, seen)
    if bundle.model.config.head != "mask":
        return Outcome("", None, [], seen)
    ids = bundle.text_ids(source)
    shares = bundle.model(bundle.packed([ids])).float().softmax(-1)
    return Outcome("", None, _steps(bundle.tokenizer, shares, ids), seen)


def _labelled(probabilities: Mapping[str, float], seen: Look | ImageLook) -> Outcome:
    best = dict(sorted(probabilities.items(), key=lambda one: -one[1])[:LIKELIEST])
    if not best:
        return Outcome("", None, [], seen)
    label, share = next(iter(best.items()))
    return Outcome(label, None, [Step(label, share, best)], seen)


def _forced(translator: Translator, seen: Look, source: str, target: str) -> Outcome:
    pair = translator.source_ids(source), translator.target_ids(target)
    wanted = [*translator.special.begun(pair[1])[1:], translator.special.eos]
    shares = translator.model(*translator.teacher_forced([pair])).float().softmax(-1)
    steps = _steps(translator.target_tokenizer, shares, wanted)
    return Outcome(target, _logprob(shares, wanted), steps, seen)


def _read(writer: LanguageModel, seen: Look, ids: list[int], written: str) -> Outcome:
    shares = writer.model(writer.packed([ids])).float().softmax(-1)
    steps = _steps(writer.tokenizer, shares, ids[1:])
    return Outcome(written, _logprob(shares, ids[1:]), steps, seen)


def _logprob(shares: Float[Tensor, "T V"], wanted: Sequence[int]) -> float:
    return float(shares.double()[range(len(wanted)), list(wanted)].log().sum())


def _steps(tokenizer: Tokenizer, shares: Float[Tensor, "T V"], wanted: Sequence[int]) -> list[Step]:
    """One for each row; `wanted` is what stands there, where the text goes so far."""
    names = tokenizer.vocabulary

    def called(number: int) -> str:
        return tokenizer.decode([number]) or names[number]

    steps = []
    best, which = shares.topk(min(LIKELIEST, shares.shape[1]))
    for i, (probabilities, ids) in enumerate(zip(best.tolist(), which.tolist())):
        there = i < len(wanted)
        likeliest: dict[str, float] = {}
        for number, share in zip(ids, probabilities):
            # Two tokens may be the same letters, with a space before and without.
            likeliest[called(number) if called(number) not in likeliest else names[number]] = share
        steps.append(
            Step(called(wanted[i]) if there else "", float(shares[i, wanted[i]]) if there else None, likeliest)
        )
    return steps


def _check(rows: Sequence[RowSet], seen: Look | ImageLook | None) -> None:
    """An error for rows and keys that are not there."""
    for one in rows:
        shown = seen.maps.get(one.attention) if seen is not None else None
        if shown is None:
            continue
        if not 0 <= one.row < len(shown.rows):
            raise RegardError(f"{one.attention} has no row {one.row}.", f"There are {len(shown.rows)}, from 0.")
        if len(one.weights) != len(shown.columns):
            raise RegardError(
                f"Row {one.row} of {one.attention} looks at {len(shown.columns)} tokens, and {len(one.weights)} "
                "weights were given.",
                "Give a weight for each.",
            )


@dataclass(eq=False)
class _Overwritten(Recorded):
    """A recording some of whose rows were written over."""

    rows: Sequence[RowSet] = ()

    @torch.no_grad()
    def weights(self, heads: Chosen = None, queries: Chosen = None) -> Float[Tensor, "B h t S"]:
        found = super().weights().clone()
        for one in self.rows:
            keys = _fitted(one, found.shape[3], growing=True) if one.row < found.shape[2] else None
            if keys is not None:
                found[:, one.head, one.row] = torch.tensor(keys, dtype=found.dtype, device=found.device)
        chosen = exact.indices(heads, found.shape[1], "head")
        return found[:, chosen][:, :, exact.indices(queries, found.shape[2], "query")]


def _with_rows(seen: Any, rows: Sequence[RowSet]) -> Any:
    """The look whose maps have the rows that were written over."""
    maps = {}
    for name, one in seen.maps.items():
        mine = [row for row in rows if row.attention == name]
        recorded = {part.name: getattr(one.recorded, part.name) for part in fields(Recorded)}
        maps[name] = replace(one, recorded=_Overwritten(**recorded, rows=mine)) if mine else one
    return replace(seen, maps=maps)


@dataclass
class _Written:
    """What was written so far in each of the (B, K) hypotheses, and what it is written about."""

    sources: list[list[int]] | None
    ids: list[list[int]]
    beams: int = 1
    begun: bool = False


class _Rereading(nn.Module):
    """A model that reads anew all that it wrote for each token: slow, but every row of every attention is there."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def start(self, source: Packed) -> _Written:
        given = [one.tolist() for one in source.ids.split(source.offsets.lengths.tolist())]
        if hasattr(self.model, "encode"):  # a source of its own; otherwise what is written goes on with it
            return _Written(given, [[] for _ in given])
        return _Written(None, given)

    def step(self, state: _Written, last: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "B K V"], _Written]:
        texts = state.ids
        if state.sources is not None or state.begun:
            texts = [[*one, token] for one, token in zip(texts, last.flatten().tolist())]
        packed = pack(texts).to(last.device)
        inputs = [packed]
        if state.sources is not None:
            inputs = [pack([one for one in state.sources for _ in range(state.beams)]).to(last.device), packed]
        logits = self.model(*inputs)[packed.offsets.starts[1:].long() - 1]
        return logits.unflatten(0, last.shape), _Written(state.sources, texts, state.beams, True)

    def reorder(self, state: _Written, indices: Int[Tensor, "B2 K2"]) -> _Written:
        rows = indices.flatten().tolist()
        sources = state.sources
        if sources is not None:
            sources = [sources[i // state.beams] for i in indices[:, 0].tolist()]
        return _Written(sources, [state.ids[i] for i in rows], indices.shape[1], state.begun)


# Requests: what a page asks for, as JSON


def answer(bundle: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """A request of a page, and what it shows of the answer.

    A request has `source`, and perhaps `target`, `prefix`, `instead` (another sentence), `changes` (each with its name
    as `change`, and its parts) and `shown`: the attention whose weights are wanted, and its head ("mean": of all).
    """
    told, shown = request.get("changes") or [], request.get("shown")
    if not isinstance(told, list) or not all(isinstance(one, dict) for one in told):
        raise RegardError("The changes are no list of changes.", "Give a list.")
    if shown is not None and not isinstance(shown, dict):
        raise RegardError("What should be shown has no name.", "Give an attention, and a head.")
    changes = [change_of(one) for one in told]
    texts = {name: request.get(name) for name in ("source", "target", "prefix", "instead")}
    for name, text in texts.items():
        if not isinstance(text, str) and not (text is None and name != "source"):
            raise RegardError(f"What was asked to be tried has no {name} that is a text.", "Give one.")
        if text is not None and re.search("[\ud800-\udfff]", text):
            raise RegardError(f"The {name} holds half a character.", "Give whole ones.")
    source, target, prefix, instead = texts.values()
    both = try_it(bundle, source or "", changes, target, prefix or "", instead=instead)
    return {"before": _told(both.before, shown), "after": _told(both.after, shown)}


def change_of(told: Mapping[str, Any]) -> Change:
    """A change from what a request says.

    >>> change_of({"change": "head", "attention": "decoder.0.cross", "head": 1})
    HeadOff(attention='decoder.0.cross', head=1)
    """
    kind = CHANGES.get(str(told.get("change")))
    if kind is None:
        raise RegardError(f"No change is called {told.get('change')!r}.", f"Choose one of {', '.join(CHANGES)}.")
    types: dict[str, Any] = {"attention": str, "layer": str, "head": int, "row": int, "weights": list}
    parts = {name: value for name, value in told.items() if name != "change"}
    wanted = {one.name for one in fields(kind)}
    if not set(parts) <= wanted or not all(type(value) is types[name] for name, value in parts.items()):
        raise RegardError(f"{dict(parts)} is not what the change {told['change']!r} takes.", f"It takes {wanted}.")
    if isinstance(parts.get("weights"), list) and not all(type(one) in (int, float) for one in parts["weights"]):
        raise RegardError("Weights are numbers.", "Give a number for each token that is looked at.")
    try:
        return kind(**parts)
    except TypeError:
        raise RegardError(f"{dict(parts)} is too little for {told['change']!r}.", f"It takes {wanted}.") from None


def _told(outcome: Outcome, shown: Mapping[str, Any] | None) -> dict[str, Any]:
    told: dict[str, Any] = {
        "text": outcome.text,
        "logprob": outcome.logprob,
        "steps": [
            {"token": one.token, "probability": one.probability, "likeliest": list(one.likeliest.items())}
            for one in outcome.steps
        ],
        "map": None,
    }
    one = None if shown is None else outcome.look.maps.get(str(shown.get("attention")))
    if one is not None:
        head = shown.get("head") if shown is not None else None
        weights = one.weights[head] if type(head) is int and 0 <= head < len(one.weights) else one.weights.mean(0)
        told["map"] = {"rows": one.rows, "columns": one.columns, "weights": weights.tolist()}
    return told

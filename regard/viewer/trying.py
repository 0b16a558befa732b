"""Trying: what becomes of the output if a part of a model is switched off, or looks elsewhere (see changes.py)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import Recorded
from regard.attention.exact_weights import Chosen, resolve_indices
from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.folder import ImageModel, LanguageModel, TextEncoder, Translator
from regard.folder.pictures import Picture
from regard.layers.packed import Packed, pack
from regard.viewer.changes import (
    CHANGES,
    Change,
    MaskOff,
    RowSet,
    fitted,
    tried,
)
from regard.viewer.looking import Look, look
from regard.viewer.overlays import ImageLook

# So many of the likeliest are named.
LIKELIEST = 5
# So many tokens a language model goes on with.
CONTINUED = 12


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
        return _labelled(seen.probabilities, seen) if seen.probabilities else Outcome("", None, _areas(seen), seen)
    if isinstance(bundle, Translator):
        if target is None:
            target = writer.translate([source], prefixes=[prefix] if prefix else None)[0][0].text
        return _forced(bundle, look(bundle, source, target), source, target)
    if isinstance(bundle, LanguageModel):
        text = source + prefix
        written = writer.generate([text], DecodeConfig(method="greedy", max_len=CONTINUED))[0][0].text
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


def _areas(seen: ImageLook) -> list[Step]:
    """Of a segmenter: how many of the pixels have which label."""
    labels, output = seen.run.model.config.labels, seen.run.output
    if seen.run.model.config.head != "segment" or not isinstance(output, Tensor):
        return []
    shares = torch.bincount(output[0].argmax(0).flatten(), minlength=len(labels)) / output[0, 0].numel()
    best, which = shares.topk(min(LIKELIEST, len(labels)))
    return [Step("pixels", None, {labels[i]: share for i, share in zip(which.tolist(), best.tolist())})]


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
            keys = fitted(one, found.shape[3], growing=True) if one.row < found.shape[2] else None
            if keys is not None:
                found[:, one.head, one.row] = torch.tensor(keys, dtype=found.dtype, device=found.device)
        chosen = resolve_indices(heads, found.shape[1], "head")
        return found[:, chosen][:, :, resolve_indices(queries, found.shape[2], "query")]


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


def answer(bundle: Any, request: Mapping[str, Any], picture: Picture | Tensor | None = None) -> dict[str, Any]:
    """A request of a page, and what it shows of the answer.

    A request has `source`, and perhaps `target`, `prefix`, `instead` (another sentence), `changes` (each with its name
    as `change`, and its parts) and `shown`: the attention whose weights are wanted, and its head ("mean": of all).
    Of a picture, which whoever asks must not choose, the source is only a name.
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
    given: Any = (source or "") if picture is None else picture
    both = try_it(bundle, given, changes, target, prefix or "", instead=instead)
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

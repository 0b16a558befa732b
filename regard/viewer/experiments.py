"""Experiments: the output of a model with and without interventions (see interventions.py)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import Recorded
from regard.attention.exact_weights import Selection, resolve_indices
from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.layers.packed import Packed, pack
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, Translator
from regard.pipelines.image_model import ImageLike
from regard.viewer.image_look import ImageLook
from regard.viewer.interventions import (
    INTERVENTIONS,
    Intervention,
    RemoveMask,
    SetAttentionRow,
    apply_interventions,
    fit_weights,
    wrong_row_length,
)
from regard.viewer.text_look import Look, look

# Alternatives listed per prediction.
TOP_K = 5
# Tokens that a language model generates.
CONTINUATION_TOKENS = 12


class PredictionStep(NamedTuple):
    """A prediction: the token (or label), its probability, and the most likely alternatives."""

    token: str
    probability: float | None
    likeliest: dict[str, float]


@dataclass(frozen=True, eq=False)
class Outcome:
    """The output of a model: a translation, a continuation or a label (empty for an encoder without a head).

    `steps` are the predictions: the tokens of the translation; the tokens of the text and the one after it; or the
    label. `logprob` is the log-probability of the translation or the text.
    """

    text: str
    logprob: float | None
    steps: list[PredictionStep] = field(repr=False)
    look: Look | ImageLook = field(repr=False)
    """the attention maps"""


class Experiment(NamedTuple):
    """The output of a model without and with the interventions."""

    before: Outcome
    after: Outcome


@torch.no_grad()
def run_experiment(
    pipeline: Translator | TextGenerator | TextEncoder | ImageModel,
    source: str | ImageLike,
    interventions: Sequence[Intervention] = (),
    target: str | None = None,
    prefix: str = "",
    *,
    instead: str | ImageLike | None = None,
) -> Experiment:
    """Run a model on a text or an image without and with interventions.

    A translator scores the `target`, if one is given; otherwise the model with interventions translates, beginning with
    `prefix`. For a language model the prefix is appended to the text. `instead` replaces the input of the second run.

    >>> experiment = run_experiment(translator, "The cat sleeps.", [AblateHead("decoder.1.cross", 0)])  # doctest: +SKIP
    >>> experiment.before.text, experiment.after.text  # doctest: +SKIP
    ('Le chat dort.', 'Le chat le chat.')
    """
    generates = isinstance(pipeline, Translator | TextGenerator)
    if prefix and (not generates or target is not None):
        raise RegardError("A prefix needs a model that generates text, and no target.", "Leave out the prefix.")
    if target is not None and not isinstance(pipeline, Translator):
        raise RegardError("Only a translator takes a target.", "Leave out the target.")
    if isinstance(pipeline, Translator) and pipeline.ensemble_members:
        pipeline = replace(pipeline, ensemble_members=[])  # interventions name modules of one model
    before = _outcome(pipeline, source, target, "", pipeline)
    rows = [one for one in interventions if isinstance(one, SetAttentionRow)]
    # These change the states of earlier tokens at every step, so cached keys and values cannot be used.
    without_cache = generates and any(isinstance(one, SetAttentionRow | RemoveMask) for one in interventions)
    generator: Any = pipeline
    if without_cache:
        generator = replace(pipeline, model=_UncachedDecoder(pipeline.model))  # type: ignore[arg-type]
    with apply_interventions(pipeline.model, interventions):
        _check_rows(rows, before.look if instead is None else None)
        after = _outcome(pipeline, source if instead is None else instead, target, prefix, generator)
    return Experiment(before, replace(after, look=_with_rows(after.look, rows)) if rows else after)


def _outcome(pipeline: Any, source: Any, target: str | None, prefix: str, generator: Any) -> Outcome:
    if isinstance(pipeline, ImageModel):
        seen = look(pipeline, source)
        return _label_outcome(seen.probabilities, seen) if seen.probabilities else Outcome("", None, _areas(seen), seen)
    if isinstance(pipeline, Translator):
        if target is None:
            target = generator.translate([source], prefixes=[prefix] if prefix else None)[0][0].text
        return _target_outcome(pipeline, look(pipeline, source, target), source, target)
    if isinstance(pipeline, TextGenerator):
        text = source + prefix
        config = DecodeConfig(method="greedy", max_len=CONTINUATION_TOKENS)
        continuation = generator.generate([text], config)[0][0].text
        return _text_outcome(pipeline, look(pipeline, text), pipeline.encode_prompt(text), continuation)
    seen = look(pipeline, source)
    if pipeline.model.config.head == "classify":
        return _label_outcome(pipeline.classify([source])[0].probabilities, seen)
    if pipeline.model.config.head != "mask":
        return Outcome("", None, [], seen)
    ids = pipeline.encode_text(source)
    probabilities = pipeline.model(pipeline.pack([ids])).float().softmax(-1)
    return Outcome("", None, _steps(pipeline.tokenizer, probabilities, ids), seen)


def _label_outcome(probabilities: Mapping[str, float], seen: Look | ImageLook) -> Outcome:
    best = dict(sorted(probabilities.items(), key=lambda one: -one[1])[:TOP_K])
    if not best:
        return Outcome("", None, [], seen)
    label, probability = next(iter(best.items()))
    return Outcome(label, None, [PredictionStep(label, probability, best)], seen)


def _areas(seen: ImageLook) -> list[PredictionStep]:
    """For a segmenter: the fraction of pixels per label."""
    labels, output = seen.run.model.config.labels, seen.run.output
    if seen.run.model.config.head != "segment" or not isinstance(output, Tensor):
        return []
    shares = torch.bincount(output[0].argmax(0).flatten(), minlength=len(labels)) / output[0, 0].numel()
    best, indices = shares.topk(min(TOP_K, len(labels)))
    return [PredictionStep("pixels", None, {labels[i]: share for i, share in zip(indices.tolist(), best.tolist())})]


def _target_outcome(translator: Translator, seen: Look, source: str, target: str) -> Outcome:
    pair = translator.encode_source(source), translator.encode_target(target)
    targets = [*translator.special.make_decoder_input(pair[1])[1:], translator.special.eos]
    probabilities = translator.model(*translator.teacher_forced([pair])).float().softmax(-1)
    steps = _steps(translator.target_tokenizer, probabilities, targets)
    return Outcome(target, _logprob(probabilities, targets), steps, seen)


def _text_outcome(language_model: TextGenerator, seen: Look, ids: list[int], continuation: str) -> Outcome:
    probabilities = language_model.model(language_model.pack([ids])).float().softmax(-1)
    steps = _steps(language_model.tokenizer, probabilities, ids[1:])
    return Outcome(continuation, _logprob(probabilities, ids[1:]), steps, seen)


def _logprob(probabilities: Float[Tensor, "T V"], targets: Sequence[int]) -> float:
    return float(probabilities.double()[range(len(targets)), list(targets)].log().sum())


def _steps(tokenizer: Tokenizer, probabilities: Float[Tensor, "T V"], targets: Sequence[int]) -> list[PredictionStep]:
    """One step per row; rows beyond the last target have no token."""
    names = tokenizer.vocabulary

    def token_text(token_id: int) -> str:
        return tokenizer.decode([token_id]) or names[token_id]

    steps = []
    best, indices = probabilities.topk(min(TOP_K, probabilities.shape[1]))
    for i, (top_probabilities, ids) in enumerate(zip(best.tolist(), indices.tolist())):
        likeliest: dict[str, float] = {}
        for token_id, probability in zip(ids, top_probabilities):
            # Two tokens may decode to the same text, with and without a space before it.
            text = token_text(token_id)
            likeliest[text if text not in likeliest else names[token_id]] = probability
        if i < len(targets):
            steps.append(PredictionStep(token_text(targets[i]), float(probabilities[i, targets[i]]), likeliest))
        else:
            steps.append(PredictionStep("", None, likeliest))
    return steps


def _check_rows(rows: Sequence[SetAttentionRow], seen: Look | ImageLook | None) -> None:
    """Raise an error for a row index or a number of weights that does not match the attention map."""
    for one in rows:
        shown = seen.maps.get(one.attention) if seen is not None else None
        if shown is None:
            continue
        if not 0 <= one.row < len(shown.rows):
            raise RegardError(
                f"{one.attention} has no row {one.row}.", f"Choose a row from 0 to {len(shown.rows) - 1}."
            )
        if len(one.weights) != len(shown.columns):
            raise wrong_row_length(one, len(shown.columns))


@dataclass(eq=False)
class _RecordedWithRows(Recorded):
    """A recording in which some rows of weights are replaced."""

    rows: Sequence[SetAttentionRow] = ()

    @torch.no_grad()
    def weights(self, heads: Selection = None, queries: Selection = None) -> Float[Tensor, "B h t S"]:
        weights = super().weights().clone()
        for one in self.rows:
            row = fit_weights(one, weights.shape[3], is_growing=True) if one.row < weights.shape[2] else None
            if row is not None:
                weights[:, one.head, one.row] = torch.tensor(row, dtype=weights.dtype, device=weights.device)
        head_indices = resolve_indices(heads, weights.shape[1], "head")
        return weights[:, head_indices][:, :, resolve_indices(queries, weights.shape[2], "query")]


def _with_rows(seen: Any, rows: Sequence[SetAttentionRow]) -> Any:
    """The look with the replaced rows in its maps."""
    maps = {}
    for name, one in seen.maps.items():
        replaced = [row for row in rows if row.attention == name]
        recorded = {part.name: getattr(one.recorded, part.name) for part in fields(Recorded)}
        maps[name] = replace(one, recorded=_RecordedWithRows(**recorded, rows=replaced)) if replaced else one
    return replace(seen, maps=maps)


@dataclass
class _UncachedState:
    """Decoding state: the ids of the (B, K) hypotheses, and the sources of an encoder-decoder."""

    sources: list[list[int]] | None
    ids: list[list[int]]
    beams: int = 1
    has_started: bool = False


class _UncachedDecoder(nn.Module):
    """Decoding without a cache: every step runs the model on full sequences, so that all rows are computed again."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def start(self, source: Packed) -> _UncachedState:
        sequences = [one.tolist() for one in source.ids.split(source.offsets.lengths.tolist())]
        if hasattr(self.model, "encode"):  # encoder-decoder; otherwise the output continues the source
            return _UncachedState(sequences, [[] for _ in sequences])
        return _UncachedState(None, sequences)

    def step(self, state: _UncachedState, last: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "B K V"], _UncachedState]:
        texts = state.ids
        if state.sources is not None or state.has_started:
            texts = [[*one, token] for one, token in zip(texts, last.flatten().tolist())]
        packed = pack(texts).to(last.device)
        inputs = [packed]
        if state.sources is not None:
            inputs = [pack([one for one in state.sources for _ in range(state.beams)]).to(last.device), packed]
        logits = self.model(*inputs)[packed.offsets.starts[1:].long() - 1]
        return logits.unflatten(0, last.shape), _UncachedState(state.sources, texts, state.beams, True)

    def reorder(self, state: _UncachedState, indices: Int[Tensor, "B2 K2"]) -> _UncachedState:
        rows = indices.flatten().tolist()
        sources = state.sources
        if sources is not None:
            sources = [sources[i // state.beams] for i in indices[:, 0].tolist()]
        return _UncachedState(sources, [state.ids[i] for i in rows], indices.shape[1], state.has_started)


# Requests of a page, as JSON


def handle_experiment(
    pipeline: Any, request: Mapping[str, Any], image: ImageLike | Tensor | None = None
) -> dict[str, Any]:
    """Run the experiment that a page requests; returns the two outcomes as JSON.

    A request has `source`, and optionally `target`, `prefix`, `instead` (another sentence), `changes` (interventions,
    each with its name as `change` and its fields) and `shown`: the attention and head ("mean" for all) whose weights
    the response contains. With an `image`, the source is only its name: a page cannot open files.
    """
    changes, shown = request.get("changes") or [], request.get("shown")
    if not isinstance(changes, list) or not all(isinstance(one, dict) for one in changes):
        raise RegardError("`changes` must be a list of objects.", "Send a list of interventions.")
    if shown is not None and not isinstance(shown, dict):
        raise RegardError("`shown` must be an object.", "Send the names of an attention and a head.")
    interventions = [parse_intervention(one) for one in changes]
    texts = {name: request.get(name) for name in ("source", "target", "prefix", "instead")}
    for name, text in texts.items():
        if not isinstance(text, str) and not (text is None and name != "source"):
            raise RegardError(f"The request has no valid `{name}`.", "Send a string.")
        if text is not None and re.search("[\ud800-\udfff]", text):
            raise RegardError(f"`{name}` contains an unpaired surrogate.", "Send valid Unicode.")
    source, target, prefix, instead = texts.values()
    model_input: Any = (source or "") if image is None else image
    experiment = run_experiment(pipeline, model_input, interventions, target, prefix or "", instead=instead)
    return {"before": _outcome_header(experiment.before, shown), "after": _outcome_header(experiment.after, shown)}


def parse_intervention(request: Mapping[str, Any]) -> Intervention:
    """The intervention that a request describes.

    >>> parse_intervention({"change": "head", "attention": "decoder.0.cross", "head": 1})
    AblateHead(attention='decoder.0.cross', head=1)
    """
    name = request.get("change")
    kind = INTERVENTIONS.get(str(name))
    if kind is None:
        raise RegardError(f"Unknown intervention {name!r}.", f"Choose one of {', '.join(INTERVENTIONS)}.")
    types: dict[str, Any] = {"attention": str, "layer": str, "head": int, "row": int, "weights": list}
    values = {field_name: value for field_name, value in request.items() if field_name != "change"}
    expected = [one.name for one in fields(kind)]
    hint = f"Expected fields: {', '.join(expected) or 'none'}."
    if not set(values) <= set(expected) or not all(type(value) is types[key] for key, value in values.items()):
        raise RegardError(f"Invalid fields for the intervention {name!r}: {values}.", hint)
    if isinstance(values.get("weights"), list) and not all(type(one) in (int, float) for one in values["weights"]):
        raise RegardError("The weights must be numbers.", "Send one number per key.")
    try:
        return kind(**values)
    except TypeError:
        raise RegardError(f"Missing fields for the intervention {name!r}: {values}.", hint) from None


def _outcome_header(outcome: Outcome, shown: Mapping[str, Any] | None) -> dict[str, Any]:
    header: dict[str, Any] = {
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
        header["map"] = {"rows": one.rows, "columns": one.columns, "weights": weights.tolist()}
    return header

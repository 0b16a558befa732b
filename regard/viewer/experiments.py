"""Experiments: the output of a model with and without interventions (see interventions.py)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import Recorded
from regard.attention.exact_weights import Selection, resolve_indices
from regard.errors import RegardError
from regard.layers.packed import Packed, pack
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, Translator
from regard.pipelines.image_model import ImageLike
from regard.pipelines.pipeline import DecodingPipeline
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
from regard.viewer.outcomes import Outcome, compute_outcome, outcome_header
from regard.viewer.text_look import Look, look, look_at_output


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
    context: str | None = None,
) -> Experiment:
    """Run a model on a text or an image without and with interventions.

    A translator scores the `target`, if one is given; otherwise the model with interventions translates, beginning with
    `prefix`. For a language model the prefix is appended to the text. `instead` replaces the input of the second run;
    `context` is the text that a question is about.

    >>> experiment = run_experiment(translator, "The cat sleeps.", [AblateHead("decoder.1.cross", 0)])  # doctest: +SKIP
    >>> experiment.before.text, experiment.after.text  # doctest: +SKIP
    ('Le chat dort.', 'Le chat le chat.')
    """
    generates = isinstance(pipeline, DecodingPipeline)
    if prefix and (not generates or target is not None):
        raise RegardError("A prefix needs a model that generates text, and no target.", "Leave out the prefix.")
    if target is not None and "target" not in pipeline.fields:
        raise RegardError("Only a translator takes a target.", "Leave out the target.")
    if getattr(pipeline, "ensemble_members", ()):
        # Interventions name modules of one model.
        pipeline = replace(pipeline, ensemble_members=[])  # type: ignore[arg-type]
    before = _outcome(pipeline, source, target, "", pipeline, context)
    rows = [intervention for intervention in interventions if isinstance(intervention, SetAttentionRow)]
    # These change the states of earlier tokens at every step, so cached keys and values cannot be used.
    without_cache = generates and any(
        isinstance(intervention, SetAttentionRow | RemoveMask) for intervention in interventions
    )
    generator: Any = pipeline
    if without_cache:
        generator = replace(pipeline, model=_UncachedDecoder(pipeline.model))  # type: ignore[arg-type]
    with apply_interventions(pipeline.model, interventions):
        _check_rows(rows, before.look if instead is None else None)
        after = _outcome(pipeline, source if instead is None else instead, target, prefix, generator, context)
    return Experiment(before, replace(after, look=_with_rows(after.look, rows)) if rows else after)


def _outcome(
    pipeline: Any, source: Any, target: str | None, prefix: str, generator: Any, context: str | None
) -> Outcome:
    """The outcome of the model, which may have interventions; `generator` is the model that generates the output."""
    if "target" in pipeline.fields and target is None:
        best = generator.translate([source], prefixes=[prefix] if prefix else None)[0][0]
        return compute_outcome(look_at_output(pipeline, source, best), pipeline, generator)
    result = look(pipeline, source + prefix if prefix else source, target, context=context)
    return compute_outcome(result, pipeline, generator)


def _check_rows(rows: Sequence[SetAttentionRow], result: Look | ImageLook | None) -> None:
    """Raise an error for a row index or a number of weights that does not match the attention map."""
    for row in rows:
        shown = result.maps.get(row.attention) if result is not None else None
        if shown is None:
            continue
        if not 0 <= row.row < len(shown.rows):
            raise RegardError(
                f"{row.attention} has no row {row.row}.", f"Choose a row from 0 to {len(shown.rows) - 1}."
            )
        if len(row.weights) != len(shown.columns):
            raise wrong_row_length(row, len(shown.columns))


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


def _with_rows(result: Any, rows: Sequence[SetAttentionRow]) -> Any:
    """The look with the replaced rows in its maps."""
    maps = {}
    for name, one in result.maps.items():
        replaced = [row for row in rows if row.attention == name]
        recorded = {part.name: getattr(one.recorded, part.name) for part in fields(Recorded)}
        maps[name] = replace(one, recorded=_RecordedWithRows(**recorded, rows=replaced)) if replaced else one
    return replace(result, maps=maps)


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
        sequences = [ids.tolist() for ids in source.ids.split(source.offsets.lengths.tolist())]
        if hasattr(self.model, "encode"):  # encoder-decoder; otherwise the output continues the source
            return _UncachedState(sequences, [[] for _ in sequences])
        return _UncachedState(None, sequences)

    def step(self, state: _UncachedState, last: Int[Tensor, "B K"]) -> tuple[Float[Tensor, "B K V"], _UncachedState]:
        texts = state.ids
        if state.sources is not None or state.has_started:
            texts = [[*text, token] for text, token in zip(texts, last.flatten().tolist())]
        packed = pack(texts).to(last.device)
        inputs = [packed]
        if state.sources is not None:
            inputs = [pack([source for source in state.sources for _ in range(state.beams)]).to(last.device), packed]
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

    A request has `source`, and optionally `target`, `prefix`, `instead` (another sentence), `context` (of a question),
    `changes` (interventions, each with its name as `change` and its fields) and `shown`: the attention and head ("mean"
    for all) whose weights the response contains. With an `image`, the source is only its name: a page cannot open
    files.
    """
    changes, shown = request.get("changes") or [], request.get("shown")
    if not isinstance(changes, list) or not all(isinstance(change, dict) for change in changes):
        raise RegardError("`changes` must be a list of objects.", "Send a list of interventions.")
    if shown is not None and not isinstance(shown, dict):
        raise RegardError("`shown` must be an object.", "Send the names of an attention and a head.")
    interventions = [parse_intervention(change) for change in changes]
    texts = {name: request.get(name) for name in ("source", "target", "prefix", "instead", "context")}
    for name, text in texts.items():
        if not isinstance(text, str) and not (text is None and name != "source"):
            raise RegardError(f"The request has no valid `{name}`.", "Send a string.")
        if text is not None and re.search("[\ud800-\udfff]", text):
            raise RegardError(f"`{name}` contains an unpaired surrogate.", "Send valid Unicode.")
    source, target, prefix, instead, context = texts.values()
    model_input: Any = (source or "") if image is None else image
    more: dict[str, Any] = dict(instead=instead, context=context)
    experiment = run_experiment(pipeline, model_input, interventions, target, prefix or "", **more)
    before, after = experiment
    return {
        "before": _response_header(before, shown),
        "after": _response_header(after, shown),
        # Cosine of the embeddings of an encoder without a head.
        "similarity": None if before.vector is None or after.vector is None else float(before.vector @ after.vector),
    }


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


def _response_header(outcome: Outcome, shown: Mapping[str, Any] | None) -> dict[str, Any]:
    header: dict[str, Any] = {**outcome_header(outcome), "map": None}
    one = None if shown is None else outcome.look.maps.get(str(shown.get("attention")))
    if one is not None:
        head = shown.get("head") if shown is not None else None
        weights = one.weights[head] if type(head) is int and 0 <= head < len(one.weights) else one.weights.mean(0)
        header["map"] = {"rows": one.rows, "columns": one.columns, "weights": weights.tolist()}
    return header

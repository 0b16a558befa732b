"""Explanations of a page: computed in advance for a saved page without its model, otherwise on request."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from regard.attention.recording import KINDS
from regard.errors import RegardError
from regard.pipelines import vocab_sizes
from regard.viewer.explanations.attribution import attribution_values, check_method
from regard.viewer.explanations.head_effects import compute_head_effects, module_name
from regard.viewer.explanations.logit_lens import (
    LENS_TOP_K,
    check_has_lens,
    compute_logit_lens,
    lens_steps,
)
from regard.viewer.explanations.output import (
    ExplainedOutput,
    ExplainedStep,
    column_name,
    explain_output,
    has_label_row,
    model_of,
)
from regard.viewer.image_look import ImageLook
from regard.viewer.model_run import blocks_of, inner_bytes
from regard.viewer.outcomes import Outcome
from regard.viewer.text_look import Look

# Multiplications, and numbers in the page, up to which a measure is computed in advance by default: a few seconds, and
# less than 1 MB.
MAX_MULTIPLICATIONS, MAX_NUMBERS = 2e11, 40_000
# Multiplications that take as long as the softmax of one weight.
SOFTMAX_COST = 32
# Positions of the logit lens in a page: the last ones.
MAX_LENS_POSITIONS = 64
# Tokens of the inputs in a request.
MAX_REQUESTED_TOKENS = 1 << 16


def explanation_header(look: Look | ImageLook, outcome: Outcome | None, include: bool | None) -> dict[str, Any] | None:
    """The explained output of a scene and its measures; None if there is nothing to explain.

    `include`: compute all measures in advance (True), those that are cheap (None), or none (False).
    """
    try:
        output = explain_output(look, outcome)
    except RegardError:
        return None
    header: dict[str, Any] = {
        "inputs": [list(tokens) for tokens in output.inputs],
        "steps": [list(step) for step in output.steps],
        "tokens": output.tokens,
        "measures": _measures(look),
    }
    for measure in header["measures"]:
        multiplications, numbers = _costs(look, output, measure)
        is_cheap = multiplications <= MAX_MULTIPLICATIONS and numbers <= MAX_NUMBERS
        header[measure] = MEASURES[measure](look, output) if include or (include is None and is_cheap) else None
    return header


def _measures(look: Look | ImageLook) -> list[str]:
    """The measures that the model supports. Attributions of an image are part of its labels."""
    measures = ["effects"] if look.maps else []
    try:
        check_has_lens(model_of(look))
        measures.append("lens")
    except RegardError:
        pass
    return measures if isinstance(look, ImageLook) else [*measures, "attribution"]


def _costs(look: Look | ImageLook, output: ExplainedOutput, measure: str) -> tuple[float, int]:
    """Multiplications that a measure takes, and how many numbers it has."""
    model, attentions = model_of(look), look.maps.values()
    tokens, steps = sum(len(ids) for one in output.inputs for ids in one) or model.config.max_len, len(output.steps)
    weights = sum(
        attention.heads
        * len(attention.rows)
        * len(attention.columns)
        * (2 * attention.recorded.calls[0].q.shape[-1] + SOFTMAX_COST)
        for attention in attentions
    )
    layers = tokens * inner_bytes(model) / 4 + len(output.inputs) * weights
    logits = tokens * model.output.weight.numel()
    if measure == "effects":
        heads = sum(attention.heads for attention in attentions)
        return heads * (layers + logits), heads * steps
    if measure == "lens":
        depth, positions = 1 + len(blocks_of(model)), min(MAX_LENS_POSITIONS, len(lens_steps(look, output)[0]))
        return layers + depth * logits, depth * positions * (1 + 2 * LENS_TOP_K)
    # One backward pass, which takes as long as two forward passes, per step of an input; inputs form batches.
    per_input = max(Counter(step.sequence for step in output.steps).values())
    return (1 + 2 * per_input) * (layers + logits), steps * max(sum(map(len, one)) for one in output.inputs)


def _rounded(x: np.ndarray) -> Any:
    """Numbers with six significant digits, as nested lists."""
    return [_rounded(row) for row in x] if x.ndim else float(f"{float(x):.6g}")


def _effects(look: Look | ImageLook, output: ExplainedOutput, attention: str | None = None) -> dict[str, Any]:
    """Effect of each head on each step, by attention."""
    effects = compute_head_effects(look, output, None if attention is None else [attention])
    return {name: _rounded(values) for name, values in effects.by_attention.items()}


def _lens(look: Look | ImageLook, output: ExplainedOutput) -> dict[str, Any]:
    lens = compute_logit_lens(look, output, last=MAX_LENS_POSITIONS)
    return {
        "layers": len(lens.layers),
        "tokens": lens.tokens,
        "targets": lens.targets,
        "own": _rounded(lens.probabilities),
        "columns": lens.columns.tolist(),
        "probabilities": _rounded(lens.top_probabilities),
        "names": {str(column): name for column, name in lens.names.items()},
    }


def _attribution(look: Look | ImageLook, output: ExplainedOutput, method: str = "gradient") -> dict[str, Any]:
    assert isinstance(look, Look)
    return {side: _rounded(values) for side, values in attribution_values(look, output, method).items()}


MEASURES: dict[str, Callable[..., dict[str, Any]]] = {"effects": _effects, "lens": _lens, "attribution": _attribution}
"""measures by their names in a scene and in requests"""


def handle_explanation(look: Look | ImageLook, request: Mapping[str, Any]) -> dict[str, Any]:
    """Compute a measure that a page requests: `measure`, `inputs` and `steps` (see `ExplainedOutput`), and the
    `attention` of effects or the `method` of attributions.

    The look provides the model and, of an image model, the image.
    """
    measure, attention = request.get("measure"), request.get("attention")
    if measure not in MEASURES or (isinstance(look, ImageLook) and measure == "attribution"):
        raise RegardError(f"Unknown measure {measure!r}.", f"Choose one of {', '.join(MEASURES)}.")
    if measure == "effects":
        modules = dict(model_of(look).named_modules())
        name = module_name(model_of(look), attention) if isinstance(attention, str) else ""
        if getattr(modules.get(name), "kind", None) not in KINDS:
            raise RegardError(f"The model has no attention {attention!r}.", "Send the name of an attention module.")
    check_method(method := request.get("method", "gradient"))
    output = _read_output(look, request)
    options = {"effects": [attention], "attribution": [method]}.get(measure, [])
    return {measure: MEASURES[measure](look, output, *options)}


def _read_output(look: Look | ImageLook, request: Mapping[str, Any]) -> ExplainedOutput:
    """The output of a request, checked: ids within the vocabulary, steps within the output."""
    error = RegardError("Invalid request for an explanation.", "Send the inputs and steps of the scene.")
    inputs, steps = request.get("inputs"), request.get("steps")
    if not _is_list(inputs, list) or not inputs or not _is_list(steps, list) or not steps:
        raise error
    config = model_of(look).config
    if isinstance(look, ImageLook):
        sides, columns = [], len(config.labels)
    else:
        sides = list(vocab_sizes(config))
        columns = len(getattr(config, "labels", ())) or sides[-1]
    limit = None if isinstance(look, ImageLook) else look.pipeline.length_limit
    for one in inputs:
        valid = len(one) == len(sides) and all(_is_list(ids, int) and ids for ids in one)
        if not valid or any(not 0 <= i < size for ids, size in zip(one, sides) for i in ids):
            raise error
        if limit is not None and any(len(ids) > limit for ids in one):
            raise error
    if sum(len(ids) for one in inputs for ids in one) > MAX_REQUESTED_TOKENS or len(steps) > MAX_REQUESTED_TOKENS:
        raise error
    is_label = has_label_row(look)
    for step in steps:
        if not _is_list(step, int) or len(step) != 3 or min(step) < 0 or step[0] >= len(inputs) or step[2] >= columns:
            raise error
        if step[1] >= (1 if is_label else len(inputs[step[0]][-1])):
            raise error
    tokens = [column_name(look, step[2]) for step in steps]
    return ExplainedOutput([tuple(one) for one in inputs], [ExplainedStep(*step) for step in steps], tokens)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)

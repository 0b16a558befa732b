"""How much each input token or patch contributes to a prediction: gradient × input, integrated gradients, occlusion.

All refer to the embedding x of a token or patch, before positions are added, and the last two to zeros in its place.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import RegardError
from regard.layers.embeddings import Embedding
from regard.viewer.explanations.output import (
    ExplainedOutput,
    ExplainedStep,
    batch_size,
    explain_output,
    model_of,
    run_inputs,
    step_logprob,
)
from regard.viewer.image_look import ImageLook
from regard.viewer.text_look import Look

# Points of integrated gradients between zeros and the input: more until the values of a prediction add up to the change
# of its log-probability, with this tolerance, relative and absolute.
INTEGRATION_POINTS, TOLERANCE = (32, 128, 512), (0.05, 0.02)
logger = logging.getLogger("regard")


@dataclass(frozen=True, eq=False)
class Attribution:
    """Attribution of every prediction p to the embedding x of each input token, by a method of `METHODS`.

    "gradient" is gradient × input, Σ_e x_e ∂ log p / ∂ x_e. "integrated_gradients" has the mean of the gradients at α·x
    for α from 0 to 1, of all tokens together (Sundararajan, Taly and Yan 2017). "occlusion" is log p minus log p with
    zeros in place of x.
    """

    tokens: list[str]
    """the predicted tokens, or the label"""
    inputs: dict[str, list[str]]
    """the input tokens: of source and target, or of the text"""
    values: dict[str, Float[np.ndarray, "steps T"]]
    """attribution of each prediction to the tokens of an input; 0 for tokens after it"""


def compute_attribution(look: Look, output: ExplainedOutput | None = None, method: str = "gradient") -> Attribution:
    """Attribution of each predicted token to the input tokens.

    >>> compute_attribution(look(translator, "The cat sleeps.")).values["source"].shape  # doctest: +SKIP
    (5, 4)
    """
    check_method(method)
    output = output or explain_output(look)
    values = attribution_values(look, output, method)
    return Attribution(output.tokens, _input_labels(look, output, list(values)), values)


def check_method(method: Any) -> None:
    """Raise an error unless there is such a method."""
    if not isinstance(method, str) or method not in METHODS:
        raise RegardError(f"There is no attribution method {method!r}.", f"Choose one of {', '.join(METHODS)}.")


def attribution_values(
    look: Look, output: ExplainedOutput, method: str = "gradient"
) -> dict[str, Float[np.ndarray, "steps T"]]:
    """The values of an attribution, which depend only on the model of the look."""
    sides = look.pipeline.sides
    values = {
        side: np.zeros((len(output.steps), max(len(one[i]) for one in output.inputs))) for i, side in enumerate(sides)
    }
    for step, side, tokens, found in METHODS[method](look, output):
        values[sides[side]][step, tokens] = found
    return values


def compute_image_attribution(
    look: ImageLook, label: str | None = None, method: str = "gradient"
) -> Float[np.ndarray, "rows columns"]:
    """Attribution of a label, by default the most likely one, to the patches.

    >>> compute_image_attribution(look(model, "photo.jpg"), "cat").shape  # doctest: +SKIP
    (14, 14)
    """
    check_method(method)
    if look.label is None:
        raise RegardError(
            f"Attribution needs an image classifier with labels; this model has the head {look.model.config.head}.",
            "Use a model with labels.",
        )
    step = ExplainedStep(0, 0, look.label_index(look.label if label is None else label))
    values = np.zeros(look.grid[0] * look.grid[1])
    for _, _, patches, found in METHODS[method](look, ExplainedOutput([()], [step], [""])):
        values[patches] = found
    return values.reshape(look.grid)


_Values = Iterator[tuple[int, int, slice, np.ndarray]]
"""index of a step, side of its input, tokens of this side (or patches), and their values"""


def _gradients(look: Look | ImageLook, output: ExplainedOutput, scale: float = 1.0) -> _Values:
    """Embeddings times their gradients, at embeddings that are multiplied by `scale`, summed over the width."""
    size = batch_size(look, output)
    for first in range(0, len(output.inputs), size):
        inputs = output.inputs[first : first + size]
        logits, leaves = _run_scaled(look, inputs, [scale] * len(_lengths(look, inputs[0])), needs_grad=True)
        lengths = list(zip(*(_lengths(look, tokens) for tokens in inputs)))
        # Inputs are independent: the gradients of one step of each are computed together.
        rounds: dict[int, list[tuple[int, ExplainedStep]]] = {}
        counts: dict[int, int] = {}
        for i, step in enumerate(output.steps):
            if first <= step.sequence < first + len(inputs):
                counts[step.sequence] = counts.get(step.sequence, -1) + 1
                rounds.setdefault(counts[step.sequence], []).append((i, step))
        for chosen in rounds.values():
            with torch.inference_mode(False):
                with torch.enable_grad():
                    total = torch.stack(
                        [step_logprob(look, logits[one.sequence - first], one) for _, one in chosen]
                    ).sum()
                gradients = torch.autograd.grad(total, leaves, retain_graph=True)
            for side, (gradient, leaf) in enumerate(zip(gradients, leaves)):
                products = (gradient * leaf.detach() / scale).sum(-1).flatten().cpu().split(lengths[side])
                for i, step in chosen:
                    product = products[step.sequence - first]
                    yield i, side, slice(len(product)), product.numpy()


def _integrated_gradients(look: Look | ImageLook, output: ExplainedOutput) -> _Values:
    """The mean of the gradients on the way from zeros to the embeddings.

    Most of its points are near zeros, where a norm of the embeddings changes most: the midpoint rule in u, for α = u³.
    """
    changes = _logprobs(look, output, 1.0) - _logprobs(look, output, 0.0)
    for count in INTEGRATION_POINTS:
        means: dict[tuple[int, int], np.ndarray] = {}
        for u in (np.arange(count) + 0.5) / count:
            for step, side, _, values in _gradients(look, output, u**3):
                means[step, side] = means.get((step, side), 0) + 3 * u**2 * values / count
        errors = changes.copy()
        for (step, _), values in means.items():
            errors[step] -= values.sum()
        if (abs(errors) <= TOLERANCE[0] * abs(changes) + TOLERANCE[1]).all():
            break
    else:
        logger.warning(
            "Integrated gradients: the values of a prediction add up to its change of log p only within %.2g.",
            abs(errors).max(),
        )
    for (step, side), values in means.items():
        yield step, side, slice(len(values)), values


def _logprobs(look: Look | ImageLook, output: ExplainedOutput, scale: float) -> Float[np.ndarray, "steps"]:
    """The log-probability of each prediction, at embeddings that are multiplied by `scale`."""
    found, size = np.zeros(len(output.steps)), batch_size(look, output)
    for first in range(0, len(output.inputs), size):
        inputs = output.inputs[first : first + size]
        logits, _ = _run_scaled(look, inputs, [scale] * len(_lengths(look, inputs[0])), needs_grad=False)
        for i, step in enumerate(output.steps):
            if first <= step.sequence < first + len(inputs):
                found[i] = step_logprob(look, logits[step.sequence - first], step).item()
    return found


def _occlusion(look: Look | ImageLook, output: ExplainedOutput) -> _Values:
    """Log-probabilities minus those without a token. Copies of an input, each without one token, form a batch."""
    size = batch_size(look, output)
    for sequence, tokens in enumerate(output.inputs):
        lengths = _lengths(look, tokens)
        steps = [(i, step) for i, step in enumerate(output.steps) if step.sequence == sequence]
        (plain,), _ = _run_scaled(look, [tokens], [1.0] * len(lengths), needs_grad=False)
        for side, length in enumerate(lengths):
            for kept in (1 - torch.eye(length)).split(size):
                factors: list[Tensor | float] = [1.0] * len(lengths)
                factors[side] = kept
                logits, _ = _run_scaled(look, [tokens] * len(kept), factors, needs_grad=False)
                first = int(kept[0].argmin())
                for i, step in steps:
                    without = torch.stack([step_logprob(look, rows, step) for rows in logits])
                    values = (step_logprob(look, plain, step) - without).cpu().numpy()
                    yield i, side, slice(first, first + len(kept)), values


METHODS: dict[str, Callable[..., _Values]] = {
    "gradient": _gradients,
    "integrated_gradients": _integrated_gradients,
    "occlusion": _occlusion,
}


def _lengths(look: Look | ImageLook, one: tuple[list[int], ...]) -> list[int]:
    """Number of tokens of each side of an input, or of patches."""
    return [look.grid[0] * look.grid[1]] if isinstance(look, ImageLook) else [len(ids) for ids in one]


def _run_scaled(
    look: Look | ImageLook, inputs: list[tuple[list[int], ...]], factors: Sequence[Tensor | float], needs_grad: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The logits of inputs whose embeddings are multiplied by a factor per side (a number, or one per token), and these
    embeddings as leaves of the graph.
    """
    leaves: list[Tensor] = []

    def make_leaf(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        factor = torch.as_tensor(factors[len(leaves)], dtype=out.dtype, device=out.device)
        factor = factor.view(*out.shape[:-1], 1) if factor.dim() else factor
        leaves.append((out.detach() * factor).requires_grad_())
        return leaves[-1]

    model = model_of(look)
    if isinstance(look, ImageLook):
        modules = [model.embedding.patches]
    else:
        tables = [module.tokens for module in model.modules() if isinstance(module, Embedding)]
        modules = list({id(table): table for table in tables}.values())
    with torch.inference_mode(False), torch.set_grad_enabled(needs_grad), ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(make_leaf).remove)
        logits = run_inputs(look, inputs)
    return logits, leaves


def _input_labels(look: Look, output: ExplainedOutput, sides: list[str]) -> dict[str, list[str]]:
    if len(sides) == 1:
        added = output.tokens[:-1] if look.pipeline.continues_source else []
        return {sides[0]: [*look.source_pieces, *added]}
    axes = {axis.name: axis.tokens for shown in look.maps.values() for axis in (shown.queries, shown.keys)}
    vocabularies = [tokenizer.vocabulary for tokenizer in look.pipeline.tokenizers]
    return {
        side: axes.get(side) or [vocabulary[i] for i in ids]
        for side, vocabulary, ids in zip(sides, vocabularies, output.inputs[0])
    }

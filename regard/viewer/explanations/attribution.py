"""Gradient × input: how much each input token or patch contributes to a prediction, to first order."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import RegardError
from regard.models import ViT
from regard.pipelines import TextGenerator, Translator
from regard.viewer.explanations.explained_output import (
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


@dataclass(frozen=True, eq=False)
class Attribution:
    """Gradient × input of every prediction p: Σ_e x_e ∂ log p / ∂ x_e for the embedding x of each input token."""

    tokens: list[str]
    """the predicted tokens, or the label"""
    inputs: dict[str, list[str]]
    """the input tokens: of source and target, or of the text"""
    values: dict[str, Float[np.ndarray, "steps T"]]
    """attribution of each prediction to the tokens of an input; 0 for tokens after it"""


def compute_attribution(look: Look, output: ExplainedOutput | None = None) -> Attribution:
    """Attribution of each predicted token to the input tokens: gradient of its log-probability times the embedding.

    >>> compute_attribution(look(translator, "The cat sleeps.")).values["source"].shape  # doctest: +SKIP
    (5, 4)
    """
    output = output or explain_output(look)
    values = attribution_values(look, output)
    return Attribution(output.tokens, _input_labels(look, output, list(values)), values)


def attribution_values(look: Look, output: ExplainedOutput) -> dict[str, Float[np.ndarray, "steps T"]]:
    """The values of an attribution, which depend only on the model of the look."""
    sides = ["source", "target"] if isinstance(look.pipeline, Translator) else ["text"]
    values = {
        side: np.zeros((len(output.steps), max(len(one[i]) for one in output.inputs))) for i, side in enumerate(sides)
    }
    size = batch_size(look, output)
    for first in range(0, len(output.inputs), size):
        inputs = output.inputs[first : first + size]
        steps = [(i, one) for i, one in enumerate(output.steps) if first <= one.sequence < first + len(inputs)]
        for i, gradients in _products(look, output, first, len(inputs), steps):
            for side, row in zip(sides, gradients):
                values[side][i, : len(row)] = row
    return values


def _products(
    look: Look, output: ExplainedOutput, first: int, count: int, steps: list[tuple[int, ExplainedStep]]
) -> list[tuple[int, list[np.ndarray]]]:
    """For each step, the products of gradient and embedding, summed over the width, of its input's tokens."""
    inputs = output.inputs[first : first + count]
    model = model_of(look)
    names = ("source_embedding", "target_embedding") if isinstance(look.pipeline, Translator) else ("embedding",)
    modules = {id(one): one for one in (getattr(model, name).tokens for name in names)}
    logits, leaves = _run_with_leaves(look, inputs, list(modules.values()))
    lengths = [[len(one[side]) for one in inputs] for side in range(len(leaves))]
    found = []
    # Inputs are independent: the gradients of one step of each are computed together.
    rounds: dict[int, list[tuple[int, ExplainedStep]]] = {}
    counts: dict[int, int] = {}
    for i, step in steps:
        counts[step.sequence] = counts.get(step.sequence, -1) + 1
        rounds.setdefault(counts[step.sequence], []).append((i, step))
    for chosen in rounds.values():
        with torch.enable_grad():
            total = torch.stack([step_logprob(look, logits[one.sequence - first], one) for _, one in chosen]).sum()
        products = _times_gradient(total, leaves)
        parts = [product.split(sizes) for product, sizes in zip(products, lengths)]
        found += [(i, [side[step.sequence - first].numpy() for side in parts]) for i, step in chosen]
    return found


def compute_image_attribution(look: ImageLook, label: str | None = None) -> Float[np.ndarray, "rows columns"]:
    """Attribution of a label, by default the most likely one, to the patches: gradient of its log-probability times the
    embedding of each patch.

    >>> compute_image_attribution(look(model, "photo.jpg"), "cat").shape  # doctest: +SKIP
    (14, 14)
    """
    model = look.model
    if look.label is None or not isinstance(model, ViT):
        raise RegardError(
            f"Attribution needs an image classifier with labels; this model has the head {model.config.head}.",
            "Use a model with labels.",
        )
    step = ExplainedStep(0, 0, look.label_index(look.label if label is None else label))
    logits, leaves = _run_with_leaves(look, [()], [model.embedding.patches])
    with torch.enable_grad():
        logprob = step_logprob(look, logits[0], step)
    (product,) = _times_gradient(logprob, leaves)
    return product.view(look.grid).numpy()


def _run_with_leaves(
    look: Look | ImageLook, inputs: list[tuple[list[int], ...]], modules: list[nn.Module]
) -> tuple[list[Tensor], list[Tensor]]:
    """The logits of inputs, and the outputs of embedding modules as leaves of the graph, in the order of the calls."""
    leaves: list[Tensor] = []

    def make_leaf(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        leaves.append(out.detach().clone().requires_grad_())
        return leaves[-1]

    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(make_leaf).remove)
        logits = run_inputs(look, inputs)
    return logits, leaves


def _times_gradient(total: Tensor, leaves: list[Tensor]) -> list[Float[Tensor, "..."]]:
    with torch.inference_mode(False):
        gradients = torch.autograd.grad(total, leaves, retain_graph=True)
    return [(gradient * leaf.detach()).sum(-1).cpu() for gradient, leaf in zip(gradients, leaves)]


def _input_labels(look: Look, output: ExplainedOutput, sides: list[str]) -> dict[str, list[str]]:
    if isinstance(look.pipeline, Translator):
        axes = {axis.name: axis.tokens for one in look.maps.values() for axis in (one.queries, one.keys)}
        names = [one.vocabulary for one in look.pipeline.tokenizers]
        return {
            side: axes.get(side) or [vocabulary[i] for i in ids]
            for side, vocabulary, ids in zip(sides, (names[0], names[-1]), output.inputs[0])
        }
    added = output.tokens[:-1] if isinstance(look.pipeline, TextGenerator) else []
    return {"text": [*look.source_pieces, *added]}

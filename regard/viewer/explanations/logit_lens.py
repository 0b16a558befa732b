"""Logit lens (nostalgebraist 2020): the output layer applied to the residual stream after every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import RegardError
from regard.viewer.explanations.output import (
    ExplainedOutput,
    ExplainedStep,
    batch_size,
    column_name,
    column_names,
    explain_output,
    model_inputs,
    model_of,
    recorded_run,
    split_logits,
)
from regard.viewer.image_look import ImageLook
from regard.viewer.model_run import record_streams
from regard.viewer.text_look import Look

# Candidates per layer and position.
LENS_TOP_K = 5


@dataclass(frozen=True, eq=False)
class LogitLens:
    """What the model would predict after each layer, if it skipped the layers after it."""

    layers: list[str]
    """the embedding, then every layer"""
    tokens: list[str]
    """the token or label at each position of the output"""
    targets: list[int] = field(repr=False)
    """its id"""
    probabilities: Float[np.ndarray, "L T"]
    """probability of this token after each layer"""
    columns: Int[np.ndarray, "L T K"] = field(repr=False)
    """ids of the most likely tokens or labels after each layer"""
    top_probabilities: Float[np.ndarray, "L T K"] = field(repr=False)
    names: dict[int, str] = field(repr=False)
    """text of each id"""

    def candidates(self, layer: int, position: int) -> dict[str, float]:
        """The most likely tokens or labels after a layer (0: embedding), with their probabilities."""
        columns = self.columns[layer, position].tolist()
        probabilities = self.top_probabilities[layer, position].tolist()
        return {self.names[column]: probability for column, probability in zip(columns, probabilities)}


@torch.no_grad()
def compute_logit_lens(
    look: Look | ImageLook, output: ExplainedOutput | None = None, *, last: int | None = None
) -> LogitLens:
    """The logit lens at the positions of the output; of a language model, at all positions of the text.

    `last` limits the number of positions to the last ones.

    >>> lens = compute_logit_lens(look(translator, "The cat sleeps."))  # doctest: +SKIP
    >>> lens.layers, lens.candidates(2, 0)  # doctest: +SKIP
    (['embedding', 'layer 1', 'layer 2'], {'le': 0.93, 'la': 0.04, 'un': 0.01, 'une': 0.01, 'les': 0.0})
    """
    output = output or explain_output(look)
    model = model_of(look).eval()
    check_has_lens(model)
    steps, tokens = lens_steps(look, output)
    cut = slice(0 if last is None else max(0, len(steps) - last), None)
    steps, tokens = steps[cut], tokens[cut]
    per_layer: list[list[Tensor]] = []  # by layer, the probabilities of each step
    size = batch_size(look, output)
    for first in range(0, len(output.inputs), size):
        inputs = output.inputs[first : first + size]
        arguments = model_inputs(look, inputs)
        for layer, stream in enumerate(_streams(look, inputs, arguments)):
            logits = split_logits(look, inputs, model.unembed(stream, arguments[-1]))
            if layer == len(per_layer):
                per_layer.append([])
            per_layer[layer] += [
                logits[one.sequence - first][one.row].softmax(-1)
                for one in steps
                if first <= one.sequence < first + len(inputs)
            ]
    probabilities = torch.stack([torch.stack(rows) for rows in per_layer])
    targets = [step.column for step in steps]
    best, columns = probabilities.topk(min(LENS_TOP_K, probabilities.shape[-1]))
    own = probabilities[:, range(len(steps)), targets]
    names = column_names(look, sorted(set(columns.flatten().tolist())))
    layers = ["embedding", *(f"layer {i + 1}" for i in range(len(per_layer) - 1))]
    return LogitLens(layers, tokens, targets, own.cpu().numpy(), columns.cpu().numpy(), best.cpu().numpy(), names)


def _streams(look: Look | ImageLook, inputs: Sequence[tuple[list[int], ...]], arguments: list[Any]) -> Sequence[Tensor]:
    """The residual stream of inputs: that of the look's own run, or of another one."""
    if (run := recorded_run(look, inputs)) is not None:
        return run.streams
    model = model_of(look)
    with record_streams(model) as streams:
        # The forward of an image classifier skips the patches in the last block.
        model.encode(*arguments) if isinstance(look, ImageLook) else model(*arguments)
    return streams


def lens_steps(look: Look | ImageLook, output: ExplainedOutput) -> tuple[list[ExplainedStep], list[str]]:
    """Positions of the lens: those of the output; of a language model, also those of the text before it."""
    if isinstance(look, ImageLook) or not look.pipeline.continues_source:
        return output.steps, output.tokens
    ((ids,),) = output.inputs
    first = output.steps[0].row
    before = [ExplainedStep(0, row, ids[row + 1]) for row in range(first)]
    return before + output.steps, [column_name(look, one.column) for one in before] + output.tokens


def check_has_lens(model: nn.Module) -> None:
    """Raise an error unless the model has layers with a residual stream that ends in an output layer."""
    has_output = getattr(model, "output", None) is not None and getattr(model.config, "head", "") != "segment"
    if not hasattr(model, "unembed") or not has_output:
        raise RegardError(
            f"The logit lens needs a residual stream and an output layer; {type(model).__name__} has none.",
            "Use a Transformer with an output layer.",
        )

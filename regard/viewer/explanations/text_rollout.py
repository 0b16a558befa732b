"""Attention rollout of texts (Abnar and Zuidema 2020): attention weights multiplied through all layers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from regard.errors import RegardError
from regard.models import Bert
from regard.viewer.text_look import AttentionMap, Look


def text_rollout(look: Look) -> dict[str, Float[np.ndarray, "T S"]]:
    """How much each input token contributes to each token of the last layer, by attention weights alone.

    In each layer the heads are averaged, and attention and residual connection count in equal parts. In a translator,
    the rows of the decoder distribute their weight over source and target: the rollout of the encoder is continued
    through the cross-attentions. Rows sum to 1, of a translator over source and target together.

    >>> text_rollout(look(translator, "The cat sleeps."))["source"].shape  # doctest: +SKIP
    (5, 4)
    """
    if look.pipeline is None:
        raise RegardError("This look has no model.", "Create it with regard.look.")
    model: Any = look.pipeline.model
    kinds = {kind: [one for one in look.maps.values() if one.kind == kind] for kind in ("self", "masked", "cross")}
    stack = getattr(model, "stack", None)
    if stack is not None:
        expected = {"masked": len(stack.blocks)}
        if stack.has_cross:
            expected |= {"self": len(model.encoder), "cross": len(stack.blocks)}
    elif isinstance(model, Bert):
        expected = {"self": model.config.layers}
    else:
        raise RegardError("Rollout needs a Transformer, in which every layer has attention.", "Use another measure.")
    if any(len(kinds[kind]) != count for kind, count in expected.items()):
        raise RegardError("Rollout needs all attentions of the model.", "Leave out layers.")
    if "cross" not in expected:
        return {"text": _through(kinds["self"] or kinds["masked"])}
    encoder = _through(kinds["self"])
    target_length, source_length = len(kinds["masked"][0].rows), len(encoder)
    source, target = np.zeros((target_length, source_length)), np.eye(target_length)
    for masked, cross in zip(kinds["masked"], kinds["cross"]):
        weights = masked.head_weights()
        source, target = (source + weights @ source) / 2, (target + weights @ target) / 2
        source, target = (source + cross.head_weights() @ encoder) / 2, target / 2
    return {"source": source, "target": target}


def _through(layers: Sequence[AttentionMap]) -> Float[np.ndarray, "T T"]:
    """The product of the layers, each in equal parts with the identity."""
    matrix = np.eye(len(layers[0].rows))
    for one in layers:
        matrix = (matrix + one.head_weights() @ matrix) / 2
    return matrix

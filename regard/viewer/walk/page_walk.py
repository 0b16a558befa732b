"""Builds the walk of a look, and decides whether a page includes it."""

from collections.abc import Mapping

from regard.errors import RegardError
from regard.viewer.image_look import ImageLook
from regard.viewer.text_look import Look
from regard.viewer.walk import limits
from regard.viewer.walk.image_walk import ImageWalkBuilder
from regard.viewer.walk.text_walk import TextWalkBuilder
from regard.viewer.walk.walkthrough import Walk, inner_bytes


def build_walk(look: Look | ImageLook, tensors: Mapping[str, int] | None = None) -> Walk:
    """Build the walk of a look: every step from the input to the output.

    `tensors`: indices of parameters in the model of the page, if it contains one. Then the walk contains no numbers.

    >>> walk = build_walk(look(translator, "The cat sleeps."))  # doctest: +SKIP
    >>> walk.trace["decoder.0.cross.a"].shape  # the weights a = softmax(e)  # doctest: +SKIP
    (4, 5, 6)
    """
    return ImageWalkBuilder(look).build() if isinstance(look, ImageLook) else TextWalkBuilder(look, tensors).build()


def walk_for_page(
    look: Look | ImageLook, include: bool | None = None, tensors: Mapping[str, int] | None = None
) -> Walk | None:
    """The walk of a page, or None; by default it is included if model and input are small."""
    if include is not None:
        return build_walk(look, tensors) if include else None
    if isinstance(look, ImageLook):
        model, is_short = look.model, look.grid[0] * look.grid[1] <= limits.MAX_DEFAULT_PATCHES
    elif look.pipeline is not None:
        model, is_short = look.pipeline.model, max(map(len, look.ids)) <= limits.MAX_DEFAULT_TOKENS
    else:
        return None
    if not is_short or inner_bytes(model) > limits.MAX_MODEL_BYTES:
        return None
    try:
        walk = build_walk(look, tensors)
    except RegardError:  # an operation without a primitive
        return None
    return walk if walk.trace.size <= limits.MAX_DEFAULT_BYTES else None

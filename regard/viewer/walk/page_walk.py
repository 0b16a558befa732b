"""The walk of a look, and whether a page has one."""

from regard.errors import RegardError
from regard.viewer.image_look import ImageLook
from regard.viewer.text_look import Look
from regard.viewer.walk import limits
from regard.viewer.walk.image_walk import ImageWalk
from regard.viewer.walk.text_walk import TextWalk
from regard.viewer.walk.walkthrough import Walk, bytes_inside


def walk_of(look: Look | ImageLook) -> Walk:
    """The walk of a look: each step from its text, or its image, to the output.

    >>> walk = walk_of(look(translator, "The cat sleeps."))  # doctest: +SKIP
    >>> walk.trace["decoder.0.cross.a"].shape  # the weights a = softmax(e)  # doctest: +SKIP
    (4, 5, 6)
    """
    return ImageWalk(look).walk() if isinstance(look, ImageLook) else TextWalk(look).walk()


def walk_for(look: Look | ImageLook, wanted: bool | None = None) -> Walk | None:
    """A page's walk: if it is wanted, or by default if model and input are small."""
    if wanted is not None:
        return walk_of(look) if wanted else None
    if isinstance(look, ImageLook):
        model, is_short = look.run.model, look.grid[0] * look.grid[1] <= limits.FEW
    elif look.bundle is not None:
        model, is_short = look.bundle.model, max(map(len, look.ids)) <= limits.SHORT
    else:
        return None
    if not is_short or bytes_inside(model) > limits.WHOLE:
        return None
    try:
        walk = walk_of(look)
    except RegardError:  # an operation that programs do not have
        return None
    return walk if walk.trace.size <= limits.SMALL else None

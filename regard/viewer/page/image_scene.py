"""What a page is given of a look at a picture: its pixels and patches, and q and k of every attention as of a text's.

Maps over patches, and rollout, the page computes itself. What asks for gradients, rollout for a label, it is given.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from regard.errors import RegardError
from regard.models import family_of
from regard.version import __version__
from regard.viewer.image_look import BLOCKS, POOLER, SEGMENTER, ImageLook, Patch
from regard.viewer.page.text_scene import FORMAT, TITLE, Scene, carried, put, sides_of
from regard.viewer.plots.mask_overlays import label_colours
from regard.viewer.rollout import number_of, roll_outs
from regard.viewer.text_look import AttentionMap, Side
from regard.viewer.walk.page_walk import walk_for
from regard.viewer.walk.walkthrough import header_of

# For so many labels, the likeliest, a page is given the rollout.
LIKELIEST = 5
# What stands along the axes of an attention, by how its name begins: rows, columns.
SIDES = {BLOCKS: ("picture", "picture"), POOLER: ("label", "patches"), SEGMENTER: ("labels", "labels")}


def scene_of_picture(
    look: ImageLook,
    attention: str | None = None,
    head: int | None = None,
    *,
    patch: Patch | None = None,
    label: str | None = None,
    rollout: bool = False,
    walk: bool | None = None,
    pictures: Sequence[str] = (),
) -> Scene:
    """The scene of a look at a picture; the choices, which are those of `ImageLook.save`, say what it opens with.
    `pictures` are the names of others that a live page can be asked for.

    >>> scene_of_picture(look(model, "photo.jpg")).header["picture"]["grid"]  # doctest: +SKIP
    [14, 14]
    """
    opens = _opening(look, attention, head, patch, label, rollout)
    maps = {name: _with_sides(one) for name, one in look.maps.items()}
    blobs: list[bytes] = []
    walked = walk_for(look, walk)
    header = {
        "format": FORMAT,
        "title": look.title if len(look.title) <= TITLE else look.title[: TITLE - 1] + "…",
        "model": {"family": family_of(look.run.model.config), "name": look.model_name, "regard": __version__},
        "texts": {"source": look.name, "target": ""},
        "opens": opens,
        "sides": sides_of(maps),
        "attentions": carried(maps, blobs),
        "picture": _picture(look, label, blobs),
        "walk": None if walked is None else header_of(walked, blobs),
        "pictures": list(pictures),
        "links": None,
    }
    return Scene(header, blobs)


def _with_sides(one: Any) -> AttentionMap:
    """The attention with names for its axes: a page knows by them where the patches begin."""
    rows, columns = next(names for start, names in SIDES.items() if one.name.startswith(start))
    queries, keys = Side(rows, one.rows, [-1] * len(one.rows)), Side(columns, one.columns, [-1] * len(one.columns))
    return AttentionMap(one.name, one.kind, queries, keys, one.recorded)


def _opening(
    look: ImageLook, attention: str | None, head: int | None, patch: Patch | None, label: str | None, rollout: bool
) -> dict[str, Any]:
    """What the page opens with: what is laid over the picture, who asks, for which label."""
    overview = attention == "all"
    shown = look.chosen(None if overview else attention, patch)
    number = None if label is None else look.number(label)
    if rollout or (number is not None and not look.by_queries):
        if attention is not None or head is not None:
            raise RegardError("Rollout goes through all attentions.", "Name neither an attention nor a head.")
        if patch is not None and number is not None:
            raise RegardError("Either a patch asks, or a label.", "Leave out one of them.")
        over = "rollout"
    else:
        asked = any(one is not None for one in (attention, head, patch, label))
        over = "mask" if _has_mask(look) and not asked else "attention"
    heads = len(shown.recorded.calls[0].q[0])
    if head is not None and not 0 <= head < heads:
        raise RegardError(f"{shown.name} has no head {head}.", f"There are {heads}, counted from 0.")
    token = None
    if patch is not None:
        if shown.name == POOLER:
            raise RegardError(f"In {POOLER} no patch asks.", "Name another attention, or leave out the patch.")
        token = len(shown.rows) - look.grid[0] * look.grid[1] + number_of(patch, look.grid)
    elif number is not None and over == "attention":
        if not shown.name.startswith(SEGMENTER):
            raise RegardError(f"In {shown.name} no label asks.", "Leave it out, or ask for the rollout.")
        token = number
    return {"attention": shown.name, "head": head, "all": overview, "over": over, "token": token, "label": number}


def _has_mask(look: ImageLook) -> bool:
    return look.run.model.config.head == "segment"


def _picture(look: ImageLook, label: str | None, blobs: list[bytes]) -> dict[str, Any]:
    """The picture itself, who speaks for it, and what the model says of it."""
    config = look.run.model.config
    names = {BLOCKS: config.prefix, SEGMENTER: len(config.labels)}
    return {
        "grid": list(look.grid),
        "patch": config.patch,
        "pixels": _bytes(blobs, look.pixels),
        "first": {"patches": 0, **{SIDES[start][0]: first for start, first in names.items()}},
        "speaks": {name: 0 if look.one_asks(one) else None for name, one in look.maps.items()},
        # Of rollout: the tokens of the last block that the label is read off; where there are none, see "speaks".
        "read": list(range(1 + config.distilled)) if config.pooling == "class" and config.head != "segment" else None,
        "answer": "" if look.label is None else f"{look.label}, {100 * look.probabilities[look.label]:.1f} %",
        "labels": _labels(look, label, blobs),
        "mask": _mask(look, blobs) if _has_mask(look) else None,
    }


def _labels(look: ImageLook, asked: str | None, blobs: list[bytes]) -> list[dict[str, Any]]:
    """The likeliest labels and one that was asked for, each with what speaks for it; of a segmenter, all of them."""
    if not look.probabilities:
        return [{"number": i, "name": name} for i, name in enumerate(look.run.model.config.labels)]
    best = sorted(look.probabilities, key=lambda one: -look.probabilities[one])[:LIKELIEST]
    best += [] if asked is None or asked in best else [asked]
    spoken = roll_outs(look.run.model, look.run.images, [[look.number(name)] for name in best])
    return [
        {
            "number": look.number(name),
            "name": name,
            "probability": look.probabilities[name],
            "rollout": put(blobs, one.over_patches().cpu().numpy()),
        }
        for name, one in zip(best, spoken)
    ]


def _mask(look: ImageLook, blobs: list[bytes]) -> dict[str, Any]:
    """Which label each pixel has, and the labels' colours."""
    labels, output = look.run.model.config.labels, look.run.output
    assert isinstance(output, Tensor)
    best = output[0].argmax(0).cpu().numpy()
    return {
        **_bytes(blobs, best.astype("u1" if len(labels) <= 256 else "<u2")),
        "colours": label_colours(len(labels)).tolist(),
    }


def _bytes(blobs: list[bytes], x: np.ndarray) -> dict[str, Any]:
    """Puts whole numbers with the blobs as they are."""
    blobs.append(np.ascontiguousarray(x).tobytes())
    return {"at": len(blobs) - 1, "shape": list(x.shape), "type": x.dtype.name}

"""Scenes of images: pixels, labels, and q and k of every attention.

The page computes the maps over patches and the rollout. The rollout for a label needs gradients and is included.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from regard.errors import RegardError
from regard.evaluation.teacher_forcing import entropy
from regard.models import family_name
from regard.models.vit import IMAGE_HEADS
from regard.viewer.image_look import (
    BLOCKS,
    POOLER,
    SEGMENTER,
    ImageLook,
    PatchMap,
    check_has_class_queries,
    check_has_patch_queries,
    check_head,
    check_rollout,
)
from regard.viewer.masks import label_colors
from regard.viewer.page.explanations import explanation_header
from regard.viewer.page.text_scene import Scene, add_blob, attention_headers, axis_headers, make_header
from regard.viewer.rollout import PatchCoordinates, label_rollouts, patch_index
from regard.viewer.text_look import AttentionMap
from regard.viewer.token_axis import TokenAxis
from regard.viewer.trace.build import trace_for_page
from regard.viewer.trace.steps import trace_header

# Labels, most likely first, for which a page includes the rollout.
MAX_LABEL_ROLLOUTS = 5
# Names of the axes (rows, columns) of an attention, by the prefix of its name.
AXIS_NAMES = {BLOCKS: ("image", "image"), POOLER: ("label", "patches"), SEGMENTER: ("labels", "labels")}


def build_image_scene(
    look: ImageLook,
    attention: str | None = None,
    head: int | None = None,
    *,
    patch: PatchCoordinates | None = None,
    label: str | None = None,
    rollout: bool = False,
    trace: bool | None = None,
    explain: bool | None = False,
    images: Sequence[str] = (),
) -> Scene:
    """Build the scene of a look at an image; the arguments, as of `ImageLook.save`, select the initial view.

    `explain` computes the explanations of the label in advance (None: if they are cheap); otherwise the page requests
    them from its model. `images` are the names of all images that a live page can request.

    >>> build_image_scene(look(model, "photo.jpg")).header["image"]["grid"]  # doctest: +SKIP
    [14, 14]
    """
    initial = _initial_view(look, attention, head, patch, label, rollout)
    maps = {name: with_axes(one) for name, one in look.maps.items()}
    blobs: list[bytes] = []
    page_trace = trace_for_page(look, trace)
    header = make_header(
        look.title,
        family_name(look.run.model.config),
        look.model_name,
        {"source": look.name, "target": ""},
        initial=initial,
        sides=axis_headers(maps),
        attentions=attention_headers(maps, blobs),
        image=_image_header(look, label, blobs),
        trace=None if page_trace is None else trace_header(page_trace, blobs),
        explained=explanation_header(look, None, explain),
        images=list(images),
    )
    return Scene(header, blobs)


def with_axes(one: PatchMap) -> AttentionMap:
    """The map with named axes, by which the page finds the first patch."""
    rows, columns = next(names for prefix, names in AXIS_NAMES.items() if one.name.startswith(prefix))
    queries = TokenAxis(rows, one.rows, [-1] * len(one.rows))
    keys = TokenAxis(columns, one.columns, [-1] * len(one.columns))
    return AttentionMap(one.name, one.kind, queries, keys, one.recorded)


def _initial_view(
    look: ImageLook,
    attention: str | None,
    head: int | None,
    patch: PatchCoordinates | None,
    label: str | None,
    rollout: bool,
) -> dict[str, Any]:
    """The initial view of the page: the kind of overlay, its attention and head, the query token and the label."""
    overview = attention == "all"
    shown = look.select_attention(None if overview else attention, patch)
    has_selection = any(one is not None for one in (attention, head, patch, label))
    label_index = None if label is None else look.label_index(label)
    if rollout or (label_index is not None and not look.has_class_queries):
        check_rollout(attention, head)
        if patch is not None and label_index is not None:
            raise RegardError("A patch and a label cannot be combined.", "Leave out one of them.")
        overlay = "rollout"
    else:
        overlay = "mask" if _has_mask(look) and not has_selection else "attention"
        if overlay == "attention" and not has_selection:
            shown, head = _sharpest_head(look, shown)
    check_head(shown, head, len(shown.recorded.calls[0].q[0]))
    token = None
    if patch is not None:
        check_has_patch_queries(shown)
        token = len(shown.rows) - look.grid[0] * look.grid[1] + patch_index(patch, look.grid)
    elif label_index is not None and overlay == "attention":
        check_has_class_queries(shown)
        token = label_index
    return {
        "attention": shown.name,
        "head": head,
        "all": overview,
        "over": overlay,
        "token": token,
        "label": label_index,
    }


def _sharpest_head(look: ImageLook, default: PatchMap) -> tuple[PatchMap, int]:
    """The head in which the class token or the pooling query attends to the fewest patches: the lowest entropy.

    In a model without such a query, a head of the default attention, averaged over the queries of all patches.
    """
    names = [name for name, one in look.maps.items() if look.has_single_query(one)] or [default.name]
    best = min(
        (float(entropy(weights.reshape(1, -1) / weights.sum())[0]), name, head)
        for name in names
        for head, weights in enumerate(look.patch_weights(name))
    )
    return look.maps[best[1]], best[2]


def _has_mask(look: ImageLook) -> bool:
    return IMAGE_HEADS[look.run.model.config.head].is_per_pixel


def _image_header(look: ImageLook, label: str | None, blobs: list[bytes]) -> dict[str, Any]:
    """The pixels, the queries that represent the image, and the output of the model."""
    config = look.run.model.config
    first_patches = {BLOCKS: config.prefix, SEGMENTER: len(config.labels)}
    return {
        "grid": list(look.grid),
        "patch": config.patch,
        "pixels": _add_bytes(blobs, look.pixels),
        "first": {"patches": 0, **{AXIS_NAMES[prefix][0]: first for prefix, first in first_patches.items()}},
        "single_query": {name: 0 if look.has_single_query(one) else None for name, one in look.maps.items()},
        # For rollout: the tokens of the last block from which the label is predicted; None: see "single_query".
        "read": list(range(1 + config.distilled)) if config.reads_class_token else None,
        "answer": "" if look.label is None else f"{look.label}, {100 * look.probabilities[look.label]:.1f} %",
        "labels": _label_headers(look, label, blobs),
        "mask": _mask_header(look, blobs) if _has_mask(look) else None,
    }


def _label_headers(look: ImageLook, selected: str | None, blobs: list[bytes]) -> list[dict[str, Any]]:
    """The most likely labels and the selected one, each with its rollout; for a segmenter, all labels."""
    if not look.probabilities:
        return [{"number": i, "name": name} for i, name in enumerate(look.run.model.config.labels)]
    best = sorted(look.probabilities, key=lambda one: -look.probabilities[one])[:MAX_LABEL_ROLLOUTS]
    best += [] if selected is None or selected in best else [selected]
    rollouts = label_rollouts(look.model, look.run.images, [[look.label_index(name)] for name in best])
    return [
        {
            "number": look.label_index(name),
            "name": name,
            "probability": look.probabilities[name],
            "rollout": add_blob(blobs, rollout.patch_weights().cpu().numpy()),
            "attribution": add_blob(blobs, look.attribution(name)),
        }
        for name, rollout in zip(best, rollouts)
    ]


def _mask_header(look: ImageLook, blobs: list[bytes]) -> dict[str, Any]:
    """The label of each pixel, and the colors of the labels."""
    labels, output = look.run.model.config.labels, look.run.output
    assert isinstance(output, Tensor)
    best = output[0].argmax(0).cpu().numpy()
    return {
        **_add_bytes(blobs, best.astype("u1" if len(labels) <= 256 else "<u2")),
        "colors": label_colors(len(labels)).tolist(),
    }


def _add_bytes(blobs: list[bytes], x: np.ndarray) -> dict[str, Any]:
    """Append an array of integers to the blobs; returns its header."""
    blobs.append(np.ascontiguousarray(x).tobytes())
    return {"at": len(blobs) - 1, "shape": list(x.shape), "type": x.dtype.name}

"""Walks: a trace with the tokens of its axes and the initial selection, as a page contains it."""

import re
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from regard.viewer.token_axis import TokenAxis
from regard.viewer.walk.trace import Trace


@dataclass(frozen=True, eq=False)
class Walk:
    """A trace, the tokens of its axes, the initial selection and the names of the outputs."""

    trace: Trace
    sides: dict[str, TokenAxis]
    focus: dict[str, Any]
    """attention, head and tokens that are selected initially"""
    names: dict[int, str]
    """names of columns of the last step: the most likely ones per row"""
    note: str | None
    """which values are precomputed, if any"""
    linked: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    """axes whose selection follows another axis: its name, and the row for each of its tokens"""


def walk_header(walk: Walk, blobs: list[bytes]) -> dict[str, Any]:
    """The header of a walk; appends its numbers to the blobs."""
    trace = walk.trace
    arrays: dict[str, Any] = {}
    for name, raw in (("params", trace.params), ("outputs", trace.outputs)):
        if not raw:
            arrays[name] = None
            continue
        blobs.append(raw)
        arrays[name] = {"at": len(blobs) - 1, "shape": [len(raw) // 4], "type": "float32"}
    return {
        "sides": {
            name: {"tokens": axis.tokens, "words": axis.words}
            | (dict(zip(("of", "rows"), walk.linked[name])) if name in walk.linked else {})
            for name, axis in walk.sides.items()
        },
        "focus": walk.focus,
        "names": {str(column): name for column, name in walk.names.items()},
        "note": walk.note,
        "sections": trace.sections,
        "steps": trace.steps,
        "inputs": None if trace.template is None else trace.inputs,
        **arrays,
    }


def walk_template(walk: Walk) -> dict[str, Any] | None:
    """What a page with its model needs to walk through another input; None if values are precomputed."""
    template = walk.trace.template
    if template is None:
        return None
    return {"note": walk.note, "sections": walk.trace.sections, "steps": template.steps, "loops": template.loops}


def inner_bytes(model: nn.Module) -> int:
    """Bytes of the parameters without embeddings and output layer, of which a walk may need a few rows only."""
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    output = getattr(model, "output", None)
    tables |= {id(output.weight)} if isinstance(output, nn.Linear) else set()
    return sum(4 * p.numel() for p in model.parameters() if id(p) not in tables)


def block_path(attention: str) -> str:
    """The path of the block that contains an attention.

    >>> block_path("decoder.0.cross"), block_path("blocks.1.attention.3"), block_path("decoder.attention")
    ('decoder.0', 'blocks.1', '')
    """
    match = re.match(r"(.*\.\d+)\.(attention|cross)(\.\d+)?$", attention)
    return match[1] if match else ""


def large_model_note(block: str) -> str:
    return f"The model is large: only the steps of {block} are shown. The outputs of other layers are precomputed."

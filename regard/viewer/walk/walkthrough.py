"""A walk as a page has it: a trace, what it is about, and where it begins."""

import re
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from regard.viewer.text_look import Side
from regard.viewer.walk.trace import Trace


@dataclass(frozen=True, eq=False)
class Walk:
    """A trace, and what it is about: the tokens, those that are looked at first, and the names of the outputs."""

    trace: Trace
    sides: dict[str, Side]
    focus: dict[str, Any]
    names: dict[int, str]
    """of columns of the last step: the ten likeliest of each row"""
    note: str | None
    """what is given and not computed, where that is so"""
    linked: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    """sides that follow another: which, and the row for each of its tokens"""


def header_of(walk: Walk, blobs: list[bytes]) -> dict[str, Any]:
    """What a scene's header says of a walk; its numbers go to the blobs."""
    trace = walk.trace
    places = {}
    for name, raw in (("params", trace.params), ("outputs", trace.outputs)):
        blobs.append(raw)
        places[name] = {"at": len(blobs) - 1, "shape": [len(raw) // 4], "type": "float32"}
    return {
        "sides": {
            name: {"tokens": side.tokens, "words": side.words}
            | (dict(zip(("of", "rows"), walk.linked[name])) if name in walk.linked else {})
            for name, side in walk.sides.items()
        },
        "focus": walk.focus,
        "names": {str(column): name for column, name in walk.names.items()},
        "note": walk.note,
        "sections": trace.sections,
        "steps": trace.steps,
        **places,
    }


def bytes_inside(model: nn.Module) -> int:
    """Of the parameters between embeddings and output layer, of whose rows only a few may be needed."""
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    output = getattr(model, "output", None)
    tables |= {id(output.weight)} if isinstance(output, nn.Linear) else set()
    return sum(4 * p.numel() for p in model.parameters() if id(p) not in tables)


def block_of(attention: str) -> str:
    """The block of an attention, by its name.

    >>> block_of("decoder.0.cross"), block_of("blocks.1.attention.3"), block_of("decoder.attention")
    ('decoder.0', 'blocks.1', '')
    """
    found = re.match(r"(.*\.\d+)\.(attention|cross)(\.\d+)?$", attention)
    return found[1] if found else ""


def large_note(block: str) -> str:
    return f"The model is large: the walk has the steps of {block} alone. The output of its other layers is given."

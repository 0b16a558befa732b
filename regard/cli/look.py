"""`regard look`: a picture of what the model regarded."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from regard.cli.common import Model, Truncate, as_text, parse
from regard.folder import Device, load
from regard.viewer import look


@dataclass(frozen=True)
class Options:
    """Translates a sentence and draws where the model looked: regard look MODEL "The cat sleeps." --out map.png

    The picture is the clearest cross-attention, its heads averaged; or another, one head of it, or all of them. A
    language model and an encoder of texts read the sentence; the picture is of what they regarded in it.
    """

    model: Model
    text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    """the sentence"""
    target: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """the translation to look at, instead of the model's own"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("map.png")
    """the picture, .png or .svg"""
    attention: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """the name of an attention: see regard info"""
    head: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """one head of it, from 0"""
    all: bool = False
    """every head of every attention, as small maps"""
    truncate: Truncate = False
    device: Device = "auto"


def run(argv: list[str]) -> int:
    options = parse(Options, "look", argv)
    translator = load(options.model, options.device)
    target = None if options.target is None else as_text(options.target, "--target")
    seen = look(translator, as_text(options.text, "the text"), target, truncate=options.truncate)
    seen.save(options.out, options.attention, options.head, overview=options.all)
    if seen.translation:
        print(seen.translation)
    print(f"The picture is in {options.out}.", file=sys.stderr)
    return 0

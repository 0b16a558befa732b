"""`regard look`: a page, or a picture, of what the model regarded."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from regard.cli.common import Model, Truncate, as_text, parse
from regard.errors import RegardError
from regard.folder import Device, ImageModel, load
from regard.viewer import look


@dataclass(frozen=True)
class Options:
    """Translates a sentence and shows where the model looked: regard look MODEL "The cat sleeps." --out page.html

    A page (.html) shows every head of every attention, in any browser and without a network. A picture (.png, .svg)
    shows the clearest cross-attention, its heads averaged; or another, one head of it, or all of them, and a page may
    open with that. A language model and an encoder of texts read the sentence, and show what they regarded in it.

    A model of images takes a picture: regard look MODEL photo.jpg --out map.png shows what each head of its last
    attention regarded of the patches.
    """

    model: Model
    text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    """the sentence, or the file of a picture"""
    target: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """the translation to look at, instead of the model's own"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """the page, .html, or the picture, .png or .svg; by default page.html, for pictures map.png"""
    attention: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """the name of an attention: see regard info"""
    head: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """one head of it, from 0"""
    all: bool = False
    """every head of every attention, as small maps"""
    layers: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """look at these attentions alone, with * and ?: for texts that are too long for all"""
    patch: Annotated[str | None, tyro.conf.arg(metavar="ROW,COLUMN")] = None
    """of a picture: what this patch regarded, counted from 0, instead of the class token"""
    rollout: bool = False
    """of a picture: all layers together"""
    label: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """of a picture: what in it speaks for this label; in a segmenter by queries, what the label's query regarded"""
    truncate: Truncate = False
    device: Device = "auto"


def run(argv: list[str]) -> int:
    options = parse(Options, "look", argv)
    translator = load(options.model, options.device)
    if isinstance(translator, ImageModel):
        return _picture(translator, options)
    if options.patch is not None or options.rollout or options.label is not None:
        raise RegardError("Only a picture has patches, rollout and labels.", "Leave out --patch, --rollout, --label.")
    out = options.out or Path("page.html")
    target = None if options.target is None else as_text(options.target, "--target")
    seen = look(
        translator,
        as_text(options.text, "the text"),
        target,
        layers=options.layers,
        name=options.model.resolve().name,
        truncate=options.truncate,
    )
    seen.save(out, options.attention, options.head, overview=options.all)
    if seen.translation:
        print(seen.translation)
    if out.suffix.lower() == ".html":
        print(f"The page is in {out}: open it in a browser.", file=sys.stderr)
    else:
        print(f"The picture is in {out}.", file=sys.stderr)
    return 0


def _picture(model: ImageModel, options: Options) -> int:
    if options.target is not None or options.layers is not None or options.truncate:
        raise RegardError("Targets, layers and truncation are for texts.", "Leave out --target, --layers, --truncate.")
    out = options.out or Path("map.png")
    patch = None
    if options.patch is not None:
        place = re.fullmatch(r"(\d+),(\d+)", options.patch)
        if place is None:
            raise RegardError(f"--patch {options.patch} is not a row and a column.", "Write it like 3,5.")
        patch = int(place[1]), int(place[2])
    seen = look(model, as_text(options.text, "the picture's name"))
    attention = "all" if options.all else options.attention
    seen.save(out, attention, options.head, patch=patch, label=options.label, rollout=options.rollout)
    if seen.label is not None:
        print(f"{seen.label}\t{seen.probabilities[seen.label]:.4f}")
    print(f"The picture is in {out}.", file=sys.stderr)
    return 0

"""`regard look`: a page, or a picture, of what the model regarded."""

import os
import re
import sys
import webbrowser
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from regard.cli.common import Model, Quiet, Truncate, as_text, note, parse
from regard.cli.inference.look_comparison import desk_for
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.pipelines import Device, ImageModel, load
from regard.viewer import look
from regard.viewer.page.image_requests import PictureDesk
from regard.viewer.page.image_scene import scene_of_picture
from regard.viewer.page.live_server import Live
from regard.viewer.page.text_requests import Desk
from regard.viewer.page.text_scene import Scene, scene_of

# That a request, which is under way when the page is closed, may still take.
SECONDS = 5.0


@dataclass(frozen=True)
class Options:
    """Show the attention of a model on a sentence or an image: regard look MODEL "The cat sleeps." --out page.html

    A page (.html) shows every head of every attention, in any browser and without a network. A picture (.png, .svg)
    shows the clearest cross-attention, its heads averaged; or another, one head of it, or all of them, and a page may
    open with that. A language model and an encoder of texts read the sentence, and show what they regarded in it.

    --live opens a page that asks the model again, whenever its sentence is changed: regard look MODEL --live

    A model that answers questions takes the text too: regard look MODEL "Who sleeps?" --context "The cat sleeps."

    --beside puts another model, or another sentence, beside it: regard look MODEL "The cat sleeps." --beside OTHER; and
    --steps all models that a run kept while it learned, with a slider.

    A model of images takes a picture: regard look MODEL photo.jpg --out page.html shows what every head regarded of its
    patches, and all layers together; map.png what each head of the last attention did.
    """

    model: Model
    text: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")] = None
    """the sentence, or the file of a picture; a live page can do without"""
    more: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PICTURE")] = ()
    """more pictures, for a live page, which shows one after the other"""
    target: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """the translation to look at, instead of the model's own"""
    context: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """of a model that answers questions: the text that the question is about"""
    beam: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """how many outputs the search for the translation, which a page shows, keeps side by side; by default 5"""
    prefix: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """what the model's translation must begin with"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """the page, .html, or the picture, .png or .svg; by default page.html, for pictures map.png"""
    attention: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """the name of an attention: see regard info"""
    head: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """one head of it, from 0"""
    all: bool = False
    """every head of every attention, as small maps"""
    walk: bool = False
    """have every number between text and output in the page, also of a large model and of a long text"""
    layers: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """look at these attentions alone, with * and ?: for texts that are too long for all"""
    patch: Annotated[str | None, tyro.conf.arg(metavar="ROW,COLUMN")] = None
    """of a picture: what this patch regarded, counted from 0, instead of the class token"""
    rollout: bool = False
    """of a picture: all layers together"""
    label: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """of a picture: what in it speaks for this label; in a segmenter by queries, what the label's query regarded"""
    beside: Annotated[str | None, tyro.conf.arg(metavar="MODEL|TEXT")] = None
    """the folder of another model, or another sentence: one page compares both"""
    steps: bool = False
    """all models that a run kept while it learned (train.keep_every), in one page, with a slider"""
    live: bool = False
    """serve the page, to this machine alone, until Ctrl-C"""
    port: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """of the live page; by default one that is free"""
    no_browser: bool = False
    """print the live page's address, and do not open it"""
    truncate: Truncate = False
    device: Device = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "look", argv)
    if options.live and options.out is not None:
        raise RegardError("A live page is not written to a file.", "Leave out --live or --out.")
    if not options.live and (options.port or options.no_browser):
        raise RegardError("Only a live page has a port and is opened.", "Give --live too, or leave it out.")
    if options.text is None and (not options.live or options.target is not None):
        raise RegardError("There is no text to look at.", "Give a sentence; or --live, and write it in the page.")
    if options.text is None and (options.beam is not None or options.prefix is not None):
        raise RegardError("There is no text to search a translation for.", "Give it, or leave out --beam and --prefix.")
    if options.beside is not None or options.steps:
        return _compare(options)
    translator = load(options.model, options.device)
    if isinstance(translator, ImageModel):
        return _picture(translator, options)
    if options.more:
        raise RegardError(f"{options.more[0]!r} is one text too many.", "Put the sentence in quotation marks.")
    if options.patch is not None or options.rollout or options.label is not None:
        raise RegardError("Only a picture has patches, rollout and labels.", "Leave out --patch, --rollout, --label.")
    name = options.model.resolve().name
    seen = None
    if options.text is not None:
        seen = look(
            translator,
            as_text(options.text, "the text"),
            None if options.target is None else as_text(options.target, "--target"),
            layers=options.layers,
            config=None if options.beam is None else DecodeConfig(beam=options.beam),
            prefix="" if options.prefix is None else as_text(options.prefix, "--prefix"),
            name=name,
            truncate=options.truncate,
            context=None if options.context is None else as_text(options.context, "--context"),
        )
    if options.live:
        desk = Desk(translator, name, options.layers, options.truncate)
        how: dict[str, Any] = dict(overview=options.all, walk=options.walk or None)
        return _serve(desk, None if seen is None else scene_of(seen, options.attention, options.head, **how), options)
    assert seen is not None
    out = options.out or Path("page.html")
    seen.save(out, options.attention, options.head, overview=options.all, walk=options.walk or None)
    if seen.translation:
        print(seen.translation)
    _tell(out)
    return 0


def _compare(options: Options) -> int:
    desk, texts = desk_for(options)
    seen = desk.compared(texts) if texts else None
    if options.live:
        return _serve(desk, None if seen is None else seen.scene(options.attention, options.head), options)
    assert seen is not None
    out = options.out or Path("page.html")
    seen.save(out, options.attention, options.head)
    for label, one in zip(seen.labels, seen.looks):
        if one.translation:
            print(f"{label}\t{one.translation}")
    _tell(out)
    return 0


def _tell(out: Path) -> None:
    if out.suffix.lower() == ".html":
        note(f"The page is in {out}: open it in a browser.")
    else:
        note(f"The picture is in {out}.")


def _serve(desk: Desk, scene: Scene | None, options: Options) -> int:
    """The live page, until Ctrl-C."""
    with Live(desk, scene, options.port) as live:
        print(f"The page is at {live.address}\nCtrl-C closes it.", file=sys.stderr, flush=True)
        if not options.no_browser and _has_screen():
            webbrowser.open(live.address)
        with suppress(KeyboardInterrupt):
            live.serve_forever()
    # What the model is doing for a page is done before Python takes it down.
    desk.lock.acquire(timeout=SECONDS)
    note("The page is closed.")
    return 0


def _has_screen() -> bool:
    """Whether a browser would have where to show itself; elsewhere one of texts might open, in this very terminal."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _picture(model: ImageModel, options: Options) -> int:
    if options.text is None:
        raise RegardError("There is no picture to look at.", "Name its file.")
    if options.more and not options.live:
        raise RegardError("A page or a picture is of one picture.", "Name one; or give --live too.")
    if options.target is not None or options.context is not None or options.layers is not None or options.truncate:
        raise RegardError(
            "Targets, contexts, layers and truncation are for texts.",
            "Leave out --target, --context, --layers, --truncate.",
        )
    if options.beam is not None or options.prefix is not None:
        raise RegardError("A model of pictures searches for nothing.", "Leave out --beam and --prefix.")
    out = options.out or Path("map.png")
    patch = None
    if options.patch is not None:
        place = re.fullmatch(r"(\d+),(\d+)", options.patch)
        if place is None:
            raise RegardError(f"--patch {options.patch} is not a row and a column.", "Write it like 3,5.")
        patch = int(place[1]), int(place[2])
    name = options.model.resolve().name
    pictures = [as_text(one, "the picture's name") for one in (options.text, *options.more)]
    seen = look(model, pictures[0], name=name)
    how: dict[str, Any] = dict(patch=patch, label=options.label, rollout=options.rollout, walk=options.walk or None)
    attention = "all" if options.all else options.attention
    if options.live:
        # By their names, as they were given: a page can ask for these, and for no other file.
        seen = replace(seen, name=pictures[0])
        scene = scene_of_picture(seen, attention, options.head, **how, pictures=pictures)
        return _serve(PictureDesk(model, name, pictures={one: one for one in pictures}), scene, options)
    seen.save(out, attention, options.head, **how)
    if seen.label is not None:
        print(f"{seen.label}\t{seen.probabilities[seen.label]:.4f}")
    _tell(out)
    return 0

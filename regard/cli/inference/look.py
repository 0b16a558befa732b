"""`regard look`: attention as an interactive page or an image."""

import os
import re
import sys
import webbrowser
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from regard.cli.common import (
    DeviceOption,
    Model,
    Quiet,
    SourceLanguage,
    TargetLanguage,
    Truncate,
    check_utf8,
    parse,
    print_note,
)
from regard.cli.options import Arg
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.evaluation.teacher_forcing import require_attention
from regard.files import check_output_file
from regard.pipelines import ImageModel, Translator, load
from regard.ranges import Port
from regard.training import list_step_folders
from regard.viewer import look
from regard.viewer.comparison import SECOND_SOURCE, ComparisonRequestHandler
from regard.viewer.page.image_scene import build_image_scene
from regard.viewer.page.live_server import LiveServer
from regard.viewer.page.requests import ImageRequestHandler, TextRequestHandler
from regard.viewer.page.text_scene import Scene, build_scene

# Seconds to wait for a running request when the live page is closed.
SHUTDOWN_TIMEOUT = 5.0


@dataclass(frozen=True)
class Options:
    """Show attention on a sentence or an image: regard look MODEL "The cat sleeps." --out page.html

    A page (.html) shows all attention heads in any browser, offline. An image (.png, .svg, .pdf) shows the sharpest
    cross-attention averaged over heads, or the attention selected by --attention, --head and --all; a page opens with
    that selection. For a language model or a text encoder, the sentence is the input text.

    Live page, which runs the model on edited text: regard look MODEL --live

    Question answering model: regard look MODEL "Who sleeps?" --context "The cat sleeps."

    Comparison with another model or sentence: regard look MODEL "The cat sleeps." --beside OTHER

    Comparison of the saved steps of a training run: regard look MODEL "The cat sleeps." --steps

    Image model: regard look MODEL photo.jpg --out page.html shows all heads over the patches and attention rollout;
    with --out map.png, the heads of the last attention.
    """

    model: Model
    text: Annotated[str | None, Arg(is_positional=True)] = None
    """sentence or image file; optional with --live"""
    more: Annotated[tuple[str, ...], Arg("IMAGE", is_positional=True)] = ()
    """further image files to choose from in a live page"""
    target: Annotated[str | None, Arg(default="the model's translation")] = None
    """target text for teacher forcing"""
    to: TargetLanguage = None
    source_language: SourceLanguage = None
    context: str | None = None
    """question answering models: text that the question is about"""
    beam: Annotated[int | None, Arg(default="5")] = None
    """beam width of the search shown in the page"""
    prefix: str | None = None
    """forced beginning of the translation"""
    out: Annotated[Path | None, Arg(default="page.html, for image models map.png")] = None
    """output file: a page (.html) or an image (.png, .svg, .pdf)"""
    attention: Annotated[str | None, Arg("NAME", default="the sharpest")] = None
    """attention to show first, by its name in regard info"""
    head: Annotated[int | None, Arg(default="mean of all heads")] = None
    """head of that attention, from 0"""
    all: bool = False
    """show all heads of all attentions as small maps"""
    trace: bool = False
    """include the step-by-step view of all intermediate values, even for a large model or a long text"""
    explain: bool = False
    """include the effect of every head, the logit lens and attributions in the page, however long they take"""
    with_model: bool = False
    """include the model in the page, which then runs new input offline (default for models of at most 4 MB)"""
    no_with_model: bool = False
    """never include the model in the page"""
    layers: Annotated[str | None, Arg("NAME", default="all")] = None
    """pattern (* and ?) of the attentions to record, for texts too long to record all"""
    patch: Annotated[str | None, Arg("ROW,COLUMN", default="class token")] = None
    """images: query patch, from 0,0"""
    rollout: bool = False
    """images: attention rollout through all layers"""
    label: Annotated[str | None, Arg("NAME")] = None
    """images: relevance of the patches for this label; for query-based segmentation, attention of its query"""
    beside: Annotated[str | None, Arg("MODEL|TEXT")] = None
    """model folder or sentence to compare with, in one page"""
    steps: bool = False
    """compare the saved steps of a training run (train.keep_every), in one page with a slider"""
    live: bool = False
    """serve an interactive page on localhost until Ctrl-C"""
    port: Annotated[Port, Arg(default="a free one")] = 0
    """port of the live page"""
    no_browser: bool = False
    """print the address of the live page without opening a browser"""
    truncate: Truncate = False
    device: DeviceOption = "auto"
    quiet: Quiet = False


def run(argv: list[str]) -> int:
    options = parse(Options, "look", argv)
    if options.with_model and options.no_with_model:
        raise RegardError("--with-model and --no-with-model cannot be combined.", "Leave out one of them.")
    if options.with_model and (options.live or options.beside is not None or options.steps):
        raise RegardError("--with-model is for a page of one model.", "Leave it out, or --live, --beside and --steps.")
    if options.live and options.out is not None:
        raise RegardError("--live and --out cannot be combined.", "Leave out one of them.")
    if not options.live and (options.port or options.no_browser):
        raise RegardError("--port and --no-browser require --live.", "Add --live, or leave them out.")
    if options.text is None and (not options.live or options.target is not None):
        raise RegardError("The input text is missing.", "Pass a sentence, or use --live and type it in the page.")
    if options.text is None and (options.beam is not None or options.prefix is not None):
        raise RegardError("--beam and --prefix require an input text.", "Pass a text, or leave them out.")
    if options.out is not None:
        check_output_file(options.out, [options.text, *options.more])
    if options.beside is not None or options.steps:
        return _compare(options)
    pipeline = load_for_look(options.model, options)
    if isinstance(pipeline, ImageModel):
        return _look_at_image(pipeline, options)
    if options.more:
        raise RegardError(f"Unexpected argument {options.more[0]!r}.", "Quote the sentence.")
    if options.patch is not None or options.rollout or options.label is not None:
        raise RegardError("--patch, --rollout and --label require an image model.", "Leave them out.")
    name = options.model.resolve().name
    attention = None
    if options.text is not None:
        attention = look(
            pipeline,
            check_utf8(options.text, "the text"),
            None if options.target is None else check_utf8(options.target, "--target"),
            layers=options.layers,
            config=_search_config(pipeline, options.beam),
            prefix="" if options.prefix is None else check_utf8(options.prefix, "--prefix"),
            name=name,
            truncate=options.truncate,
            context=None if options.context is None else check_utf8(options.context, "--context"),
        )
    if options.live:
        handler = TextRequestHandler(pipeline, name, options.layers, options.truncate)
        scene = None
        if attention is not None:
            view: dict[str, Any] = dict(overview=options.all, trace=options.trace or None)
            scene = build_scene(attention, options.attention, options.head, **view)
        return _serve(handler, scene, options)
    assert attention is not None
    out = options.out or Path("page.html")
    with_model = _with_model(options)
    view = dict(overview=options.all, trace=options.trace or None, explain=options.explain or None)
    attention.save(out, options.attention, options.head, **view, with_model=with_model)
    if attention.translation:
        print(attention.translation)
    _print_output_path(out)
    return 0


def _with_model(options: Options) -> bool | None:
    return False if options.no_with_model else options.with_model or None


def _search_config(pipeline: Any, beam: int | None) -> DecodeConfig | None:
    """The options of beam search with this width; None: those of the model."""
    if beam is None:
        return None
    decoding = pipeline.decoding if isinstance(pipeline, Translator) else DecodeConfig()
    return replace(decoding, method="beam", beam=beam)


def load_for_look(folder: str | Path, options: Options) -> Any:
    """Load a model folder on the device of the options, with their languages if it is a multilingual translator."""
    pipeline = load(folder, options.device)
    if isinstance(pipeline, Translator):
        return pipeline.with_target(options.to, options.source_language)
    if options.to is not None or options.source_language is not None:
        raise RegardError("--to and --from require a translator.", "Leave them out.")
    return pipeline


def comparison_handler(options: Options) -> tuple[ComparisonRequestHandler, dict[str, str]]:
    """The request handler of a comparison, and the input texts; no texts for an empty live page."""
    if options.beside is not None and options.steps:
        raise RegardError("--beside and --steps cannot be combined.", "Leave out one of them.")
    if options.beam is not None or options.prefix is not None or options.all or options.trace or options.more:
        raise RegardError("A comparison shows only attention.", "Leave out --beam, --prefix, --all and --trace.")
    if options.explain:
        raise RegardError("--explain is for a page of one model.", "Leave it out, or --beside and --steps.")
    name = options.model.resolve().name
    common: dict[str, Any] = {"layers": options.layers, "truncate": options.truncate}
    texts, beside = {"source": options.text, "target": options.target}, options.beside or ""
    if options.steps:
        steps = list_step_folders(options.model)
        loaders = [partial(load_for_look, folder, options) for folder in steps.values()]
        labels = [f"step {step}" for step in steps]
        handler = ComparisonRequestHandler(
            loaders[-1](), name, models=loaders, labels=labels, share_last_translation=True, **common
        )
    elif Path(beside).is_dir():
        both = [load_for_look(folder, options) for folder in (options.model, beside)]
        names = [name, Path(beside).resolve().name]
        labels = names if names[0] != names[1] else [str(options.model), beside]
        handler = ComparisonRequestHandler(
            both[0], models=[lambda model=model: model for model in both], labels=labels, **common
        )
        _check_comparable(both[1])
    else:
        if os.sep in beside and not any(character.isspace() for character in beside):
            raise RegardError(f"{beside}: model folder not found.", "Pass an existing folder, or a sentence.")
        if not beside.strip():
            raise RegardError("--beside is empty.", "Pass a sentence or a model folder.")
        if options.text is None or options.target is not None:
            raise RegardError(
                "Comparing two sentences requires both of them, and no --target.",
                "Pass two sentences, and leave out --target.",
            )
        handler = ComparisonRequestHandler(load_for_look(options.model, options), name, **common)
        texts = {"source": options.text, SECOND_SOURCE: beside}
    _check_comparable(handler.pipeline)
    return handler, {key: check_utf8(text, f"the {key}") for key, text in texts.items() if text is not None}


def _check_comparable(model: Any) -> None:
    if isinstance(model, ImageModel):
        raise RegardError("--beside and --steps are not supported for image models.", "Leave them out.")
    if isinstance(model, Translator):
        require_attention(model)


def _compare(options: Options) -> int:
    handler, texts = comparison_handler(options)
    comparison = handler.compare(texts) if texts else None
    if options.live:
        scene = None if comparison is None else comparison.scene(options.attention, options.head)
        return _serve(handler, scene, options)
    assert comparison is not None
    out = options.out or Path("page.html")
    comparison.save(out, options.attention, options.head)
    # What each model outputs itself, where all were given one translation.
    own = comparison.outputs or [None] * len(comparison.looks)
    for label, attention, output in zip(comparison.labels, comparison.looks, own):
        text = attention.translation if output is None else output
        if text:
            print(f"{label}\t{text}")
    _print_output_path(out)
    return 0


def _print_output_path(out: Path) -> None:
    if out.suffix.lower() == ".html":
        print_note(f"Wrote {out}: open it in a browser.")
    else:
        print_note(f"Wrote {out}.")


def _serve(handler: TextRequestHandler, scene: Scene | None, options: Options) -> int:
    """Serve the live page until Ctrl-C."""
    with LiveServer(handler, scene, options.port) as live:
        print(f"Live page: {live.address}\nStop with Ctrl-C.", file=sys.stderr, flush=True)
        if not options.no_browser and _has_display():
            live.open_browser = webbrowser.open
            webbrowser.open(live.address)
        with suppress(KeyboardInterrupt):
            live.serve_forever()
    # Let a running request finish before the interpreter shuts down.
    handler.lock.acquire(timeout=SHUTDOWN_TIMEOUT)
    print_note("Live page stopped.")
    return 0


def _has_display() -> bool:
    """Whether a graphical browser can open; without a display, a text browser might open in this terminal."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _look_at_image(model: ImageModel, options: Options) -> int:
    if options.text is None:
        raise RegardError("The image file is missing.", "Pass an image file.")
    if options.more and not options.live:
        raise RegardError("Several images require --live.", "Pass one image, or add --live.")
    if options.target is not None or options.context is not None or options.layers is not None or options.truncate:
        raise RegardError(
            "--target, --context, --layers and --truncate are not supported for image models.",
            "Leave them out.",
        )
    if options.beam is not None or options.prefix is not None:
        raise RegardError("--beam and --prefix are not supported for image models.", "Leave them out.")
    out = options.out or Path("map.png")
    patch = None
    if options.patch is not None:
        match = re.fullmatch(r"(\d+),(\d+)", options.patch)
        if match is None:
            raise RegardError(f"--patch {options.patch} is invalid; expected ROW,COLUMN.", "For example: --patch 3,5.")
        patch = int(match[1]), int(match[2])
    name = options.model.resolve().name
    images = [check_utf8(file, "the image file name") for file in (options.text, *options.more)]
    result = look(model, images[0], name=name)
    view: dict[str, Any] = dict(patch=patch, label=options.label, rollout=options.rollout, trace=options.trace or None)
    attention = "all" if options.all else options.attention
    if options.live:
        # The page can request only the files given on the command line, by these names.
        result = replace(result, name=images[0])
        scene = build_image_scene(result, attention, options.head, **view, images=images)
        return _serve(ImageRequestHandler(model, name, images={file: file for file in images}), scene, options)
    result.save(out, attention, options.head, **view, explain=options.explain or None, with_model=_with_model(options))
    if result.label is not None:
        print(f"{result.label}\t{result.probabilities[result.label]:.4f}")
    _print_output_path(out)
    return 0

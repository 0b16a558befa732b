"""Comparisons of `regard look`: two models or two sentences (--beside), or the steps of a run (--steps)."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from regard.cli.common import check_utf8
from regard.errors import RegardError
from regard.evaluation.teacher_forcing import require_attention
from regard.pipelines import ImageModel, Translator, load
from regard.training import list_step_folders
from regard.viewer.comparison import SECOND_SOURCE, ComparisonRequestHandler


def load_for_look(folder: str | Path, options: Any) -> Any:
    """Load a model folder on the device of the options, with their languages if it is a multilingual translator."""
    pipeline = load(folder, options.device)
    if isinstance(pipeline, Translator):
        return pipeline.with_target(options.to, options.source_language)
    if options.to is not None or options.source_language is not None:
        raise RegardError("--to and --from require a translator.", "Leave them out.")
    return pipeline


def comparison_handler(options: Any) -> tuple[ComparisonRequestHandler, dict[str, str]]:
    """The request handler of a comparison, and the input texts; no texts for an empty live page."""
    if options.beside is not None and options.steps:
        raise RegardError("--beside and --steps cannot be combined.", "Leave out one of them.")
    if options.beam is not None or options.prefix is not None or options.all or options.trace or options.more:
        raise RegardError("A comparison shows only attention.", "Leave out --beam, --prefix, --all and --trace.")
    if options.explain:
        raise RegardError("--explain is for a page of one model.", "Leave it out, or --beside and --steps.")
    name = options.model.resolve().name
    common: dict[str, Any] = {"layers": options.layers, "truncate": options.truncate}
    texts = {"source": options.text, "target": options.target}
    if options.steps:
        steps = list_step_folders(options.model)
        loaders = [partial(load_for_look, folder, options) for folder in steps.values()]
        labels = [f"step {step}" for step in steps]
        handler = ComparisonRequestHandler(
            loaders[-1](), name, models=loaders, labels=labels, share_last_translation=True, **common
        )
    elif Path(options.beside).is_dir():
        both = [load_for_look(folder, options) for folder in (options.model, options.beside)]
        names = [name, Path(options.beside).resolve().name]
        labels = names if names[0] != names[1] else [str(options.model), options.beside]
        handler = ComparisonRequestHandler(
            both[0], models=[lambda one=one: one for one in both], labels=labels, **common
        )
        _check_comparable(both[1])
    else:
        if os.sep in options.beside and not any(character.isspace() for character in options.beside):
            raise RegardError(f"{options.beside}: model folder not found.", "Pass an existing folder, or a sentence.")
        if not options.beside.strip():
            raise RegardError("--beside is empty.", "Pass a sentence or a model folder.")
        if options.text is None or options.target is not None:
            raise RegardError(
                "Comparing two sentences requires both of them, and no --target.",
                "Pass two sentences, and leave out --target.",
            )
        handler = ComparisonRequestHandler(load_for_look(options.model, options), name, **common)
        texts = {"source": options.text, SECOND_SOURCE: options.beside}
    _check_comparable(handler.pipeline)
    return handler, {key: check_utf8(text, f"the {key}") for key, text in texts.items() if text is not None}


def _check_comparable(model: Any) -> None:
    if isinstance(model, ImageModel):
        raise RegardError("--beside and --steps are not supported for image models.", "Leave them out.")
    if isinstance(model, Translator):
        require_attention(model)

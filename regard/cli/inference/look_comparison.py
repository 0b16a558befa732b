"""What `regard look --beside` and `--steps` compare: two models, two sentences, or the steps of a run."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from regard.cli.common import as_text
from regard.errors import RegardError
from regard.pipelines import ImageModel, Translator, load
from regard.training import kept_steps
from regard.viewer import need_attention
from regard.viewer.comparison import BESIDE, ComparingDesk


def desk_for(options: Any) -> tuple[ComparingDesk, dict[str, str]]:
    """Who answers for what is compared, and the texts to look at; none where they are yet to be written."""
    if options.beside is not None and options.steps:
        raise RegardError("A model is compared with another, or with its own steps.", "Leave out --beside or --steps.")
    if options.beam is not None or options.prefix is not None or options.all or options.walk or options.more:
        raise RegardError(
            "Where several are compared, a page shows their heads alone.", "Leave out --beam, --prefix, --all, --walk."
        )
    name = options.model.resolve().name
    given: dict[str, Any] = {"layers": options.layers, "truncate": options.truncate}
    texts = {"source": options.text, "target": options.target}
    if options.steps:
        steps = kept_steps(options.model)
        openers = [partial(load, folder, options.device) for folder in steps.values()]
        labels = [f"step {step}" for step in steps]
        desk = ComparingDesk(openers[-1](), name, models=openers, labels=labels, last_leads=True, **given)
    elif Path(options.beside).is_dir():
        both = [load(folder, options.device) for folder in (options.model, options.beside)]
        names = [name, Path(options.beside).resolve().name]
        labels = names if names[0] != names[1] else [str(options.model), options.beside]
        desk = ComparingDesk(both[0], models=[lambda one=one: one for one in both], labels=labels, **given)
        _refuse_pictures(both[1])
    else:
        if os.sep in options.beside and not any(sign.isspace() for sign in options.beside):
            raise RegardError(f"{options.beside}: there is no such model folder.", "Name one, or give a sentence.")
        if not options.beside.strip():
            raise RegardError("The other sentence is empty.", "Give one after --beside, or the folder of a model.")
        if options.text is None or options.target is not None:
            raise RegardError(
                "Two sentences are compared, each with the model's own translation.",
                "Give both of them, and leave out --target.",
            )
        desk = ComparingDesk(load(options.model, options.device), name, **given)
        texts = {"source": options.text, BESIDE: options.beside}
    _refuse_pictures(desk.bundle)
    return desk, {key: as_text(text, f"the {key}") for key, text in texts.items() if text is not None}


def _refuse_pictures(model: Any) -> None:
    if isinstance(model, ImageModel):
        raise RegardError("Looks at pictures cannot be compared.", "Leave out --beside and --steps.")
    if isinstance(model, Translator):
        need_attention(model)

"""Reasons for the settings of a suggested recipe that differ from the defaults."""

import dataclasses
from typing import Any

from regard.models import family_name
from regard.training.recipe import Recipe

_SIZE = "a model that suits the amount of data"
_IMAGES = "taken from the images"
_REGULARIZATION = "common for this task and number of steps"
_AUGMENTATION = "more variety from the same images"
# Keys: a field of a section, or a family or task and a field.
_REASONS: dict[str, str] = {
    **dict.fromkeys(("width", "heads", "layers", "encoder_layers", "decoder_layers", "feedforward"), _SIZE),
    **dict.fromkeys(("dropout", "drop_path"), "less data needs more regularization"),
    "max_len": "limits the length of training examples; the positions extrapolate beyond it",
    "positions": "extrapolate beyond max_len, unlike learned positions",
    "norm": "less sensitive to learning rate and warm-up (Xiong et al. 2020)",
    "norm_eps": "common for this norm",
    "norm_kind": "as in T5 1.1",
    "activation": "as in T5 1.1",
    "bias": "as in T5 1.1",
    "gpt.activation": "as in Qwen3, so that transformers can run the model",
    "transformer.positions": "0.9 to 1.0 BLEU better than sinusoidal on small corpora; extrapolate beyond max_len",
    "text2text.positions": "as in T5 1.1; extrapolate beyond max_len",
    "vit.positions": "work for any image size without interpolating a table",
    **dict.fromkeys(("channels", "mean", "std"), _IMAGES),
    "patch": "the largest size that leaves enough patches per image",
    "patches": "convolutions add locality, which small datasets do not teach",
    "pooling": "the mean over all patches needs no class token",
    "head": "required by the task",
    "segmenter": "one query per class (Strudel et al. 2021)",
    **dict.fromkeys(("weight_decay", "label_smoothing", "ema"), _REGULARIZATION),
}


def describe_choices(recipe: Recipe, suggested: Recipe) -> list[str]:
    """One line per reason, with the fields for which the recipe kept a suggested value that is not the default.

    Fields of [train] that the plan prints elsewhere are omitted.

    >>> from regard.models import TransformerConfig
    >>> recipe = Recipe(model=TransformerConfig(norm="post", width=128))
    >>> describe_choices(recipe, Recipe(model=TransformerConfig(width=128)))
    ['width 128, not 256: a model that suits the amount of data']
    """
    changes: list[tuple[str, str]] = []
    if type(recipe.model) is type(suggested.model):
        family = family_name(recipe.model)
        for name, text in _kept_changes(recipe.model, suggested.model).items():
            keys = (f"{recipe.task}.{name}", f"{family}.{name}", name)
            changes.append((text, next((_REASONS[key] for key in keys if key in _REASONS), "chosen from the data")))
    for name, text in _kept_changes(recipe.train, suggested.train).items():
        if name in _REASONS:
            changes.append((text, _REASONS[name]))
    changes += [(text, _AUGMENTATION) for text in _kept_changes(recipe.augment, suggested.augment).values()]
    by_reason: dict[str, list[str]] = {}
    for text, reason in changes:
        by_reason.setdefault(reason, []).append(text)
    return [f"{'; '.join(texts)}: {reason}" for reason, texts in by_reason.items()]


def _kept_changes(config: Any, suggested: Any) -> dict[str, str]:
    """Describe the fields of `config` that have the suggested value, where that is not the default."""
    changes = {}
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), field.default
        if value == getattr(suggested, field.name) and value != default:
            changes[field.name] = f"{field.name} {format_value(value)}, not {format_value(default)}"
    return changes


def format_value(value: Any) -> str:
    """A value as the plan prints it.

    >>> format_value((0.5, 0.25)), format_value(True)
    ('0.5 0.25', 'true')
    """
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)

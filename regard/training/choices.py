"""What a suggested recipe sets otherwise than a config's default, and why."""

import dataclasses
from typing import Any

from regard.models import family_of
from regard.training.recipe import Recipe

_SIZE = "a model that suits the amount of data"
_IMAGES = "as the images are"
_REGULARIZATION = "usual for the task and the number of steps"
_AUGMENTATION = "more variety from the same images"
# By field of a section, or by family and field.
_REASONS: dict[str, str] = {
    **dict.fromkeys(("width", "heads", "layers", "encoder_layers", "decoder_layers", "feedforward"), _SIZE),
    **dict.fromkeys(("dropout", "drop_path"), "the less data, the more"),
    "max_len": "a bound for training batches that suits such texts; the positions go beyond it",
    "positions": "they go beyond max_len, which learned ones do not",
    "norm": "less sensitive to learning rate and warm-up (Xiong et al. 2020)",
    "norm_eps": "usual for this norm",
    "norm_kind": "the form of T5 1.1",
    "activation": "the form of T5 1.1",
    "bias": "the form of T5 1.1",
    "transformer.positions": "0.9 to 1.4 BLEU better than sinusoidal ones on small corpora; they go beyond max_len",
    "text2text.positions": "the form of T5 1.1; they go beyond max_len",
    "vit.positions": "images of any size, without a table to interpolate",
    **dict.fromkeys(("channels", "mean", "std"), _IMAGES),
    "patch": "the largest that leaves enough patches per image",
    "patches": "convolutions relate neighboring pixels from the start, which few images cannot teach",
    "pooling": "the mean over all patches needs no class token",
    "head": "the task",
    "segmenter": "one query per class (Strudel et al. 2021)",
    **dict.fromkeys(("weight_decay", "label_smoothing", "ema"), _REGULARIZATION),
}


def describe_choices(recipe: Recipe, suggested: Recipe) -> list[str]:
    """A line for each reason: the fields that the suggestion changed from their default and that the recipe has kept.

    Of [train] those that no other line of the plan shows.

    >>> from regard.models import TransformerConfig
    >>> recipe = Recipe(model=TransformerConfig(norm="post", width=128))
    >>> describe_choices(recipe, Recipe(model=TransformerConfig(width=128)))
    ['width 128, not 256: a model that suits the amount of data']
    """
    changes: list[tuple[str, str]] = []
    if type(recipe.model) is type(suggested.model):
        family = family_of(recipe.model)
        for name, text in _kept_changes(recipe.model, suggested.model).items():
            names = (f"{recipe.task}.{name}", f"{family}.{name}", name)
            changes.append((text, next((_REASONS[one] for one in names if one in _REASONS), "suits the data")))
    for name, text in _kept_changes(recipe.train, suggested.train).items():
        if name in _REASONS:
            changes.append((text, _REASONS[name]))
    changes += [(text, _AUGMENTATION) for text in _kept_changes(recipe.augment, suggested.augment).values()]
    by_reason: dict[str, list[str]] = {}
    for text, reason in changes:
        by_reason.setdefault(reason, []).append(text)
    return [f"{'; '.join(texts)}: {reason}" for reason, texts in by_reason.items()]


def _kept_changes(config: Any, suggested: Any) -> dict[str, str]:
    """Fields of `config` with the suggested value, where that is not the default: in words."""
    changes = {}
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), field.default
        if value == getattr(suggested, field.name) and value != default:
            changes[field.name] = f"{field.name} {shown(value)}, not {shown(default)}"
    return changes


def shown(value: Any) -> str:
    """A value as the plan shows it.

    >>> shown((0.5, 0.25)), shown(True)
    ('0.5 0.25', 'true')
    """
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)

"""The plan of a run, printed before the first step: data, model, training, validation, expected time and memory."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from regard.errors import RegardError
from regard.evaluation.text_metrics import METRIC_FORMATS
from regard.models import family_name
from regard.training.datasets import Dataset, count_units
from regard.training.distributed import Cost
from regard.training.pretrained_embeddings import VectorCoverage
from regard.training.recipe import TASKS, Recipe, TrainConfig
from regard.training.schedules import format_duration
from regard.training.tasks.task import Task

if TYPE_CHECKING:
    from regard.training.run import Setup


def describe_plan(
    setup: "Setup",
    model: nn.Module,
    note: str,
    cost: Cost | None,
    vectors: Sequence[VectorCoverage] = (),
) -> list[str]:
    """The lines of the plan, followed by warnings about the data."""
    recipe, dataset, is_fine_tuned = setup.recipe, setup.dataset, setup.origin is not None
    config, task = recipe.train, TASKS[recipe.task]
    assert cost is not None
    parameters = sum(p.numel() for p in model.parameters())
    # Two float32 moments per parameter (Adam), which are allocated after the measurement.
    memory = cost.workers * (cost.memory + 8 * parameters)
    choices = [] if is_fine_tuned else _choices(recipe, task, dataset, setup.suggested)
    where = cost.device.type if cost.workers == 1 else f"{cost.workers} workers"
    rows = [
        ("data", dataset.describe()),
        ("", note),
        (
            "model",
            f"{_describe_model(recipe)}: {parameters / 1e6:.2f} M parameters{', fine-tuned' if is_fine_tuned else ''}",
        ),
        *(("", str(coverage)) for coverage in vectors),
        ("training", _describe_training(recipe, task)),
        ("validation", _describe_validation(config)),
        ("time", _describe_time(config, cost)),
        ("memory", f"about {memory / 1e9:.1f} GB on {where}"),
        *(("chosen", reason) for reason in task.reasons(dataset, recipe)),
        *(("chosen", choice) for choice in choices),
    ]
    lines = [f"  {name:<11}{text}" for name, text in rows]
    warnings = [*task.warnings(dataset), *(text for coverage in vectors for text in coverage.warnings())]
    return ["Plan", *lines, *(f"Warning: {text}" for text in warnings)]


def metric_name(config: TrainConfig) -> str:
    """The display name of the metric that selects the model.

    >>> metric_name(TrainConfig(validate_by="bleu")), metric_name(TrainConfig(validate_by="loss"))
    ('BLEU', 'loss')
    """
    name = config.validate_by
    return METRIC_FORMATS[name][0] if name in METRIC_FORMATS and name != "loss" else name


def _choices(recipe: Recipe, task: Task, dataset: Dataset, suggested: Recipe | None) -> list[str]:
    try:
        return describe_choices(recipe, suggested or task.suggest_recipe(dataset, False))
    except RegardError:  # there is no suggestion for these data; all settings are the user's
        return []


def _describe_model(recipe: Recipe) -> str:
    model: Any = recipe.model
    layers = getattr(model, "layers", None)
    if layers is None:
        depth = f"{model.encoder_layers}+{model.decoder_layers} layers"
    else:
        depth = count_units(layers, "layers")
    return f"{family_name(model)}, {depth} of width {model.width}"


def _describe_training(recipe: Recipe, task: Task) -> str:
    config = recipe.train
    batch = (
        count_units(config.batch_images, "images")
        if task.is_image_task and not recipe.data.longest
        else f"{config.batch_tokens:,} tokens"
    )
    decay = {"wsd": "constant, then decay", "inverse_root": "inverse square root"}.get(config.schedule, config.schedule)
    return (
        f"up to {count_units(config.steps, 'steps')} of {batch}; {config.optimizer}, "
        f"learning rate {config.lr:g} ({decay}), warm-up {config.warmup:,}"
    )


def _describe_validation(config: TrainConfig) -> str:
    selected = {"last": "the last model is saved", "loss": "the model with the best loss is saved"}.get(
        config.validate_by, f"the last model whose {metric_name(config)} equals the best within its margin is saved"
    )
    outcome = "the learning rate decays and training ends" if config.schedule == "wsd" else "training ends"
    early = f"; after {config.patience} without improvement {outcome}" if config.patience else ""
    return f"every {config.validate_every:,} steps; {selected}{early}"


def _describe_time(config: TrainConfig, cost: Cost) -> str:
    seconds = config.steps * config.accumulate * cost.seconds
    bound = "at most " if cost.device.type == "cuda" else "about "  # captured updates are faster than the measured ones
    text = f"{bound}{format_duration(seconds)} plus validation ({cost.seconds:.3f} s per batch, measured)"
    return f"{text}; ends within {config.time}" if config.time else text


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
    **dict.fromkeys(("weight_decay", "label_smoothing", "r_drop", "ema"), _REGULARIZATION),
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

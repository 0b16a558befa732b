"""The plan of a run, printed before the first step: data, model, training, validation, expected time and memory."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from regard.errors import RegardError
from regard.evaluation.text_metrics import METRIC_FORMATS
from regard.models import family_name
from regard.training.choices import describe_choices
from regard.training.datasets import Dataset, count_units
from regard.training.optim.schedules import format_duration
from regard.training.pretrained_embeddings import VectorCoverage
from regard.training.recipe import Recipe, TrainConfig
from regard.training.tasks.task import Task


class Cost(NamedTuple):
    """Measured cost of one update on one worker: seconds, and peak memory in bytes."""

    seconds: float
    memory: int


def describe_plan(
    recipe: Recipe,
    task: Task,
    dataset: Dataset,
    model: torch.nn.Module,
    note: str,
    cost: Cost,
    workers: int,
    device: torch.device,
    is_fine_tuned: bool,
    vectors: Sequence[VectorCoverage] = (),
) -> list[str]:
    """The lines of the plan, followed by warnings about the data."""
    config = recipe.train
    parameters = sum(p.numel() for p in model.parameters())
    # Two float32 moments per parameter (Adam), which are allocated after the measurement.
    memory = workers * cost.memory + 8 * parameters * workers
    choices = [] if is_fine_tuned else _choices(recipe, task, dataset)
    where = device.type if workers == 1 else f"{workers} workers"
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
        ("time", _describe_time(config, cost, device)),
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


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _choices(recipe: Recipe, task: Task, dataset: Dataset) -> list[str]:
    try:
        return describe_choices(recipe, task.suggest_recipe(dataset, False))
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
        config.validate_by, f"the model with the best {metric_name(config)} is saved, ties broken by loss"
    )
    outcome = "the learning rate decays and training ends" if config.schedule == "wsd" else "training ends"
    early = f"; after {config.patience} without improvement {outcome}" if config.patience else ""
    return f"every {config.validate_every:,} steps; {selected}{early}"


def _describe_time(config: TrainConfig, cost: Cost, device: torch.device) -> str:
    seconds = config.steps * config.accumulate * cost.seconds
    bound = "at most " if device.type == "cuda" else "about "  # captured updates are faster than the measured ones
    text = f"{bound}{format_duration(seconds)} plus validation ({cost.seconds:.3f} s per batch, measured)"
    return f"{text}; ends within {config.time}" if config.time else text

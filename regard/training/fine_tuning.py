"""Fine-tuning: the config and the initial weights that a new model inherits from a trained one."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.layers.patches import patch_coordinates
from regard.models import BertConfig, ModelConfig, ViT, ViTConfig, family_name
from regard.pipelines import ModelFolder, Pipeline
from regard.ranges import format_value
from regard.training.recipe import Recipe
from regard.training.registry import families_for

StartFrom = str | Path | Pipeline
"""the model to fine-tune: its folder, or a pipeline"""
# Prefixes of parameters that may differ from those of the model to fine-tune: task heads.
HEAD_PARAMETERS = (
    "output.",
    "mask_head.",
    "query_pool.",
    "pooler.",
    "distilled.",
    "pooled_map.",
    "segmenter.",
    "painter.",
)
# Settings that a recipe may change when a Vision Transformer is fine-tuned: those that do not affect the shapes of its
# weights, beside those of a head that it does not have yet.
_ADJUSTABLE_FIELDS = ("dropout", "drop_path")


def origin_name(start_from: StartFrom | None) -> str | None:
    """The folder of the model to fine-tune, for messages and training.json.

    >>> origin_name("models/encoder"), origin_name(None)
    ('models/encoder', None)
    """
    if start_from is None or isinstance(start_from, str | Path):
        return None if start_from is None else str(start_from)
    if not isinstance(start_from, Pipeline) or len(getattr(start_from, "models", [start_from.model])) > 1:
        raise RegardError(
            f"start_from must be a model folder, or a model that regard.load returns (got {format_value(start_from)}).",
            "Pass one model.",
        )
    return str(min(start_from.folders, default="a model in memory"))


def origin_config(start_from: StartFrom) -> Any:
    """The model config of the model to fine-tune."""
    return start_from.model.config if isinstance(start_from, Pipeline) else ModelFolder.open(start_from).config


def fine_tuning_recipe(recipe: Recipe, model: ModelConfig, origin: object) -> Recipe:
    """The recipe with the sizes of the model to fine-tune."""
    families = families_for(recipe.task)
    if family_name(model) not in families:
        raise RegardError(
            f"{origin} holds a model of the family {family_name(model)}, which does not support the task "
            f"{recipe.task}.",
            f"Pass a model of the family {' or '.join(families)}.",
        )
    if isinstance(model, ViTConfig):
        names = [*_ADJUSTABLE_FIELDS, *model.unused_head_fields]
        model = dataclasses.replace(model, **{name: getattr(recipe.model, name) for name in names})
    if isinstance(model, BertConfig):
        # A classifier keeps its pooling; an encoder that becomes a classifier uses the pooling of the recipe.
        chosen: Any = model if model.head == "classify" else recipe.model
        pooling: Any = chosen.pooling if recipe.task == "classify" else "first"
        model = dataclasses.replace(model, pooling=pooling, problem_type="single_label")
    return dataclasses.replace(recipe, model=model)


@torch.no_grad()
def initial_weights(model: nn.Module, origin: nn.Module) -> dict[str, Tensor]:
    """The weights of `origin` for the new model, with learned positions interpolated to the new image size."""
    weights: dict[str, Tensor] = dict(origin.named_parameters())
    if isinstance(model, ViT) and isinstance(origin, ViT):
        new, old = model.embedding.learned, origin.embedding.learned
        if new is not None and old is not None and new.grid != old.grid:
            table = torch.cat((old.weight[: old.prefix], old(*patch_coordinates(new.grid))))
            weights["embedding.learned.weight"] = table
    return weights

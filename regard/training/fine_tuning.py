"""Fine-tuning: config and initial weights that a new model inherits from a trained one."""

import copy
import dataclasses
from functools import singledispatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.layers.patches import patch_coordinates
from regard.models import BertConfig, ViT, ViTConfig, family_name
from regard.models.bert import TEXT_HEADS
from regard.pipelines import Pipeline, check_storable, load
from regard.ranges import format_value
from regard.training.recipe import TASKS, Recipe, families_for

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
    "mae_decoder.",
)
# Settings that a recipe may change when a Vision Transformer is fine-tuned: those that do not affect the shapes of its
# weights, beside those of a head that it does not have yet.
_ADJUSTABLE_FIELDS = ("dropout", "drop_path")


class Origin(NamedTuple):
    """The model to fine-tune: its name, for messages and training.json, and its pipeline, on the CPU."""

    name: str
    pipeline: Any


def open_origin(start_from: StartFrom) -> Origin:
    """Open the model to fine-tune, a folder or a pipeline."""
    if isinstance(start_from, str | Path):
        return Origin(str(start_from), load(start_from, "cpu"))
    if not isinstance(start_from, Pipeline) or len(getattr(start_from, "models", [start_from.model])) > 1:
        raise RegardError(
            f"start_from must be a model folder, or a model that regard.load returns (got {format_value(start_from)}).",
            "Pass one model.",
        )
    check_storable(start_from)  # its config and parameters are used
    pipeline: Any = start_from
    if pipeline.device.type != "cpu":
        pipeline = dataclasses.replace(pipeline, model=copy.deepcopy(pipeline.model).cpu())
    return Origin(str(min(start_from.folders, default="a model in memory")), pipeline)


def fine_tuning_recipe(recipe: Recipe, origin: Origin) -> Recipe:
    """The recipe with the sizes of the model to fine-tune."""
    model = origin.pipeline.model.config
    families = families_for(recipe.task)
    if family_name(model) not in families:
        raise RegardError(
            f"{origin.name} holds a model of the family {family_name(model)}, which does not support the task "
            f"{recipe.task}.",
            f"Pass a model of the family {' or '.join(families)}.",
        )
    return dataclasses.replace(recipe, model=inherited_config(model, recipe))


@singledispatch
def inherited_config(model: Any, recipe: Recipe) -> Any:
    """The config of the model to fine-tune, with the settings that the recipe may change."""
    return model


@inherited_config.register
def _inherited_image_config(model: ViTConfig, recipe: Recipe) -> ViTConfig:
    names = [*_ADJUSTABLE_FIELDS, *model.unused_head_fields]
    return dataclasses.replace(model, **{name: getattr(recipe.model, name) for name in names})


@inherited_config.register
def _inherited_encoder_config(model: BertConfig, recipe: Recipe) -> BertConfig:
    # A classifier keeps its pooling; an encoder that becomes a classifier uses the pooling of the recipe.
    chosen: Any = model if TEXT_HEADS[model.head].is_per_text else recipe.model
    head = TEXT_HEADS[TASKS[recipe.task].with_head(model).head]
    pooling: Any = chosen.pooling if head.is_per_text else "first"
    return dataclasses.replace(model, pooling=pooling, problem_type="single_label")


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

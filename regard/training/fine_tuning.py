"""Fine-tuning: the config and the initial weights that a new model inherits from a trained one."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.layers.patches import patch_coordinates
from regard.models import BertConfig, ModelConfig, ViT, ViTConfig, family_name
from regard.training.recipe import Recipe
from regard.training.registry import families_for

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
# weights, and those of a head that it does not have yet.
_ADJUSTABLE_FIELDS = ("dropout", "drop_path")
_HEAD_FIELDS = {"segment": ("segmenter", "segmenter_layers"), "pixels": ("decoder_width", "decoder_layers")}


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
        names = [
            *_ADJUSTABLE_FIELDS,
            *(name for head, fields in _HEAD_FIELDS.items() if head != model.head for name in fields),
        ]
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

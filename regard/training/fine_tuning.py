"""Fine-tuning: what a new model takes over from a trained one."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.layers.patches import whereabouts
from regard.models import BertConfig, ModelConfig, ViT, ViTConfig, family_of
from regard.training.recipe import Recipe
from regard.training.registry import families_for

# Parameters that may differ between a model and the one it is fine-tuned from: the heads of tasks.
HEADS = ("output.", "mask_head.", "query_pool.", "pooler.", "distilled.", "pooled_map.", "segmenter.", "painter.")
# What a recipe decides when a Vision Transformer is fine-tuned: nothing that its weights depend on, except those of a
# head that it did not have.
_FREE = ("dropout", "drop_path")
_OF_HEADS = {"segment": ("segmenter", "segmenter_layers"), "pixels": ("decoder_width", "decoder_layers")}


def fine_tuned_recipe(recipe: Recipe, model: ModelConfig, origin: object) -> Recipe:
    """The recipe with the sizes of the model to fine-tune."""
    families = families_for(recipe.task)
    if family_of(model) not in families:
        raise RegardError(
            f"{origin} holds a {family_of(model)}, which cannot be trained to {recipe.task}.",
            f"Name a folder of: {', '.join(families)}.",
        )
    if isinstance(model, ViTConfig):
        names = [*_FREE, *(name for head, own in _OF_HEADS.items() if head != model.head for name in own)]
        model = dataclasses.replace(model, **{name: getattr(recipe.model, name) for name in names})
    if isinstance(model, BertConfig):
        # A classifier keeps its pooling; an encoder that becomes one takes the recipe's.
        chosen: Any = model if model.head == "classify" else recipe.model
        model = dataclasses.replace(model, pooling=chosen.pooling if recipe.task == "classify" else "first")
    return dataclasses.replace(recipe, model=model)


@torch.no_grad()
def initial_weights(model: nn.Module, origin: nn.Module) -> dict[str, Tensor]:
    """The weights of `origin` for the new model; learned positions are resampled to the new image size."""
    weights: dict[str, Tensor] = dict(origin.named_parameters())
    if isinstance(model, ViT) and isinstance(origin, ViT):
        new, old = model.embedding.learned, origin.embedding.learned
        if new is not None and old is not None and new.grid != old.grid:
            table = torch.cat((old.weight[: old.prefix], old(*whereabouts(new.grid))))
            weights["embedding.learned.weight"] = table
    return weights

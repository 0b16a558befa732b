"""A model that is trained already, as the beginning of another: what is taken over, and what is new."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.layers.patches import whereabouts
from regard.models import BertConfig, ModelConfig, ViT, ViTConfig, family_of
from regard.training.recipe import FAMILIES_FOR, Recipe

# What a model may lack or have too much when it is trained on for another task.
HEADS = ("output.", "mask_head.", "query_pool.", "pooler.", "distilled.", "pooled_map.", "segmenter.", "painter.")
# What a recipe decides of a Vision Transformer that is trained on: nothing that its weights depend on, but for those of
# a head that it did not have.
_FREE = ("dropout", "drop_path")
_OF_HEADS = {"segment": ("segmenter", "segmenter_layers"), "pixels": ("decoder_width", "decoder_layers")}


def taking_over(recipe: Recipe, model: ModelConfig, origin: object) -> Recipe:
    """The recipe with the sizes of the model that it goes on from."""
    families = FAMILIES_FOR[recipe.task]
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
def weights_for(model: nn.Module, origin: nn.Module) -> dict[str, Tensor]:
    """The weights of the model that another begins with; positions that were learned for other sizes of images are
    brought to the new one's.
    """
    weights: dict[str, Tensor] = dict(origin.named_parameters())
    if isinstance(model, ViT) and isinstance(origin, ViT):
        new, old = model.embedding.learned, origin.embedding.learned
        if new is not None and old is not None and new.grid != old.grid:
            table = torch.cat((old.weight[: old.prefix], old(*whereabouts(new.grid))))
            weights["embedding.learned.weight"] = table
    return weights

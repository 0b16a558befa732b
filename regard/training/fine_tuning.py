"""Fine-tuning: config, initial weights and settings that a new model inherits from a trained one."""

import copy
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.data.text.languages import add_directions
from regard.errors import RegardError
from regard.layers.patches import patch_coordinates
from regard.models import BertConfig, ViT, ViTConfig, family_name
from regard.pipelines import Pipeline, TextEncoder, Translator, check_storable, load
from regard.ranges import format_value
from regard.training.recipe import Recipe, families_for

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
# weights, and those of a head that it does not have yet.
_ADJUSTABLE_FIELDS = ("dropout", "drop_path")
_HEAD_FIELDS = {"segment": ("segmenter", "segmenter_layers"), "pixels": ("decoder_width", "decoder_layers")}


class Origin(NamedTuple):
    """The model to fine-tune: its name, for messages and training.json, and its pipeline, on the CPU."""

    name: str
    pipeline: Any


def open_origin(start_from: StartFrom | None) -> Origin | None:
    """Open the model to fine-tune, a folder or a pipeline.

    >>> open_origin(None)
    """
    if start_from is None:
        return None
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


def inherit_settings(pipeline: Any, origin: Any) -> None:
    """Give a pipeline the languages, options of decoding and sentence embedding of the one it is fine-tuned from."""
    if isinstance(origin, Translator):
        # A model that is fine-tuned on some of its language pairs keeps the others.
        keeps = pipeline.source_tokenizer.language_tags or not pipeline.language_pairs
        pairs = (*origin.language_pairs, *pipeline.language_pairs) if keeps else pipeline.language_pairs
        pipeline.language_pairs = add_directions(pairs, both=False)
        pipeline.language_tokens = origin.language_tokens
        pipeline.source_language, pipeline.target_language = origin.source_language, origin.target_language
    if hasattr(origin, "decoding") and type(origin) is type(pipeline):
        pipeline.decoding = origin.decoding
    if isinstance(origin, TextEncoder) and isinstance(pipeline, TextEncoder):
        pipeline.sentence = origin.sentence

"""The training tasks by name, and functions that suggest recipes for them."""

import dataclasses
from typing import Any

from regard.interop.export_targets import ExportTarget, check_exportable, unsupported_settings
from regard.progress import show_progress
from regard.training.recipe import TASKS, DataConfig, Recipe, TaskName, register_task
from regard.training.shards.dataset import check_no_folder, read_shards
from regard.training.tasks.answer import AnswerTask
from regard.training.tasks.classify import ClassifyTask
from regard.training.tasks.classify_images import ClassifyImagesTask
from regard.training.tasks.language import LanguageTask
from regard.training.tasks.mask import MaskTask
from regard.training.tasks.mask_images import MaskImagesTask
from regard.training.tasks.segment import SegmentTask
from regard.training.tasks.tag import TagTask
from regard.training.tasks.text2text import Text2TextTask
from regard.training.tasks.translate import TranslateTask

for _name, _task in {
    "translate": TranslateTask(),
    "text2text": Text2TextTask(),
    "language": LanguageTask(),
    "mask": MaskTask(),
    "classify": ClassifyTask(),
    "answer": AnswerTask(),
    "tag": TagTask(),
    "classify-images": ClassifyImagesTask(),
    "segment": SegmentTask(),
    "mask-images": MaskImagesTask(),
}.items():
    register_task(_name, _task)


def read_dataset(task: TaskName, data: DataConfig, *, quiet: bool = False) -> Any:
    """Read the dataset of a task, with a progress bar while images are decoded; token shards are only opened.

    >>> len(read_dataset("translate", DataConfig(limit=100)).training)
    100
    """
    entry: Any = TASKS[task]
    if (shards := read_shards(task, data)) is not None:
        return shards
    if not entry.reads_folders:
        check_no_folder(data.files)
    if not entry.is_image_task:
        return entry.read(data)
    with show_progress("decoding", silent=quiet) as on_progress:
        return entry.read(data, on_progress)


def suggest_recipe(task: TaskName, dataset: Any, fine_tune: bool = False) -> Recipe:
    """Suggest a recipe for a dataset; with `fine_tune`, for fine-tuning a trained model.

    >>> suggest_recipe("translate", read_dataset("translate", DataConfig(limit=100))).tokenizer.kind
    'bpe'
    """
    return TASKS[task].suggest_recipe(dataset, fine_tune)


def restrict_recipe(recipe: Recipe, target: ExportTarget) -> Recipe:
    """The recipe with unsupported model settings replaced by ones that export to `target`.

    >>> from regard.models import TransformerConfig
    >>> restrict_recipe(Recipe(model=TransformerConfig(qk_norm=True)), "ctranslate2").model.qk_norm
    False
    """
    changes = unsupported_settings(TASKS[recipe.task].expected_config(recipe), target)
    if "head" in changes:  # which the task needs
        check_recipe(recipe, target)
    model: Any = recipe.model
    changed = dataclasses.replace(model, **{field: values[0] for field, values in changes.items()})
    return dataclasses.replace(recipe, model=changed)


def check_recipe(recipe: Recipe, target: ExportTarget) -> None:
    """Raise an error if the model of the recipe does not export to `target`.

    >>> from regard.models import TransformerConfig
    >>> check_recipe(Recipe(model=TransformerConfig(qk_norm=True)), "ctranslate2")
    Traceback (most recent call last):
    regard.errors.RegardError: ...
    """
    check_exportable(TASKS[recipe.task].expected_config(recipe), target)

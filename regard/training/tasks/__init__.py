"""The tasks that a model can be trained for, by their names in recipes."""

import dataclasses
from typing import Any

from regard.interop.export_targets import Target, check_exportable, exportable
from regard.models import TransformerConfig
from regard.training.recipe import DataConfig, Recipe
from regard.training.registry import TASKS, TaskName, register_task
from regard.training.run_log import show_progress
from regard.training.tasks.answer_task import Answer
from regard.training.tasks.classify_images_task import ClassifyImages
from regard.training.tasks.classify_task import Classify
from regard.training.tasks.image_tasks import ImageTask
from regard.training.tasks.language_task import Language
from regard.training.tasks.mask_images_task import MaskImages
from regard.training.tasks.mask_task import Mask
from regard.training.tasks.segment_task import Segment
from regard.training.tasks.text2text_task import Text2Text
from regard.training.tasks.translate_task import Translate

for _name, _task in {
    "translate": Translate(),
    "text2text": Text2Text(),
    "language": Language(),
    "mask": Mask(),
    "classify": Classify(),
    "answer": Answer(),
    "classify-images": ClassifyImages(),
    "segment": Segment(),
    "mask-images": MaskImages(),
}.items():
    register_task(_name, _task)


def read_dataset(task: TaskName, data: DataConfig, *, quiet: bool = False) -> Any:
    """The dataset of a task, with a progress bar while images are decoded.

    >>> len(read_dataset("translate", DataConfig(phrasebook_size=100)).training)
    100
    """
    reader = TASKS[task]
    if not isinstance(reader, ImageTask):
        return reader.read(data)
    with show_progress("decoding", silent=quiet) as on_progress:
        return reader.read(data, on_progress)


def suggest_recipe(task: TaskName, dataset: Any, fine_tune: bool = False) -> Recipe:
    """A recipe that suits a dataset; `fine_tune`: for a model that is already trained.

    >>> suggest_recipe("translate", read_dataset("translate", DataConfig(phrasebook_size=100))).tokenizer.kind
    'bpe'
    """
    return TASKS[task].suggest_recipe(dataset, fine_tune)


def plan(
    task: TaskName, data: DataConfig, *, fine_tune: bool = False, export_for: Target | None = None
) -> tuple[Recipe, Any]:
    """A suggested recipe and the dataset that it is for; `fine_tune`: for a model that is already trained.

    `export_for` restricts the model to a form that this export target computes.

    >>> recipe, dataset = plan("translate", DataConfig(phrasebook_size=100), export_for="huggingface")
    >>> recipe.tokenizer.kind, recipe.model.positions, len(dataset.training)
    ('bpe', 'sinusoidal', 100)
    """
    dataset = read_dataset(task, data, quiet=True)
    recipe = dataclasses.replace(suggest_recipe(task, dataset, fine_tune), data=data)
    return restrict_recipe(recipe, export_for) if export_for else recipe, dataset


def restrict_recipe(recipe: Recipe, target: Target) -> Recipe:
    """The recipe with the model's form changed, where necessary, to one that exports to `target`.

    >>> from regard.models import TransformerConfig
    >>> restrict_recipe(Recipe(model=TransformerConfig(qk_norm=True)), "ctranslate2").model.qk_norm
    False
    """
    model = exportable(_with_vocabularies(recipe), target)
    return dataclasses.replace(recipe, model=dataclasses.replace(model, shared_vocab=False))


def check_recipe(recipe: Recipe, target: Target) -> None:
    """Raises an error if the recipe's model does not export to `target`.

    >>> from regard.models import TransformerConfig
    >>> check_recipe(Recipe(model=TransformerConfig(qk_norm=True)), "ctranslate2")
    Traceback (most recent call last):
    regard.errors.RegardError: ...
    """
    check_exportable(_with_vocabularies(recipe), target)


def _with_vocabularies(recipe: Recipe) -> Any:
    """The recipe's model config, which says whether both sides share a vocabulary, as it will once it is trained."""
    if not isinstance(recipe.model, TransformerConfig):
        return recipe.model
    return dataclasses.replace(recipe.model, shared_vocab=recipe.tokenizer.shared)

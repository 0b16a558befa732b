"""Training: from data and a recipe to a model folder."""

from regard.config_reader import read_toml
from regard.training.checkpoint import list_step_folders
from regard.training.datasets import Dataset, split_dataset
from regard.training.recipe import (
    TASKS,
    DataConfig,
    Recipe,
    TokenizerConfig,
    TrainConfig,
    recipe_from_dict,
    register_task,
)
from regard.training.run import run_recipe, train
from regard.training.tasks import read_dataset, suggest_recipe
from regard.training.tasks.task import Task
from regard.training.tasks.translate import TranslateTask

__all__ = [
    "TASKS",
    "DataConfig",
    "Dataset",
    "Recipe",
    "Task",
    "TokenizerConfig",
    "TrainConfig",
    "TranslateTask",
    "list_step_folders",
    "read_dataset",
    "read_toml",
    "recipe_from_dict",
    "register_task",
    "run_recipe",
    "split_dataset",
    "suggest_recipe",
    "train",
]

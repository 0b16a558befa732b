"""Training: from a recipe to a model folder."""

from regard.config_reader import read_toml
from regard.evaluation.text_metrics import TextScores, squad_scores, text_scores
from regard.training.checkpoint import list_step_folders
from regard.training.datasets import Dataset
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig, recipe_from_dict
from regard.training.tasks import TASKS, plan, read_dataset, suggest_recipe
from regard.training.trainer import train

__all__ = [
    "TASKS",
    "DataConfig",
    "Dataset",
    "Recipe",
    "TextScores",
    "TokenizerConfig",
    "TrainConfig",
    "list_step_folders",
    "plan",
    "read_dataset",
    "read_toml",
    "recipe_from_dict",
    "squad_scores",
    "suggest_recipe",
    "text_scores",
    "train",
]

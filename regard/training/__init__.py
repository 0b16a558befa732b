"""Training: from a recipe to a model folder."""

from regard.config_reader import read_toml
from regard.evaluation.text_metrics import TextScores, squad_scores, text_scores
from regard.training.checkpoint import kept_steps
from regard.training.datasets import Dataset
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig, recipe_from
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
    "kept_steps",
    "plan",
    "read_dataset",
    "read_toml",
    "recipe_from",
    "squad_scores",
    "suggest_recipe",
    "text_scores",
    "train",
]

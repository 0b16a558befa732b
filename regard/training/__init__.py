"""From a recipe to a model folder."""

from regard.training.checkpoint import kept_steps
from regard.training.datasets import Corpus, read_corpus
from regard.training.metrics import TextScores, squad_scores, text_scores
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig, read_toml, recipe_from
from regard.training.suggestions import suggest
from regard.training.tasks import TASKS, plan
from regard.training.trainer import train

__all__ = [
    "TASKS",
    "Corpus",
    "DataConfig",
    "Recipe",
    "TextScores",
    "TokenizerConfig",
    "TrainConfig",
    "kept_steps",
    "plan",
    "read_corpus",
    "read_toml",
    "recipe_from",
    "squad_scores",
    "suggest",
    "text_scores",
    "train",
]

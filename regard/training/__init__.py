"""From a recipe to a model folder."""

from regard.config_reader import read_toml
from regard.training.checkpoint import kept_steps
from regard.training.corpus import Corpus, read_corpus
from regard.training.loop import train
from regard.training.metrics import TextScores, squad_scores, text_scores
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig, recipe_from
from regard.training.sizing import suggest
from regard.training.tasks import TASKS, plan

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

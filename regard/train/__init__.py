"""From a recipe to a model folder."""

from regard.train.checkpoint import kept_steps
from regard.train.corpus import Corpus, read_corpus
from regard.train.loop import train
from regard.train.metrics import TextScores, squad_scores, text_scores
from regard.train.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig, read_toml, recipe_from
from regard.train.sizing import suggest
from regard.train.tasks import TASKS, plan

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

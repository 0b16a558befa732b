"""Train, run and explain attention models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.version import __version__ as __version__

if TYPE_CHECKING:
    from regard.decode import DecodeConfig as DecodeConfig
    from regard.errors import RegardError as RegardError
    from regard.evaluation import evaluate as evaluate
    from regard.pipelines import Translator as Translator
    from regard.pipelines import load as load
    from regard.pipelines import save as save
    from regard.serve.client import connect as connect
    from regard.training.api import train as train
    from regard.training.recipe import Recipe as Recipe
    from regard.training.score_comparison import scores as scores
    from regard.training.shards.preparation import prepare as prepare
    from regard.viewer import compare as compare
    from regard.viewer import look as look

# Public names and where they live: imported when first used, so that `import regard` is quick.
_PUBLIC = {
    "DecodeConfig": "regard.decode",
    "Recipe": "regard.training",
    "RegardError": "regard.errors",
    "Translator": "regard.pipelines",
    "compare": "regard.viewer",
    "connect": "regard.serve.client",
    "evaluate": "regard.evaluation",
    "load": "regard.pipelines",
    "look": "regard.viewer",
    "prepare": "regard.training.shards.preparation",
    "save": "regard.pipelines",
    "scores": "regard.training.score_comparison",
    "train": "regard.training.api",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

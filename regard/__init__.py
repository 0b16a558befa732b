"""Train, run and explain attention models. `translator` below is a pipeline: a model with its tokenizers.

Train a model on files, or on rows such as [("The cat sleeps.", "Le chat dort."), …]:
    translator = regard.train("pairs.tsv", out="model")
Load a trained or imported model, or several as an ensemble:
    translator = regard.load("model")
Translate, or with models of other tasks generate, embed, classify (help(translator)):
    translator("The cat sleeps.")
See where a model looked, as a page or a plot:
    regard.look(translator, "The cat sleeps.").save("page.html")
Compare two sentences, models or training steps:
    regard.compare(regard.look(translator, "He sleeps."), regard.look(translator, "She sleeps.")).save("page.html")
Measure quality on test data:
    regard.evaluate(translator, "test.tsv")
Save a model:
    regard.save("copy", translator)
Record the exact attention weights of any forward pass, also of your own modules:
    with regard.record(translator) as recording:
        translator("The cat sleeps.")
Use a model on a server (regard serve model):
    translator = regard.connect("http://localhost:8000")
Compare the six scores on the same sentence pairs:
    print(regard.scores("pairs.tsv"))
"""

import importlib as _importlib
import typing as _typing

from regard.version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from regard import attention as attention
    from regard import viewer as viewer
    from regard.attention import attend as attend
    from regard.attention import causal as causal
    from regard.attention import local as local
    from regard.attention import padding as padding
    from regard.attention import record as record
    from regard.attention import weights as weights
    from regard.attention import window as window
    from regard.decode import DecodeConfig as DecodeConfig
    from regard.errors import RegardError as RegardError
    from regard.evaluation import evaluate as evaluate
    from regard.interop.formats import export_model as export_model
    from regard.interop.formats import import_model as import_model
    from regard.pipelines import ImageModel as ImageModel
    from regard.pipelines import TextEncoder as TextEncoder
    from regard.pipelines import TextGenerator as TextGenerator
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
    "ImageModel": "regard.pipelines",
    "Recipe": "regard.training.recipe",
    "RegardError": "regard.errors",
    "TextEncoder": "regard.pipelines",
    "TextGenerator": "regard.pipelines",
    "Translator": "regard.pipelines",
    "attend": "regard.attention",
    "causal": "regard.attention",
    "compare": "regard.viewer",
    "connect": "regard.serve.client",
    "evaluate": "regard.evaluation",
    "export_model": "regard.interop.formats",
    "import_model": "regard.interop.formats",
    "load": "regard.pipelines",
    "local": "regard.attention",
    "look": "regard.viewer",
    "padding": "regard.attention",
    "prepare": "regard.training.shards.preparation",
    "record": "regard.attention",
    "save": "regard.pipelines",
    "scores": "regard.training.score_comparison",
    "train": "regard.training.api",
    "weights": "regard.attention",
    "window": "regard.attention",
}
# Packages that need no import of their own.
_PACKAGES = (
    "attention",
    "data",
    "decode",
    "evaluation",
    "interop",
    "layers",
    "models",
    "pipelines",
    "training",
    "viewer",
)
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> _typing.Any:
    if name in _PACKAGES:
        return _importlib.import_module(f"regard.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return getattr(_importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

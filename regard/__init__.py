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
        translator.translate("The cat sleeps.", regard.DecodeConfig(method="greedy"))
Use a model on a server (regard serve model):
    translator = regard.connect("http://localhost:8000")
Compare the six scores on the same sentence pairs:
    print(regard.scores("pairs.tsv"))
"""

from regard.lazy import lazy_names as _lazy_names
from regard.version import __version__ as __version__

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)

"""Task: text to text. Each file is a task of its own, which a prefix names (T5, Raffel et al. 2020)."""

import dataclasses
from typing import Any

import numpy as np

from regard.data import Counts
from regard.errors import RegardError
from regard.models.transformer import t5_small
from regard.training.datasets import Dataset, Pairs, read_pair_splits
from regard.training.recipe import DataConfig, Recipe
from regard.training.tasks.translate_task import Translate


class Text2Text(Translate):
    families = ("transformer",)
    try_it = 'regard translate {out} "PREFIX …"'

    def read(self, config: DataConfig) -> Dataset[Pairs]:
        count = len(config.files)
        prefixes, weights = config.prefixes or ("",) * count, config.weights or (1.0,) * count
        for name, values in (("prefixes", prefixes), ("weights", weights), ("validation", config.validation)):
            if values and len(values) != count:
                raise RegardError(
                    f"data.{name} has {len(values)} entries for {count} files.", "Give one for each of data.files."
                )
        training: Pairs = []
        validation: Pairs = []
        counts = Counts(0)
        for number, file in enumerate(config.files):
            pairs, held_out, cleaned = read_pair_splits(config, [file], config.validation[number : number + 1])
            training += _prefixed(_repeated(pairs, weights[number] / min(weights)), prefixes[number])
            validation += _prefixed(held_out, prefixes[number])
            counts = Counts(*(a + b for a, b in zip(dataclasses.astuple(counts), dataclasses.astuple(cleaned))))
        # Mixed, so that the first of them, which BLEU is measured on, are of every task.
        order = np.random.default_rng(0).permutation(len(validation)).tolist()
        return Dataset(training, [validation[i] for i in order], left_out=counts.reasons)

    def suggest_recipe(self, dataset: Dataset[Pairs], fine_tune: bool) -> Recipe:
        recipe: Any = super().suggest_recipe(dataset, fine_tune)
        names = ("width", "heads", "feedforward", "encoder_layers", "decoder_layers", "dropout", "max_len")
        sizes = {name: getattr(recipe.model, name) for name in names}
        # T5's own form, unscaled scores and embeddings, wants more data than most people have.
        scores = dict.fromkeys(("encoder_score", "decoder_score", "cross_score"), "scaled_dot")
        model = t5_small(**sizes, **scores, head_width=0, tied=True, embedding_scale=True)
        return dataclasses.replace(recipe, task="text2text", model=model)


def _prefixed(pairs: Pairs, prefix: str) -> Pairs:
    return [(prefix + source, target) for source, target in pairs]


def _repeated(pairs: Pairs, weight: float) -> Pairs:
    """Each pair as often as the weight says; of what is left over, a part that is always the same.

    >>> len(_repeated([("a", "b"), ("c", "d")], 2.5))
    5
    """
    whole, part = divmod(weight, 1.0)
    drawn = np.random.default_rng(0).permutation(len(pairs))[: round(part * len(pairs))]
    return pairs * int(whole) + [pairs[i] for i in sorted(drawn.tolist())]

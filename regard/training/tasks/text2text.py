"""The task `text2text`: several text-to-text tasks, one per file, named by prefixes (T5, Raffel et al. 2020)."""

import dataclasses
from typing import Any

from regard.data.text.cleaning import CleaningCounts
from regard.errors import RegardError
from regard.models.transformer import t5_small
from regard.training.datasets import Dataset, Pairs, read_pair_splits, repeat_pairs
from regard.training.recipe import DataConfig, Recipe
from regard.training.tasks.translate import TranslateTask


class Text2TextTask(TranslateTask):
    """Several text-to-text tasks in one model."""

    families = ("transformer",)
    usage_hint = 'regard translate {out} "PREFIX …"'

    def read(self, config: DataConfig) -> Dataset[Pairs]:
        count = len(config.files)
        prefixes, weights = config.prefixes or ("",) * count, config.weights or (1.0,) * count
        for name, values in (("prefixes", prefixes), ("weights", weights), ("validation", config.validation)):
            if values and len(values) != count:
                raise RegardError(
                    f"data.{name} must have one entry per file of data.files: expected {count}, got {len(values)}.",
                    f"Pass one entry of data.{name} per file.",
                )
        training: Pairs = []
        validation: Pairs = []
        counts = CleaningCounts(0)
        for index, file in enumerate(config.files):
            pairs, validation_pairs, cleaned = read_pair_splits(config, [file], config.validation[index : index + 1])
            training += _add_prefix(repeat_pairs(pairs, weights[index] / min(weights)), prefixes[index])
            validation += _add_prefix(validation_pairs, prefixes[index])
            counts = CleaningCounts(*(a + b for a, b in zip(dataclasses.astuple(counts), dataclasses.astuple(cleaned))))
        return Dataset(training, validation, dropped=counts.reasons)

    def suggest_recipe(self, dataset: Dataset[Pairs], fine_tune: bool) -> Recipe:
        recipe: Any = super().suggest_recipe(dataset, fine_tune)
        names = ("width", "heads", "feedforward", "encoder_layers", "decoder_layers", "dropout", "max_len")
        sizes = {name: getattr(recipe.model, name) for name in names}
        # T5 itself has unscaled scores and embeddings, which need more data to train well.
        scores = dict.fromkeys(("encoder_score", "decoder_score", "cross_score"), "scaled_dot")
        model = t5_small(**sizes, **scores, head_width=0, tied=True, embedding_scale=True)
        return dataclasses.replace(recipe, task="text2text", model=model)


def _add_prefix(pairs: Pairs, prefix: str) -> Pairs:
    return [(prefix + source, target) for source, target in pairs]

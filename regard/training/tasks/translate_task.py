"""Task: translate, from sentence pairs."""

import dataclasses
from typing import Any

from regard.data import Batches, Tokenizer, encode_pairs
from regard.data.text.special_tokens import Special
from regard.decode import DecodeConfig
from regard.evaluation.text_metrics import text_scores
from regard.models import ModelConfig
from regard.pipelines import Translator
from regard.training.datasets import Dataset, Pairs, read_pair_dataset
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig
from regard.training.suggestions import profile_pairs, suggest_for_pairs
from regard.training.tasks.task import Encoded, Shape, Task, Tokenizers, one_tokenizer

# Sentences of the validation split that are translated each time; with fewer the choice of the model is noise.
VALIDATED = 1000


class Translate(Task):
    pipeline = "translator"
    metrics = ("bleu", "chrf", "exact_match")
    unit = "token"
    try_it = 'regard translate {out} "…"'

    def read(self, config: DataConfig) -> Dataset[Pairs]:
        return read_pair_dataset(config)

    def suggest_recipe(self, dataset: Dataset[Pairs], fine_tune: bool) -> Recipe:
        return suggest_for_pairs(dataset.training, fine_tune)

    def make_tokenizers(self, dataset: Dataset[Pairs], config: TokenizerConfig) -> Tokenizers:
        sources, targets = ([pair[side] for pair in dataset.training] for side in (0, 1))
        target_kind = config.target_kind or config.kind
        if config.shared and target_kind == config.kind:
            return one_tokenizer(sources + targets, config)
        return (
            Tokenizer.train(sources, config.kind, config.vocab_size, config.lowercase),
            Tokenizer.train(targets, target_kind, config.vocab_size, config.lowercase),
        )

    def complete_config(self, config: Any, dataset: Dataset[Pairs], tokenizers: Tokenizers) -> Any:
        source, target = tokenizers
        return dataclasses.replace(
            config,
            source_vocab=max(config.source_vocab, source.vocab_size),  # an imported model may have room for more
            target_vocab=max(config.target_vocab, target.vocab_size),
            shared_vocab=target is source,
        )

    def encode(
        self,
        dataset: Dataset[Pairs],
        tokenizers: Tokenizers,
        special: Special,
        recipe: Recipe,
        model: ModelConfig,
        shape: Shape,
    ) -> Encoded:
        common = shape.options | dict(max_len=model.max_len, special=(special, special))
        # Room for one id that frames a text is taken for granted there; imported models may have more.
        longest = model.max_len + 1 - max(len(special.framed([])), len(special.begun([])))
        dropout = recipe.tokenizer.dropout
        *sides, too_long = encode_pairs(
            dataset.training, *tokenizers, max_len=longest, dropout=dropout, seed=shape.seed
        )
        *held_out, _ = encode_pairs(dataset.validation, *tokenizers, max_len=longest)
        validation = list(Batches(*held_out, **common).epoch(0))
        return Encoded(Batches(*sides, **common), validation, f"{too_long:,} pairs are too long for the model")

    def validation_scores(self, bundle: Translator, dataset: Dataset[Pairs]) -> dict[str, float]:
        pairs = dataset.validation[:VALIDATED]
        config = DecodeConfig(method="greedy", max_len=min(DecodeConfig.max_len, bundle.trained_length - 1))
        outputs = bundle.translate([source for source, _ in pairs], config, truncate=True)
        scores = text_scores([best[0].text for best in outputs], [target for _, target in pairs])
        return {"bleu": scores.bleu, "chrf": scores.chrf, "exact_match": scores.exact_match}

    def reasons(self, dataset: Dataset[Pairs], recipe: Recipe) -> list[str]:
        return profile_pairs(dataset.training).reasons(recipe)

    def warnings(self, dataset: Dataset[Pairs]) -> list[str]:
        spelling, count = profile_pairs(dataset.training).spelling, len(dataset.training)
        enough, what = (1_000, "words") if spelling else (10_000, "sentence pairs")
        if count >= enough:
            return []
        return [
            f"{count:,} pairs are few: from fewer than about {enough:,} {what} a model learns the commonest patterns "
            "and fails on most new input. More data helps most; or fine-tune a trained model with --from."
        ]

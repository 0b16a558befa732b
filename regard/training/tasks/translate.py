"""The task `translate`: sequence-to-sequence learning from sentence pairs."""

import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from regard.data import PairBatches, Tokenizer, encode_pairs
from regard.data.text.special_tokens import SpecialTokens
from regard.decode import DecodeConfig
from regard.evaluation.text_metrics import text_scores
from regard.models import ModelConfig
from regard.pipelines import Translator
from regard.training.datasets import Dataset, Pairs, count_units, read_pair_dataset
from regard.training.multilingual import (
    MultilingualDataset,
    language_tags,
    read_multilingual_dataset,
    select_training_languages,
    source_tags,
    training_pairs,
)
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig
from regard.training.shards.dataset import ShardedDataset
from regard.training.suggest import profile_pairs, suggest_for_pairs
from regard.training.tasks.task import (
    BatchShape,
    EncodedDataset,
    Task,
    Tokenizers,
    random_sample,
    train_shared_tokenizer,
)

# Sentences, drawn from the validation split, that each validation translates; with fewer, model selection is noisy.
VALIDATION_SENTENCES = 1000
# Of several language pairs, each has an equal part of them, and at least these.
MIN_PAIR_SENTENCES = 100


class TranslateTask(Task):
    """Translation and other sequence-to-sequence tasks."""

    pipeline = "translator"
    metrics = ("bleu", "chrf", "exact_match")
    unit = "token"
    usage_hint = 'regard translate {out} "…"'

    def read(self, config: DataConfig) -> Dataset[Pairs]:
        return read_multilingual_dataset(config) if training_pairs(config) else read_pair_dataset(config)

    def suggest_recipe(self, dataset: Dataset[Pairs], fine_tune: bool) -> Recipe:
        return suggest_for_pairs(dataset.sample, fine_tune, len(dataset.training))

    def make_tokenizers(self, dataset: Dataset[Pairs], config: TokenizerConfig) -> Tokenizers:
        sources, targets = ([pair[side] for pair in dataset.training] for side in (0, 1))
        tags = language_tags(dataset.language_pairs) if isinstance(dataset, MultilingualDataset) else ()
        target_kind = config.target_kind or config.kind
        if config.shared and target_kind == config.kind:
            return train_shared_tokenizer(sources + targets, config, tags=tags)
        return (
            Tokenizer.train(sources, config.kind, config.vocab_size, config.lowercase, tags=tags),
            Tokenizer.train(targets, target_kind, config.vocab_size, config.lowercase),
        )

    def expected_config(self, recipe: Recipe) -> Any:
        return dataclasses.replace(super().expected_config(recipe), shared_vocab=recipe.tokenizer.shared)

    def adapt_origin(self, origin: Translator, data: DataConfig) -> Translator:
        return select_training_languages(origin, data)

    def complete_config(self, config: Any, dataset: Dataset[Pairs], tokenizers: Tokenizers) -> Any:
        source, target = tokenizers
        return dataclasses.replace(
            config,
            source_vocab=max(config.source_vocab, source.vocab_size),  # an imported model may have a larger vocabulary
            target_vocab=max(config.target_vocab, target.vocab_size),
            shared_vocab=target is source,
        )

    def encode(
        self,
        dataset: Dataset[Pairs],
        tokenizers: Tokenizers,
        special: SpecialTokens,
        recipe: Recipe,
        model: ModelConfig,
        shape: BatchShape,
    ) -> EncodedDataset:
        common = shape.options | dict(max_len=model.max_len, special=(special, special))
        # encode_pairs reserves room for one special token; imported models may add more.
        max_len = model.max_len + 1 - max(len(special.add_special_tokens([])), len(special.make_decoder_input([])))
        dropout = recipe.tokenizer.dropout
        training_tags, validation_tags = source_tags(dataset, tokenizers[0], recipe.data)
        training_ids: list[Any]
        if isinstance(dataset, ShardedDataset):
            *training_ids, too_long = dataset.pairs(max_len)
        else:
            *training_ids, too_long = encode_pairs(
                dataset.training, *tokenizers, max_len=max_len, dropout=dropout, seed=shape.seed, tags=training_tags
            )
        *validation_ids, _ = encode_pairs(dataset.validation, *tokenizers, max_len=max_len, tags=validation_tags)
        validation = list(PairBatches(*validation_ids, **common).epoch(0))
        note = f"too long for the model: {count_units(too_long, 'pairs')}"
        return EncodedDataset(PairBatches(*training_ids, **common), validation, note)

    def validation_scores(self, pipeline: Translator, dataset: Dataset[Pairs]) -> dict[str, float]:
        if not isinstance(dataset, MultilingualDataset):
            return _greedy_scores(pipeline.with_target(), random_sample(dataset.validation, VALIDATION_SENTENCES))
        count = max(MIN_PAIR_SENTENCES, VALIDATION_SENTENCES // len(dataset.language_pairs))
        per_pair = {
            str(pair): _greedy_scores(pipeline.with_target(pair.target), random_sample(dataset.validation_of(i), count))
            for i, pair in enumerate(dataset.language_pairs)
        }
        if len(per_pair) == 1:
            return next(iter(per_pair.values()))
        means = {name: fmean(scores[name] for scores in per_pair.values()) for name in self.metrics}
        return means | {f"{name}_{pair}": scores[name] for pair, scores in per_pair.items() for name in self.metrics}

    def reasons(self, dataset: Dataset[Pairs], recipe: Recipe) -> list[str]:
        return profile_pairs(dataset.sample).reasons(recipe)

    def warnings(self, dataset: Dataset[Pairs]) -> list[str]:
        is_spelling, count = profile_pairs(dataset.sample).is_spelling, len(dataset.training)
        min_recommended, unit = (1_000, "words") if is_spelling else (10_000, "sentence pairs")
        if count >= min_recommended:
            return []
        return [
            f"Little data: {count_units(count, 'pairs')}. With fewer than about {min_recommended:,} {unit}, a model "
            "learns common patterns and fails on most new input. Add more data, or fine-tune a model with --from."
        ]


def _greedy_scores(translator: Translator, pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    max_len = min(DecodeConfig.max_len, translator.trained_length - 1)
    config = DecodeConfig(method="greedy", max_len=max_len, engine="plain")  # the weights change between calls
    outputs = translator.translate([source for source, _ in pairs], config, truncate=True)
    scores = text_scores([best[0].text for best in outputs], [target for _, target in pairs])
    return {"bleu": scores.bleu, "chrf": scores.chrf, "exact_match": scores.exact_match}

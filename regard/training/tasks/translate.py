"""The task `translate`: sequence-to-sequence learning from sentence pairs.

One model for several language pairs gets the target language as a tag of the source.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from jaxtyping import Int

from regard.data import PairBatches, Tokenizer, encode_pairs
from regard.data.text.cleaning import CleaningCounts, count_near_duplicates
from regard.data.text.languages import LanguagePair, add_directions, files_per_pair, language_tag, parse_language_pairs
from regard.data.text.special_tokens import SpecialTokens
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.evaluation.text_metrics import text_sums
from regard.models import ModelConfig
from regard.pipelines import Translator
from regard.training.datasets import Dataset, Pairs, count_units, read_pair_dataset, read_pair_splits, repeat_pairs
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig
from regard.training.shards.dataset import ShardedDataset
from regard.training.suggest import profile_pairs, suggest_for_pairs
from regard.training.tasks.task import (
    BatchShape,
    EncodedDataset,
    Task,
    Tokenizers,
    margin_key,
    random_sample,
    train_shared_tokenizer,
    with_margins,
)

# Sentences, drawn from the validation split, that each validation translates; with fewer, model selection is noisy.
VALIDATION_SENTENCES = 1000
# Of several language pairs, each has an equal part of them, and at least these.
MIN_PAIR_SENTENCES = 100


@dataclass(frozen=True)
class MultilingualDataset(Dataset[Pairs]):
    """Sentence pairs of known languages; `training_languages` has the index of the language pair of each.

    >>> dataset = MultilingualDataset([("a", "b")], [("c", "d")], language_pairs=(LanguagePair("en", "de"),))
    >>> dataset.validation_of(0)
    [('c', 'd')]
    """

    language_pairs: tuple[LanguagePair, ...] = ()
    training_languages: Int[np.ndarray, "M"] = field(default_factory=lambda: np.zeros(1, np.int64))
    validation_languages: Int[np.ndarray, "K"] = field(default_factory=lambda: np.zeros(1, np.int64))

    def validation_of(self, index: int) -> Pairs:
        """The validation split of a language pair."""
        return [self.validation[i] for i in np.flatnonzero(self.validation_languages == index)]

    def describe(self) -> str:
        if len(self.language_pairs) < 2:
            return super().describe()
        counts = np.bincount(self.training_languages, minlength=len(self.language_pairs))
        sizes = ", ".join(f"{pair} {count:,}" for pair, count in zip(self.language_pairs, counts))
        return f"{super().describe()}; per epoch: {sizes}"


def training_pairs(config: DataConfig) -> tuple[LanguagePair, ...]:
    """The language pairs that are trained with these data, each once.

    >>> [str(pair) for pair in training_pairs(DataConfig(languages=("en-de",), both_directions=True))]
    ['en-de', 'de-en']
    """
    return add_directions(parse_language_pairs(config.languages), config.both_directions)


def read_multilingual_dataset(config: DataConfig) -> MultilingualDataset:
    """Read the files of the language pairs; each pair has its own validation split.

    A pair of n sentence pairs is sampled in proportion to n^(1/T), where T is `data.sampling_temperature`
    (Arivazhagan et al. 2019): pairs with less data are repeated within an epoch.
    """
    language_pairs = training_pairs(config)
    if len(language_pairs) == 1:
        single = read_pair_dataset(config)
        indices = (np.zeros(len(split), np.int64) for split in (single.training, single.validation))
        return MultilingualDataset(
            single.training, single.validation, single.unit, single.detail, single.dropped, language_pairs, *indices
        )
    training: list[Pairs] = [[] for _ in language_pairs]
    validation: list[Pairs] = [[] for _ in language_pairs]
    counts = CleaningCounts(0)
    for pair, files, validation_files in _files_of_pairs(config):
        *splits, cleaned = read_pair_splits(config, files, validation_files)
        counts = CleaningCounts(*(a + b for a, b in zip(dataclasses.astuple(counts), dataclasses.astuple(cleaned))))
        for split, pairs in zip((training, validation), splits):
            split[language_pairs.index(pair)] += pairs
            if config.both_directions:
                split[language_pairs.index(pair.reversed)] += [(target, source) for source, target in pairs]
    sizes = np.array([len(pairs) for pairs in training])
    weights = sizes ** (1 / config.sampling_temperature) / sizes  # per sentence pair
    training = [repeat_pairs(pairs, weight / weights.min()) for pairs, weight in zip(training, weights)]
    training_languages, validation_languages = (
        np.repeat(np.arange(len(language_pairs)), [len(pairs) for pairs in split]) for split in (training, validation)
    )
    return MultilingualDataset(
        [pair for pairs in training for pair in pairs],
        [pair for pairs in validation for pair in pairs],
        dropped=counts.reasons,
        language_pairs=language_pairs,
        training_languages=training_languages,
        validation_languages=validation_languages,
    )


def _files_of_pairs(config: DataConfig) -> Iterator[tuple[LanguagePair, tuple[str, ...], tuple[str, ...]]]:
    """For each entry of `data.languages`, its training and validation files."""
    pairs = parse_language_pairs(config.languages)
    training = files_per_pair(config.files, pairs, "data.files")
    validation = files_per_pair(config.validation, pairs, "data.validation") if config.validation else [()] * len(pairs)
    return zip(pairs, training, validation)


def language_tags(pairs: Sequence[LanguagePair]) -> list[str]:
    """The tags of the target languages, for a tokenizer; none for a single pair, which needs no tag.

    >>> language_tags(parse_language_pairs(["en-de", "en-fr"]))
    ['<2de>', '<2fr>']
    """
    return [] if len(pairs) < 2 else list(dict.fromkeys(language_tag(pair.target) for pair in pairs))


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
        for name in map(margin_key, self.metrics):
            means[name] = math.hypot(*(scores[name] for scores in per_pair.values())) / len(per_pair)
        return means | {f"{name}_{pair}": scores[name] for pair, scores in per_pair.items() for name in self.metrics}

    def reasons(self, dataset: Dataset[Pairs], recipe: Recipe) -> list[str]:
        return profile_pairs(dataset.sample).reasons(recipe)

    def warnings(self, dataset: Dataset[Pairs]) -> list[str]:
        is_spelling, count = profile_pairs(dataset.sample).is_spelling, len(dataset.training)
        min_recommended, unit = (1_000, "words") if is_spelling else (10_000, "sentence pairs")
        warnings = []
        if isinstance(dataset.training, list) and (near := count_near_duplicates(dataset.training, dataset.validation)):
            warnings.append(
                f"{near:,} of {len(dataset.validation):,} validation sources differ from a training one only in case "
                "and punctuation. The score on other input is lower."
            )
        if count >= min_recommended:
            return warnings
        return [
            *warnings,
            f"Little data: {count_units(count, 'pairs')}. With fewer than about {min_recommended:,} {unit}, a model "
            "learns common patterns and fails on most new input. Add more data, or fine-tune a model with --from.",
        ]


def _greedy_scores(translator: Translator, pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    max_len = min(DecodeConfig.max_len, translator.trained_length - 1)
    config = DecodeConfig(method="greedy", max_len=max_len, engine="plain")  # the weights change between calls
    outputs = translator.translate([source for source, _ in pairs], config, truncate=True)
    sums, _ = text_sums([best[0].text for best in outputs], [target for _, target in pairs])
    return with_margins({name: sums[name] for name in TranslateTask.metrics})


def select_training_languages(translator: Translator, config: DataConfig) -> Translator:
    """An imported multilingual translator with the languages of the training data, which become its default languages.

    The data have one language pair: `data.languages`, or the default languages of the model. Other translators are
    returned as they are.
    """
    if translator.language_tokens is None:
        return translator
    pairs = training_pairs(config)
    if len(pairs) > 1:
        raise RegardError(
            f"data.languages: an imported multilingual model is fine-tuned on one language pair (got {len(pairs)}).",
            "Fine-tune on one pair after the other.",
        )
    source, target = pairs[0] if pairs else (None, None)
    bound = translator.with_target(target, source)
    tokens = dataclasses.replace(
        translator.language_tokens, default_source=bound.source_language, default_target=bound.target_language
    )
    return dataclasses.replace(bound, language_tokens=tokens)


def source_tags(
    dataset: Dataset[Pairs], tokenizer: Tokenizer, config: DataConfig
) -> tuple[list[int] | None, list[int] | None]:
    """The ids of the tags of all training and all validation sources; None for a model of one language pair."""
    pairs, known = training_pairs(config), tokenizer.language_tags
    if not known and len(pairs) < 2:
        return None, None
    if not pairs:
        raise RegardError(
            f"The model translates into several languages ({', '.join(known)}); those of the data are unknown.",
            "Pass data.languages, for example en-de.",
        )
    if missing := [pair.target for pair in pairs if pair.target not in known]:
        raise RegardError(
            f"The tokenizer has no tag for the target language {missing[0]}; its languages: "
            f"{', '.join(known) or 'one pair, without tags'}.",
            "Train a new model, or fine-tune one that was trained with this language.",
        )
    if not isinstance(dataset, MultilingualDataset):
        raise RegardError(
            "The language pairs of these data are unknown: token shards and the task text2text have no language tags.",
            "Train on the files with the task translate.",
        )
    tags = np.array([known[pair.target] for pair in dataset.language_pairs])
    return tags[dataset.training_languages].tolist(), tags[dataset.validation_languages].tolist()

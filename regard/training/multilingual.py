"""Datasets of known language pairs: one model for several, with the target language as a tag of the source."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from regard.data import Tokenizer
from regard.data.text.cleaning import CleaningCounts
from regard.data.text.languages import LanguagePair, add_directions, files_per_pair, language_tag, parse_language_pairs
from regard.errors import RegardError
from regard.pipelines import Translator
from regard.training.datasets import Dataset, Pairs, read_pair_dataset, read_pair_splits, repeat_pairs
from regard.training.recipe import DataConfig


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

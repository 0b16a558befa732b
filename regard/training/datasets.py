"""From the files that a recipe names to sentence pairs: read, cleaned, split, counted."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from regard.data import Counts, Tokenizer, clean, read_pairs, split_validation
from regard.data.phrasebook import phrasebook_pairs
from regard.errors import RegardError
from regard.training.recipe import PHRASEBOOK, DataConfig, TokenizerConfig

Pairs = list[tuple[str, str]]


def describe_split(training: int, validation: int, called: str) -> str:
    """How the data are split, for the log.

    >>> describe_split(19600, 400, "pairs")
    '19,600 pairs for training, 400 for validation'
    """
    return f"{training:,} {called} for training, {validation:,} for validation"


@dataclass(frozen=True)
class Corpus:
    """Sentence pairs to learn from and to be judged by, and what was dropped on the way."""

    training: Pairs
    validation: Pairs
    counts: Counts

    @property
    def fingerprints(self) -> dict[str, object]:
        """Sizes and SHA-256 of what was trained on and validated by."""
        return {
            name: {"pairs": len(pairs), "sha256": _fingerprint(pairs)}
            for name, pairs in (("training", self.training), ("validation", self.validation))
        }

    def describe(self) -> str:
        left_out = self.counts.reasons
        return describe_split(len(self.training), len(self.validation), "pairs") + (
            f"; left out: {left_out}" if left_out else ""
        )


def read_corpus(config: DataConfig) -> Corpus:
    """Reads, cleans and, where no validation data are named, splits the data.

    >>> len(read_corpus(DataConfig(phrasebook_size=100)).training)
    100
    """
    if len(config.languages) not in (0, 2):
        raise RegardError(
            f"data.languages = {list(config.languages)}; expected two codes.",
            "Name two, for example en fr.",
        )
    if config.files == (PHRASEBOOK,):
        training = [(pair.source, pair.target) for pair in phrasebook_pairs("train", config.phrasebook_size)]
        validation = [(pair.source, pair.target) for pair in phrasebook_pairs("val", 500)]
        return Corpus(training, validation, Counts(len(training)))
    training, counts = clean(read_pairs(config.files, config.columns), config.max_ratio)
    if not training:
        raise RegardError(f"{' '.join(config.files)}: no pair is left after cleaning.", f"Dropped: {counts}.")
    if config.validation:
        validation = [
            pair for pair in read_pairs(config.validation, config.columns) if all(side.strip() for side in pair)
        ]
        if not validation:
            raise RegardError(f"{' '.join(config.validation)}: every pair has an empty side.", "Give other pairs.")
    else:
        # The same split whatever the run's seed: runs of several seeds are judged alike, and their models can vote.
        training, validation = split_validation(training, seed=0)
    return Corpus(training, validation, counts)


def train_tokenizers(pairs: Pairs, config: TokenizerConfig) -> tuple[Tokenizer, Tokenizer]:
    """The tokenisers of both sides: one and the same where the recipe shares it."""
    sources, targets = [one for one, _ in pairs], [other for _, other in pairs]
    target_kind = config.target_kind or config.kind
    if config.shared and target_kind == config.kind:
        both = Tokenizer.train(sources + targets, config.kind, config.vocab_size, config.lowercase)
        return both, both
    return (
        Tokenizer.train(sources, config.kind, config.vocab_size, config.lowercase),
        Tokenizer.train(targets, target_kind, config.vocab_size, config.lowercase),
    )


def _fingerprint(pairs: Sequence[tuple[str, str]]) -> str:
    digest = hashlib.sha256()
    for source, target in pairs:
        digest.update(f"{source}\t{target}\n".encode())
    return digest.hexdigest()

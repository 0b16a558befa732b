"""Suggested recipes: model size, vocabulary and steps from the data alone."""

import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import Literal, NamedTuple, TypeVar

from regard.data.text.scripts import is_unsegmented
from regard.evaluation.text_metrics import METRIC_NAMES
from regard.models import TransformerConfig
from regard.training.recipe import Recipe, TokenizerConfig, TokenizerKind, TrainConfig

Item = TypeVar("Item")
# Validations without improvement after which the learning rate decays; there are about twenty in a run.
PATIENCE = 5


@dataclasses.dataclass(frozen=True)
class _Size:
    """A shape of model that does well on up to so many tokens of one side, and how to train it."""

    tokens: float
    width: int
    heads: int
    layers: int
    dropout: float
    lr: float
    batch_tokens: int
    epochs: int


# Little text wants a small model, much dropout and many passes. The last two rows are for a GPU.
_SIZES = (
    _Size(30_000, width=128, heads=4, layers=2, dropout=0.3, lr=2e-3, batch_tokens=1024, epochs=120),
    _Size(150_000, width=128, heads=4, layers=3, dropout=0.3, lr=2e-3, batch_tokens=1024, epochs=80),
    _Size(500_000, width=128, heads=4, layers=3, dropout=0.2, lr=2e-3, batch_tokens=2048, epochs=40),
    _Size(1_500_000, width=192, heads=4, layers=3, dropout=0.2, lr=2e-3, batch_tokens=4096, epochs=20),
    _Size(6_000_000, width=256, heads=4, layers=4, dropout=0.15, lr=2e-3, batch_tokens=4096, epochs=12),
    _Size(40_000_000, width=512, heads=8, layers=6, dropout=0.1, lr=1e-3, batch_tokens=8192, epochs=8),
    _Size(float("inf"), width=512, heads=8, layers=6, dropout=0.1, lr=1e-3, batch_tokens=16384, epochs=4),
)


class PairProfile(NamedTuple):
    """What the pairs are like, and what follows from it for tokenizers and for the metric that selects the model."""

    spelling: bool
    """sources are single words: pronunciation, inflection"""
    symbols: bool
    """targets are many words of one or two letters: phonemes separated by spaces"""
    unsegmented: bool
    """targets are written without spaces"""
    target_words: float
    target_characters: float

    @property
    def kinds(self) -> tuple[TokenizerKind, TokenizerKind]:
        """Kinds of the tokenizers of source and target."""
        kind: TokenizerKind = "char" if self.spelling else "bpe"
        return kind, "space" if self.symbols else "char" if self.by_character else kind

    @property
    def by_character(self) -> bool:
        """Whether targets are split into characters."""
        return (self.spelling or self.unsegmented) and not self.symbols

    @property
    def metric(self) -> Literal["bleu", "chrf", "exact_match"]:
        """BLEU counts sequences of four words: it is 0 for shorter targets, and for text without spaces."""
        if self.symbols or (self.target_words < 1.5 and self.target_characters < (8 if self.unsegmented else 20)):
            return "exact_match"
        return "chrf" if self.unsegmented or self.target_words < 4 else "bleu"

    def reasons(self, recipe: Recipe) -> list[str]:
        """Why the tokenizer and the metric are what they are, in so far as the profile chose them."""
        sources, targets = f"sources are {'single words' if self.spelling else 'text'}", self._describe_targets()
        found = []
        tokenizer = recipe.tokenizer
        if (tokenizer.kind, tokenizer.target_kind or tokenizer.kind) == self.kinds:
            found.append(f"tokenizer {' and '.join(dict.fromkeys(self.kinds))}: {sources}, {targets}")
        if recipe.train.validate_by == self.metric:
            found.append(f"model selection by {METRIC_NAMES[self.metric]}: {targets}")
        return found

    def _describe_targets(self) -> str:
        if self.symbols:
            return "targets are symbols separated by spaces"
        if self.unsegmented:
            return "targets are written without spaces"
        if self.target_words < 1.5:
            return "targets are single words"
        return f"targets have {self.target_words:.0f} words on average"


def profile_pairs(pairs: Sequence[tuple[str, str]]) -> PairProfile:
    """The profile of sentence pairs, from a sample of them.

    >>> profile_pairs([("cat", "cats"), ("dog", "dogs")]).metric
    'exact_match'
    """
    sample = _sample(pairs)
    sources, targets = ([pair[side].split() for pair in sample] for side in (0, 1))
    words = fmean(map(len, targets))
    symbols = words > 1.5 and _mean_letters(targets) < 2.5
    return PairProfile(
        spelling=fmean(map(len, sources)) < 1.5,
        symbols=symbols,
        unsegmented=not symbols and is_unsegmented(target for _, target in sample),
        target_words=words,
        target_characters=fmean(len(target) for _, target in sample),
    )


def suggest_for_pairs(pairs: Sequence[tuple[str, str]], fine_tune: bool = False) -> Recipe:
    """A recipe for sentence pairs; `fine_tune` lowers the learning rate, which would otherwise undo the training.

    Single words in the source mean spelling (pronunciation, inflection): characters. Targets of many one- or
    two-letter words are symbols separated by spaces (phonemes); targets without spaces are characters too. All else is
    text: byte-pair encoding, one vocabulary for both sides.

    >>> suggest_for_pairs([("abc", "e b i")] * 9).tokenizer.target_kind
    'space'
    """
    sample, profile = _sample(pairs), profile_pairs(pairs)
    target_length = 1 + fmean(len(pair[1]) if profile.by_character else 1.3 * len(pair[1].split()) for pair in sample)
    tokens = len(pairs) * target_length
    size = next(size for size in _SIZES if tokens <= size.tokens)
    kind, target_kind = profile.kinds
    sides = (0, 1) if target_kind == "bpe" else (0,)
    words = {word for pair in sample for side in sides for word in pair[side].split()}
    tokenizer = TokenizerConfig(
        kind=kind,
        target_kind=None if target_kind == kind else target_kind,
        vocab_size=_vocabulary(len(words), len(sample), len(pairs)),
        shared=target_kind == kind,
    )
    epochs, least, lr = size.epochs, 500, size.lr
    if fine_tune:
        epochs, least, lr = max(3, epochs // 10), 200, lr / 10
    steps = max(least, int(epochs * tokens / size.batch_tokens))
    longest = max(max(len(a), len(b)) for a, b in sample)
    return Recipe(
        tokenizer=tokenizer,
        model=TransformerConfig(
            width=size.width,
            heads=size.heads,
            feedforward=size.width * 4,
            encoder_layers=size.layers,
            decoder_layers=size.layers,
            dropout=size.dropout,
            # Worth 0.9 to 1.4 BLEU beside sinusoidal positions; QK-norm is worth nothing (benchmarks/README.md).
            positions="rotary",
            max_len=256 if longest < 1000 else 512,
        ),
        train=TrainConfig(
            steps=steps,
            batch_tokens=size.batch_tokens,
            lr=lr,
            schedule="linear" if fine_tune else "wsd",
            warmup=min(1000, steps // 10),
            validate_every=max(100, steps // 20),
            save_every=max(100, steps // 20),
            patience=0 if fine_tune else PATIENCE,
            ema=0.999 if steps > 5000 else 0.99,
            # Exact outputs keep improving when the likelihood no longer does.
            validate_by=profile.metric,
        ),
    )


def vocabulary_for(texts: Sequence[str]) -> int:
    """How many entries a tokeniser of subwords should have for such texts.

    >>> vocabulary_for(["the cat sat"])
    1000
    """
    sample = _sample(texts)
    return _vocabulary(len({word for text in sample for word in text.split()}), len(sample), len(texts))


def _sample(items: Sequence[Item]) -> Sequence[Item]:
    return items[:: max(1, len(items) // 5000)]


def _mean_letters(lines: list[list[str]]) -> float:
    return fmean(len(word) for words in lines for word in words) if any(lines) else 0.0


def _vocabulary(distinct: int, seen: int, pairs: int) -> int:
    """Entries for so many distinct words in a sample: enough for the frequent words, few enough to learn each."""
    grown = distinct * (pairs / max(1, seen)) ** 0.6  # Heaps' law
    return max(1000, min(32_000, round(grown * 0.4 / 1000) * 1000))

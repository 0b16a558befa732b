"""Suggested recipes for sentence pairs: tokenizers, model size, vocabulary and steps, chosen from the data."""

import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import Literal, NamedTuple, TypeVar

from regard.data.text.languages import is_unsegmented
from regard.devices import find_device
from regard.evaluation.text_metrics import METRIC_FORMATS
from regard.models import TransformerConfig
from regard.training.recipe import Recipe, TokenizerConfig, TokenizerKind, TrainConfig

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """Model size and training settings for data of up to `max_tokens` target tokens."""

    max_tokens: float
    width: int
    heads: int
    feedforward: int
    layers: int
    dropout: float
    lr: float
    batch_tokens: int
    epochs: int
    min_steps: int = 500
    r_drop: float = 0.0
    needs_gpu: bool = False


# The first row that fits. All decay by a cosine to a length that is fixed beforehand, and save the last EMA weights: a
# decay that noisy validations trigger, and the best of twenty validations, cost 5 points of word error rate on 8,000
# words. The measurements are in benchmarks/translation.md#small-data.
_RECIPES = (
    # 800 words: thousands of updates with R-Drop. Error rate of Greek 32 -> 26; 1,200 updates of 512 tokens are worse.
    _Recipe(30_000, 128, 4, 512, 2, dropout=0.3, lr=2e-3, batch_tokens=1024, epochs=120, min_steps=2500, r_drop=1.0),
    # 8,000 words: the schedule alone. Bulgarian 22.0 -> 17.2.
    _Recipe(150_000, 128, 4, 512, 3, dropout=0.3, lr=2e-3, batch_tokens=1024, epochs=80, min_steps=5000),
    # 29,000 to 165,000 sentence pairs: the recipe multi30k-transformer, longer. BLEU of Tatoeba 46.6 -> 47.8.
    _Recipe(3_000_000, 256, 4, 512, 4, 0.3, 3e-3, 8192, epochs=36, min_steps=5000, r_drop=2.5, needs_gpu=True),
    # Sizes, dropout and epochs of 2026-11-16; not measured with the cosine.
    _Recipe(500_000, 128, 4, 512, 3, dropout=0.2, lr=2e-3, batch_tokens=2048, epochs=40),
    _Recipe(1_500_000, 192, 4, 768, 3, dropout=0.2, lr=2e-3, batch_tokens=4096, epochs=20),
    _Recipe(6_000_000, 256, 4, 1024, 4, dropout=0.15, lr=2e-3, batch_tokens=4096, epochs=12),
    _Recipe(40_000_000, 512, 8, 2048, 6, dropout=0.1, lr=1e-3, batch_tokens=8192, epochs=8),
    _Recipe(float("inf"), 512, 8, 2048, 6, dropout=0.1, lr=1e-3, batch_tokens=16384, epochs=4),
)


class PairProfile(NamedTuple):
    """Statistics of sentence pairs, from which tokenizers and the metric for model selection are chosen."""

    is_spelling: bool
    """sources are single words, as in pronunciation or inflection"""
    has_symbol_targets: bool
    """targets are sequences of words of one or two letters, such as phonemes"""
    is_unsegmented: bool
    """targets are written without spaces"""
    target_words: float
    target_characters: float

    @property
    def kinds(self) -> tuple[TokenizerKind, TokenizerKind]:
        """Tokenizer kinds of source and target."""
        kind: TokenizerKind = "char" if self.is_spelling else "bpe"
        return kind, "space" if self.has_symbol_targets else "char" if self.uses_target_characters else kind

    @property
    def uses_target_characters(self) -> bool:
        """Whether targets are tokenized by character."""
        return (self.is_spelling or self.is_unsegmented) and not self.has_symbol_targets

    @property
    def metric(self) -> Literal["bleu", "chrf", "exact_match"]:
        """The metric for model selection. BLEU counts 4-grams of words, so it is 0 for short or unsegmented targets."""
        if self.has_symbol_targets or (
            self.target_words < 1.5 and self.target_characters < (8 if self.is_unsegmented else 20)
        ):
            return "exact_match"
        return "chrf" if self.is_unsegmented or self.target_words < 4 else "bleu"

    def reasons(self, recipe: Recipe) -> list[str]:
        """Reasons for tokenizer and metric, if the recipe has the ones chosen from the profile."""
        sources, targets = f"sources are {'single words' if self.is_spelling else 'text'}", self._describe_targets()
        reasons = []
        tokenizer = recipe.tokenizer
        if (tokenizer.kind, tokenizer.target_kind or tokenizer.kind) == self.kinds:
            reasons.append(f"tokenizer {' and '.join(dict.fromkeys(self.kinds))}: {sources}, {targets}")
        if recipe.train.validate_by == self.metric:
            reasons.append(f"model selection by {METRIC_FORMATS[self.metric][0]}: {targets}")
        return reasons

    def _describe_targets(self) -> str:
        if self.has_symbol_targets:
            return "targets are symbols separated by spaces"
        if self.is_unsegmented:
            return "targets are written without spaces"
        if self.target_words < 1.5:
            return "targets are single words"
        return f"targets have {self.target_words:.0f} words on average"


def profile_pairs(pairs: Sequence[tuple[str, str]]) -> PairProfile:
    """Compute the profile of sentence pairs from a sample.

    >>> profile_pairs([("cat", "cats"), ("dog", "dogs")]).metric
    'exact_match'
    """
    sample = _sample(pairs)
    sources, targets = ([pair[side].split() for pair in sample] for side in (0, 1))
    words = fmean(map(len, targets))
    has_symbol_targets = words > 1.5 and _mean_letters(targets) < 2.5
    return PairProfile(
        is_spelling=fmean(map(len, sources)) < 1.5,
        has_symbol_targets=has_symbol_targets,
        is_unsegmented=not has_symbol_targets and is_unsegmented(target for _, target in sample),
        target_words=words,
        target_characters=fmean(len(target) for _, target in sample),
    )


def suggest_for_pairs(pairs: Sequence[tuple[str, str]], fine_tune: bool = False, count: int | None = None) -> Recipe:
    """Suggest a recipe for sentence pairs; `fine_tune` lowers the learning rate, to preserve the trained weights.
    `count` is the number of pairs, if `pairs` are only a sample.

    Tokenizers: characters if sources are single words (pronunciation, inflection) or targets are written without
    spaces; symbols split at spaces if targets are words of one or two letters (phonemes); else BPE with a shared
    vocabulary.

    >>> suggest_for_pairs([("abc", "e b i")] * 9).tokenizer.target_kind
    'space'
    """
    sample, profile, count = _sample(pairs), profile_pairs(pairs), count or len(pairs)
    target_length = 1 + fmean(
        len(pair[1]) if profile.uses_target_characters else 1.3 * len(pair[1].split()) for pair in sample
    )
    tokens = count * target_length
    on_gpu = find_device("auto").type != "cpu"
    size = next(row for row in _RECIPES if tokens <= row.max_tokens and (on_gpu or not row.needs_gpu))
    kind, target_kind = profile.kinds
    sides = (0, 1) if target_kind == "bpe" else (0,)
    words = {word for pair in sample for side in sides for word in pair[side].split()}
    tokenizer = TokenizerConfig(
        kind=kind,
        target_kind=None if target_kind == kind else target_kind,
        vocab_size=_estimate_vocab_size(len(words), len(sample), count),
        shared=target_kind == kind,
    )
    epochs, min_steps, lr = size.epochs, size.min_steps, size.lr
    if fine_tune:
        epochs, min_steps, lr = max(3, epochs // 10), 200, lr / 10
    steps = max(min_steps, int(epochs * tokens / size.batch_tokens))
    max_characters = max(max(len(a), len(b)) for a, b in sample)
    return Recipe(
        tokenizer=tokenizer,
        model=TransformerConfig(
            width=size.width,
            heads=size.heads,
            feedforward=size.feedforward,
            encoder_layers=size.layers,
            decoder_layers=size.layers,
            dropout=size.dropout,
            # Rotary positions gain 0.9 to 1.0 BLEU over sinusoidal ones, QK-norm nothing (benchmarks/translation.md).
            positions="rotary",
            max_len=256 if max_characters < 1000 else 512,
        ),
        train=TrainConfig(
            steps=steps,
            batch_tokens=size.batch_tokens,
            lr=lr,
            schedule="linear" if fine_tune else "cosine",
            warmup=min(1000, steps // 10),
            r_drop=0.0 if fine_tune else size.r_drop,
            validate_every=max(100, steps // 10),
            save_every=max(100, steps // 20),
            ema=0.999 if steps >= 2000 else 0.99,
            # Output quality keeps improving after the likelihood has stopped improving.
            validate_by=profile.metric,
        ),
    )


def suggest_vocab_size(texts: Sequence[str], count: int | None = None) -> int:
    """Suggest the vocabulary size of a subword tokenizer for these texts, or for `count` of which they are a sample.

    >>> suggest_vocab_size(["the cat sat"])
    1000
    """
    sample = _sample(texts)
    return _estimate_vocab_size(
        len({word for text in sample for word in text.split()}), len(sample), count or len(texts)
    )


def _sample(items: Sequence[Item]) -> Sequence[Item]:
    return items[:: max(1, len(items) // 5000)]


def _mean_letters(lines: list[list[str]]) -> float:
    return fmean(len(word) for words in lines for word in words) if any(lines) else 0.0


def _estimate_vocab_size(distinct_words: int, sample_size: int, total: int) -> int:
    """Vocabulary size from the distinct words in a sample: room for frequent words, enough examples per entry."""
    words = distinct_words * (total / max(1, sample_size)) ** 0.6  # Heaps' law
    return max(1000, min(32_000, round(words * 0.4 / 1000) * 1000))

"""A sensible recipe from the data alone: sizes, vocabulary and steps for somebody who names nothing but files."""

import dataclasses
from collections.abc import Sequence
from statistics import fmean

from regard.models import TransformerConfig
from regard.train.corpus import Corpus
from regard.train.recipe import Recipe, TokenizerConfig, TrainConfig


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
    _Size(30_000, width=128, heads=4, layers=2, dropout=0.3, lr=3e-3, batch_tokens=1024, epochs=120),
    _Size(150_000, width=128, heads=4, layers=3, dropout=0.3, lr=4e-3, batch_tokens=1024, epochs=80),
    _Size(500_000, width=128, heads=4, layers=3, dropout=0.2, lr=4e-3, batch_tokens=2048, epochs=40),
    _Size(1_500_000, width=192, heads=4, layers=3, dropout=0.2, lr=3e-3, batch_tokens=4096, epochs=20),
    _Size(6_000_000, width=256, heads=4, layers=4, dropout=0.15, lr=2e-3, batch_tokens=4096, epochs=12),
    _Size(40_000_000, width=512, heads=8, layers=6, dropout=0.1, lr=1e-3, batch_tokens=8192, epochs=8),
    _Size(float("inf"), width=512, heads=8, layers=6, dropout=0.1, lr=1e-3, batch_tokens=16384, epochs=4),
)


def suggest(corpus: Corpus, goes_on: bool = False) -> Recipe:
    """The recipe for these pairs; `goes_on`: for a model that is trained already, which a fresh run's rate would undo.

    Single words in the source mean spelling (pronunciation, inflection): characters. Targets of many one- or
    two-letter words are symbols separated by spaces (phonemes). All else is text: byte-pair encoding, one vocabulary
    for both sides.

    >>> from regard.data import Counts
    >>> suggest(Corpus([("abc", "e b i")] * 9, [("a", "e")], Counts())).tokenizer.target_kind
    'space'
    """
    sample = corpus.training[:: max(1, len(corpus.training) // 5000)]
    sources, targets = ([pair[side].split() for pair in sample] for side in (0, 1))
    spelling = fmean(len(words) for words in sources) < 1.5
    symbols = fmean(len(words) for words in targets) > 1.5 and _mean_letters(targets) < 2.5
    words = {word for pair in sample for side in pair for word in side.split()}
    letters = spelling and not symbols
    target_length = 1 + fmean(len(pair[1]) if letters else 1.3 * len(pair[1].split()) for pair in sample)
    tokens = len(corpus.training) * target_length
    size = next(size for size in _SIZES if tokens <= size.tokens)
    tokenizer = TokenizerConfig(
        kind="char" if spelling else "bpe",
        target_kind="space" if symbols else None,
        vocab_size=_vocabulary(len(words), len(sample), len(corpus.training)),
        shared=not symbols,
    )
    epochs, least, lr = size.epochs, 500, size.lr
    if goes_on:
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
            # These two learned the demo's grammar in half the steps (benchmarks/LOG.md).
            positions="rotary",
            qk_norm=True,
            max_len=256 if longest < 1000 else 512,
        ),
        train=TrainConfig(
            steps=steps,
            batch_tokens=size.batch_tokens,
            lr=lr,
            schedule="linear" if goes_on else "cosine",
            warmup=min(1000, steps // 10),
            validate_every=max(100, steps // 20),
            save_every=max(100, steps // 20),
            ema=0.999 if steps > 5000 else 0.99,
            # Exact outputs go on improving while the likelihood no longer does.
            validate_by="bleu",
        ),
    )


def vocabulary_for(texts: Sequence[str]) -> int:
    """How many entries a tokeniser of subwords should have for such texts.

    >>> vocabulary_for(["the cat sat"])
    1000
    """
    sample = texts[:: max(1, len(texts) // 5000)]
    return _vocabulary(len({word for text in sample for word in text.split()}), len(sample), len(texts))


def _mean_letters(lines: list[list[str]]) -> float:
    return fmean(len(word) for words in lines for word in words) if any(lines) else 0.0


def _vocabulary(distinct: int, seen: int, pairs: int) -> int:
    """Entries for so many distinct words in a sample: enough for the frequent words, few enough to learn each."""
    grown = distinct * (pairs / max(1, seen)) ** 0.6  # Heaps' law
    return max(1000, min(32_000, round(grown * 0.4 / 1000) * 1000))

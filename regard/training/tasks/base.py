"""What the training loop asks of a task: the task knows the data and what is good, the loop knows how to train."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from regard.data import Batch, Tokenizer
from regard.data.special import Special
from regard.folder import find_device
from regard.models import ModelConfig
from regard.training.losses import LossParts, token_loss
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig

Autocast = Callable[[], AbstractContextManager[Any]]
Features = Callable[..., Tensor]
# Of both sides, which may be one and the same; of pictures there are none.
Tokenizers = tuple[Tokenizer, ...]


class Corpus(Protocol):
    """What is learned from and judged by, as text or as pictures."""

    @property
    def fingerprints(self) -> dict[str, Any]:
        """What training.json remembers of it: sizes and digests."""

    def describe(self) -> str:
        """A sentence for the log."""


class EpochsOfBatches(Protocol):
    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]: ...


class Encoded(NamedTuple):
    """The corpus as the model takes it, and a word about what did not fit."""

    batches: EpochsOfBatches
    validation: Iterable[Batch]
    note: str


class Shape(NamedTuple):
    """How batches are to be cut: tokens of each, the run's seed, whether shapes may not change; pictures of each."""

    budget: int
    seed: int
    constant: bool
    images: int = 1


class Task(Protocol):
    """One entry of TASKS."""

    metrics: tuple[str, ...]
    """measures of validation by which, other than the loss, the best model can be chosen"""
    unit: str
    """what the loss is counted by"""
    try_it: str
    """the command that uses the result"""

    def read(self, config: DataConfig) -> Any:
        """The corpus of a recipe's files."""

    def suggest(self, corpus: Any, fine_tune: bool) -> Recipe:
        """A sensible recipe for these data; `fine_tune`: for a model that is trained already."""

    def make_tokenizers(self, corpus: Any, config: TokenizerConfig) -> Tokenizers: ...

    def complete_config(self, config: ModelConfig, corpus: Any, tokenizers: Tokenizers) -> ModelConfig:
        """The model's config with what follows from the data."""

    def encode(
        self, corpus: Any, tokenizers: Tokenizers, special: Special, recipe: Recipe, model: ModelConfig, shape: Shape
    ) -> Encoded: ...

    def loss(self, model: Any, features: Features, batch: Batch, config: TrainConfig) -> LossParts: ...

    def validation_scores(self, bundle: Any, corpus: Any) -> dict[str, float]:
        """Measures of validation beside the loss."""

    def reasons(self, corpus: Any, recipe: Recipe) -> list[str]:
        """What was chosen from the data, and why: a sentence each."""

    def warnings(self, corpus: Any) -> list[str]:
        """What about the data may disappoint, with what to expect: a sentence each."""


def has_gpu() -> bool:
    """Whether there is anything faster than a CPU to train on."""
    return find_device("auto").type != "cpu"


def warn_of_rare_labels(counts: Mapping[str, int], items: str, enough: int) -> list[str]:
    """A warning if most labels have few examples.

    >>> warn_of_rare_labels({"cat": 30, "dog": 31}, "images", enough=200)[0][:48]
    '30 images per label (median) are few for a model'
    """
    median = int(statistics.median_low(counts.values())) if counts else 0
    if median >= enough:
        return []
    return [
        f"{median} {items} per label (median) are few for a model trained from scratch: expect it to be right far less "
        f"often on new {items} than on these. From about {enough} it becomes useful; or fine-tune a model with --from."
    ]


def suggested_training(steps: int, batch_tokens: int, lr: float, **changes: Any) -> TrainConfig:
    """The defaults of most tasks: AdamW, a tenth of the steps as warm-up, twenty validations, early stopping.

    >>> suggested_training(5000, 4096, 1e-3, validate_by="f1").warmup
    500
    """
    every = max(50, steps // 20)
    usual: dict[str, Any] = dict(optimizer="adamw", warmup=min(1000, steps // 10), weight_decay=0.01)
    usual |= dict(label_smoothing=0.0, validate_every=every, save_every=every, schedule="wsd", patience=5)
    return TrainConfig(steps=steps, batch_tokens=batch_tokens, lr=lr, **(usual | changes))


def features_loss(model: Any, features: Features, batch: Batch, config: TrainConfig) -> LossParts:
    """The loss of models whose features go through an output layer: of tokens, and of labels."""
    first = features(*batch.inputs)
    twin = features(*batch.inputs) if config.r_drop and torch.is_grad_enabled() else None
    smoothing = config.label_smoothing if torch.is_grad_enabled() else 0.0
    divergence = config.r_drop if twin is not None else 0.0
    return token_loss(first, model.output.weight, batch.targets, smoothing, twin, divergence, model.output.bias)


@torch.no_grad()
def evaluate_loss(task: Task, model: Any, batches: Iterable[Batch], autocast: Autocast) -> dict[str, float]:
    """The plain loss per token (no smoothing, no dropout) and, of texts, the perplexity that it means."""
    device = next(model.parameters()).device
    model.eval()
    nll, tokens = 0.0, 0.0
    for batch in batches:
        with autocast():
            parts = task.loss(model, model.features, batch.to(device), TrainConfig())
        nll += float(parts.nll)
        tokens += float(parts.tokens)
    mean = nll / max(1.0, tokens)
    return {"nll": mean} if task.unit == "picture" else {"nll": mean, "perplexity": math.exp(min(mean, 50.0))}

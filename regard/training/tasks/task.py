"""The interface between tasks and the trainer, with what most tasks share."""

import dataclasses
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from regard.data import Batch, Tokenizer
from regard.data.text.special_tokens import Special
from regard.models import FAMILIES, ModelConfig
from regard.pipelines import find_device
from regard.training.datasets import Dataset
from regard.training.losses import LossParts, token_loss
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig

Autocast = Callable[[], AbstractContextManager[Any]]
Features = Callable[..., Tensor]
# Source and target, which may be the same object; none for images.
Tokenizers = tuple[Tokenizer, ...]


class EpochsOfBatches(Protocol):
    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]: ...


class Encoded(NamedTuple):
    """A dataset as batches of ids or pixels, with a note for the log."""

    batches: EpochsOfBatches
    validation: Iterable[Batch]
    note: str


class Shape(NamedTuple):
    """The size of batches: tokens or images per batch, the seed of their order, and whether shapes are constant."""

    budget: int
    seed: int
    constant: bool
    images: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of batches of text."""
        return dict(budget=self.budget, seed=self.seed, constant_shapes=self.constant)


class Task(ABC):
    """One entry of TASKS: what to read, which model to suggest, what to minimize and what to measure."""

    pipeline: ClassVar[str]
    """pipeline of the trained model: "translator", "text_generator", "text_encoder" or "image_model"; every family of
    this pipeline can be trained for the task"""
    metrics: ClassVar[tuple[str, ...]] = ()
    """validation metrics, beside the loss, that can select the model"""
    unit: ClassVar[str]
    """what the loss is averaged over"""
    try_it: ClassVar[str]
    """the command that uses the trained model"""

    @property
    def families(self) -> tuple[str, ...]:
        """Model families that can be trained for this task; the first is the default."""
        return tuple(name for name, family in FAMILIES.items() if family.pipeline == self.pipeline)

    @abstractmethod
    def read(self, config: DataConfig) -> Dataset[Any]:
        """The dataset of a recipe's files."""

    @abstractmethod
    def suggest_recipe(self, dataset: Any, fine_tune: bool) -> Recipe:
        """A recipe for this dataset; `fine_tune`: for a model that is already trained."""

    @abstractmethod
    def make_tokenizers(self, dataset: Any, config: TokenizerConfig) -> Tokenizers:
        """The tokenizers of source and target, trained on the dataset."""

    @abstractmethod
    def complete_config(self, config: Any, dataset: Any, tokenizers: Tokenizers) -> ModelConfig:
        """The model's config with the fields that follow from the data."""

    @abstractmethod
    def encode(
        self, dataset: Any, tokenizers: Tokenizers, special: Special, recipe: Recipe, model: Any, shape: Shape
    ) -> Encoded:
        """The dataset as batches."""

    def loss(self, model: Any, features: Features, batch: Any, config: TrainConfig) -> LossParts:
        """The loss of a batch, summed over its tokens, texts or images."""
        return features_loss(model, features, batch, config)

    def validation_scores(self, bundle: Any, dataset: Any) -> dict[str, float]:
        """Metrics on the validation split beside the loss."""
        return {}

    @abstractmethod
    def reasons(self, dataset: Any, recipe: Recipe) -> list[str]:
        """What was chosen from the data, and why: a sentence each."""

    @abstractmethod
    def warnings(self, dataset: Any) -> list[str]:
        """What about the data may limit the model: a sentence each."""


def one_tokenizer(texts: Sequence[str], config: TokenizerConfig, **options: Any) -> Tokenizers:
    """A tokenizer that serves as source and target tokenizer."""
    tokenizer = Tokenizer.train(list(texts), config.kind, config.vocab_size, config.lowercase, **options)
    return tokenizer, tokenizer


def with_vocabulary(config: Any, tokenizers: Tokenizers, **changes: Any) -> Any:
    """The config with room for the tokenizer's vocabulary (an imported model may have room for more)."""
    return dataclasses.replace(config, vocab=max(config.vocab, tokenizers[0].vocab_size), **changes)


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

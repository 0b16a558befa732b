"""The interface between tasks and the trainer, and helpers that most tasks share."""

import dataclasses
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard.data import Tokenizer
from regard.data.batching.batch import WHOLE, Batch, RankSlice
from regard.data.text.special_tokens import SpecialTokens
from regard.devices import find_device
from regard.evaluation.bootstrap import ExampleSums
from regard.evaluation.text_metrics import margin_key
from regard.models import FAMILIES, ModelConfig
from regard.training.datasets import Dataset
from regard.training.losses import LossParts, token_loss
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig

Example = TypeVar("Example")
Autocast = Callable[[], AbstractContextManager[Any]]
Features = Callable[..., Tensor]
# Source and target tokenizer, which may be the same object; empty for images.
Tokenizers = tuple[Tokenizer, ...]


class BatchSource(Protocol):
    """Training batches by epoch; `start` is the index of the first batch, `part` the part of each for one rank."""

    def epoch(self, number: int, start: int = 0, part: RankSlice = WHOLE, /) -> Iterator[Batch]: ...


class EncodedDataset(NamedTuple):
    """A dataset as batches of token ids or pixels, with a note for the plan."""

    batches: BatchSource
    validation: Iterable[Batch]
    note: str


class BatchShape(NamedTuple):
    """The shape of batches: tokens or images per batch, the seed of the order, and whether shapes are constant."""

    budget: int
    seed: int
    constant: bool
    images: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments for batches of text."""
        return dict(budget=self.budget, seed=self.seed, constant_shapes=self.constant)


class Task(ABC):
    """A training task: how to read data, suggest a recipe, compute the loss and measure quality. TASKS lists them."""

    pipeline: ClassVar[str]
    """pipeline of the trained model: "translator", "text_generator", "text_encoder" or "image_model"; every family of
    this pipeline can be trained for the task"""
    metrics: ClassVar[tuple[str, ...]] = ()
    """validation metrics, in addition to the loss, that can select the model"""
    unit: ClassVar[str]
    """singular noun: the loss is averaged over these"""
    is_image_task: ClassVar[bool] = False
    reads_folders: ClassVar[bool] = False
    """whether the data may be folders of files"""
    head: ClassVar[Mapping[str, Any]] = {}
    """fields of the model config that the task sets"""
    usage_hint: ClassVar[str]
    """a command that uses the trained model"""

    @property
    def families(self) -> tuple[str, ...]:
        """Model families that can be trained for this task; the first is the default."""
        return tuple(name for name, family in FAMILIES.items() if family.pipeline == self.pipeline)

    @abstractmethod
    def read(self, config: DataConfig) -> Dataset[Any]:
        """Read the dataset from the files of a recipe."""

    @abstractmethod
    def suggest_recipe(self, dataset: Any, fine_tune: bool) -> Recipe:
        """Suggest a recipe for this dataset; with `fine_tune`, for fine-tuning a trained model."""

    @abstractmethod
    def make_tokenizers(self, dataset: Any, config: TokenizerConfig) -> Tokenizers:
        """Train the source and target tokenizers on the dataset."""

    def with_head(self, config: Any) -> Any:
        """The model config with the head of the task."""
        return dataclasses.replace(config, **self.head)

    def expected_config(self, recipe: Recipe) -> Any:
        """The model config of a recipe with the fields that depend on the task, the tokenizer and the data."""
        return self.with_head(recipe.model)

    def adapt_origin(self, origin: Any, data: DataConfig) -> Any:
        """The pipeline to fine-tune, prepared for these data."""
        return origin

    @abstractmethod
    def complete_config(self, config: Any, dataset: Any, tokenizers: Tokenizers) -> ModelConfig:
        """The model config with the fields that are derived from the data."""

    @abstractmethod
    def encode(
        self,
        dataset: Any,
        tokenizers: Tokenizers,
        special: SpecialTokens,
        recipe: Recipe,
        model: Any,
        shape: BatchShape,
    ) -> EncodedDataset:
        """Encode the dataset as batches."""

    def loss(self, model: Any, features: Features, batch: Any, config: TrainConfig) -> LossParts:
        """The loss of a batch, summed over its tokens, texts or images."""
        return features_loss(model, features, batch, config)

    def validation_scores(self, pipeline: Any, dataset: Any) -> dict[str, float]:
        """Metrics on a random sample of the validation split, in addition to the loss; `with_margins`, if they have."""
        return {}

    @abstractmethod
    def reasons(self, dataset: Any, recipe: Recipe) -> list[str]:
        """Settings that were chosen from the data, each with its reason, for the plan."""

    @abstractmethod
    def warnings(self, dataset: Any) -> list[str]:
        """Warnings about the data that may limit the quality of the model."""


def random_sample(examples: Sequence[Example], count: int) -> Sequence[Example]:
    """At most `count` examples, the same ones in every run: the first ones of a sorted file would not represent it.

    >>> len(random_sample(range(100), 10)), random_sample("abc", 10)
    (10, 'abc')
    """
    if len(examples) <= count:
        return examples
    rows = np.random.default_rng(0).choice(len(examples), count, replace=False)
    return [examples[row] for row in sorted(rows)]


def with_margins(metrics: Mapping[str, ExampleSums]) -> dict[str, float]:
    """The values of metrics, and half of the width of their 95% confidence intervals.

    >>> from regard.evaluation.bootstrap import share
    >>> with_margins({"accuracy": share([True, False] * 50)})
    {'accuracy': 50.0, 'accuracy_margin': 10.0}
    """
    values = {name: metric.value for name, metric in metrics.items()}
    return values | {margin_key(name): metric.margin for name, metric in metrics.items()}


def train_shared_tokenizer(texts: Sequence[str], config: TokenizerConfig, **options: Any) -> Tokenizers:
    """Train one tokenizer for source and target."""
    tokenizer = Tokenizer.train(texts, config.kind, config.vocab_size, config.lowercase, **options)
    return tokenizer, tokenizer


def set_vocab_size(config: Any, tokenizers: Tokenizers, **changes: Any) -> Any:
    """The config with room for the vocabulary of the tokenizer (an imported model may have a larger one)."""
    return dataclasses.replace(config, vocab=max(config.vocab, tokenizers[0].vocab_size), **changes)


def has_gpu() -> bool:
    """Whether training can use a GPU."""
    return find_device("auto").type != "cpu"


def warn_about_rare_labels(counts: Mapping[str, int], items: str, min_recommended: int) -> list[str]:
    """A warning if most labels have few examples.

    >>> warn_about_rare_labels({"cat": 30, "dog": 31}, "images", min_recommended=200)[0][:44]
    'Few images per label: 30 (median). Accuracy '
    """
    median = int(statistics.median_low(counts.values())) if counts else 0
    if median >= min_recommended:
        return []
    return [
        f"Few {items} per label: {median} (median). Accuracy on new {items} will be much lower than on these. A model "
        f"trained from scratch needs at least {min_recommended}; otherwise fine-tune a model with --from."
    ]


def warn_about_case(labels: Iterable[str]) -> list[str]:
    """A warning if labels differ only in case.

    >>> warn_about_case(["Good", "bad", "good"])
    ['Labels differ only in case: Good and good. If they mean the same, write them in the same way.']
    """
    groups: dict[str, list[str]] = {}
    for label in sorted(set(labels)):
        groups.setdefault(label.casefold(), []).append(label)
    same = [" and ".join(group) for group in groups.values() if len(group) > 1]
    names = ", ".join(same[:5]) + (", …" if len(same) > 5 else "")
    return [f"Labels differ only in case: {names}. If they mean the same, write them in the same way."] if same else []


def suggested_training(steps: int, batch_tokens: int, lr: float, **changes: Any) -> TrainConfig:
    """The training settings of most tasks: AdamW, 10% of the steps as warm-up, twenty validations, early stopping.

    >>> suggested_training(5000, 4096, 1e-3, validate_by="f1").warmup
    500
    """
    every = max(50, steps // 20)
    defaults: dict[str, Any] = dict(optimizer="adamw", warmup=min(1000, steps // 10), weight_decay=0.01)
    defaults |= dict(label_smoothing=0.0, validate_every=every, save_every=every, schedule="wsd", patience=5)
    return TrainConfig(steps=steps, batch_tokens=batch_tokens, lr=lr, **(defaults | changes))


def features_loss(model: Any, features: Features, batch: Batch, config: TrainConfig) -> LossParts:
    """The cross-entropy loss of models with a linear output layer over tokens or labels."""
    first_pass = features(*batch.inputs)
    second_pass = features(*batch.inputs) if config.r_drop and torch.is_grad_enabled() else None
    smoothing = config.label_smoothing if torch.is_grad_enabled() else 0.0
    divergence = config.r_drop if second_pass is not None else 0.0
    output, logit_cap = model.output, getattr(model.config, "logit_cap", 0.0)
    return token_loss(
        first_pass, output.weight, batch.targets, smoothing, second_pass, divergence, output.bias, logit_cap
    )


@torch.no_grad()
def evaluate_loss(task: Task, model: Any, batches: Iterable[Batch], autocast: Autocast) -> dict[str, float]:
    """The mean negative log-likelihood on the validation split (no smoothing, no dropout) and, for text, perplexity."""
    device = next(model.parameters()).device
    model.eval()
    nll, tokens = 0.0, 0.0
    for batch in batches:
        with autocast():
            parts = task.loss(model, model.features, batch.to(device), TrainConfig())
        nll += float(parts.nll)
        tokens += float(parts.tokens)
    mean = nll / max(1.0, tokens)
    return {"nll": mean} if task.is_image_task else {"nll": mean, "perplexity": math.exp(min(mean, 50.0))}

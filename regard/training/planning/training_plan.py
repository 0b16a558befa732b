"""Plans of training runs on a cluster: memory per rank, tokens per second, days and cost."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.config_reader import read_toml
from regard.data.text.compression import SUFFIXES
from regard.errors import RegardError, did_you_mean
from regard.models import ModelConfig, TransformerConfig, family_name
from regard.ranges import check_value
from regard.recipes import find_recipe
from regard.training.planning.step_estimates import (
    GPUS,
    ModelCost,
    RankMemory,
    Sharding,
    StepTime,
    estimate_memory,
    estimate_step_time,
    model_cost,
)
from regard.training.recipe import Recipe, TrainConfig, recipe_from_dict

# Bytes of text per token of a byte-pair encoding of English text, for corpora given as files.
BYTES_PER_TOKEN = 4.0


@dataclass(frozen=True)
class TrainingPlan:
    """Expected memory, speed, time and cost of a run; `print(plan)` shows a table."""

    model: ModelConfig
    cost: ModelCost
    gpu: str
    gpus: int
    gpus_per_node: int
    sharding: Sharding
    batch_tokens: int
    """tokens per GPU and step; of pairs, source and target together"""
    tokens: float
    """training tokens in total"""
    memory: RankMemory
    step: StepTime
    price: float
    """per GPU and hour"""

    @property
    def fits(self) -> bool:
        """Whether a rank fits into the memory of a GPU, with a tenth to spare."""
        return self.memory.total <= 0.9 * GPUS[self.gpu].memory

    @property
    def tokens_per_second(self) -> float:
        return self.gpus * self.batch_tokens / self.step.total

    @property
    def scaling(self) -> float:
        """Speed per GPU, as a share of that of a single GPU (weak scaling)."""
        return 1 - self.step.exchange / self.step.total

    @property
    def steps(self) -> int:
        return max(1, round(self.tokens / (self.gpus * self.batch_tokens)))

    @property
    def days(self) -> float:
        return self.tokens / self.tokens_per_second / 86_400

    @property
    def total_price(self) -> float:
        return self.days * 24 * self.gpus * self.price

    def __str__(self) -> str:
        memory, step = self.memory, self.step
        parts = {
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "moving average": memory.average,
            "gathered": memory.gathered,
            "activations": memory.activations,
        }
        shares = {
            "matrix products": step.matrix_products,
            "memory traffic": step.memory_traffic,
            "launches": step.launches,
            "optimizer": step.optimizer,
            "exchange of gradients": step.exchange,
        }
        capacity = GPUS[self.gpu].memory
        batch = f"{self.gpus * self.batch_tokens:,} tokens ({self.batch_tokens:,} per GPU)"
        verdict = "" if self.fits else ": too much"
        millions = f"{self.cost.parameters / 1e6:,.1f} M parameters"
        rows = [
            ("model", f"{family_name(self.model)} of width {self.cost.width}: {millions}"),
            ("cluster", f"{self.gpus:,} × {self.gpu}, {self.gpus_per_node} per node, {self.sharding}"),
            ("memory", f"{memory.total / 1e9:,.1f} of {capacity / 1e9:,.0f} GB per GPU{verdict}"),
            ("", ", ".join(f"{name} {size / 1e9:,.2f}" for name, size in parts.items() if size)),
            ("step", f"{1e3 * step.total:,.1f} ms for {batch}"),
            ("", ", ".join(f"{name} {1e3 * part:,.1f}" for name, part in shares.items() if part)),
            ("speed", f"{self.tokens_per_second:,.0f} tokens/s; {self.scaling:.0%} of a single GPU's, per GPU"),
            ("training", f"{self.tokens:,.0f} tokens, {self.steps:,} steps"),
            ("time", _format_days(self.days)),
        ]
        if self.price:
            rows.append(("cost", f"{self.total_price:,.2f} at {self.price:g} per GPU-hour"))
        return "\n".join(f"{name:<10}{text}" for name, text in rows)


def plan(
    model: str | Path | Recipe | ModelConfig,
    *,
    tokens: float | None = None,
    data: Sequence[str | Path] = (),
    epochs: float = 1.0,
    vocab: int = 0,
    batch_tokens: int = 0,
    gpus: int = 1,
    gpu: str = "h200",
    gpus_per_node: int = 8,
    link: float = 50.0,
    sharding: Sharding = "ddp",
    price: float = 0.0,
) -> TrainingPlan:
    """Plan a training run on a cluster: memory per rank, tokens per second, days and cost.

    `model` is a recipe (file, name of a packaged one, or `Recipe`) or the config of a model. Training tokens are
    `tokens`, or those of `data` (4 bytes of text per token) × `epochs`, or those of the recipe. `batch_tokens` are per
    GPU, by default those of the recipe; of pairs, source and target are counted together, here and in `tokens`. `link`
    is the bandwidth between nodes in GB/s per GPU (50: one 400 Gbit/s adapter per GPU). `price` is per GPU and hour.
    `regard.training.planning.step_estimates` has the formulas.

    >>> base = TransformerConfig(width=512, heads=8, feedforward=2048, encoder_layers=6, decoder_layers=6)
    >>> p = plan(base, vocab=32_000, tokens=5.12e9, batch_tokens=51_200, gpus=8, price=3.0)
    >>> f"{p.memory.total / 1e9:.1f} GB, {p.tokens_per_second / 1e6:.1f} M tokens/s, {24 * 60 * p.days:.0f} minutes"
    '6.5 GB, 15.7 M tokens/s, 5 minutes'
    """
    recipe = _find_recipe(model)
    config = _with_vocab(recipe.model, vocab or recipe.tokenizer.vocab_size)
    if gpu not in GPUS:
        raise RegardError(f"Unknown GPU {gpu!r}.", did_you_mean(gpu, GPUS, f"Choose from: {', '.join(GPUS)}."))
    for name, value in (("gpus", gpus), ("gpus_per_node", gpus_per_node), ("link", link), ("epochs", epochs)):
        if value <= 0:
            raise RegardError(f"{name} must be positive (got {value}).", "Pass a larger number.")
    check_value(Sharding, sharding, "sharding")
    sides = 2 if isinstance(config, TransformerConfig) else 1
    train = recipe.train
    batch_tokens = batch_tokens or sides * train.batch_tokens * train.accumulate
    if tokens is None:
        tokens = (
            epochs * count_tokens(data) if data else float(sides * train.batch_tokens * train.accumulate * train.steps)
        )
    cost = model_cost(config)
    return TrainingPlan(
        model=config,
        cost=cost,
        gpu=gpu,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        sharding=sharding,
        batch_tokens=batch_tokens,
        tokens=tokens,
        memory=estimate_memory(cost, batch_tokens, gpus, sharding, train.optimizer, average=train.ema > 0),
        step=estimate_step_time(cost, batch_tokens, gpus, gpu, gpus_per_node, 1e9 * link, sharding),
        price=price,
    )


def count_tokens(files: Sequence[str | Path]) -> float:
    """An estimate of the tokens of plain text files: one per 4 bytes, as in a byte-pair encoding of English text.

    >>> count_tokens([__file__]) > 1000
    True
    """
    for file in files:
        if Path(file).suffix in SUFFIXES:
            raise RegardError(f"{file} is compressed: its tokens cannot be estimated.", "Pass --tokens.")
    try:
        return sum(os.path.getsize(file) for file in files) / BYTES_PER_TOKEN
    except OSError as error:
        raise RegardError(f"{error.filename}: {error.strerror}.", "Check the path.") from None


def _find_recipe(model: str | Path | Recipe | ModelConfig) -> Recipe:
    if isinstance(model, Recipe):
        return model
    if isinstance(model, str | Path):
        return recipe_from_dict(read_toml(find_recipe(str(model))), origin=str(model))
    return Recipe(model=model, train=TrainConfig())


def _with_vocab(config: Any, vocab: int) -> Any:
    """The config with the size of the vocabulary, which a run sets from its tokenizers."""
    if isinstance(config, TransformerConfig) and not config.target_vocab:
        config = dataclasses.replace(config, source_vocab=vocab, target_vocab=vocab, shared_vocab=True)
    elif getattr(config, "vocab", None) == 0:
        config = dataclasses.replace(config, vocab=vocab)
    config.check()
    return config


def _format_days(days: float) -> str:
    """A duration in the unit that suits it.

    >>> _format_days(12.3), _format_days(0.1), _format_days(0.001)
    ('12.3 days', '2.4 hours', '1.4 minutes')
    """
    for unit, size in (("days", 1.0), ("hours", 24.0), ("minutes", 1440.0)):
        if days * size >= 1 or unit == "minutes":
            break
    return f"{days * size:,.1f} {unit}"

"""The task `mask`: masked language modeling (BERT, Devlin et al. 2019)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from regard.data import read_documents
from regard.data.batching.masked_batches import MaskedBatches
from regard.data.batching.pair_batches import IGNORE_INDEX, Batch
from regard.data.batching.sequences import Sequences
from regard.data.text.special_tokens import SpecialTokens
from regard.models.bert import bert_tiny
from regard.training.datasets import Dataset, count_units, split_dataset
from regard.training.losses import LossParts, token_loss
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig
from regard.training.shards.dataset import ShardedDataset
from regard.training.suggest import suggest_vocab_size
from regard.training.tasks.task import (
    BatchShape,
    EncodedDataset,
    Features,
    Task,
    Tokenizers,
    features_loss,
    set_vocab_size,
    suggested_training,
    train_shared_tokenizer,
)

MIN_RECOMMENDED_TEXTS = 10_000


class MaskTask(Task):
    """Masked language modeling by an encoder."""

    pipeline = "text_encoder"
    unit = "token"
    head: ClassVar = {"head": "mask", "labels": ()}
    usage_hint = 'regard embed {out} "…"'

    def read(self, config: DataConfig) -> Dataset[Sequence[str]]:
        return split_dataset(
            _lines(config.files, config.columns)[: config.limit or None],
            _lines(config.validation, config.columns),
            "texts",
            key=lambda text: text,
        )

    def suggest_recipe(self, dataset: Dataset[Sequence[str]], fine_tune: bool) -> Recipe:
        words = dataset.total(lambda text: len(text.split()))
        is_small = words < 500_000
        width, layers = (128, 3) if is_small else (256, 6)
        batch = 4096 if is_small else 8192
        steps = max(300, int(max(1, min(40, 20_000_000 // words)) * 1.4 * words / batch))
        return Recipe(
            task="mask",
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=suggest_vocab_size(dataset.sample, len(dataset.training))),
            model=bert_tiny(width=width, layers=layers, feedforward=4 * width),
            train=suggested_training(steps, batch, 2e-4 if fine_tune else 1e-3),
        )

    def make_tokenizers(self, dataset: Dataset[Sequence[str]], config: TokenizerConfig) -> Tokenizers:
        return train_shared_tokenizer(dataset.training, config, mask=True)

    def complete_config(self, config: Any, dataset: Dataset[Sequence[str]], tokenizers: Tokenizers) -> Any:
        return set_vocab_size(self.with_head(config), tokenizers)

    def encode(
        self,
        dataset: Dataset[Sequence[str]],
        tokenizers: Tokenizers,
        special: SpecialTokens,
        recipe: Recipe,
        model: Any,
        shape: BatchShape,
    ) -> EncodedDataset:
        if isinstance(dataset, ShardedDataset):
            training_ids: Sequences = dataset.sequences(0)
        else:
            training_ids = _encode(dataset.training, tokenizers)
        training, validation = (
            MaskedBatches(
                ids,
                vocab=tokenizers[0].vocab_size,
                special=special,
                max_len=min(model.max_len, shape.budget),
                **(shape.options | {"seed": seed}),
            )
            # The masked tokens of the validation split are the same for every run.
            for ids, seed in ((training_ids, shape.seed), (_encode(dataset.validation, tokenizers), 0))
        )
        return EncodedDataset(training, list(validation.epoch(0)), "15% of the tokens are masked")

    def loss(self, model: Any, features: Features, batch: Batch, config: TrainConfig) -> LossParts:
        if batch.targets.device.type != "cpu" or config.r_drop:
            return features_loss(model, features, batch, config)
        # Six tokens of seven have no target; their logits are not computed.
        masked = (batch.targets != IGNORE_INDEX).nonzero().squeeze(1)
        rows = model.mask_head(model.encode(*batch.inputs)[masked])
        smoothing = config.label_smoothing if torch.is_grad_enabled() else 0.0
        return token_loss(rows, model.output.weight, batch.targets[masked], smoothing, bias=model.output.bias)

    def reasons(self, dataset: Dataset[Sequence[str]], recipe: Recipe) -> list[str]:
        return [f"size and steps: {count_units(len(dataset.training), 'texts')}"]

    def warnings(self, dataset: Dataset[Sequence[str]]) -> list[str]:
        if len(dataset.training) >= MIN_RECOMMENDED_TEXTS:
            return []
        count = count_units(len(dataset.training), "texts")
        return [f"Little data: {count}. An encoder needs much more text to be a good starting point for fine-tuning."]


def _encode(texts: Sequence[str], tokenizers: Tokenizers) -> Sequences:
    return Sequences.from_lists(tokenizers[0].encode_batch(list(texts)))


def _lines(files: tuple[str, ...], columns: tuple[str, ...]) -> list[str]:
    """The non-empty lines of the files; documents of .jsonl files are split into lines too."""
    if not files:
        return []
    return [line for document in read_documents(files, columns) for line in document.split("\n") if line.strip()]

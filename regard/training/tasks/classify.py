"""The task `classify`: classification of texts or pairs of texts."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from regard.data.batching.texts import encode_texts
from regard.data.text.labeled_texts import LabeledText, LabeledTextBatches, label_ids, label_names, read_labeled_texts
from regard.data.text.special_tokens import SpecialTokens
from regard.evaluation.bootstrap import share
from regard.models.bert import bert_tiny
from regard.pipelines import TextEncoder
from regard.training.datasets import Dataset, count_units, keep_known_names, split_dataset
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig
from regard.training.suggest import suggest_vocab_size
from regard.training.tasks.task import (
    BatchShape,
    EncodedDataset,
    Task,
    Tokenizers,
    random_sample,
    set_vocab_size,
    suggested_training,
    train_shared_tokenizer,
    warn_about_case,
    warn_about_rare_labels,
    with_margins,
)

# Texts, drawn from the validation split, that are classified in each validation.
VALIDATION_TEXTS = 2000
# Per label; with fewer, accuracy on new texts is poor.
MIN_RECOMMENDED_TEXTS = 100


class ClassifyTask(Task):
    """Classification of texts by an encoder."""

    pipeline = "text_encoder"
    metrics = ("accuracy",)
    unit = "text"
    head: ClassVar = {"head": "classify"}
    usage_hint = 'regard classify {out} "…"'

    def read(self, config: DataConfig) -> Dataset[Sequence[LabeledText]]:
        examples = read_labeled_texts(config.files, config.columns)[: config.limit or None]
        if config.validation:
            return Dataset(examples, read_labeled_texts(config.validation, config.columns), "labeled texts")
        split = split_dataset(examples, [], "labeled texts", key=lambda example: example.texts)
        return keep_known_names(split, lambda example: (example.label,))

    def suggest_recipe(self, dataset: Dataset[Sequence[LabeledText]], fine_tune: bool) -> Recipe:
        texts = [text for example in dataset.training for text in example.texts]
        words = max(1, sum(len(text.split()) for text in texts))
        batch = 2048
        steps = max(200, int((3 if fine_tune else max(2, min(20, 5_000_000 // words))) * 1.5 * words / batch))
        return Recipe(
            task="classify",
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=suggest_vocab_size(texts)),
            model=bert_tiny(layers=2, feedforward=256, dropout=0.3, max_len=256),
            train=suggested_training(
                steps,
                batch,
                lr=1e-4 if fine_tune else 1e-3,
                schedule="linear" if fine_tune else "wsd",
                label_smoothing=0.1,
                validate_by="accuracy",
            ),
        )

    def make_tokenizers(self, dataset: Dataset[Sequence[LabeledText]], config: TokenizerConfig) -> Tokenizers:
        texts = [text for example in dataset.training for text in example.texts]
        return train_shared_tokenizer(texts, config, mask=True)

    def with_head(self, config: Any) -> Any:
        needs_pooler = config.pooler == "none" and config.pooling == "first" and not config.head_transform
        return dataclasses.replace(super().with_head(config), pooler="tanh" if needs_pooler else config.pooler)

    def complete_config(self, config: Any, dataset: Dataset[Sequence[LabeledText]], tokenizers: Tokenizers) -> Any:
        return set_vocab_size(self.with_head(config), tokenizers, labels=label_names(dataset.training))

    def encode(
        self,
        dataset: Dataset[Sequence[LabeledText]],
        tokenizers: Tokenizers,
        special: SpecialTokens,
        recipe: Recipe,
        model: Any,
        shape: BatchShape,
    ) -> EncodedDataset:
        max_len = min(model.max_len, shape.budget)
        splits, truncated = [], 0
        for examples in (dataset.training, dataset.validation):
            texts, too_long = encode_texts(
                [example.texts for example in examples],
                tokenizers[0],
                special,
                max_len=max_len,
                segments=model.segments > 1,
            )
            truncated += too_long
            splits.append(
                LabeledTextBatches(texts, label_ids(examples, model.labels), max_len=max_len, **shape.options)
            )
        labels = ", ".join(model.labels[:10]) + (", …" if len(model.labels) > 10 else "")
        note = f"labels: {labels}; truncated: {count_units(truncated, 'texts')}"
        return EncodedDataset(splits[0], list(splits[1].epoch(0)), note)

    def validation_scores(self, pipeline: TextEncoder, dataset: Dataset[Sequence[LabeledText]]) -> dict[str, float]:
        examples = random_sample(dataset.validation, VALIDATION_TEXTS)
        predictions = pipeline.classify([example.texts for example in examples], truncate=True)
        correct = [prediction.label == example.label for prediction, example in zip(predictions, examples)]
        return with_margins({"accuracy": share(correct)})

    def reasons(self, dataset: Dataset[Sequence[LabeledText]], recipe: Recipe) -> list[str]:
        labels = len(label_names(dataset.training))
        count = count_units(len(dataset.training), "texts")
        return [f"size and steps: {count}, {labels} labels; model selection by accuracy"]

    def warnings(self, dataset: Dataset[Sequence[LabeledText]]) -> list[str]:
        labels = Counter(example.label for example in dataset.training)
        return warn_about_case(labels) + warn_about_rare_labels(labels, "texts", MIN_RECOMMENDED_TEXTS)

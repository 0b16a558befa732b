"""The task `tag`: token classification, such as named entities and parts of speech."""

from collections.abc import Sequence
from typing import Any, ClassVar

from regard.data.text.examples.tagged_texts import (
    TaggedText,
    TaggedTextBatches,
    TaggingWindows,
    read_tagged_texts,
    tag_names,
)
from regard.data.text.special_tokens import SpecialTokens
from regard.evaluation.tag_metrics import is_bio, tag_scores
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
)

# Texts, drawn from the validation split, that are tagged in each validation.
VALIDATION_TEXTS = 2000
MIN_RECOMMENDED_TEXTS = 5000


class TagTask(Task):
    """Token classification by an encoder, from files in CoNLL format."""

    pipeline = "text_encoder"
    metrics = ("f1", "accuracy")
    unit = "word"
    head: ClassVar = {"head": "tag", "pooler": "none"}
    usage_hint = 'regard tag {out} "…"'

    def read(self, config: DataConfig) -> Dataset[Sequence[TaggedText]]:
        texts = read_tagged_texts(config.files, config.columns)[: config.limit or None]
        if config.validation:
            return Dataset(texts, read_tagged_texts(config.validation, config.columns), "tagged texts")
        split = split_dataset(texts, [], "tagged texts", key=lambda text: text.words)
        return keep_known_names(split, lambda text: text.tags)

    def suggest_recipe(self, dataset: Dataset[Sequence[TaggedText]], fine_tune: bool) -> Recipe:
        words = max(1, sum(len(text.words) for text in dataset.training))
        batch = 2048
        steps = max(200, int((3 if fine_tune else max(3, min(20, 5_000_000 // words))) * 1.5 * words / batch))
        return Recipe(
            task="tag",
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=suggest_vocab_size(_texts(dataset))),
            model=bert_tiny(dropout=0.3, max_len=256),
            train=suggested_training(
                steps,
                batch,
                lr=1e-4 if fine_tune else 1e-3,
                schedule="linear" if fine_tune else "wsd",
                validate_by="f1" if is_bio(tag_names(dataset.training)) else "accuracy",
            ),
        )

    def make_tokenizers(self, dataset: Dataset[Sequence[TaggedText]], config: TokenizerConfig) -> Tokenizers:
        return train_shared_tokenizer(_texts(dataset), config, mask=True)

    def complete_config(self, config: Any, dataset: Dataset[Sequence[TaggedText]], tokenizers: Tokenizers) -> Any:
        return set_vocab_size(self.with_head(config), tokenizers, labels=tag_names(dataset.training))

    def encode(
        self,
        dataset: Dataset[Sequence[TaggedText]],
        tokenizers: Tokenizers,
        special: SpecialTokens,
        recipe: Recipe,
        model: Any,
        shape: BatchShape,
    ) -> EncodedDataset:
        max_len = min(model.max_len, shape.budget)
        splits = []
        for texts in (dataset.training, dataset.validation):
            windows = TaggingWindows.from_words(
                [text.words for text in texts], tokenizers[0], special, max_len=max_len, segments=model.segments > 1
            )
            splits.append(TaggedTextBatches(windows, texts, model.labels, max_len=max_len, **shape.options))
        tags = ", ".join(model.labels[:10]) + (", …" if len(model.labels) > 10 else "")
        return EncodedDataset(splits[0], list(splits[1].epoch(0)), f"tags: {tags}")

    def validation_scores(self, pipeline: TextEncoder, dataset: Dataset[Sequence[TaggedText]]) -> dict[str, float]:
        texts = random_sample(dataset.validation, VALIDATION_TEXTS)
        predicted = [[word.tag for word in words] for words in pipeline.tag([text.words for text in texts])]
        scores = tag_scores(predicted, [text.tags for text in texts], pipeline.model.config.labels)
        f1 = {} if scores.entities is None else {"f1": scores.entities.f1}
        return f1 | {"accuracy": scores.accuracy}

    def reasons(self, dataset: Dataset[Sequence[TaggedText]], recipe: Recipe) -> list[str]:
        names = tag_names(dataset.training)
        metric = "F1 of entities" if is_bio(names) else "accuracy"
        count = count_units(len(dataset.training), "texts")
        return [f"size and steps: {count}, {len(names)} tags; model selection by {metric}"]

    def warnings(self, dataset: Dataset[Sequence[TaggedText]]) -> list[str]:
        warnings = warn_about_case(tag_names(dataset.training))
        if len(dataset.training) >= MIN_RECOMMENDED_TEXTS:
            return warnings
        count = count_units(len(dataset.training), "texts")
        return [*warnings, f"Little data to train from scratch: {count}. Fine-tune an encoder with --from instead."]


def _texts(dataset: Dataset[Sequence[TaggedText]]) -> list[str]:
    return [" ".join(text.words) for text in dataset.training]

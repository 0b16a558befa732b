"""Task: classify texts."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from regard.data.batching.text_batches import encode_texts
from regard.data.text.labeled_texts import Labelled, LabelledBatches, label_ids, label_names, read_labelled
from regard.data.text.special_tokens import Special
from regard.models.bert import bert_tiny
from regard.pipelines import TextEncoder
from regard.training.datasets import Dataset, split_dataset, too_few
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig
from regard.training.suggestions import vocabulary_for
from regard.training.tasks.task import (
    Encoded,
    Shape,
    Task,
    Tokenizers,
    one_tokenizer,
    suggested_training,
    warn_of_rare_labels,
    with_vocabulary,
)

# Texts of the validation split that are classified each time.
VALIDATED = 2000
# Per label; below it accuracy on new texts is poor.
ENOUGH_TEXTS = 100


class Classify(Task):
    pipeline = "text_encoder"
    metrics = ("accuracy",)
    unit = "text"
    try_it = 'regard classify {out} "…"'

    def read(self, config: DataConfig) -> Dataset[Sequence[Labelled]]:
        examples = read_labelled(config.files, config.columns)
        if config.validation:
            return Dataset(examples, read_labelled(config.validation, config.columns), "labelled texts")
        split = split_dataset(examples, [], "labelled texts", key=lambda one: one.texts)
        # If all texts of a rare label are in the validation split, they become training examples.
        known = {one.label for one in split.training}
        validation = [one for one in split.validation if one.label in known]
        if not validation:
            raise too_few(split.unit)
        rare = [one for one in split.validation if one.label not in known]
        return Dataset([*split.training, *rare], validation, split.unit)

    def suggest_recipe(self, dataset: Dataset[Sequence[Labelled]], fine_tune: bool) -> Recipe:
        texts = [text for example in dataset.training for text in example.texts]
        words = max(1, sum(len(text.split()) for text in texts))
        batch = 2048
        steps = max(200, int((3 if fine_tune else max(2, min(20, 5_000_000 // words))) * 1.5 * words / batch))
        return Recipe(
            task="classify",
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=vocabulary_for(texts)),
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

    def make_tokenizers(self, dataset: Dataset[Sequence[Labelled]], config: TokenizerConfig) -> Tokenizers:
        texts = [text for example in dataset.training for text in example.texts]
        return one_tokenizer(texts, config, mask=True)

    def complete_config(self, config: Any, dataset: Dataset[Sequence[Labelled]], tokenizers: Tokenizers) -> Any:
        return with_vocabulary(
            config,
            tokenizers,
            head="classify",
            pooler="tanh" if config.pooler == "none" and config.pooling == "first" else config.pooler,
            labels=label_names(dataset.training),
        )

    def encode(
        self,
        dataset: Dataset[Sequence[Labelled]],
        tokenizers: Tokenizers,
        special: Special,
        recipe: Recipe,
        model: Any,
        shape: Shape,
    ) -> Encoded:
        longest = min(model.max_len, shape.budget)
        sides, cut = [], 0
        for examples in (dataset.training, dataset.validation):
            texts, too_long = encode_texts(
                [one.texts for one in examples],
                tokenizers[0],
                special,
                max_len=longest,
                segments=model.segments > 1,
            )
            cut += too_long
            sides.append(LabelledBatches(texts, label_ids(examples, model.labels), max_len=longest, **shape.options))
        labels = ", ".join(model.labels[:10]) + (", …" if len(model.labels) > 10 else "")
        return Encoded(sides[0], list(sides[1].epoch(0)), f"labels: {labels}; {cut:,} texts are cut to fit")

    def validation_scores(self, bundle: TextEncoder, dataset: Dataset[Sequence[Labelled]]) -> dict[str, float]:
        examples = dataset.validation[:VALIDATED]
        found = bundle.classify([one.texts for one in examples], truncate=True)
        right = sum(answer.label == example.label for answer, example in zip(found, examples))
        return {"accuracy": 100 * right / len(examples)}

    def reasons(self, dataset: Dataset[Sequence[Labelled]], recipe: Recipe) -> list[str]:
        labels = len(label_names(dataset.training))
        return [f"size and steps: {len(dataset.training):,} texts, {labels} labels; model selection by accuracy"]

    def warnings(self, dataset: Dataset[Sequence[Labelled]]) -> list[str]:
        return warn_of_rare_labels(Counter(one.label for one in dataset.training), "texts", ENOUGH_TEXTS)

"""Texts with labels to a model that gives a text its label."""

import dataclasses
from collections import Counter
from typing import Any

from regard.data import Batch, Tokenizer
from regard.data.labelled import Labelled, LabelledBatches, label_ids, label_names, read_labelled
from regard.data.special import Special
from regard.data.texts import encode_texts
from regard.errors import RegardError
from regard.folder import TextEncoder
from regard.models.bert import bert_tiny
from regard.training.losses import LossParts
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig
from regard.training.sizing import vocabulary_for
from regard.training.tasks.base import (
    Encoded,
    Features,
    Shape,
    Tokenizers,
    features_loss,
    suggested_training,
    warn_of_rare_labels,
)
from regard.training.tasks.held import Held, with_validation

# Texts of the validation set that are classified each time.
JUDGED = 2000
# Per label; below it accuracy on new texts is poor.
ENOUGH_TEXTS = 100


class Classify:
    qualities: tuple[str, ...] = ("accuracy",)
    unit = "text"
    try_it = 'regard classify {out} "…"'

    def read(self, config: DataConfig) -> Held[Labelled]:
        examples = read_labelled(config.files, config.columns)
        if config.validation:
            return Held(examples, read_labelled(config.validation, config.columns), "labelled texts")
        held = with_validation(examples, [], "labelled texts", key=lambda one: one.texts)
        # Of a rare label every text may have been set aside: those are learned from after all.
        known = {one.label for one in held.training}
        validation = [one for one in held.validation if one.label in known]
        if not validation:
            raise RegardError(
                "There are too few labelled texts to set some aside for validation.",
                "Give more of them, or validation files of their own.",
            )
        rare = [one for one in held.validation if one.label not in known]
        return Held([*held.training, *rare], validation, held.called)

    def suggest(self, corpus: Held[Labelled], goes_on: bool) -> Recipe:
        texts = [text for example in corpus.training for text in example.texts]
        words = max(1, sum(len(text.split()) for text in texts))
        batch = 2048
        steps = max(200, int((3 if goes_on else max(2, min(20, 5_000_000 // words))) * 1.5 * words / batch))
        return Recipe(
            task="classify",
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=vocabulary_for(texts)),
            model=bert_tiny(layers=2, feedforward=256, dropout=0.3, max_len=256),
            train=suggested_training(
                steps,
                batch,
                lr=1e-4 if goes_on else 1e-3,
                schedule="linear" if goes_on else "wsd",
                label_smoothing=0.1,
                validate_by="accuracy",
            ),
        )

    def make_tokenizers(self, corpus: Held[Labelled], config: TokenizerConfig) -> Tokenizers:
        texts = [text for example in corpus.training for text in example.texts]
        tokenizer = Tokenizer.train(texts, config.kind, config.vocab_size, config.lowercase, mask=True)
        return tokenizer, tokenizer

    def sized(self, config: Any, corpus: Held[Labelled], tokenizers: Tokenizers) -> Any:
        return dataclasses.replace(
            config,
            vocab=max(config.vocab, tokenizers[0].vocab_size),
            head="classify",
            pooler="tanh" if config.pooler == "none" and config.pooling == "first" else config.pooler,
            labels=label_names(corpus.training),
        )

    def encode(
        self,
        corpus: Held[Labelled],
        tokenizers: Tokenizers,
        special: Special,
        recipe: Recipe,
        model: Any,
        shape: Shape,
    ) -> Encoded:
        longest = min(model.max_len, shape.budget)
        sides, cut = [], 0
        for examples in (corpus.training, corpus.validation):
            texts, too_long = encode_texts(
                [one.texts for one in examples],
                tokenizers[0],
                special,
                max_len=longest,
                segments=model.segments > 1,
            )
            cut += too_long
            sides.append(
                LabelledBatches(
                    texts,
                    label_ids(examples, model.labels),
                    budget=shape.budget,
                    max_len=longest,
                    seed=shape.seed,
                    constant_shapes=shape.constant,
                )
            )
        labels = ", ".join(model.labels[:10]) + (", …" if len(model.labels) > 10 else "")
        return Encoded(sides[0], list(sides[1].epoch(0)), f"labels: {labels}; {cut:,} texts are cut to fit")

    def loss(self, model: Any, features: Features, batch: Batch, config: TrainConfig) -> LossParts:
        return features_loss(model, features, batch, config)

    def judge(self, bundle: TextEncoder, corpus: Held[Labelled]) -> dict[str, float]:
        examples = corpus.validation[:JUDGED]
        found = bundle.classify([one.texts for one in examples], truncate=True)
        right = sum(answer.label == example.label for answer, example in zip(found, examples))
        return {"accuracy": 100 * right / len(examples)}

    def reasons(self, corpus: Held[Labelled], recipe: Recipe) -> list[str]:
        labels = len(label_names(corpus.training))
        return [f"size and steps: {len(corpus.training):,} texts, {labels} labels; model selection by accuracy"]

    def warnings(self, corpus: Held[Labelled]) -> list[str]:
        return warn_of_rare_labels(Counter(one.label for one in corpus.training), "texts", ENOUGH_TEXTS)

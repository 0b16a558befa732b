"""Sentence pairs to a translator."""

import dataclasses
from typing import Any

from regard.data import Batch, Batches, encode_pairs
from regard.data.special import Special
from regard.decode import DecodeConfig
from regard.folder import Translator
from regard.models import ModelConfig
from regard.training.corpus import Corpus, read_corpus, train_tokenizers
from regard.training.losses import LossParts
from regard.training.metrics import text_scores
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig
from regard.training.sizing import profile_pairs, suggest
from regard.training.tasks.base import Encoded, Features, Shape, Tokenizers, features_loss

# Sentences of the validation split that are translated each time; with fewer the choice of the model is noise.
VALIDATED = 1000


class Translate:
    qualities: tuple[str, ...] = ("bleu", "chrf", "exact_match")
    unit = "token"
    try_it = 'regard translate {out} "…"'

    def read(self, config: DataConfig) -> Corpus:
        return read_corpus(config)

    def suggest(self, corpus: Corpus, goes_on: bool) -> Recipe:
        return suggest(corpus, goes_on)

    def make_tokenizers(self, corpus: Corpus, config: TokenizerConfig) -> Tokenizers:
        return train_tokenizers(corpus.training, config)

    def sized(self, config: Any, corpus: Corpus, tokenizers: Tokenizers) -> Any:
        source, target = tokenizers
        return dataclasses.replace(
            config,
            source_vocab=max(config.source_vocab, source.vocab_size),  # an imported model may have room for more
            target_vocab=max(config.target_vocab, target.vocab_size),
            shared_vocab=target is source,
        )

    def encode(
        self,
        corpus: Corpus,
        tokenizers: Tokenizers,
        special: Special,
        recipe: Recipe,
        model: ModelConfig,
        shape: Shape,
    ) -> Encoded:
        common: dict[str, Any] = dict(
            budget=shape.budget,
            max_len=model.max_len,
            seed=shape.seed,
            constant_shapes=shape.constant,
            special=(special, special),
        )
        # Room for one id that frames a text is taken for granted there; imported models may have more.
        longest = model.max_len + 1 - max(len(special.framed([])), len(special.begun([])))
        dropout = recipe.tokenizer.dropout
        *sides, too_long = encode_pairs(corpus.training, *tokenizers, max_len=longest, dropout=dropout, seed=shape.seed)
        *held_out, _ = encode_pairs(corpus.validation, *tokenizers, max_len=longest)
        validation = list(Batches(*held_out, **common).epoch(0))
        return Encoded(Batches(*sides, **common), validation, f"{too_long:,} pairs are too long for the model")

    def loss(self, model: Any, features: Features, batch: Batch, config: TrainConfig) -> LossParts:
        return features_loss(model, features, batch, config)

    def judge(self, bundle: Translator, corpus: Corpus) -> dict[str, float]:
        pairs = corpus.validation[:VALIDATED]
        config = DecodeConfig(method="greedy", max_len=min(DecodeConfig.max_len, bundle.trained_length - 1))
        outputs = bundle.translate([source for source, _ in pairs], config, truncate=True)
        scores = text_scores([best[0].text for best in outputs], [target for _, target in pairs])
        return {"bleu": scores.bleu, "chrf": scores.chrf, "exact_match": scores.exact_match}

    def reasons(self, corpus: Corpus, recipe: Recipe) -> list[str]:
        return profile_pairs(corpus.training).reasons(recipe)

    def warnings(self, corpus: Corpus) -> list[str]:
        spelling, count = profile_pairs(corpus.training).spelling, len(corpus.training)
        enough, what = (1_000, "words") if spelling else (10_000, "sentence pairs")
        if count >= enough:
            return []
        return [
            f"{count:,} pairs are few: from fewer than about {enough:,} {what} a model learns the commonest patterns "
            "and fails on most new input. More data helps most; or fine-tune a trained model with --from."
        ]

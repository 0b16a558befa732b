"""Plain text to a language model: every token from those before it."""

import dataclasses
from typing import Any

from regard.data import Batch, Tokenizer, encode_documents, read_documents, split_documents
from regard.data.special import Special
from regard.data.streams import TextBatches, whole_text
from regard.errors import RegardError
from regard.folder import LanguageModel
from regard.models import GPTConfig
from regard.training.corpus import describe_split
from regard.training.losses import LossParts
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig
from regard.training.tasks.base import (
    Encoded,
    Features,
    Shape,
    Tokenizers,
    features_loss,
    has_gpu,
    suggested_training,
)
from regard.training.tasks.held import Held

# Below so many characters letters are learned; above, pieces of words.
FEW_CHARACTERS = 5_000_000
ENOUGH_CHARACTERS = 300_000
# Without a GPU a suggested run is a small model on this many tokens: about ten minutes on two cores.
CPU_TOKENS = 10_000_000


class Language:
    qualities: tuple[str, ...] = ()
    unit = "token"
    try_it = 'regard generate {out} "…"'

    def read(self, config: DataConfig) -> Held[str]:
        documents = read_documents(config.files)
        if config.validation:
            return Held(documents, read_documents(config.validation), "documents")
        return Held(*split_documents(documents), "documents")

    def suggest(self, corpus: Held[str], goes_on: bool) -> Recipe:
        characters = sum(map(len, corpus.training))
        letters = characters < FEW_CHARACTERS
        tokens = characters if letters else characters // 4
        small = tokens < 300_000 or not has_gpu()
        width, layers, context = (128, 4, 128) if small else (256, 6, 256)
        batch = 4096 if small else 8192
        epochs = max(1, min(20, (20_000_000 if has_gpu() else CPU_TOKENS) // tokens))
        steps = max(200, int(epochs * tokens / batch))
        return Recipe(
            task="language",
            tokenizer=TokenizerConfig(kind="char" if letters else "bytes", vocab_size=8000),
            model=GPTConfig(width=width, layers=layers, feedforward=4 * width, dropout=0.2, max_len=context),
            train=suggested_training(steps, batch, 2e-4 if goes_on else 2e-3, weight_decay=0.1),
        )

    def make_tokenizers(self, corpus: Held[str], config: TokenizerConfig) -> Tokenizers:
        if config.kind not in ("char", "bytes", "word"):
            raise RegardError(
                f"A tokenizer of kind {config.kind} does not keep the line ends of a text.",
                "Set tokenizer.kind to char, word, or bytes, which are subwords too.",
            )
        kept = {"exact": config.kind == "char", "line_ends": config.kind == "word"}
        tokenizer = Tokenizer.train(corpus.training, config.kind, config.vocab_size, config.lowercase, **kept)
        return tokenizer, tokenizer

    def sized(self, config: Any, corpus: Held[str], tokenizers: Tokenizers) -> Any:
        return dataclasses.replace(config, vocab=max(config.vocab, tokenizers[0].vocab_size))

    def encode(
        self, corpus: Held[str], tokenizers: Tokenizers, special: Special, recipe: Recipe, model: Any, shape: Shape
    ) -> Encoded:
        stream, held_out = (
            encode_documents(documents, tokenizers[0], special) for documents in (corpus.training, corpus.validation)
        )
        batches = TextBatches(
            stream, model.max_len, budget=shape.budget, seed=shape.seed, constant_shapes=shape.constant
        )
        validation = list(whole_text(held_out, model.max_len, budget=shape.budget, constant_shapes=shape.constant))
        note = describe_split(len(stream), len(held_out), "tokens")
        if tokenizers[0].kind == "word":
            note += f"; words outside of the vocabulary: {(held_out == special.unk).mean():.1%} of those for validation"
        return Encoded(batches, validation, note)

    def loss(self, model: Any, features: Features, batch: Batch, config: TrainConfig) -> LossParts:
        return features_loss(model, features, batch, config)

    def judge(self, bundle: LanguageModel, corpus: Held[str]) -> dict[str, float]:
        return {}

    def reasons(self, corpus: Held[str], recipe: Recipe) -> list[str]:
        count = sum(map(len, corpus.training))
        where = "" if has_gpu() else "; a small model, since there is no GPU"
        return [f"tokenizer {recipe.tokenizer.kind}, size and steps: {count:,} characters of text{where}"]

    def warnings(self, corpus: Held[str]) -> list[str]:
        count = sum(map(len, corpus.training))
        if count >= ENOUGH_CHARACTERS:
            return []
        return [
            f"{count:,} characters are few: the model will repeat pieces of them. Expect text from about 1 million."
        ]

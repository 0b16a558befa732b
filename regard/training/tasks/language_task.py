"""Task: language, a model of plain text that predicts each token from those before it."""

from collections.abc import Sequence
from typing import Any

from regard.data import encode_documents, read_documents, split_documents
from regard.data.batching.token_streams import TextBatches, whole_text
from regard.data.text.special_tokens import Special
from regard.errors import RegardError
from regard.models import GPTConfig
from regard.training.datasets import Dataset, describe_split
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig
from regard.training.tasks.task import (
    Encoded,
    Shape,
    Task,
    Tokenizers,
    has_gpu,
    one_tokenizer,
    suggested_training,
    with_vocabulary,
)

# Texts with fewer characters are tokenized by character, longer ones into subwords (bytes).
FEW_CHARACTERS = 5_000_000
ENOUGH_CHARACTERS = 300_000
# Without a GPU a suggested run is a small model on this many tokens: about ten minutes on two cores.
CPU_TOKENS = 10_000_000


class Language(Task):
    pipeline = "text_generator"
    unit = "token"
    try_it = 'regard generate {out} "…"'

    def read(self, config: DataConfig) -> Dataset[Sequence[str]]:
        documents = read_documents(config.files)
        if config.validation:
            return Dataset(documents, read_documents(config.validation), "documents")
        return Dataset(*split_documents(documents), "documents")

    def suggest_recipe(self, dataset: Dataset[Sequence[str]], fine_tune: bool) -> Recipe:
        characters = sum(map(len, dataset.training))
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
            train=suggested_training(steps, batch, 2e-4 if fine_tune else 2e-3, weight_decay=0.1),
        )

    def make_tokenizers(self, dataset: Dataset[Sequence[str]], config: TokenizerConfig) -> Tokenizers:
        if config.kind not in ("char", "bytes", "word"):
            raise RegardError(
                f"A tokenizer of kind {config.kind} does not keep the line ends of a text.",
                "Set tokenizer.kind to char, word, or bytes, which are subwords too.",
            )
        return one_tokenizer(dataset.training, config, exact=config.kind == "char", line_ends=config.kind == "word")

    def complete_config(self, config: Any, dataset: Dataset[Sequence[str]], tokenizers: Tokenizers) -> Any:
        return with_vocabulary(config, tokenizers)

    def encode(
        self,
        dataset: Dataset[Sequence[str]],
        tokenizers: Tokenizers,
        special: Special,
        recipe: Recipe,
        model: Any,
        shape: Shape,
    ) -> Encoded:
        stream, held_out = (
            encode_documents(documents, tokenizers[0], special) for documents in (dataset.training, dataset.validation)
        )
        batches = TextBatches(stream, model.max_len, **shape.options)
        validation = list(whole_text(held_out, model.max_len, budget=shape.budget, constant_shapes=shape.constant))
        note = describe_split(len(stream), len(held_out), "tokens")
        if tokenizers[0].kind == "word":
            note += f"; words outside of the vocabulary: {(held_out == special.unk).mean():.1%} of those for validation"
        return Encoded(batches, validation, note)

    def reasons(self, dataset: Dataset[Sequence[str]], recipe: Recipe) -> list[str]:
        count = sum(map(len, dataset.training))
        where = "" if has_gpu() else "; a small model, since there is no GPU"
        return [f"tokenizer {recipe.tokenizer.kind}, size and steps: {count:,} characters of text{where}"]

    def warnings(self, dataset: Dataset[Sequence[str]]) -> list[str]:
        count = sum(map(len, dataset.training))
        if count >= ENOUGH_CHARACTERS:
            return []
        return [
            f"{count:,} characters are few: the model will repeat pieces of them. Expect text from about 1 million."
        ]

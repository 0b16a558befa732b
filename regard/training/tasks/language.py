"""The task `language`: language modeling, the prediction of the next token of plain text."""

from collections.abc import Sequence
from typing import Any

from regard.data import encode_documents, read_documents, split_documents
from regard.data.batching.streams import TokenStreamBatches, sliding_window_batches
from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.models import GPTConfig
from regard.training.datasets import Dataset, count_units, describe_split
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig
from regard.training.shards.dataset import ShardedDataset
from regard.training.tasks.task import (
    BatchShape,
    EncodedDataset,
    Task,
    Tokenizers,
    has_gpu,
    set_vocab_size,
    suggested_training,
    train_shared_tokenizer,
)

# Data with fewer characters are tokenized by character, larger data into subwords (byte-level BPE).
MIN_SUBWORD_CHARACTERS = 5_000_000
MIN_RECOMMENDED_CHARACTERS = 300_000
# Without a GPU, a suggested run trains a small model on this many tokens: about ten minutes on two cores.
CPU_TOKENS = 10_000_000


class LanguageTask(Task):
    """Language modeling by a decoder."""

    pipeline = "text_generator"
    reads_folders = True
    unit = "token"
    usage_hint = 'regard generate {out} "…"'

    def read(self, config: DataConfig) -> Dataset[Sequence[str]]:
        documents = read_documents(config.files, config.columns)[: config.limit or None]
        if config.validation:
            return Dataset(documents, read_documents(config.validation, config.columns), "documents")
        return Dataset(*split_documents(documents), "documents")

    def suggest_recipe(self, dataset: Dataset[Sequence[str]], fine_tune: bool) -> Recipe:
        characters = dataset.total(len)
        by_character = characters < MIN_SUBWORD_CHARACTERS
        tokens = characters if by_character else characters // 4
        is_small = tokens < 300_000 or not has_gpu()
        width, layers, context = (128, 4, 128) if is_small else (256, 6, 256)
        batch = 4096 if is_small else 8192
        epochs = max(1, min(20, (20_000_000 if has_gpu() else CPU_TOKENS) // tokens))
        steps = max(200, int(epochs * tokens / batch))
        return Recipe(
            task="language",
            tokenizer=TokenizerConfig(kind="char" if by_character else "bytes", vocab_size=8000),
            # The form of Qwen3; SwiGLU costs nothing beside the squared ReLU (benchmarks/training.md).
            model=GPTConfig(
                width=width,
                layers=layers,
                feedforward=-(-width // 3) * 8,  # as many weights as without gates and 4 × width
                dropout=0.2,
                activation="swiglu",
                max_len=context,
            ),
            train=suggested_training(steps, batch, 2e-4 if fine_tune else 2e-3, weight_decay=0.1),
        )

    def make_tokenizers(self, dataset: Dataset[Sequence[str]], config: TokenizerConfig) -> Tokenizers:
        if config.kind not in ("char", "bytes", "word"):
            raise RegardError(
                f"tokenizer.kind = {config.kind!r} does not preserve line breaks.",
                "Set tokenizer.kind to char, word or bytes (subwords).",
            )
        return train_shared_tokenizer(
            dataset.training, config, exact=config.kind == "char", keep_newlines=config.kind == "word"
        )

    def complete_config(self, config: Any, dataset: Dataset[Sequence[str]], tokenizers: Tokenizers) -> Any:
        return set_vocab_size(config, tokenizers)

    def encode(
        self,
        dataset: Dataset[Sequence[str]],
        tokenizers: Tokenizers,
        special: SpecialTokens,
        recipe: Recipe,
        model: Any,
        shape: BatchShape,
    ) -> EncodedDataset:
        stream: Any
        if isinstance(dataset, ShardedDataset):
            stream = dataset.stream(special)
        else:
            stream = encode_documents(dataset.training, tokenizers[0], special)
        validation_stream = encode_documents(dataset.validation, tokenizers[0], special)
        batches = TokenStreamBatches(stream, model.max_len, **shape.options)
        validation = list(
            sliding_window_batches(
                validation_stream, model.max_len, budget=shape.budget, constant_shapes=shape.constant
            )
        )
        note = describe_split(len(stream), len(validation_stream), "tokens")
        if tokenizers[0].kind == "word":
            unknown = (validation_stream == special.unk).mean()
            note += f"; out-of-vocabulary words in validation: {unknown:.1%}"
        return EncodedDataset(batches, validation, note)

    def reasons(self, dataset: Dataset[Sequence[str]], recipe: Recipe) -> list[str]:
        count = dataset.total(len)
        where = "" if has_gpu() else "; small because there is no GPU"
        return [f"tokenizer {recipe.tokenizer.kind}, size and steps: {count:,} characters{where}"]

    def warnings(self, dataset: Dataset[Sequence[str]]) -> list[str]:
        count = dataset.total(len)
        if count >= MIN_RECOMMENDED_CHARACTERS:
            return []
        return [
            f"Little data: {count_units(count, 'characters')}. The model will mostly repeat parts of it; fluent text "
            "needs about 1 million."
        ]

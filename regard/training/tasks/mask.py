"""The task `mask`: masked language modeling (BERT, Devlin et al. 2019)."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from regard.data import read_documents
from regard.data.batching.batch import IGNORE_INDEX, WHOLE, Batch, RankSlice
from regard.data.batching.sequences import Sequences
from regard.data.batching.texts import EncodedTexts, LengthGroupedBatches, max_text_tokens
from regard.data.text.special_tokens import SpecialTokens
from regard.errors import RegardError
from regard.layers.packed import Packed, pack
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
    reads_folders = True
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


# Of the selected tokens, this share becomes the mask token and this share a random token; the rest stay unchanged.
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1


class MaskedBatches:
    """Texts in batches of similar length, in which `mask_fraction` of the tokens are selected as targets.

    Texts longer than `max_len` are split, and special tokens are added to each part. Of the selected tokens, 80% are
    replaced by `special.mask`, 10% by a random id that is not special, and 10% stay unchanged. Epoch e depends on
    (seed, e) alone: use the same epoch for every validation.

    >>> texts = Sequences.from_lists([[5, 6, 7], [8, 9, 10]])
    >>> special = SpecialTokens(begin=2, end=3, mask=4)
    >>> options = dict(vocab=20, special=special, budget=16, max_len=16, seed=0)
    >>> [batch] = MaskedBatches(texts, **options, mask_fraction=0.5).epoch(0)
    >>> batch.inputs[0].ids, batch.targets
    (tensor([2, 5, 4, 7, 3, 2, 8, 4, 4, 3]), tensor([-1, -1,  6, -1, -1, -1, -1,  9, 10, -1]))
    """

    def __init__(
        self,
        texts: Sequences,
        *,
        vocab: int,
        special: SpecialTokens,
        budget: int,
        max_len: int,
        seed: int,
        constant_shapes: bool = False,
        mask_fraction: float = 0.15,
    ) -> None:
        if special.mask is None:
            raise RegardError(
                "The model has no mask token.", hint="Train a tokenizer with <mask>, or import another model."
            )
        if not 0 < mask_fraction <= 1:
            raise RegardError(f"mask_fraction must be greater than 0 and at most 1 (got {mask_fraction}).", "Use 0.15.")
        parts = _split_texts(texts, max_text_tokens(special, 1, max_len))
        if not len(parts):
            raise RegardError("All texts are empty: there are no tokens to mask.", hint="Provide other texts.")
        self.seed, self.mask_fraction, self.mask = seed, mask_fraction, special.mask
        self._special = np.array(special.ids)
        options: dict[str, Any] = dict(vocab=vocab, special=special, budget=budget, max_len=max_len, seed=seed)
        options |= dict(constant_shapes=constant_shapes, mask_fraction=mask_fraction)
        self._arguments = texts, options
        self._ordinary = np.setdiff1d(np.arange(vocab), self._special)
        self._texts = LengthGroupedBatches(
            EncodedTexts(parts),
            budget=budget,
            max_len=max_len,
            seed=seed,
            constant_shapes=constant_shapes,
            begin=special.begin,
            end=special.end,
        )

    def epoch(self, number: int, start: int = 0, part: RankSlice = WHOLE) -> Iterator[Batch]:
        """The batches of an epoch from index `start` on, or a part of each. Skipped batches are not built."""
        for index, (rows, inputs) in enumerate(self._texts.epoch(number, start), start):
            # index + 1: NumPy seeds [seed, number, 0] like [seed, number], which already sampled the batches.
            batch = self._make_batch(rows, inputs[0], np.random.default_rng([self.seed, number, index + 1]))
            yield batch if part == WHOLE else self._take_part(batch, part)

    def __reduce__(self) -> Any:
        """Pickle the arguments: memory-mapped texts are pickled by path, and their parts are computed again."""
        texts, options = self._arguments
        return functools.partial(MaskedBatches, **options), (texts,)

    def _make_batch(self, rows: list[int], packed: Packed, generator: np.random.Generator) -> Batch:
        tokens = int(packed.offsets.starts[len(rows)])  # without padding
        ids, targets = packed.ids.numpy(), np.full(len(packed.ids), IGNORE_INDEX)
        candidates = np.flatnonzero(~np.isin(ids[:tokens], self._special))
        selected = generator.permutation(candidates)[: max(1, round(self.mask_fraction * len(candidates)))]
        targets[selected] = ids[selected]
        draw = generator.random(len(selected))
        is_random = (draw >= MASK_SHARE) & (draw < MASK_SHARE + RANDOM_SHARE)
        ids[selected[draw < MASK_SHARE]] = self.mask
        ids[selected[is_random]] = generator.choice(self._ordinary, is_random.sum())
        return Batch((packed,), torch.from_numpy(targets), sentences=len(rows), tokens=tokens)

    def _take_part(self, batch: Batch, part: RankSlice) -> Batch:
        """The part of a masked batch, so that the masked tokens do not depend on the number of ranks."""
        packed: Any = batch.inputs[0]
        lengths = packed.offsets.lengths[: batch.sentences].tolist()
        selected, count = part.select(lengths)
        options = self._texts.pack_options(np.array(lengths), part)
        ids, targets = (
            pack([rows[i].numpy() for i in selected], **options, fill=fill)
            for rows, fill in (
                (x[: batch.tokens].split(lengths), fill) for x, fill in ((packed.ids, 0), (batch.targets, IGNORE_INDEX))
            )
        )
        return Batch((ids,), targets.ids, sentences=count, tokens=sum(lengths[i] for i in selected[:count]))


def _split_texts(texts: Sequences, max_tokens: int) -> Sequences:
    """Split texts into parts of at most `max_tokens` tokens; an empty text has no part."""
    counts = -(-texts.lengths // max_tokens)
    before = np.repeat(np.cumsum(counts) - counts, counts)  # number of parts of all previous texts
    starts = np.repeat(texts.starts[:-1], counts) + max_tokens * (np.arange(len(before)) - before)
    return Sequences(texts.ids, np.append(starts, texts.starts[-1]))

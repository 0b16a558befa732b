"""The task `answer`: extractive question answering, by a span of the context."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regard.data.batching.batch import IGNORE_INDEX, Batch
from regard.data.text.labeled_texts import LabeledTextBatches
from regard.data.text.questions import Question, QuestionWindows, read_squad
from regard.data.text.special_tokens import SpecialTokens
from regard.evaluation.text_metrics import squad_scores
from regard.models.bert import bert_tiny
from regard.pipelines import TextEncoder
from regard.training.datasets import Dataset, count_units, split_dataset
from regard.training.losses import LossParts
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig
from regard.training.suggest import suggest_vocab_size
from regard.training.tasks.task import (
    BatchShape,
    EncodedDataset,
    Features,
    Task,
    Tokenizers,
    random_sample,
    set_vocab_size,
    suggested_training,
    train_shared_tokenizer,
)

# Questions, drawn from the validation split, that are answered in each validation.
VALIDATION_QUESTIONS = 500
MIN_RECOMMENDED_QUESTIONS = 20_000


class AnswerTask(Task):
    """Extractive question answering in the format of SQuAD."""

    pipeline = "text_encoder"
    metrics = ("f1", "exact_match")
    unit = "question"
    head: ClassVar = {"head": "answer", "pooler": "none", "labels": ()}
    usage_hint = 'regard answer {out} --question "…" --context "…"'

    def read(self, config: DataConfig) -> Dataset[Sequence[Question]]:
        questions, validation = (
            [question for file in files for question in read_squad(file)] for files in (config.files, config.validation)
        )
        return split_dataset(
            questions[: config.limit or None], validation, "questions", key=lambda question: question.context
        )

    def suggest_recipe(self, dataset: Dataset[Sequence[Question]], fine_tune: bool) -> Recipe:
        texts = _texts(dataset)
        words = sum(len(item.question.split()) + len(item.context.split()) for item in dataset.training)
        batch = 4096
        steps = max(300, int((4 if fine_tune else 20) * 1.6 * words / batch))
        return Recipe(
            task="answer",
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=suggest_vocab_size(texts)),
            model=bert_tiny(dropout=0.2, max_len=256),
            train=suggested_training(
                steps,
                batch,
                lr=1e-4 if fine_tune else 1e-3,
                schedule="linear" if fine_tune else "wsd",
                validate_by="f1",
            ),
        )

    def make_tokenizers(self, dataset: Dataset[Sequence[Question]], config: TokenizerConfig) -> Tokenizers:
        return train_shared_tokenizer(_texts(dataset), config, mask=True)

    def complete_config(self, config: Any, dataset: Dataset[Sequence[Question]], tokenizers: Tokenizers) -> Any:
        return set_vocab_size(self.with_head(config), tokenizers)

    def encode(
        self,
        dataset: Dataset[Sequence[Question]],
        tokenizers: Tokenizers,
        special: SpecialTokens,
        recipe: Recipe,
        model: Any,
        shape: BatchShape,
    ) -> EncodedDataset:
        max_len = min(model.max_len, shape.budget)
        options = {"max_len": max_len, "segments": model.segments > 1}
        parts = [
            QuestionWindows.from_questions(questions, tokenizers[0], special, **options)
            for questions in (dataset.training, dataset.validation)
        ]
        training, validation = (
            LabeledTextBatches(part.texts, part.answers, max_len=max_len, **shape.options) for part in parts
        )
        return EncodedDataset(
            training, list(validation.epoch(0)), f"windows of {max_len} tokens, including the question"
        )

    def loss(self, model: Any, features: Features, batch: Batch, config: TrainConfig) -> LossParts:
        is_training = torch.is_grad_enabled()
        first_pass = model.output(features(*batch.inputs))
        second_pass = model.output(features(*batch.inputs)) if config.r_drop and is_training else None
        smoothing = config.label_smoothing if is_training else 0.0
        return span_loss(first_pass, batch, smoothing, second_pass, config.r_drop)

    def validation_scores(self, pipeline: TextEncoder, dataset: Dataset[Sequence[Question]]) -> dict[str, float]:
        # New ids, since several files may use the same ones.
        validation = random_sample(dataset.validation, VALIDATION_QUESTIONS)
        questions = [dataclasses.replace(question, id=str(i)) for i, question in enumerate(validation)]
        answers = pipeline.answer(questions, empty=any(not question.answers for question in dataset.training))
        predictions = {question.id: text for question, text in zip(questions, answers)}
        exact, f1 = squad_scores(predictions, questions)
        return {"exact_match": exact, "f1": f1}

    def reasons(self, dataset: Dataset[Sequence[Question]], recipe: Recipe) -> list[str]:
        return [f"size and steps: {count_units(len(dataset.training), 'questions')}; model selection by F1"]

    def warnings(self, dataset: Dataset[Sequence[Question]]) -> list[str]:
        if len(dataset.training) >= MIN_RECOMMENDED_QUESTIONS:
            return []
        count = count_units(len(dataset.training), "questions")
        return [f"Little data to train from scratch: {count}. Fine-tune an encoder with --from instead."]


def span_loss(
    scores: Float[Tensor, "N 2"],
    batch: Batch,
    smoothing: float = 0.0,
    second_pass: Float[Tensor, "N 2"] | None = None,
    divergence: float = 0.0,
) -> LossParts:
    """Cross-entropy of the first and the last token of the answer, over the tokens of each text.

    `smoothing`, `second_pass` and `divergence` are as in `token_loss`, with the tokens of a text as classes.
    """
    offsets = batch.inputs[0].offsets  # type: ignore[union-attr]
    real = batch.targets[:, 0] != IGNORE_INDEX
    inside = (offsets.valid & real[:, None])[..., None]
    logprobs = []
    for pass_scores in (scores,) if second_pass is None else (scores, second_pass):
        padded = pass_scores.float()[offsets.rows].masked_fill(~offsets.valid[..., None], -torch.inf)
        # A text that only pads the batch may be empty, and its log-softmax must not be NaN.
        logits = torch.where(real[:, None, None], padded, 0.0)
        logprobs.append(logits.log_softmax(1).masked_fill(~inside, 0.0))
    mean_logprobs = torch.stack(logprobs).mean(0)
    nll = -mean_logprobs.gather(1, batch.targets.clamp(min=0)[:, None, :]).mean(-1).sum()
    uniform_nll = -(mean_logprobs.sum(1) / inside.sum(1).clamp(min=1)).mean(-1).sum()
    loss = (1 - smoothing) * nll + smoothing * uniform_nll
    if second_pass is not None:  # both directions at once: Σ p (log p - log q) + q (log q - log p)
        p, q = logprobs
        loss = loss + divergence * ((p.exp() - q.exp()) * (p - q)).sum(1).mean(-1).sum() / 2
    return LossParts(loss, nll.detach(), real.float().sum())


def _texts(dataset: Dataset[Sequence[Question]]) -> list[str]:
    contexts = list(dict.fromkeys(item.context for item in dataset.training))
    return contexts + [item.question for item in dataset.training]

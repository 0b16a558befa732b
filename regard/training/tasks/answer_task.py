"""Task: answer questions about a text by a span of it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.data import IGNORED, Batch
from regard.data.text.questions import AnswerBatches, Question, QuestionPieces, read_squad
from regard.data.text.special_tokens import Special
from regard.evaluation.text_metrics import squad_scores
from regard.models.bert import bert_tiny
from regard.pipelines import TextEncoder
from regard.training.datasets import Dataset, split_dataset
from regard.training.losses import LossParts
from regard.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig
from regard.training.suggestions import vocabulary_for
from regard.training.tasks.task import (
    Encoded,
    Features,
    Shape,
    Task,
    Tokenizers,
    one_tokenizer,
    suggested_training,
    with_vocabulary,
)

# Questions of the validation split that are answered each time.
VALIDATED = 500
ENOUGH_QUESTIONS = 20_000


class Answer(Task):
    pipeline = "text_encoder"
    metrics = ("f1", "exact_match")
    unit = "question"
    try_it = 'regard answer {out} --question "…" --context "…"'

    def read(self, config: DataConfig) -> Dataset[Sequence[Question]]:
        questions, validation = (
            [question for file in files for question in read_squad(file)] for files in (config.files, config.validation)
        )
        return split_dataset(questions, validation, "questions", key=lambda one: one.context)

    def suggest_recipe(self, dataset: Dataset[Sequence[Question]], fine_tune: bool) -> Recipe:
        texts = _texts(dataset)
        words = sum(len(one.question.split()) + len(one.context.split()) for one in dataset.training)
        batch = 4096
        steps = max(300, int((4 if fine_tune else 20) * 1.6 * words / batch))
        return Recipe(
            task="answer",
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=vocabulary_for(texts)),
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
        return one_tokenizer(_texts(dataset), config, mask=True)

    def complete_config(self, config: Any, dataset: Dataset[Sequence[Question]], tokenizers: Tokenizers) -> Any:
        return with_vocabulary(config, tokenizers, head="answer", pooler="none", labels=())

    def encode(
        self,
        dataset: Dataset[Sequence[Question]],
        tokenizers: Tokenizers,
        special: Special,
        recipe: Recipe,
        model: Any,
        shape: Shape,
    ) -> Encoded:
        longest = min(model.max_len, shape.budget)
        sides = [
            AnswerBatches(
                QuestionPieces.of(questions, tokenizers[0], special, max_len=longest, segments=model.segments > 1),
                max_len=longest,
                **shape.options,
            )
            for questions in (dataset.training, dataset.validation)
        ]
        return Encoded(sides[0], list(sides[1].epoch(0)), f"pieces of {longest} tokens, question included")

    def loss(self, model: Any, features: Features, batch: Batch, config: TrainConfig) -> LossParts:
        trains = torch.is_grad_enabled()
        first = model.output(features(*batch.inputs))
        twin = model.output(features(*batch.inputs)) if config.r_drop and trains else None
        return places_loss(first, batch, config.label_smoothing if trains else 0.0, twin, config.r_drop)

    def validation_scores(self, bundle: TextEncoder, dataset: Dataset[Sequence[Question]]) -> dict[str, float]:
        # Files may have ids in common.
        questions = [dataclasses.replace(one, id=str(i)) for i, one in enumerate(dataset.validation[:VALIDATED])]
        answers = bundle.answer(questions, empty=any(not one.answers for one in dataset.training))
        exact, f1 = squad_scores({one.id: text for one, text in zip(questions, answers)}, questions)
        return {"exact_match": exact, "f1": f1}

    def reasons(self, dataset: Dataset[Sequence[Question]], recipe: Recipe) -> list[str]:
        return [f"size and steps: {len(dataset.training):,} questions; model selection by F1"]

    def warnings(self, dataset: Dataset[Sequence[Question]]) -> list[str]:
        if len(dataset.training) >= ENOUGH_QUESTIONS:
            return []
        return [f"{len(dataset.training):,} questions are few to train from scratch: fine-tune an encoder with --from."]


def places_loss(
    scores: Float[Tensor, "N 2"],
    batch: Batch,
    smoothing: float = 0.0,
    twin: Float[Tensor, "N 2"] | None = None,
    divergence: float = 0.0,
) -> LossParts:
    """Cross-entropy over the tokens of each text: which is the answer's first, and which its last.

    Smoothing and the divergence from a twin are those of `token_loss`, the tokens of a text being the choice.
    """
    offsets = batch.inputs[0].offsets  # type: ignore[union-attr]
    real = batch.targets[:, 0] != IGNORED
    inside = (offsets.valid & real[:, None])[..., None]
    logprobs = []
    for one in (scores,) if twin is None else (scores, twin):
        table = one.float()[offsets.rows].masked_fill(~offsets.valid[..., None], -torch.inf)
        # A text that only fills the batch up may be empty: what is not asked of it must not be NaN.
        logits = torch.where(real[:, None, None], table, 0.0)
        logprobs.append(logits.log_softmax(1).masked_fill(~inside, 0.0))
    both = torch.stack(logprobs).mean(0)
    nll = -both.gather(1, batch.targets.clamp(min=0)[:, None, :]).mean(-1).sum()
    even = -(both.sum(1) / inside.sum(1).clamp(min=1)).mean(-1).sum()
    loss = (1 - smoothing) * nll + smoothing * even
    if twin is not None:  # both directions at once: Σ p (log p - log q) + q (log q - log p)
        p, q = logprobs
        loss = loss + divergence * ((p.exp() - q.exp()) * (p - q)).sum(1).mean(-1).sum() / 2
    return LossParts(loss, nll.detach(), real.float().sum())


def _texts(dataset: Dataset[Sequence[Question]]) -> list[str]:
    contexts = list(dict.fromkeys(one.context for one in dataset.training))
    return contexts + [one.question for one in dataset.training]

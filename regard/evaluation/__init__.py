"""Evaluation: metrics, word alignments, and `evaluate` for every kind of model."""

from regard.evaluation.alignment import align, alignment_error_rate, format_links
from regard.evaluation.evaluators import evaluate
from regard.evaluation.teacher_forcing import attention_names
from regard.evaluation.text_metrics import TextScores, squad_scores, text_scores

__all__ = [
    "TextScores",
    "align",
    "alignment_error_rate",
    "attention_names",
    "evaluate",
    "format_links",
    "squad_scores",
    "text_scores",
]

"""Metrics: BLEU, chrF, exact match and word error rate of texts, SQuAD scores of answers, and IoU of masks."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from regard.data import Question
from regard.data.batching.batch import IGNORE_INDEX
from regard.data.text.languages import bleu_tokenizer_for
from regard.errors import RegardError
from regard.evaluation.bootstrap import ExampleSums, share

# Articles are ignored in answers. English as in SQuAD, German as in MLQA (which has no French).
_ARTICLES = {
    "en": r"\b(?:a|an|the)\b",
    "de": r"\b(?:der|die|das|den|dem|des|ein|eine|einen|einem|eines|einer)\b",
    "fr": r"\b(?:le|la|les|un|une|des|du)\b",
}
# Names and formats of metrics, in tables and logs alike; shares are in percent.
METRIC_FORMATS = {
    "bleu": ("BLEU", "{:.2f}"),
    "chrf": ("chrF", "{:.2f}"),
    "tokenized_bleu": ("BLEU, tokenized, lowercase", "{:.2f}"),
    "exact_match": ("exact match", "{:.1f} %"),
    "accuracy": ("accuracy", "{:.2f} %"),
    "top_5": ("top-5 accuracy", "{:.2f} %"),
    "mean_iou": ("mean intersection over union", "{:.2f} %"),
    "iou": ("mean IoU", "{:.2f} %"),
    "pixel_accuracy": ("pixel accuracy", "{:.2f} %"),
    "macro_f1": ("macro F1", "{:.2f} %"),
    "calibration_error": ("calibration error", "{:.2f} %"),
    "f1": ("F1", "{:.2f} %"),
    "precision": ("precision", "{:.2f} %"),
    "recall": ("recall", "{:.2f} %"),
    "word_error_rate": ("word error rate", "{:.2f} %"),
    "loss": ("loss (nats per token)", "{:.4f}"),
    "cross_entropy": ("loss (nats)", "{:.4f}"),
    "perplexity": ("perplexity", "{:.3f}"),
    "word_perplexity": ("perplexity per word", "{:.2f}"),
    "bits_per_byte": ("bits per byte", "{:.4f}"),
    "alignment_error_rate": ("alignment error rate", "{:.2f} %"),
    "sentences_per_second": ("sentences per second", "{:.1f}"),
    "images_per_second": ("images per second", "{:.1f}"),
}


def margin_key(metric: str) -> str:
    """The name of half of the width of the 95% confidence interval of a metric."""
    return f"{metric}_margin"


def format_metrics(metrics: Mapping[str, float]) -> list[str]:
    """Each metric with its name, margin and unit, for a log; numbers that are in no table keep their key.

    >>> format_metrics({"exact_match": 1.0, "nll": 0.00424, "exact_match_margin": 2.0})
    ['exact match 1.0 ± 2.0 %', 'nll 0.00424']
    """
    texts = []
    for key, value in metrics.items():
        if key.endswith(margin_key("")):
            continue
        name, value_format = METRIC_FORMATS[key] if key in METRIC_FORMATS and key != "loss" else (key, "{:.4g}")
        number, _, unit = value_format.partition(" ")
        margin = f" ± {number.format(metrics[margin_key(key)])}" if margin_key(key) in metrics else ""
        texts.append(f"{name} {number.format(value)}{margin} {unit}".rstrip())
    return texts


@dataclass(frozen=True)
class TextScores:
    """Scores in percent. `signature` is sacreBLEU's description of how BLEU was computed."""

    bleu: float
    chrf: float
    tokenized_bleu: float
    exact_match: float
    word_error_rate: float
    signature: str


def text_scores(outputs: Sequence[str], references: Sequence[str], bleu_tokenizer: str = "auto") -> TextScores:
    """Score each output against its reference.

    `bleu_tokenizer` is a tokenizer of sacreBLEU (13a, zh, ja-mecab, char, …). "auto" is 13a or, for references written
    without spaces, the tokenizer for their script. `tokenized_bleu` lowercases and splits on white space, as papers on
    tokenized text do. Without outputs every score is 0.

    >>> text_scores(["le chat dort"], ["le chat dort"]).exact_match
    100.0
    """
    sums, signature = text_sums(outputs, references, bleu_tokenizer)
    return TextScores(**{name: metric.value if outputs else 0.0 for name, metric in sums.items()}, signature=signature)


def text_sums(
    outputs: Sequence[str], references: Sequence[str], bleu_tokenizer: str = "auto"
) -> tuple[dict[str, ExampleSums], str]:
    """The metrics of `text_scores` as sums over the examples, for confidence intervals; and sacreBLEU's signature.

    >>> text_sums(["le chat dort"] * 9 + ["le chien"], ["le chat dort"] * 10)[0]["exact_match"].margin
    15.0
    """
    if len(outputs) != len(references):
        raise RegardError(
            f"Got {len(outputs)} outputs and {len(references)} references.", "Pass one reference per output."
        )
    name = bleu_tokenizer_for(references) if bleu_tokenizer == "auto" else bleu_tokenizer
    try:
        bleu = BLEU(tokenize=name)
    except (KeyError, ValueError, RuntimeError, ImportError) as error:
        hint = f"Choose from: {', '.join(BLEU.TOKENIZERS)}; some need an additional package."
        raise RegardError(f"sacreBLEU cannot use the tokenizer {name!r}: {error}.", hint) from None
    tokenized = BLEU(tokenize="none", lowercase=True, force=True)
    scorers: dict[str, BLEU | CHRF] = {"bleu": bleu, "chrf": CHRF(), "tokenized_bleu": tokenized}
    sums = {name: _corpus_sums(scorer, outputs, references) for name, scorer in scorers.items()}
    sums["exact_match"] = share([a.strip() == b.strip() for a, b in zip(outputs, references)])
    words = [(a.split(), b.split()) for a, b in zip(outputs, references)]
    sums["word_error_rate"] = ExampleSums(np.array([(_edit_distance(a, b), len(b)) for a, b in words], float))
    return sums, str(bleu.get_signature()) if outputs else ""


def _corpus_sums(scorer: BLEU | CHRF, outputs: Sequence[str], references: Sequence[str]) -> ExampleSums:
    rows = np.array(scorer._extract_corpus_statistics(outputs, [references]) if outputs else [], float)
    return ExampleSums(rows, lambda sums: float(scorer._compute_score_from_stats(sums.astype(int).tolist()).score))


def squad_scores(
    predictions: Mapping[str, str], questions: Sequence[Question], language: str = "en"
) -> tuple[float, float]:
    """Exact match and F1 in percent: means over the questions, each scored against its best-matching reference answer.

    Answers are lowercased and stripped of punctuation and articles: for English as in SQuAD, for other languages as in
    MLQA, which removes all Unicode punctuation. F1 is over the bag of words. A missing prediction counts as empty, and
    the empty answer is correct for a question without answers. Reference answers that are empty after normalization
    are ignored if there are others.

    >>> questions = [Question("1", "Who sat?", "The black cat sat.", (("The black cat", 0),))]
    >>> squad_scores({"1": "a black cat."}, questions), squad_scores({"1": "cat sat"}, questions)
    ((100.0, 100.0), (0.0, 50.0))
    """
    if language not in _ARTICLES:
        raise RegardError(f"Unsupported language {language!r}.", f"Choose from: {', '.join(_ARTICLES)}.")
    exact = f1 = 0.0
    for question in questions:
        predicted = _answer_words(predictions.get(question.id, ""), language)
        references = [words for text, _ in question.answers if (words := _answer_words(text, language))] or [[]]
        exact += any(predicted == words for words in references)
        f1 += max(_f1(predicted, words) for words in references)
    return 100 * exact / max(1, len(questions)), 100 * f1 / max(1, len(questions))


def confusion_counts(
    predictions: Int[np.ndarray, "*n"], targets: Int[np.ndarray, "*n"], labels: int
) -> Int[np.ndarray, "labels labels"]:
    """The confusion matrix: counts by target (rows) and prediction (columns); IGNORE_INDEX targets are not counted.

    >>> confusion_counts(np.array([0, 1, 1, 1]), np.array([0, 0, 1, IGNORE_INDEX]), 2)
    array([[1, 1],
           [0, 1]])
    """
    counted = targets != IGNORE_INDEX
    pairs = targets[counted].astype(np.int64) * labels + predictions[counted]
    return np.bincount(pairs, minlength=labels**2).reshape(labels, labels)


def intersection_over_union(counts: Int[np.ndarray, "V V"]) -> Float[np.ndarray, "V"]:
    """Intersection over union of each label, from a confusion matrix; NaN for a label that does not occur.

    >>> intersection_over_union(np.array([[3, 1], [0, 4]]))
    array([0.75, 0.8 ])
    """
    union = counts.sum(0) + counts.sum(1) - counts.diagonal()
    return np.where(union > 0, counts.diagonal() / np.maximum(union, 1), np.nan)


def _answer_words(text: str, language: str) -> list[str]:
    text = text.lower()
    if language == "fr":  # the elided article; without its apostrophe it would merge with the next word
        text = re.sub(r"\bl['’]", " ", text)
    text = "".join(char for char in text if not _is_punctuation(char, language))
    return re.sub(_ARTICLES[language], " ", text).split()


def _is_punctuation(char: str, language: str) -> bool:
    return char in string.punctuation or (language != "en" and unicodedata.category(char).startswith("P"))


def _f1(prediction: list[str], reference: list[str]) -> float:
    if not prediction or not reference:
        return float(prediction == reference)
    common = (Counter(prediction) & Counter(reference)).total()
    return 2 * common / (len(prediction) + len(reference))


def _edit_distance(a: list[str], b: list[str]) -> int:
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1]

"""How good are translations: BLEU as sacreBLEU and as papers on tokenised text compute it, chrF, exact match, WER.
How good are answers: exact match and F1 as SQuAD defines them. And how good are masks: intersection over union."""

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

from regard.data import IGNORED, Question
from regard.data.text.scripts import bleu_tokenizer_for
from regard.errors import RegardError

# Words that do not count in an answer. English: SQuAD; German: MLQA, which has no French.
_ARTICLES = {
    "en": r"\b(?:a|an|the)\b",
    "de": r"\b(?:der|die|das|den|dem|des|ein|eine|einen|einem|eines|einer)\b",
    "fr": r"\b(?:le|la|les|un|une|des|du)\b",
}
# Metrics that select a model, for a reader; the others are called as their keys are.
METRIC_NAMES = {"bleu": "BLEU", "chrf": "chrF", "f1": "F1", "iou": "mean IoU", "exact_match": "exact match"}


@dataclass(frozen=True)
class TextScores:
    """All in percent. `signature` says exactly how BLEU was computed."""

    bleu: float
    chrf: float
    tokenized_bleu: float
    exact_match: float
    word_error_rate: float
    signature: str


def text_scores(outputs: Sequence[str], references: Sequence[str], bleu_tokenizer: str = "auto") -> TextScores:
    """Scores of outputs against one reference each.

    `bleu_tokenizer` is a name of sacreBLEU's (13a, zh, ja-mecab, char, …); auto is 13a, or for references written
    without spaces the one that fits them. `tokenized_bleu` splits on white space and lower-cases, which is how papers
    score text that is tokenized already. Without any outputs every score is 0.

    >>> text_scores(["le chat dort"], ["le chat dort"]).exact_match
    100.0
    """
    if len(outputs) != len(references):
        raise RegardError(
            f"{len(outputs)} outputs and {len(references)} references.", "Pass one reference for each output."
        )
    name = bleu_tokenizer_for(references) if bleu_tokenizer == "auto" else bleu_tokenizer
    try:
        bleu = BLEU(tokenize=name)
    except (KeyError, ValueError, RuntimeError, ImportError) as error:
        hint = f"Choose from: {', '.join(BLEU.TOKENIZERS)}; some need a package of their own."
        raise RegardError(f"sacreBLEU cannot use the tokenizer {name!r}: {error}.", hint) from None
    if not outputs:
        return TextScores(0.0, 0.0, 0.0, 0.0, 0.0, "")
    tokenized = BLEU(tokenize="none", lowercase=True, force=True)
    return TextScores(
        bleu=bleu.corpus_score(outputs, [references]).score,
        chrf=CHRF().corpus_score(outputs, [references]).score,
        tokenized_bleu=tokenized.corpus_score(outputs, [references]).score,
        exact_match=100 * sum(a.strip() == b.strip() for a, b in zip(outputs, references)) / max(1, len(references)),
        word_error_rate=word_error_rate(outputs, references),
        signature=str(bleu.get_signature()),
    )


def word_error_rate(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Insertions, deletions and substitutions of words, as a percentage of the references' words.

    >>> word_error_rate(["a b d"], ["a b c"])
    33.333333333333336
    """
    errors = sum(_edit_distance(a.split(), b.split()) for a, b in zip(outputs, references))
    return 100 * errors / max(1, sum(len(reference.split()) for reference in references))


def squad_scores(
    predictions: Mapping[str, str], questions: Sequence[Question], language: str = "en"
) -> tuple[float, float]:
    """Exact match and F1, in percent: the means over the questions, each by the right answer that is nearest.

    Answers are compared in lower case and without punctuation and articles: as SQuAD does in English, and as MLQA,
    which knows more punctuation, does in other languages. F1 is over the words that both have, as often as both have
    them. To a question without answers nothing is the right answer; where `predictions` has none, it is nothing. An
    answer of which no word counts is none, beside others.

    >>> questions = [Question("1", "Who sat?", "The black cat sat.", (("The black cat", 0),))]
    >>> squad_scores({"1": "a black cat."}, questions), squad_scores({"1": "cat sat"}, questions)
    ((100.0, 100.0), (0.0, 50.0))
    """
    if language not in _ARTICLES:
        raise RegardError(f"The articles of {language!r} are not known.", hint=f"Choose one of {', '.join(_ARTICLES)}.")
    exact = f1 = 0.0
    for question in questions:
        given = _answer_words(predictions.get(question.id, ""), language)
        right = [words for text, _ in question.answers if (words := _answer_words(text, language))] or [[]]
        exact += any(given == words for words in right)
        f1 += max(_f1(given, words) for words in right)
    return 100 * exact / max(1, len(questions)), 100 * f1 / max(1, len(questions))


def label_counts(
    found: Int[np.ndarray, "*n"], wanted: Int[np.ndarray, "*n"], labels: int
) -> Int[np.ndarray, "labels labels"]:
    """How often what has one label (rows) was given another (columns); what is IGNORED is not counted.

    >>> label_counts(np.array([0, 1, 1, 1]), np.array([0, 0, 1, IGNORED]), 2)
    array([[1, 1],
           [0, 1]])
    """
    counted = wanted != IGNORED
    pairs = wanted[counted].astype(np.int64) * labels + found[counted]
    return np.bincount(pairs, minlength=labels**2).reshape(labels, labels)


def intersection_over_union(counts: Int[np.ndarray, "V V"]) -> Float[np.ndarray, "V"]:
    """Of each label, what has it and was given it, as a share of what has it or was given it; NaN where nothing is.

    >>> intersection_over_union(np.array([[3, 1], [0, 4]]))
    array([0.75, 0.8 ])
    """
    union = counts.sum(0) + counts.sum(1) - counts.diagonal()
    return np.where(union > 0, counts.diagonal() / np.maximum(union, 1), np.nan)


def _answer_words(text: str, language: str) -> list[str]:
    text = text.lower()
    if language == "fr":  # an article too, and after the apostrophe is gone no word of its own
        text = re.sub(r"\bl['’]", " ", text)
    text = "".join(sign for sign in text if not _is_punctuation(sign, language))
    return re.sub(_ARTICLES[language], " ", text).split()


def _is_punctuation(sign: str, language: str) -> bool:
    return sign in string.punctuation or (language != "en" and unicodedata.category(sign).startswith("P"))


def _f1(given: list[str], right: list[str]) -> float:
    if not given or not right:
        return float(given == right)
    common = (Counter(given) & Counter(right)).total()
    return 2 * common / (len(given) + len(right))


def _edit_distance(a: list[str], b: list[str]) -> int:
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1]

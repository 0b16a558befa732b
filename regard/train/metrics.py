"""How good are translations: BLEU as sacreBLEU and as papers on tokenised text compute it, chrF, exact match, WER."""

from collections.abc import Sequence
from dataclasses import dataclass

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF


@dataclass(frozen=True)
class TextScores:
    """All in percent. `signature` says exactly how BLEU was computed."""

    bleu: float
    chrf: float
    tokenized_bleu: float
    exact_match: float
    word_error_rate: float
    signature: str


def text_scores(outputs: Sequence[str], references: Sequence[str]) -> TextScores:
    """Scores of outputs against one reference each.

    `tokenized_bleu` splits on white space and lower-cases, which is how papers score text that is tokenised already.

    >>> text_scores(["le chat dort"], ["le chat dort"]).exact_match
    100.0
    """
    bleu = BLEU()
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


def _edit_distance(a: list[str], b: list[str]) -> int:
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1]

"""Scores of translations."""

import pytest
import sacrebleu

from regard.train.metrics import text_scores, word_error_rate

OUTPUTS = ["Le chat dort sur la table .", "Il mange une pomme", "Je ne sais pas quoi dire ."]
REFERENCES = ["Le chat dort sous la table .", "Il mange une Pomme", "Je ne sais pas quoi dire ."]


def test_bleu_and_chrf_are_those_of_sacrebleu():
    scores = text_scores(OUTPUTS, REFERENCES)
    assert scores.bleu == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES]).score
    assert scores.chrf == sacrebleu.corpus_chrf(OUTPUTS, [REFERENCES]).score
    tokenized = sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES], tokenize="none", lowercase=True, force=True)
    assert scores.tokenized_bleu == tokenized.score
    assert scores.bleu < scores.tokenized_bleu < 100
    assert "tok:13a" in scores.signature
    assert sacrebleu.__version__ in scores.signature


def test_exact_match_is_of_whole_lines_and_minds_case():
    assert text_scores(OUTPUTS, REFERENCES).exact_match == pytest.approx(100 / 3)


@pytest.mark.parametrize(
    ("output", "reference", "errors"),
    [
        ("a b c", "a b c", 0),
        ("a x c", "a b c", 1),
        ("a c", "a b c", 1),
        ("a b b c", "a b c", 1),
        ("", "a b c", 3),
        ("b a", "a b", 2),
        ("x y z w", "a", 4),
    ],
)
def test_word_error_rate_counts_edits(output, reference, errors):
    assert word_error_rate([output], [reference]) == pytest.approx(100 * errors / len(reference.split()))


def test_word_error_rate_is_over_all_words_together():
    assert word_error_rate(["a", "b c d e"], ["x", "b c d e"]) == pytest.approx(20.0)
    assert word_error_rate([], []) == 0.0
    assert word_error_rate([""], [""]) == 0.0


def test_empty_outputs_score_zero():
    scores = text_scores(["", ""], ["a b", "c d"])
    assert scores.bleu == scores.exact_match == 0.0
    assert scores.word_error_rate == 100.0

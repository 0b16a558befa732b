"""Metrics of translations and answers."""

import pytest
import sacrebleu

from regard.data import Question
from regard.errors import RegardError
from regard.evaluation.text_metrics import squad_scores, text_scores

OUTPUTS = ["Le chat dort sur la table .", "Il mange une pomme", "Je ne sais pas quoi dire ."]
REFERENCES = ["Le chat dort sous la table .", "Il mange une Pomme", "Je ne sais pas quoi dire ."]


def test_bleu_and_chrf_match_sacrebleu():
    scores = text_scores(OUTPUTS, REFERENCES)
    assert scores.bleu == sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES]).score
    assert scores.chrf == sacrebleu.corpus_chrf(OUTPUTS, [REFERENCES]).score
    tokenized = sacrebleu.corpus_bleu(OUTPUTS, [REFERENCES], tokenize="none", lowercase=True, force=True)
    assert scores.tokenized_bleu == tokenized.score
    assert scores.bleu < scores.tokenized_bleu < 100
    assert "tok:13a" in scores.signature
    assert sacrebleu.__version__ in scores.signature


def test_exact_match_compares_full_lines_with_case():
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
    assert text_scores([output], [reference]).word_error_rate == pytest.approx(100 * errors / len(reference.split()))


def test_word_error_rate_is_over_the_entire_corpus():
    assert text_scores(["a", "b c d e"], ["x", "b c d e"]).word_error_rate == pytest.approx(20.0)
    assert text_scores([], []).word_error_rate == 0.0
    assert text_scores([""], [""]).word_error_rate == 0.0


def test_empty_outputs_score_zero():
    scores = text_scores(["", ""], ["a b", "c d"])
    assert scores.bleu == scores.exact_match == 0.0
    assert scores.word_error_rate == 100.0


def one_question(*answers):
    return [Question("1", "?", "", tuple((answer, 0) for answer in answers))]


@pytest.mark.parametrize(
    ("prediction", "reference", "language", "exact", "f1"),
    [
        ("The Eiffel Tower!", "eiffel tower", "en", 1, 1),
        ("an  eiffel\u00a0tower", "the (Eiffel) Tower", "en", 1, 1),
        ("eiffel-tower", "eiffeltower", "en", 1, 1),  # punctuation is removed without a space
        ("theatre", "atre", "en", 0, 0),  # articles are full words
        ("the Eiffel Tower in Paris", "eiffel tower", "en", 0, 2 / 3),
        ("tower", "the old eiffel tower of paris", "en", 0, 2 / 6),
        ("la la land", "la land", "en", 0, 4 / 5),  # repeated words count
        ("land la", "la land", "en", 0, 1),
        ("Paris", "London", "en", 0, 0),
        ("", "London", "en", 0, 0),
        ("the", "a", "en", 1, 1),  # both are empty after normalization
        ("the", "cat", "en", 0, 0),
        ("“cat”", "cat", "en", 0, 0),  # SQuAD only removes ASCII punctuation
        ("«cat»", "cat", "de", 1, 1),
        ("die Katze", "eine Katze", "de", 1, 1),
        ("the Katze", "Katze", "de", 0, 2 / 3),
        ("die Katze", "Katze", "en", 0, 2 / 3),
        ("L’homme", "un homme", "fr", 1, 1),
        ("l'école du village", "école village", "fr", 1, 1),
        ("mal", "m'al", "fr", 1, 1),  # a final l is not an article
        ("le chat", "the chat", "fr", 0, 2 / 3),
    ],
)
def test_answers_are_normalized_as_in_squad_and_mlqa(prediction, reference, language, exact, f1):
    assert squad_scores({"1": prediction}, one_question(reference), language) == pytest.approx((100 * exact, 100 * f1))
    assert squad_scores({"1": reference}, one_question(prediction), language) == pytest.approx((100 * exact, 100 * f1))


def test_best_matching_reference_answer_counts():
    assert squad_scores({"1": "two cats"}, one_question("dogs", "two dogs", "Two cats.")) == (100.0, 100.0)
    assert squad_scores({"1": "two cats"}, one_question("three", "two dogs")) == (0.0, 50.0)


def test_scores_are_means_over_all_questions():
    questions = [Question(str(i), "?", "", ((word, 0),)) for i, word in enumerate(["one", "two", "three four"])]
    assert squad_scores({"0": "one", "2": "four five", "9": "no such question"}, questions) == pytest.approx(
        (100 / 3, 50)
    )
    assert squad_scores({}, []) == (0.0, 0.0)


def test_empty_answer_is_correct_for_unanswerable_questions():
    assert squad_scores({"1": ""}, one_question()) == (100.0, 100.0)
    assert squad_scores({}, one_question()) == (100.0, 100.0)
    assert squad_scores({"1": "cat"}, one_question()) == (0.0, 0.0)
    assert squad_scores({"1": ""}, one_question("the", "cat")) == (0.0, 0.0)  # the empty reference "the" is ignored


def test_unsupported_language_is_an_error():
    with pytest.raises(RegardError, match=r"Unsupported language 'xx'\. Choose from: en, de, fr\."):
        squad_scores({}, [], "xx")

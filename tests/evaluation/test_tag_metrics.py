"""Scores of tags and entities."""

import pytest

from regard.evaluation.tag_metrics import find_entities, is_bio, tag_scores


@pytest.mark.parametrize(
    ("tags", "entities"),
    [
        ("O O", []),
        ("B-A I-A O", [("A", 0, 2)]),
        ("B-A B-A", [("A", 0, 1), ("A", 1, 2)]),
        ("I-A I-A", [("A", 0, 2)]),  # CoNLL 2003: B- only between adjacent entities of a label
        ("B-A I-B", [("A", 0, 1), ("B", 1, 2)]),
        ("O I-A O I-A", [("A", 1, 2), ("A", 3, 4)]),
        ("", []),
    ],
)
def test_entities_of_tags(tags, entities):
    assert find_entities(tags.split()) == entities


def test_scores_of_entities_and_tags():
    gold = [["B-A", "I-A", "O", "B-B"], ["O", "B-A"]]
    predicted = [["B-A", "O", "O", "B-B"], ["B-B", "B-A"]]
    scores = tag_scores(predicted, gold, ["O", "B-A", "I-A", "B-B"])
    assert scores.accuracy == pytest.approx(100 * 4 / 6)
    assert scores.entities is not None
    assert (scores.entities.precision, scores.entities.recall) == pytest.approx((50, 200 / 3))
    assert scores.labels["A"].f1 == 50
    assert scores.labels["B"].support == 1


def test_other_tags_have_accuracy_only():
    assert not is_bio(["NOUN", "VERB"])
    assert not is_bio(["O", "PER"])
    scores = tag_scores([["NOUN", "VERB"]], [["NOUN", "NOUN"]], ["NOUN", "VERB"])
    assert (scores.accuracy, scores.entities) == (50.0, None)

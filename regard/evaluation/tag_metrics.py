"""Metrics of token classification: F1 of entities (CoNLL 2000) and accuracy of tags."""

from collections.abc import Sequence
from typing import NamedTuple

from regard.evaluation.label_metrics import ClassScores


class Entity(NamedTuple):
    """An entity: its label and its words from `start` up to, but not including, `end`."""

    label: str
    start: int
    end: int


def is_bio(names: Sequence[str]) -> bool:
    """Whether tags mark the beginning and the inside of entities: O, B-PER, I-PER, …

    >>> is_bio(["O", "B-PER", "I-PER"]), is_bio(["NOUN", "VERB"])
    (True, False)
    """
    return "O" in names and all(name == "O" or name[:2] in ("B-", "I-") for name in names) and len(names) > 1


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of BIO tags, as in the evaluation of CoNLL: I- after O or after another label begins an entity.

    >>> find_entities(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"])
    [Entity(label='PER', start=0, end=2), Entity(label='LOC', start=3, end=4), Entity(label='LOC', start=4, end=5)]
    """
    entities: list[Entity] = []
    label, start = "", 0
    for i, tag in enumerate([*tags, "O"]):
        position, new_label = tag[:2], tag[2:] if tag != "O" else ""
        if label and (new_label != label or position == "B-"):
            entities.append(Entity(label, start, i))
            label = ""
        if new_label and not label:
            label, start = new_label, i
    return entities


class TagScores(NamedTuple):
    """Accuracy of tags in percent and, for BIO tags, scores of entities: of all of them and of each label."""

    accuracy: float
    entities: ClassScores | None
    labels: dict[str, ClassScores]


def tag_scores(predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]], names: Sequence[str]) -> TagScores:
    """Scores of the predicted tags of several texts; an entity counts if its label and both of its ends are correct.

    >>> tag_scores([["B-PER", "O", "O"]], [["B-PER", "O", "B-LOC"]], ["O", "B-PER", "B-LOC"]).entities
    ClassScores(precision=100.0, recall=50.0, f1=66.66666666666667, support=2)
    """
    pairs = [(tag, other) for row, gold_row in zip(predicted, gold, strict=True) for tag, other in zip(row, gold_row)]
    accuracy = 100 * sum(tag == other for tag, other in pairs) / max(1, len(pairs))
    if not is_bio(names):
        return TagScores(accuracy, None, {})
    found, expected = (
        {(i, *entity) for i, row in enumerate(rows) for entity in find_entities(row)} for rows in (predicted, gold)
    )
    labels = sorted({label for _, label, _, _ in found | expected})
    by_label = {
        label: _scores(*({entity for entity in entities if entity[1] == label} for entities in (found, expected)))
        for label in labels
    }
    return TagScores(accuracy, _scores(found, expected), by_label)


def _scores(found: set, expected: set) -> ClassScores:
    correct = len(found & expected)
    precision, recall = 100 * correct / max(1, len(found)), 100 * correct / max(1, len(expected))
    f1 = 2 * precision * recall / (precision + recall) if correct else 0.0
    return ClassScores(precision, recall, f1, len(expected))

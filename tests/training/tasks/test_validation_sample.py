"""The validation score is that of a random sample, whatever the order of the file."""

from types import SimpleNamespace

import pytest

from regard.data import Question
from regard.data.text.labeled_texts import LabeledText
from regard.data.text.tagged_texts import TaggedText
from regard.training.datasets import Dataset
from regard.training.tasks import TASKS
from regard.training.tasks.task import random_sample

COUNT = 6000


class Sorted:
    """A pipeline that is right for the first half of the validation split, and wrong for the other."""

    special, trained_length = SimpleNamespace(), 64
    model = SimpleNamespace(config=SimpleNamespace(labels=("right", "wrong")))

    def with_target(self):
        return self

    def answers(self, texts) -> list[str]:
        return ["right" if int(text) < COUNT // 2 else "wrong" for text in texts]

    def translate(self, lines, config, **options):
        return [[SimpleNamespace(text=f"{word} {word} {word} {word}")] for word in self.answers(lines)]

    def classify(self, texts, **options):
        return [SimpleNamespace(label=label) for label in self.answers(text for (text,) in texts)]

    def tag(self, texts):
        return [[SimpleNamespace(tag=tag)] for tag in self.answers(text for (text,) in texts)]

    def answer(self, questions, **options):
        return self.answers(question.question for question in questions)


EXAMPLES = {
    "translate": lambda i: (str(i), "right right right right"),
    "classify": lambda i: LabeledText((str(i),), "right"),
    "tag": lambda i: TaggedText((str(i),), ("right",)),
    "answer": lambda i: Question("", str(i), "right", (("right", 0),)),
}


@pytest.mark.parametrize("task", EXAMPLES)
def test_score_of_a_sorted_validation_split_is_that_of_a_random_sample(task):
    examples = [EXAMPLES[task](i) for i in range(COUNT)]
    dataset = Dataset(examples[:1], examples)
    scores = TASKS[task].validation_scores(Sorted(), dataset)
    metric = "accuracy" if task in ("classify", "tag") else "exact_match"
    # Half of the examples are right: all of the first ones.
    assert scores[metric] == pytest.approx(50, abs=6)
    assert TASKS[task].validation_scores(Sorted(), dataset) == scores


def test_random_sample_keeps_the_order_and_takes_each_example_once():
    sample = random_sample(range(COUNT), 500)
    assert len(sample) == 500
    assert list(sample) == sorted(set(sample))

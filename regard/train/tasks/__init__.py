"""The tasks that a model can be trained for, by the names that recipes use."""

from regard.train.tasks.answer import Answer
from regard.train.tasks.base import Task
from regard.train.tasks.classify import Classify
from regard.train.tasks.language import Language
from regard.train.tasks.mask import Mask
from regard.train.tasks.text2text import Text2Text
from regard.train.tasks.translate import Translate

TASKS: dict[str, Task] = {
    "translate": Translate(),
    "text2text": Text2Text(),
    "language": Language(),
    "mask": Mask(),
    "classify": Classify(),
    "answer": Answer(),
}

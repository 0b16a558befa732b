"""The tasks that a model can be trained for, by the names that recipes use."""

import dataclasses
from typing import Any

from regard.train.recipe import DataConfig, Recipe, TaskName
from regard.train.report import telling
from regard.train.tasks.answer import Answer
from regard.train.tasks.base import Task
from regard.train.tasks.classify import Classify
from regard.train.tasks.classify_images import ClassifyImages
from regard.train.tasks.language import Language
from regard.train.tasks.mask import Mask
from regard.train.tasks.mask_images import MaskImages
from regard.train.tasks.pictures import PictureTask
from regard.train.tasks.segment import Segment
from regard.train.tasks.text2text import Text2Text
from regard.train.tasks.translate import Translate

TASKS: dict[str, Task] = {
    "translate": Translate(),
    "text2text": Text2Text(),
    "language": Language(),
    "mask": Mask(),
    "classify": Classify(),
    "answer": Answer(),
    "classify-images": ClassifyImages(),
    "segment": Segment(),
    "mask-images": MaskImages(),
}


def read_data(task: TaskName, data: DataConfig, *, quiet: bool = False) -> Any:
    """A task's data, read. While pictures are decoded, it says how far it is.

    >>> len(read_data("translate", DataConfig(phrasebook_size=100)).training)
    100
    """
    reader = TASKS[task]
    if not isinstance(reader, PictureTask):
        return reader.read(data)
    with telling("decoding", silent=quiet) as tell:
        return reader.read(data, tell)


def plan(task: TaskName, data: DataConfig, *, goes_on: bool = False) -> tuple[Recipe, Any]:
    """A task's data, read, and the recipe that suits them; `goes_on`: for a model that is trained already.

    >>> recipe, corpus = plan("translate", DataConfig(phrasebook_size=100))
    >>> recipe.tokenizer.kind, len(corpus.training)
    ('bpe', 100)
    """
    corpus = read_data(task, data, quiet=True)
    return dataclasses.replace(TASKS[task].suggest(corpus, goes_on), data=data), corpus

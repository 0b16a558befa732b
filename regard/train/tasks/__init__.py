"""The tasks that a model can be trained for, by the names that recipes use."""

from regard.train.tasks.base import Task
from regard.train.tasks.translate import Translate

TASKS: dict[str, Task] = {
    "translate": Translate(),
}

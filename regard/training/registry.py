"""Registry of the tasks that models can be trained for."""

from typing import TYPE_CHECKING, Annotated

from regard.errors import RegardError
from regard.ranges import OneOf

if TYPE_CHECKING:
    from regard.training.tasks.task import Task

TASKS: "dict[str, Task]" = {}
TaskName = Annotated[str, OneOf(TASKS)]


def register_task(name: str, task: "Task") -> None:
    """Add a task: recipes, `train` and `regard train --task` then accept it by name.

    >>> register_task("translate", TASKS["translate"])
    Traceback (most recent call last):
    regard.errors.RegardError: The task 'translate' is already registered. Choose another name.
    """
    if name in TASKS:
        raise RegardError(f"The task {name!r} is already registered.", "Choose another name.")
    TASKS[name] = task


def families_for(task: str) -> tuple[str, ...]:
    """Model families that can be trained for a task; the first is the default.

    >>> families_for("translate")
    ('transformer', 'seq2seq')
    """
    return TASKS[task].families

"""Registry of the tasks that models can be trained for."""

from typing import TYPE_CHECKING, Annotated

from regard.ranges import OneOf, register

if TYPE_CHECKING:
    from regard.training.tasks.task import Task

TASKS: "dict[str, Task]" = {}
TaskName = Annotated[str, OneOf(TASKS)]


def register_task(name: str, task: "Task") -> None:
    """Add a task: recipes, `train` and `regard train --task` then accept it by name.

    A task whose class has the same module and name replaces the earlier one.

    >>> register_task("translate", TASKS["language"])
    Traceback (most recent call last):
    regard.errors.RegardError: The task 'translate' is already registered, by ...TranslateTask. Choose another name.
    """
    register(TASKS, "task", name, task, type)


def families_for(task: str) -> tuple[str, ...]:
    """Model families that can be trained for a task; the first is the default.

    >>> families_for("translate")
    ('transformer', 'seq2seq')
    """
    return TASKS[task].families

"""The state of a run apart from tensors: counters, the best validation, and the start of the decay."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from regard.errors import RegardError
from regard.ranges import Count, Natural, check_value, format_value

_RESTORE = "Restore an intact copy of the checkpoint, or train again with another --out."


@dataclass
class TrainState:
    """Everything except tensors that a bit-exact resume needs; stored in the checkpoint as JSON.

    >>> TrainState.from_json(TrainState({"recipe": {}}, step=5, best=(0.5, -1.0)).to_json()).best
    (0.5, -1.0)
    """

    provenance: dict[str, Any] = field(default_factory=dict)
    workers: Natural = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    step: Natural = 0
    epoch: Natural = 0
    batch: Natural = 0
    best: tuple[float, float] | None = None
    """the metric that selects the model, and the negative validation loss, which breaks ties"""
    best_step: Natural = 0
    stale: Natural = 0
    """validations since the best one"""
    decay_start: int | None = None
    """the step at which the decay started earlier than planned, because validation stalled or time ran out"""
    seconds: float = 0.0
    """training time up to the last checkpoint over all processes of the run; only stored with a time budget"""
    unlogged: list[list[float]] = field(default_factory=list)
    """loss, nll and tokens of each update since the last log line, without skipped ones"""
    losses: list[float] = field(default_factory=list)
    """running statistics of the loss (see `LossStatistics`)"""
    skipped: Natural = 0
    """skipped updates so far"""
    failed_step: int | None = None
    """the step at which the run was rolled back to a checkpoint"""
    batch_parts: Count = 1
    """number of parts in which each batch is processed, to fit into memory"""
    done: bool = False

    def improves(self, metric: float, loss: float) -> bool:
        """Whether a validation with this metric and loss is the best so far.

        >>> TrainState(best=(50.0, -2.0)).improves(50.0, 1.5)
        True
        """
        return math.isfinite(loss) and (self.best is None or (metric, -loss) > self.best)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(table: dict[str, Any]) -> "TrainState":
        if table.keys() != {field.name for field in dataclasses.fields(TrainState)}:
            raise RegardError(
                "The training state was written by a different version of Regard.",
                "Resume it with that version, or choose another --out.",
            )
        _check_state(table)
        best = table["best"]
        return TrainState(**table | {"best": None if best is None else (best[0], best[1])})


def _check_state(table: dict[str, Any]) -> None:
    """Raise an error for a value of another type than that of its field."""
    for item in dataclasses.fields(TrainState):
        if item.name not in ("best", "provenance", "unlogged", "losses"):
            check_value(item.type, table[item.name], f"The training state: {item.name}", _RESTORE)
    provenance, best, unlogged, losses = (table[name] for name in ("provenance", "best", "unlogged", "losses"))
    is_table = isinstance(provenance, dict) and all(isinstance(value, dict) for value in _parts(provenance))
    is_best = best is None or (isinstance(best, list | tuple) and len(best) == 2 and _are_numbers(best))
    is_log = isinstance(unlogged, list) and all(isinstance(row, list) and _are_numbers(row) for row in unlogged)
    are_losses = isinstance(losses, list) and len(losses) in (0, 4) and _are_numbers(losses)
    for name, is_valid in (
        ("provenance", is_table),
        ("best", is_best),
        ("unlogged", is_log),
        ("losses", are_losses),
    ):
        if not is_valid:
            raise RegardError(f"The training state: {name} is damaged ({format_value(table[name])}).", _RESTORE)


def _parts(provenance: dict[str, Any]) -> list[Any]:
    """The recipe, the fingerprints of the data and each of them, which must be tables."""
    recipe, data = provenance.get("recipe"), provenance.get("data", {})
    return [recipe, data, *(data.values() if isinstance(data, dict) else ())]


def _are_numbers(values: Any) -> bool:
    return all(type(value) in (int, float) for value in values)

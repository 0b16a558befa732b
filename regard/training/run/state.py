"""The state of a run apart from tensors: counters, the best validation, and the start of the decay."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from regard.errors import RegardError
from regard.pipelines.migration import migrate_provenance


@dataclass
class TrainState:
    """Everything except tensors that a bit-exact resume needs; stored in the checkpoint as JSON.

    >>> TrainState.from_json(TrainState(step=5, best=(0.5, -1.0)).to_json()).best
    (0.5, -1.0)
    """

    provenance: dict[str, Any] = field(default_factory=dict)
    workers: int = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: tuple[float, float] | None = None
    """the metric that selects the model, and the negative validation loss, which breaks ties"""
    best_step: int = 0
    stale: int = 0
    """validations since the best one"""
    decay_start: int | None = None
    """the step at which the decay started earlier than planned, because validation stalled or time ran out"""
    seconds: float = 0.0
    """training time up to the last checkpoint over all processes of the run; only stored with a time budget"""
    unlogged: list[list[float]] = field(default_factory=list)
    """loss, nll and tokens of each update since the last log line"""
    done: bool = False

    def improves(self, metric: float, loss: float) -> bool:
        """Whether a validation with this metric and loss is the best so far.

        >>> TrainState(best=(50.0, -2.0)).improves(50.0, 1.5)
        True
        """
        return self.best is None or (metric, -loss) > self.best

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(table: dict[str, Any]) -> "TrainState":
        if table.keys() != {field.name for field in dataclasses.fields(TrainState)}:
            raise RegardError(
                "The training state was written by a different version of Regard.",
                "Resume it with that version, or choose another --out.",
            )
        state = TrainState(**table | {"provenance": migrate_provenance(table["provenance"])})
        return dataclasses.replace(state, best=None if state.best is None else (state.best[0], state.best[1]))

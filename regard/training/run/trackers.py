"""Experiment trackers beside metrics.jsonl: TensorBoard, if it is installed, and Weights & Biases."""

import contextlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from regard.errors import require_package
from regard.files import write_atomically

WandbMode = Literal["off", "offline", "online"]


class Tracker(Protocol):
    """Receives the metrics of a run; `kind` is "train" or "validation"."""

    name: str

    def add(self, step: int, kind: str, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def make_trackers(out: Path, wandb_mode: WandbMode, recipe: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of the run in a folder."""
    trackers: list[Tracker] = []
    with contextlib.suppress(ImportError):
        trackers.append(TensorBoardTracker(out / "tensorboard"))
    if wandb_mode != "off":
        trackers.append(WandbTracker(out, wandb_mode, recipe))
    return trackers


class TensorBoardTracker:
    """Event files for TensorBoard."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def add(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self.writer.close()


class WandbTracker:
    """A run of Weights & Biases. A resumed training run continues it; `step` is a metric of its own, because a run that
    is resumed or rolled back repeats steps."""

    name = "Weights & Biases"

    def __init__(self, out: Path, mode: WandbMode, recipe: Mapping[str, Any]) -> None:
        wandb = require_package("wandb", "wandb")
        folder = out / "wandb"
        if not (folder / "run_id").exists():
            write_atomically(folder / "run_id", uuid.uuid4().hex[:12].encode())
        self.run = wandb.init(
            mode=mode,
            dir=str(out),
            project=os.environ.get("WANDB_PROJECT", "regard"),
            name=os.environ.get("WANDB_NAME", out.name),
            id=(folder / "run_id").read_text(encoding="utf-8"),
            resume="allow",
            config=dict(recipe),
            settings=wandb.Settings(silent=True),
        )
        self.run.define_metric("*", step_metric="step")

    def add(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step} | {f"{kind}/{name}": value for name, value in metrics.items()})

    def close(self) -> None:
        self.run.finish()

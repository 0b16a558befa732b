"""The log of a run: progress bar or log lines, metrics.jsonl, experiment trackers, and the plot of the losses."""

import contextlib
import io
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from regard.errors import require_package
from regard.evaluation.text_metrics import format_metrics
from regard.files import write_atomically
from regard.ranges import MAX_INT
from regard.training.schedules import format_duration

WandbMode = Literal["off", "offline", "online"]


class RunLog:
    """The metrics of a run, written to metrics.jsonl (one JSON object per line), the terminal, and trackers.

    Metrics are no reason to end a run: lines that cannot be written are written later, with one warning, and a tracker
    that fails is left out.
    """

    def __init__(
        self,
        path: Path,
        steps: int,
        step: int = 0,
        is_silent: bool = False,
        writes_files: bool = True,
        wandb_mode: WandbMode = "off",
        recipe: dict[str, Any] | None = None,
    ) -> None:
        self.path, self.steps, self.is_silent, self.writes_files = path, steps, is_silent, writes_files
        self.first_step, self.start_time = step, time.monotonic()
        self.deadline = math.inf
        """when the time budget ends, by the monotonic clock"""
        self.unwritten: list[str] = []
        """lines of metrics.jsonl that could not be written yet"""
        if writes_files:
            self.truncate_after(step)
        console = Console(stderr=True)
        self.bar: Progress | None = None
        if console.is_terminal and not is_silent:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
            self.bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
            self.task = self.bar.add_task("training", total=steps, completed=step, left="", note="")
        self.trackers = make_trackers(path.parent, wandb_mode, recipe or {}) if writes_files else []

    def truncate_after(self, step: int) -> None:
        """Remove the lines after the checkpoint from which a run continues; their steps are about to be repeated."""
        self.unwritten = []
        if self.path.exists():
            kept = [line for line in read_metrics(self.path) if line["step"] <= step]
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def add(self, step: int, kind: str, **metrics: float) -> None:
        """Record the metrics of a step; `kind` is "train" or "validation"."""
        if not self.writes_files:
            return
        line = {"step": step, "kind": kind, "seconds": round(time.monotonic() - self.start_time, 3)} | metrics
        self._write(json.dumps(line) + "\n")
        for tracker in list(self.trackers):
            try:
                tracker.add(step, kind, metrics)
            except Exception as error:
                self.trackers.remove(tracker)
                self.warn(f"{tracker.name} failed and is left out from now on: {error}")
        text = "  ".join(format_metrics(metrics))
        text = f"step {step} of {self.steps}  {kind}  {text}"
        if self.bar is not None:
            if kind == "train":
                self.bar.update(self.task, note=f"loss {metrics['loss']:.3f}")
            else:
                self.bar.console.print(text, highlight=False)
        elif not self.is_silent:
            print(f"{text}  {self._time_left(step)}" if kind == "train" else text, file=sys.stderr, flush=True)

    def _write(self, line: str) -> None:
        self.unwritten.append(line)
        try:
            with open(self.path, "ab", buffering=0) as file:
                size = file.tell()
                try:
                    file.write("".join(self.unwritten).encode())
                except OSError:
                    file.truncate(size)  # a full disk takes a part of a line
                    raise
        except OSError as error:
            if len(self.unwritten) == 1:
                self.warn(f"{self.path}: cannot be written: {error.strerror}. Its lines are written when it can.")
        else:
            self.unwritten = []

    def advance(self, step: int) -> None:
        """Move the progress bar to this step."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step, total=self.steps, left=self._time_left(step))

    def _time_left(self, step: int) -> str:
        """The remaining time, estimated from the speed of this process so far."""
        pace = (time.monotonic() - self.start_time) / max(1, step - self.first_step)
        seconds = min(pace * (self.steps - step), self.deadline - time.monotonic())
        return f"{format_duration(max(0, seconds))} left"

    def warn(self, message: str) -> None:
        """Print a warning to stderr, also if the run is silent."""
        if self.bar is not None:
            self.bar.console.print(f"regard: {message}", highlight=False, markup=False)
        elif self.writes_files:
            print(f"regard: {message}", file=sys.stderr, flush=True)

    def print_lines(self, *lines: str) -> None:
        """Print lines to stderr, above the progress bar if there is one."""
        if self.is_silent:
            return
        for line in lines:
            if self.bar is not None:
                self.bar.console.print(line, highlight=False, markup=False)
            else:
                print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> "RunLog":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        for tracker in self.trackers:
            with contextlib.suppress(Exception):
                tracker.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics.jsonl; skip lines that no run writes, such as one truncated by a crash."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and _is_step(record.get("step")) and isinstance(record.get("kind"), str):
                records.append(record)
    return records


def plot_losses(metrics: list[dict[str, Any]], path: Path, unit: str = "token") -> None:
    """Plot the loss curves of a run."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for kind, name in (("train", "training"), ("validation", "validation")):
        points = [
            (line["step"], line["nll"]) for line in metrics if line["kind"] == kind and _is_finite(line.get("nll"))
        ]
        if points:
            axes.plot(*zip(*points), label=name, marker="o" if kind == "validation" else None, markersize=3)
    axes.set(xlabel="step", ylabel=f"loss per {unit}", title="Loss")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    plot = io.BytesIO()
    figure.savefig(plot, dpi=120)
    write_atomically(path, plot.getvalue())


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MAX_INT


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

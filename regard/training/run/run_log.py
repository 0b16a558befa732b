"""The log of a run: progress bar or log lines, metrics.jsonl, TensorBoard, and the plot of the losses."""

import io
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from regard.errors import RegardError
from regard.files import write_atomically
from regard.training.optim.schedules import format_duration


class RunLog:
    """The metrics of a run, written to metrics.jsonl (one JSON object per line), TensorBoard and the terminal."""

    def __init__(
        self, path: Path, steps: int, step: int = 0, is_silent: bool = False, writes_files: bool = True
    ) -> None:
        self.path, self.steps, self.is_silent, self.writes_files = path, steps, is_silent, writes_files
        self.first_step, self.start_time = step, time.monotonic()
        if writes_files:
            self._truncate_after(step)
        console = Console(stderr=True)
        self.bar: Progress | None = None
        if console.is_terminal and not is_silent:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
            self.task = self.bar.add_task("training", total=steps, completed=step, note="")
        self.tensorboard = _tensorboard_writer(path.parent / "tensorboard") if writes_files else None

    def _truncate_after(self, step: int) -> None:
        """Remove the lines after the checkpoint of a resumed run; their steps are about to be repeated."""
        if self.path.exists():
            kept = [line for line in read_metrics(self.path) if line["step"] <= step]
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def add(self, step: int, kind: str, **metrics: float) -> None:
        """Record the metrics of a step; `kind` is "train" or "validation"."""
        if not self.writes_files:
            return
        line = {"step": step, "kind": kind, "seconds": round(time.monotonic() - self.start_time, 3)} | metrics
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            hint = "The last checkpoint is intact; run the same command to resume from it."
            raise RegardError(f"{self.path}: cannot write the file: {error.strerror}.", hint) from None
        if self.tensorboard is not None:
            for name, value in metrics.items():
                self.tensorboard.add_scalar(f"{kind}/{name}", value, step)
        text = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        text = f"step {step} of {self.steps}  {kind}  {text}"
        if self.bar is not None:
            if kind == "train":
                self.bar.update(self.task, note=f"loss {metrics['loss']:.3f}")
            else:
                self.bar.console.print(text, highlight=False)
        elif not self.is_silent:
            print(f"{text}  {self._time_left(step)}" if kind == "train" else text, file=sys.stderr, flush=True)

    def advance(self, step: int) -> None:
        """Move the progress bar to this step."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step, total=self.steps)

    def _time_left(self, step: int) -> str:
        """The remaining time, estimated from the speed of this process so far."""
        pace = (time.monotonic() - self.start_time) / max(1, step - self.first_step)
        return f"{format_duration(pace * max(0, self.steps - step))} left"

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
        if self.tensorboard is not None:
            self.tensorboard.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics.jsonl; skip lines without a step, such as one truncated by a crash."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def plot_losses(metrics: list[dict[str, Any]], path: Path, unit: str = "token") -> None:
    """Plot the loss curves of a run."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for kind, name in (("train", "training"), ("validation", "validation")):
        points = [(line["step"], line["nll"]) for line in metrics if line["kind"] == kind and "nll" in line]
        if points:
            axes.plot(*zip(*points), label=name, marker="o" if kind == "validation" else None, markersize=3)
    axes.set(xlabel="step", ylabel=f"loss per {unit}", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    plot = io.BytesIO()
    figure.savefig(plot, dpi=120)
    write_atomically(path, plot.getvalue())


def _tensorboard_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))

"""The output folder of a run: checks before writing, the lock, and checks before resuming."""

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.files import check_output_folder
from regard.training.checkpoint import STATE_FOLDER, STEPS, CheckpointStore, TrainState, read_checkpoint_facts
from regard.training.datasets import count_units
from regard.training.recipe import Recipe, recipe_from_dict, recipe_to_dict
from regard.training.schedules import parse_duration

LOCK = Path(STATE_FOLDER) / "lock"
METRICS, LOSSES = "metrics.jsonl", "loss.png"
# Files and folders that a run writes beside the model, in the order in which errors list them.
_OUTPUT_NAMES = (METRICS, LOSSES, STEPS, "tensorboard", "wandb")
# Settings that may differ when a run is resumed: they change locations or the end of the run, but none of the updates
# computed so far. Data are compared by content.
RESUMABLE_CHANGES = {"train.device", "train.log_every", "train.save_every", "train.keep_every", "data.cache"}
# Batches do not depend on the number of ranks.
RESUMABLE_CHANGES |= {"train.workers", "train.sharding"}
RESUMABLE_CHANGES |= {"data.files", "data.validation", "train.steps", "train.time", "train.patience"}
RESUMABLE_CHANGES |= {"train.skip_spikes", "train.keep_checkpoints", "train.wandb"}


@contextlib.contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Lock the folder for this process; a second run in it is an error. The lock ends with the process."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    try:
        (out / LOCK).parent.mkdir(parents=True, exist_ok=True)
        file = open(out / LOCK, "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise RegardError(f"{out}: cannot create the folder: {error.strerror}.", "Choose another --out.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise RegardError(
                f"{out} is in use by another run ({owner}).", "Wait for it to end, or choose another --out."
            ) from None
        except OSError:  # the file system does not support locks
            yield
            return
        with contextlib.suppress(OSError):  # only a note for other processes; a full disk must not matter
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def check_run_folder(out: Path, inputs: Iterable[str | Path | None] = ()) -> None:
    """Raise an error for an input folder, or one whose files a run would overwrite; a run in it can be resumed."""
    has_run = bool(CheckpointStore(out).paths()) or (out / LOCK).exists()
    check_output_folder(out, inputs, allow_content=has_run)
    existing = [name for name in _OUTPUT_NAMES if os.path.lexists(out / name)]
    if existing and not has_run:
        raise RegardError(
            f"{out} holds files that this run would overwrite: {', '.join(existing)}.",
            "Choose another --out, or move them.",
        )


def read_state(checkpoint: Path) -> TrainState:
    """The state of a run at a checkpoint."""
    return TrainState.from_json(read_checkpoint_facts(checkpoint))


def read_stored_recipe(out: str | Path) -> Recipe | None:
    """The recipe of the run in this folder; None if there is no run."""
    checkpoint = CheckpointStore(out).find_intact()
    if checkpoint is None:
        return None
    return recipe_from_dict(read_state(checkpoint).provenance["recipe"], origin=str(checkpoint))


def check_same_run(out: Path, state: TrainState, provenance: dict[str, Any]) -> None:
    """Raise an error if the run in the folder differs from this one in a setting or in data that affect the results."""
    current = _flatten(provenance)
    # Keys that were added after the run have their defaults.
    recipe = recipe_to_dict(recipe_from_dict(state.provenance["recipe"], origin=str(out)))
    stored = _flatten(json.loads(json.dumps({**state.provenance, "recipe": recipe})))
    for key in current:
        name = key.removeprefix("recipe.")
        if stored.get(key) == current[key] or name in RESUMABLE_CHANGES or key.startswith("versions."):
            continue
        difference = f"{name} = {stored.get(key)!r}, not {current[key]!r}"
        raise RegardError(
            f"{out} holds a run with {'different data' if key.startswith('data.') else difference}.",
            "Use the same settings and data to resume it, or choose another --out.",
        )
    steps = current["recipe.train.steps"]
    if steps < state.step:
        raise RegardError(
            f"{out} holds a run of {count_units(state.step, 'steps')}, which exceeds train.steps ({steps}).",
            f"Pass at least --steps {state.step}, or choose another --out.",
        )


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables: {"a": {"b": 1}} becomes {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def is_extended(recipe: Recipe, state: TrainState) -> bool:
    """Whether the recipe allows more steps, or more time, than the run that wrote this state."""
    before = state.provenance["recipe"]["train"]
    more_time = bool(before["time"]) and parse_duration(recipe.train.time) > parse_duration(before["time"])
    return recipe.train.steps > before["steps"] or more_time


@contextlib.contextmanager
def open_run_folder(out: Path, dry_run: bool) -> Iterator[Path]:
    """Lock and yield the output folder; a dry run gets a temporary folder."""
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="regard-") as folder:
            yield Path(folder)
    else:
        with lock_folder(out):
            yield out

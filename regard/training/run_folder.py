"""The output folder of a run: claimed, locked against a second run, and compared before a run is resumed."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.training.checkpoint import STEPS, Checkpoint
from regard.training.recipe import Recipe, recipe_from
from regard.training.state import TrainState

STATE, LOCK = Path("state") / "last.safetensors", Path("state") / "lock"
METRICS, LOSSES = "metrics.jsonl", "loss.png"
# What a run writes, in the order in which an error names it.
_MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "target_tokenizer.json", "training.json")
_WRITTEN = (*_MODEL_FILES, METRICS, LOSSES, STEPS, "state", "tensorboard")
# What may differ between a run and its continuation: it changes where things are or when the run ends, and nothing of
# what was computed so far. Data are compared by their content.
MAY_CHANGE = {"train.device", "train.log_every", "train.save_every", "train.keep_every", "data.cache"}
MAY_CHANGE |= {"data.files", "data.validation", "train.steps", "train.time", "train.patience"}


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Locks the folder for this process; another run on it is an error. The lock ends with the process in any case."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    try:
        (out / LOCK).parent.mkdir(parents=True, exist_ok=True)
        file = open(out / LOCK, "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise RegardError(f"{out}: cannot be made: {error.strerror}.", "Choose another --out.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise RegardError(
                f"{out} is in use by another run ({owner}).", "Wait for it to end, or choose another --out."
            ) from None
        except OSError:  # a file system without locks
            yield
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def refuse_foreign_files(out: Path) -> None:
    """An error for a folder that holds files of the names that a run writes, without being the folder of a run."""
    if str(out) in ("", "."):
        raise RegardError("--out is empty.", "Name a folder for the model, for example --out model.")
    if out.exists() and not out.is_dir():
        raise RegardError(f"{out}: cannot be made: it is a file.", "Choose another --out.")
    if (out / STATE).exists() or (out / LOCK).exists():
        return
    if (out / "config.json").exists() and (out / "model.safetensors").exists():
        raise RegardError(f"{out} holds a model already.", "Choose another --out, or delete that folder first.")
    found = [name for name in _WRITTEN if os.path.lexists(out / name)]
    if found:
        raise RegardError(
            f"{out} holds {', '.join(found)}, which this run would overwrite.", "Choose another --out, or move them."
        )


def read_state(out: Path) -> TrainState | None:
    """The state of the run in this folder; None if it has not begun."""
    return TrainState.from_json(Checkpoint.load(out / STATE).facts) if (out / STATE).exists() else None


def stored_recipe(out: str | Path) -> Recipe | None:
    """The recipe of the run in this folder; None if there is no run."""
    state = read_state(Path(out))
    return None if state is None else recipe_from(state.provenance["recipe"], origin=f"{out}/{STATE}")


def refuse_other_run(out: Path, state: TrainState, provenance: dict[str, Any]) -> None:
    """An error if the folder's run differs from this one in anything that changes what is computed."""
    here = _flat(json.loads(json.dumps(provenance)))  # as it looks when it comes back from a file
    there = _flat(state.provenance)
    for key in here:
        name = key.removeprefix("recipe.")
        if there.get(key) == here[key] or name in MAY_CHANGE or key.startswith("versions."):
            continue
        other = f"{name} = {there.get(key)!r}, not {here[key]!r}"
        raise RegardError(
            f"{out} holds a run with {'other data' if key.startswith('data.') else other}.",
            "Repeat its settings and data to resume it, or choose another --out.",
        )
    steps = here["recipe.train.steps"]
    if steps < state.step:
        raise RegardError(
            f"{out} holds a run of {state.step} steps, more than train.steps ({steps}).",
            f"Pass at least --steps {state.step}, or choose another --out.",
        )


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat

"""Checkpoints: the state of a run, its files with checksums, and the folder that keeps the newest ones."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from regard.errors import RegardError
from regard.files import FULL_DISK, sync_directory, write_atomically
from regard.ranges import Count, Natural, check_value, format_value
from regard.training.optimizers import LocalShard, local_tensors, shard_like, sharded_weight

STEPS = "steps"
STATE_FOLDER, CHECKSUMS = "state", "checksums.json"
TENSORS = "state.safetensors"
# The JSON values of a sharded checkpoint, whose tensors are in one file per rank.
FACTS = "facts.json"
_RESTORE = "Restore an intact copy of the checkpoint, or train again with another --out."


class DamagedCheckpointError(RegardError):
    """A checkpoint that cannot be read, or whose checksums do not match.

    >>> DamagedCheckpointError("state/step-00000500", "the checksum of state.safetensors does not match").reason
    'the checksum of state.safetensors does not match'
    """

    def __init__(self, path: str | Path, reason: str) -> None:
        self.reason = reason
        # Deleting the file would not help: a run does not start in a folder that holds a model but no checkpoint.
        super().__init__(
            f"{path}: damaged, or not a checkpoint of Regard ({reason}).",
            "Nothing was changed. Restore an intact copy, or train again with another --out.",
        )


@dataclass
class Checkpoint:
    """Tensors by name (weights, optimizer state, EMA weights) and JSON values (step, epoch, best score)."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def to_bytes(self) -> bytes:
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}
        return to_bytes(tensors, metadata={"facts": json.dumps(self.facts)})

    @staticmethod
    def load(path: Path) -> "Checkpoint":
        with _open(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Checkpoint(tensors, _facts(file))


def read_facts(path: Path) -> dict[str, Any]:
    """The JSON values of a checkpoint file, without reading its tensors."""
    with _open(path) as file:
        return _facts(file)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, KeyError, ValueError, RecursionError, OSError) as error:
        raise DamagedCheckpointError(path, str(error)) from None


def _facts(file: Any) -> dict[str, Any]:
    facts = json.loads((file.metadata() or {})["facts"])
    if not isinstance(facts, dict):
        raise ValueError("its facts are not a table")
    return facts


def gather_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, ema_model: torch.nn.Module | None
) -> dict[str, Tensor]:
    """Weights, EMA weights and optimizer state as one flat dictionary of tensors."""
    tensors = {f"model.{name}": tensor for name, tensor in unique_parameters(model).items()}
    tensors |= {f"average.{name}": tensor for name, tensor in _ema_parameters(ema_model).items()}
    parameters = _optimizer_parameters(optimizer)
    for index, state in optimizer.state_dict()["state"].items():
        like = parameters[index]
        tensors |= {f"optimizer.{index}.{key}": shard_like(v, like) for key, v in state.items() if v is not None}
    return tensors


def _optimizer_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def restore_state(
    tensors: dict[str, Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ema_model: torch.nn.Module | None,
    make_error: Callable[[str], RegardError],
) -> None:
    """Restore the tensors of `gather_state` in place; mismatched names or shapes are an error before any change."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "optimizer": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    weights = ((unique_parameters(model), parts["model"]), (_ema_parameters(ema_model), parts["average"]))
    for current, saved in weights:
        mismatched = sorted(
            name
            for name in current.keys() | saved.keys()
            if name not in current or name not in saved or current[name].shape != saved[name].shape
        )
        if mismatched:
            raise make_error(f"{len(mismatched)} of its tensors do not match, for example {mismatched[0]}")
    # The optimizer numbers parameters group by group.
    parameters = _optimizer_parameters(optimizer)
    for name, tensor in parts["optimizer"].items():
        number, _, key = name.partition(".")
        index = int(number) if number.isdecimal() and len(number) < 10 and key else len(parameters)
        if index >= len(parameters) or (tensor.dim() and tensor.shape != sharded_weight(parameters[index]).shape):
            raise make_error(f"the optimizer state {name} does not match")
    with torch.no_grad():
        for current, saved in weights:
            for name, tensor in current.items():
                tensor.copy_(saved[name])
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in parts["optimizer"].items():
        number, key = name.split(".", 1)
        is_local = isinstance(parameters[int(number)], LocalShard)
        state.setdefault(int(number), {})[key] = local_tensors([tensor])[0] if is_local else tensor
    try:
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise make_error(f"the optimizer state does not match ({error})") from None


def _ema_parameters(ema_model: torch.nn.Module | None) -> dict[str, Tensor]:
    return {} if ema_model is None else unique_parameters(ema_model)


def unique_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters by name; tied weights appear once, under their first name."""
    return dict(model.named_parameters(remove_duplicate=True))


def list_step_folders(run: str | Path) -> dict[int, Path]:
    """The model folders of single steps that a run saved, by step; an error if there are none.

    >>> list_step_folders("no-such-run")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-run: no models of single steps were saved. Train with --train.keep-every N.
    """
    # config.json is written last: a folder without it is incomplete.
    folders = (path.parent for path in Path(run).glob(f"{STEPS}/*/config.json") if path.parent.name.isdecimal())
    steps = {int(folder.name): folder for folder in folders}
    if not steps:
        raise RegardError(f"{run}: no models of single steps were saved.", "Train with --train.keep-every N.")
    return dict(sorted(steps.items()))


class CheckpointStore:
    """The checkpoints of the run in a folder: state/step-00000500 holds safetensors files and checksums.json.

    checksums.json has the SHA-256 of the other files and is written last: a folder without it is incomplete and
    ignored. A checkpoint is deleted only after a newer one is complete.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as run:
    ...     store = CheckpointStore(run)
    ...     for step in (10, 20, 30):
    ...         store.save(Checkpoint({"weight": torch.zeros(1)}, {"step": step}), step)
    ...     [path.name for path in store.paths()], store.find_intact().name
    (['step-00000030', 'step-00000020'], 'step-00000030')
    """

    def __init__(self, run: str | Path, keep: int = 2) -> None:
        self.folder, self.keep = Path(run) / STATE_FOLDER, keep

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def paths(self) -> list[Path]:
        """The complete checkpoints, newest first."""
        return [folder for _, folder in self._folders() if (folder / CHECKSUMS).exists()]

    def save(self, checkpoint: Checkpoint, step: int) -> None:
        """Write a checkpoint of one file, and delete all but the newest `keep` checkpoints.

        On a full disk, older ones are deleted first, except the newest. A failure leaves no files of the new one.
        """
        content = checkpoint.to_bytes()
        try:
            self._write(content, step)
        except RegardError as error:
            _delete(self.path(step))
            cause, older = error.__context__, self.paths()[1:]
            if not (isinstance(cause, OSError) and cause.errno in FULL_DISK and older):
                raise
            for path in older:
                _delete(path)
            try:
                self._write(content, step)
            except RegardError:
                _delete(self.path(step))
                raise

    def _write(self, content: bytes, step: int) -> None:
        folder = self.start(step)
        # SHA-256 is faster than most disks: next to the write it takes no time where a core is idle.
        with ThreadPoolExecutor(1) as pool:
            digest = pool.submit(lambda: hashlib.sha256(content).hexdigest())
            write_atomically(folder / TENSORS, content)
            self.finish(step, {TENSORS: digest.result()})

    def start(self, step: int) -> Path:
        """The folder for the files of a new checkpoint, without what an earlier one of the same step left there."""
        _delete(self.path(step))
        return self.path(step)

    def finish(self, step: int, checksums: dict[str, str]) -> None:
        """Complete a checkpoint after its files are written: write their checksums, delete older checkpoints."""
        folder = self.path(step)
        content = json.dumps({"step": step, "sha256": checksums}, indent=1) + "\n"
        write_atomically(folder / CHECKSUMS, content.encode())
        with contextlib.suppress(OSError):
            sync_directory(self.folder)
        self._prune(step)

    def find_intact(self, report: Callable[[str], None] = lambda _: None) -> Path | None:
        """The newest checkpoint whose checksums match; None if there is no checkpoint.

        `report` gets a sentence about each damaged one that was passed over. If all of them are damaged, the error is
        that of the newest.
        """
        errors: dict[Path, DamagedCheckpointError] = {}
        for path in self.paths():
            try:
                step = verify(path)
            except DamagedCheckpointError as error:
                errors[path] = error
                continue
            for damaged, error in errors.items():
                report(f"{damaged}: damaged ({error.reason}); resuming from step {step}.")
            return path
        for error in errors.values():
            raise error
        return None

    def _folders(self) -> list[tuple[int, Path]]:
        """Steps and folders of all checkpoints, also of incomplete ones, newest first."""
        matches = ((re.fullmatch(r"step-(\d{8,})", path.name), path) for path in self.folder.glob("step-*"))
        return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)

    def _prune(self, step: int) -> None:
        """Delete all checkpoints except the newest `keep` up to `step`. Later ones are damaged, or it would not be the
        newest."""
        kept = 0
        for other, folder in self._folders():
            is_complete = other <= step and (folder / CHECKSUMS).exists()
            kept += is_complete
            if not is_complete or kept > self.keep:
                _delete(folder)


def load_checkpoint(path: Path) -> Checkpoint:
    """Load a checkpoint of one file."""
    return Checkpoint.load(path / TENSORS)


def is_sharded(path: Path) -> bool:
    """Whether a checkpoint was written by the ranks of a sharded run."""
    return (path / FACTS).exists()


def read_checkpoint_facts(path: Path) -> dict[str, Any]:
    """The JSON values of a checkpoint, without reading its tensors."""
    if not is_sharded(path):
        return read_facts(path / TENSORS)
    try:
        facts = json.loads((path / FACTS).read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise DamagedCheckpointError(path, str(error)) from None
    if not isinstance(facts, dict):
        raise DamagedCheckpointError(path, "its facts are not a table")
    return facts


def verify(path: Path) -> int:
    """Check the files of a checkpoint against its checksums, and return its step; an error says what is damaged."""
    try:
        table = json.loads((path / CHECKSUMS).read_text(encoding="utf-8"))
        step, checksums = int(table["step"]), dict(table["sha256"])
        if other := [name for name in checksums if Path(name).name != name]:
            raise DamagedCheckpointError(path, f"{CHECKSUMS} names a file outside of the folder: {other[0]}")
        damaged = [name for name, expected in checksums.items() if sha256(path / name) != expected]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedCheckpointError(path, f"{CHECKSUMS} is invalid: {error}") from None
    except OSError as error:
        raise DamagedCheckpointError(path, f"{error.filename}: {error.strerror}") from None
    if damaged:
        raise DamagedCheckpointError(path, f"the checksum of {damaged[0]} does not match")
    if not checksums or path.name != f"step-{step:08}":
        raise DamagedCheckpointError(path, f"{CHECKSUMS} names no files, or another step")
    return step


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    status = path.stat()
    return _cached_sha256(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _cached_sha256(path: Path, *_status: int) -> str:
    """A command reads the stored recipe, and later the state: the file is read for its checksum only once."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _delete(path: Path) -> None:
    """Delete a checkpoint, checksums first, so that a crash leaves no checkpoint that looks complete.

    Failures do not matter: network file systems keep files that are still open, and the next save tries again.
    """
    with contextlib.suppress(OSError):
        (path / CHECKSUMS).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


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

"""Checkpoints: the state of a run, its files with checksums, the folder of the run and its lock, and saving.

The checkpoint of a sharded run has a safetensors file per rank; any number of ranks can load it. Format and resharding
are those of torch.distributed.checkpoint with its safetensors storage; nothing is pickled.
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import shutil
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint import load as load_distributed
from torch.distributed.checkpoint import save as save_distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor, distribute_tensor

from regard.errors import RegardError
from regard.files import FULL_DISK, check_output_folder, sync_directory, write_atomically
from regard.pipelines.folder import write_model
from regard.ranges import Count, Natural, check_value, format_value
from regard.training.datasets import count_units
from regard.training.distributed import Workers, report_dead_ranks
from regard.training.log import RunLog
from regard.training.optimizers import LocalShard, local_tensors, shard_like, sharded_weight
from regard.training.recipe import Recipe, recipe_from_dict, recipe_to_dict
from regard.training.schedules import parse_duration

STEPS = "steps"
STATE_FOLDER, CHECKSUMS = "state", "checksums.json"
TENSORS = "state.safetensors"
# The JSON values of a sharded checkpoint, whose tensors are in one file per rank.
METADATA = "metadata.json"
_RESTORE = "Restore an intact copy of the checkpoint, or train again with another --out."
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
# Saves in a row that may fail before the run ends.
MAX_FAILURES = 3


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


# -- state


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
    """the step of the saved model: the last one that was not worse than the best beyond noise"""
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
    micro_batches: Count = 1
    """number of parts in which each batch is processed, to fit into memory"""
    done: bool = False

    def improves(self, metric: float, loss: float) -> bool:
        """Whether a validation with this metric and loss is the best so far.

        >>> TrainState(best=(50.0, -2.0)).improves(50.0, 1.5)
        True
        """
        return math.isfinite(loss) and (self.best is None or (metric, -loss) > self.best)

    def equals_best(self, metric: float, loss: float, margin: float) -> bool:
        """Whether a metric with a confidence interval of this half-width may be as good as the best so far.

        >>> TrainState(best=(50.0, -2.0)).equals_best(48.0, 2.0, margin=2.5)
        True
        """
        return math.isfinite(loss) and self.best is not None and metric + margin > self.best[0]

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


# -- tensors and files


@dataclass
class Checkpoint:
    """Tensors by name (weights, optimizer state, EMA weights) and JSON values (step, epoch, best score)."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    def to_bytes(self) -> bytes:
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}
        return to_bytes(tensors, metadata={"metadata": json.dumps(self.metadata)})

    @staticmethod
    def load(path: Path) -> "Checkpoint":
        with _open(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Checkpoint(tensors, _parse_metadata(file))


def _read_file_metadata(path: Path) -> dict[str, Any]:
    """The JSON values of a checkpoint file, without reading its tensors."""
    with _open(path) as file:
        return _parse_metadata(file)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, KeyError, ValueError, RecursionError, OSError) as error:
        raise DamagedCheckpointError(path, str(error)) from None


def _parse_metadata(file: Any) -> dict[str, Any]:
    metadata = json.loads((file.metadata() or {})["metadata"])
    if not isinstance(metadata, dict):
        raise ValueError("its metadata are not a table")
    return metadata


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
    return (path / METADATA).exists()


def read_metadata(path: Path) -> dict[str, Any]:
    """The JSON values of a checkpoint, without reading its tensors."""
    if not is_sharded(path):
        return _read_file_metadata(path / TENSORS)
    try:
        metadata = json.loads((path / METADATA).read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise DamagedCheckpointError(path, str(error)) from None
    if not isinstance(metadata, dict):
        raise DamagedCheckpointError(path, "its metadata are not a table")
    return metadata


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


# -- the folder of a run


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
    return TrainState.from_json(read_metadata(checkpoint))


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


# -- saving


class RunSaver:
    """Writes models and checkpoints of a run. A failure is a warning at first; the third in a row is an error.

    A model that could not be written is kept in memory, and no checkpoint is written before it: a run that is resumed
    from the last checkpoint then repeats the validation that selected the model.
    """

    def __init__(
        self,
        store: CheckpointStore,
        run_log: RunLog,
        best_step: int | None,
        shards: "AsyncSaver | None" = None,
    ) -> None:
        self.store, self.run_log, self.shards = store, run_log, shards
        self.best_step = best_step
        """step of the last checkpoint; None if there is none"""
        self.failures = 0
        self.unsaved: dict[Path, Any] = {}
        """pipelines that could not be written yet, by their folder"""

    def save_model(self, folder: Path, pipeline: Any) -> None:
        """Write a model folder."""
        self.unsaved[folder] = pipeline
        try:
            self._write_models()
        except RegardError as error:
            # The model in training changes with the next update.
            self.unsaved[folder] = dataclasses.replace(
                pipeline, model=copy.deepcopy(pipeline.model).cpu(), training=copy.deepcopy(pipeline.training)
            )
            self._fail(f"the model could not be saved: {error.message}", error)

    def save_checkpoint(self, checkpoint: Checkpoint, step: int, *, is_last: bool = False) -> None:
        """Write a checkpoint, after all models; `is_last`: a failure is an error.

        All ranks of a sharded run call it together, and it returns before the shards are written unless `is_last`. Only
        rank 0 has models and counts failures.
        """
        self.wait()
        failure: RegardError | None = None
        try:
            self._write_models()
            if self.shards is None:
                self.store.save(checkpoint, step)
                self._succeed(step)
        except RegardError as error:
            failure = error
        if self.shards is not None and not any(self.shards.workers.any(failure is not None)):
            self.shards.save(checkpoint, step)
        if failure is not None:
            self._handle_failure(step, failure, is_last)
        if is_last:
            self.wait(is_last=True)

    def wait(self, *, is_last: bool = False) -> None:
        """Wait for the shards that are being written; a failure is handled as in `save_checkpoint`."""
        if self.shards is None:
            return
        try:
            if self.shards.wait():
                self._succeed(self.shards.step)
        except RegardError as error:
            if not self.shards.workers.rank:
                self._handle_failure(self.shards.step, error, is_last)

    def _handle_failure(self, step: int, error: RegardError, is_last: bool) -> None:
        if is_last or self.best_step is None:
            raise self._error(error) from None
        self._fail(f"the checkpoint of step {step} could not be saved: {error.message}", error)

    def _succeed(self, step: int) -> None:
        if self.failures:
            self.run_log.print_lines(f"step {step}: saved again; nothing is lost.")
        self.best_step, self.failures = step, 0

    def _write_models(self) -> None:
        for folder in list(self.unsaved):
            try:
                write_model(folder, self.unsaved[folder])
            except OSError as error:  # other than in a write, which names the file
                raise RegardError(f"{folder}: cannot be written: {error.strerror}.") from None
            del self.unsaved[folder]

    def _fail(self, what: str, error: RegardError) -> None:
        self.failures += 1
        if self.failures >= MAX_FAILURES:
            raise self._error(error) from None
        self.run_log.warn(
            f"{what} Training continues, the next save tries again (failure {self.failures} of {MAX_FAILURES}). The "
            f"last checkpoint is step {self.best_step}."
        )

    def _error(self, error: RegardError) -> RegardError:
        if self.best_step is None:
            return error
        return RegardError(
            f"{error.message.removesuffix('.')}; everything up to step {self.best_step} is saved.",
            "Free some space or repair the disk, and run the same command to resume.",
        )


def load_like(path: Path, like: Mapping[str, Tensor], parameters: Iterable[Tensor]) -> Checkpoint:
    """Load a checkpoint, sharded or not, with tensors that are sharded like the current ones.

    `like` are the weights by name, `parameters` those of the optimizer in its order. Names are `model.*`, `average.*`
    and `optimizer.<index>.*`, as in `gather_state`. The number of ranks that saved the checkpoint does not matter.
    """
    patterns = _Patterns(like, [sharded_weight(p) for p in parameters])
    if is_sharded(path):
        return Checkpoint(_load_shards(path, patterns), read_metadata(path))
    checkpoint = load_checkpoint(path)
    for name, tensor in checkpoint.tensors.items():
        checkpoint.tensors[name] = _place_like(tensor, patterns.find(name, tensor.shape))
    return checkpoint


def _place_like(full: Tensor, pattern: Tensor | None) -> Tensor:
    """A tensor that all ranks have read, so that none has to send it, with the shards of `pattern`."""
    if not isinstance(pattern, DTensor):
        return full
    return distribute_tensor(full.to(pattern.device), pattern.device_mesh, pattern.placements, src_data_rank=None)


class _Patterns:
    """The current weights, after which the tensors of a checkpoint are sharded."""

    def __init__(self, like: Mapping[str, Tensor], parameters: list[Tensor]) -> None:
        self.like, self.parameters = like, parameters

    def find(self, name: str, shape: torch.Size) -> Tensor | None:
        """The weight to which a tensor of a checkpoint belongs.

        None for a tensor of another size: steps are scalars, and others belong to another model, which `restore_state`
        reports.
        """
        part, _, rest = name.partition(".")
        index = rest.split(".", 1)[0]
        if part == "optimizer":
            is_known = index.isdecimal() and len(index) < 10 and int(index) < len(self.parameters)
            pattern = self.parameters[int(index)] if is_known else None
        else:
            pattern = self.like.get(rest)
        return pattern if pattern is not None and pattern.shape == shape else None


def _load_shards(folder: Path, patterns: _Patterns) -> dict[str, Tensor]:
    reader, tensors = HuggingFaceStorageReader(str(folder)), {}
    try:
        metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
        for name, entry in metadata.items():
            # Each value is stored once. So the files bound the memory, whatever offsets they claim.
            is_complete = math.prod(entry.size) == sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if not is_complete or any(offset < 0 for chunk in entry.chunks for offset in chunk.offsets):
                raise DamagedCheckpointError(folder, f"parts of {name} are missing")
            pattern, dtype = patterns.find(name, entry.size), entry.properties.dtype
            if pattern is None:
                tensors[name] = torch.empty(entry.size, dtype=dtype)
            else:
                tensors[name] = torch.empty_like(pattern, dtype=dtype, requires_grad=False)
    except RegardError:
        raise
    except Exception as error:  # the reader does not check the offsets and names in the files
        raise DamagedCheckpointError(folder, f"{type(error).__name__}: {error}") from None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended in one process
            load_distributed(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
    except (SafetensorError, CheckpointException, KeyError, ValueError, OSError) as error:
        raise DamagedCheckpointError(folder, str(error)) from None
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):  # read as a whole
            tensors[name] = _place_like(tensor, patterns.find(name, tensor.shape))
    return tensors


class AsyncSaver:
    """Saves sharded checkpoints in the background; training continues as soon as the tensors are copied to the CPU."""

    def __init__(self, workers: Workers, store: CheckpointStore) -> None:
        self.workers, self.store = workers, store
        self.group = dist.new_group(backend="gloo", timeout=workers.timeout)
        """a group of its own, since its operations run at the same time as those of the updates"""
        self.executor = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None
        self.step = 0
        """step of the last checkpoint"""

    def save(self, checkpoint: Checkpoint, step: int) -> None:
        """Save a checkpoint, of which this rank has its shards; after `wait`. All ranks call it together."""
        if self.workers.rank == 0:
            self.store.start(step)
        self.workers.wait()
        copies = BlockingAsyncStager(cache_staged_state_dict=False).stage(dict(checkpoint.tensors))
        self.pending = self.executor.submit(self._write, copies, dict(checkpoint.metadata), step)
        self.step = step

    def _write(self, tensors: dict[str, Tensor], metadata: dict[str, Any], step: int) -> None:
        folder, rank = self.store.path(step), dist.get_rank(self.group)
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)  # flushes the files
        save_distributed(tensors, storage_writer=writer, process_group=self.group)
        results: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(results, _checksums(folder, f"shard-{rank + 1:05}-*.safetensors"), group=self.group)
        for result in results:
            if isinstance(result, str):
                raise RegardError(result)
        if rank == 0:
            content = json.dumps(metadata).encode()
            write_atomically(folder / METADATA, content)
            checksums = {name: digest for result in results for name, digest in result.items()}
            self.store.finish(step, checksums | {METADATA: hashlib.sha256(content).hexdigest()})

    def wait(self) -> bool:
        """Wait until the last save is on disk; False if there is none to wait for.

        An error of the save is raised here; one in the last files, which only rank 0 writes, is raised on rank 0 alone.
        """
        if self.pending is None:
            return False
        pending, self.pending = self.pending, None
        try:
            with report_dead_ranks():
                pending.result()
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise RegardError(f"The checkpoint could not be written: {first}.") from None
        return True


def _checksums(folder: Path, pattern: str) -> dict[str, str] | str:
    """The checksums of files by name, or what is wrong: an exception would leave the other ranks waiting."""
    try:
        return {path.name: sha256(path) for path in sorted(folder.glob(pattern))}
    except OSError as error:
        return f"{error.filename}: {error.strerror}."

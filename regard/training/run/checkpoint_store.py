"""The checkpoints of a run: one folder per saved step with checksums, of which the newest ones are kept."""

import contextlib
import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.files import FULL_DISK, sync_directory, write_atomically
from regard.training.checkpoint import Checkpoint, DamagedCheckpointError, read_facts

STATE_FOLDER, CHECKSUMS = "state", "checksums.json"
TENSORS = "state.safetensors"
# The JSON values of a sharded checkpoint, whose tensors are in one file per rank.
FACTS = "facts.json"


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

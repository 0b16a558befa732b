"""Output files that are written block by block and resumed after an interruption."""

import bz2
import errno
import gzip
import json
import lzma
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from regard.config_reader import json_bytes, read_json
from regard.data.text.compression import SUFFIXES
from regard.errors import RegardError
from regard.files import check_output_file, write_atomically
from regard.ranges import format_value

AllowedChange = tuple[str, Any, Any]
"""a setting that may change on resuming, with its previous and its new value: ("truncate", False, True)"""

# Each block is compressed separately: a sequence of gzip members (bzip2 or xz streams) is a valid file, and remains one
# if it is cut between two of them. Without a time stamp, the bytes depend only on the data.
_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    "gzip": lambda data: gzip.compress(data, compresslevel=6, mtime=0),
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}
_JOURNAL_FIELDS = ("items", "bytes", "totals", "input_sha256", "settings")
_RESUME_HINT = "Free some space, or fix the cause, and run the same command again: it resumes."


def check_output(output: str | Path, inputs: Collection[str | Path] = (), *, overwrite: bool = False) -> None:
    """Raise an error if an output file cannot be written: it exists, is one of the inputs, or its folder is missing.

    >>> check_output("no-such-folder/corpus.fr")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder/corpus.fr: there is no folder no-such-folder. Create it first.
    """
    path = Path(output)
    check_output_file(path, inputs)
    compression = SUFFIXES.get(path.suffix, "")
    if compression not in _COMPRESS:
        raise RegardError(f"{path}: {compression} output is not supported.", "Use .gz, .bz2, .xz or plain text.")
    if not path.exists():
        return
    if not path.is_file():
        raise RegardError(f"{path}: not a regular file.", "Name a file.")
    if not overwrite and not _journal_path(_target(path)).exists():
        raise _exists_error(path)


def remove_journal(output: str | Path) -> None:
    """Remove the journal of a finished output file (see `ResumableFile`)."""
    _journal_path(_target(Path(output))).unlink(missing_ok=True)


class ResumableFile:
    """An output file that is written block by block and, if interrupted at any moment, resumed.

    Blocks are appended to OUTPUT.partial. After each block, the journal OUTPUT.partial.json records how many items and
    bytes are complete; bytes beyond that belong to an interrupted block and are removed on resuming. At the end, the
    partial file is renamed to OUTPUT.

    `settings` are stored in the journal; resuming with other settings is an error, except for `allowed_changes`. With
    `overwrite`, OUTPUT may exist and is replaced at the end, and other settings start again. `header(items)` is the
    header of a binary format; its length must not depend on the number of items.

    >>> import tempfile
    >>> output = Path(tempfile.mkdtemp()) / "numbers.txt"
    >>> with ResumableFile(output, {"base": 10}) as file:
    ...     file.append(b"1\\n2\\n", 2)
    >>> with ResumableFile(output, {"base": 10}) as file:
    ...     file.items, file.append(b"3\\n", 1), file.finish()
    (2, None, None)
    >>> output.read_bytes()
    b'1\\n2\\n3\\n'
    """

    def __init__(
        self,
        output: str | Path,
        settings: dict[str, Any],
        *,
        overwrite: bool = False,
        allowed_changes: Collection[AllowedChange] = (),
        header: Callable[[int], bytes] | None = None,
    ) -> None:
        check_output(output, overwrite=overwrite)
        self.output, self.header = Path(output), header
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))  # as they are read from the journal
        self.target = _target(self.output)
        self.partial, self.journal = _partial_path(self.target), _journal_path(self.target)
        self.compress = _COMPRESS[SUFFIXES.get(self.output.suffix, "")]
        self.items, self.bytes, self.totals, self.input_sha256 = 0, 0, dict[str, float](), ""
        self.is_complete = False
        """whether all items have been written, so that only `finish` remains"""
        self._file: BinaryIO | None = None
        if self.target.exists():
            journal = None if self.partial.exists() else self._read_journal()
            if journal is not None and journal["complete"] and not self._differences(journal, allowed_changes):
                self._restore(journal)  # interrupted after the partial file was renamed
                return
            if not overwrite:
                raise _exists_error(self.output)
        self._file = self._open_partial()
        try:
            self._resume_or_restart(overwrite, allowed_changes)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "ResumableFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_renamed(self) -> bool:
        """Whether the partial file has been renamed to the output file."""
        return self._file is None

    def close(self) -> None:
        """Close the partial file, and remove one without items."""
        if self._file is None:
            return
        with suppress(OSError):  # already reported
            self._file.close()
        if self.items == 0:
            self.partial.unlink(missing_ok=True)
            self.journal.unlink(missing_ok=True)

    def append(
        self, data: bytes, items: int, *, input_sha256: str = "", totals: Mapping[str, float] | None = None
    ) -> None:
        """Append the output for `items` items. `input_sha256` is the hash of all input so far; `totals` are summed."""
        if self._file is None:  # the output is complete; the input was not
            raise _exists_error(self.output)
        data = self.compress(data)
        self.is_complete = False
        self._write(self.bytes, data)
        self.bytes += len(data)
        self.items += items
        self.input_sha256 = input_sha256
        for name, value in (totals or {}).items():
            self.totals[name] = self.totals.get(name, 0) + value
        self._write_journal()

    def finish(self, *, keep_journal: bool = False) -> None:
        """Rename the partial file to the output file, and remove the journal, by which a finished file is known."""
        if self._file is not None:
            if self.header is not None:
                self._write(0, self.header(self.items))
            self.is_complete = True
            self._write_journal()
        with self._convert_errors():
            if self._file is not None:
                self._file.close()
                self._file = None
                if self.target.exists():
                    os.chmod(self.partial, stat.S_IMODE(self.target.stat().st_mode))
                os.replace(self.partial, self.target)
            if not keep_journal:
                self.journal.unlink()

    def restart(self) -> None:
        """Remove the output so far."""
        if self._file is None:
            self._file = self._open_partial()
        self.items, self.totals, self.input_sha256, self.is_complete = 0, {}, "", False
        header = b"" if self.header is None else self.header(0)
        with self._convert_errors():
            self._file.truncate(0)
        self._write(0, header)
        self.bytes = len(header)
        self._write_journal()

    def resume_error(self, problem: str) -> RegardError:
        """The error for a partial file that cannot be resumed."""
        if self._file is None:  # it was renamed
            return _exists_error(self.output)
        return RegardError(
            f"{self.partial} cannot be resumed: {problem}.",
            f"Delete {self.partial}, or use --overwrite (in Python overwrite=True), to start again.",
        )

    def _resume_or_restart(self, overwrite: bool, allowed_changes: Collection[AllowedChange]) -> None:
        """Resume the partial file if its journal fits. With other content, only `overwrite` permits to restart."""
        assert self._file is not None
        journal = self._read_journal()
        size = os.fstat(self._file.fileno()).st_size
        problem = ""
        if journal is None:
            problem = f"{self.journal.name}, which records its settings, is missing"
        elif differences := self._differences(journal, allowed_changes):
            problem = f"it was written with other settings ({'; '.join(differences)})"
        elif size < journal["bytes"]:
            problem = f"it has {size:,} bytes, but {self.journal.name} records {journal['bytes']:,}"
        if size and problem and not overwrite:
            raise self.resume_error(problem)
        if journal is None or size == 0 or problem:
            self.restart()
            return
        self._restore(journal)
        with self._convert_errors():
            self._file.truncate(self.bytes)

    def _open_partial(self) -> BinaryIO:
        """Open the partial file and lock it for this process; the lock ends with the process.

        A POSIX lock (lockf, not flock) is not inherited by forked workers, which may outlive this process for a moment.
        """
        with self._convert_errors():
            file = open(self.partial, "r+b" if self.partial.exists() else "x+b")  # noqa: SIM115
        try:
            import fcntl

            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.close()
            raise RegardError(
                f"{self.partial} is in use by another process.", "Wait for it to end, or name another output."
            ) from None
        except (ImportError, OSError):  # not supported by the operating system or the file system
            return file
        if not self.partial.exists() or not os.path.samestat(self.partial.stat(), os.fstat(file.fileno())):
            file.close()  # renamed by another process in the meantime
            raise _exists_error(self.output)
        return file

    def _read_journal(self) -> dict[str, Any] | None:
        if not self.journal.exists():
            return None
        journal = read_json(self.journal)
        if missing := {"complete", *_JOURNAL_FIELDS} - journal.keys():
            raise RegardError(
                f"{self.journal}: not a journal of an output file ({', '.join(sorted(missing))} missing).",
                f"Delete it and {self.partial} to start again.",
            )
        for name in ("complete", *_JOURNAL_FIELDS):
            if not _is_valid(name, journal[name]):
                raise RegardError(
                    f"{self.journal}: invalid {name} ({format_value(journal[name])}).",
                    f"Delete it and {self.partial} to start again.",
                )
        return journal

    def _differences(self, journal: dict[str, Any], allowed_changes: Collection[AllowedChange]) -> list[str]:
        """The settings that differ from those in the journal, with both values."""
        previous = journal["settings"]
        changes = [(name, previous.get(name), self.settings.get(name)) for name in sorted({*previous, *self.settings})]
        return [
            f"{name} was {old}, now {new}"
            for name, old, new in changes
            if old != new and (name, old, new) not in allowed_changes
        ]

    def _restore(self, journal: dict[str, Any]) -> None:
        self.items, self.bytes, self.totals = journal["items"], journal["bytes"], journal["totals"]
        self.input_sha256, self.is_complete = journal["input_sha256"], journal["complete"]

    def _write(self, offset: int, data: bytes) -> None:
        assert self._file is not None
        with self._convert_errors():
            self._file.seek(offset)
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())

    def _write_journal(self) -> None:
        table = {"complete": self.is_complete} | {name: getattr(self, name) for name in _JOURNAL_FIELDS}
        try:
            write_atomically(self.journal, json_bytes(table))
        except RegardError as error:
            raise RegardError(error.message, _RESUME_HINT) from None

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Convert errors of the operating system, such as a full disk."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            problem = "no space left on the device" if full else f"cannot be written: {error.strerror}"
            raise RegardError(f"{self.partial}: {problem} ({self.items:,} items are complete).", _RESUME_HINT) from None


def _is_valid(name: str, value: Any) -> bool:
    """Whether a field of a journal has a value of its type."""
    if name in ("items", "bytes"):
        return type(value) is int and value >= 0
    if name == "totals":
        return isinstance(value, dict) and all(type(total) in (int, float) for total in value.values())
    return isinstance(value, {"complete": bool, "input_sha256": str, "settings": dict}[name])


def _target(output: Path) -> Path:
    """The file behind a symbolic link: the partial file must be in the folder of the file that it becomes."""
    return Path(os.path.realpath(output)) if output.is_symlink() else output


def _partial_path(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def _journal_path(target: Path) -> Path:
    return target.with_name(target.name + ".partial.json")


def _exists_error(path: Path) -> RegardError:
    return RegardError(f"{path} exists.", "Name another output, or use --overwrite (in Python overwrite=True).")

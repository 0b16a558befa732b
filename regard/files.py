"""Whole files: read with errors that name them, replaced atomically; devices and standard output written directly."""

import contextlib
import errno
import os
import stat
import sys
from pathlib import Path

from regard.errors import RegardError

STDOUT = Path("-")


def read_file(path: str | Path) -> bytes:
    """The content of a file that belongs to a model.

    >>> read_file("no-such.model")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such.model: the file is missing. Is the folder complete?
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise RegardError(f"{path}: the file is missing.", "Is the folder complete?") from None
    except OSError as error:
        raise RegardError(f"{path}: cannot be read: {error.strerror}.", "Restore the file from a good copy.") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash at any moment the old or the new content is there, never half of one.

    A symbolic link is followed and stays; a file that is replaced keeps its mode. A device or a named pipe cannot be
    replaced: it is written to directly, and so is the file that standard output is redirected to.
    """
    try:
        found = _stat(path)
        if found is not None and stat.S_ISDIR(found.st_mode):
            raise RegardError(f"{path}: is a directory.", "Name a file.")
        if found is not None and _is_stdout(found):
            _write_stdout(content)
        elif found is not None and not stat.S_ISREG(found.st_mode):
            with open(path, "wb") as file:
                file.write(content)
        else:
            _replace(Path(os.path.realpath(path)), content, found)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RegardError(
                f"{path}: no space left on the device ({len(content) / 2**20:.0f} MiB needed).",
                "What was saved before is still whole; make room and run the same command again.",
            ) from None
        raise RegardError(f"{path}: cannot be written: {error.strerror}.", "Choose another --out.") from None


def write_output(path: Path, content: bytes) -> None:
    """Write the result of a command: `write_atomically`, or standard output where the path is "-"."""
    if path == STDOUT:
        _write_stdout(content)
    else:
        write_atomically(path, content)


def _stat(path: Path) -> os.stat_result | None:
    """What the path refers to, links followed; None where there is nothing yet."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _is_stdout(found: os.stat_result) -> bool:
    try:
        return os.path.samestat(found, os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError, AttributeError):  # no standard output, or one without a descriptor
        return False


def _write_stdout(content: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def _replace(path: Path, content: bytes, replaced: os.stat_result | None) -> None:
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # left by a crash; opening it could follow a link
        with open(part, "xb") as file:
            if replaced is not None:
                os.chmod(part, stat.S_IMODE(replaced.st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise

"""Reading and writing of files: errors name the file, writing is atomic; devices and stdout are written directly."""

import contextlib
import errno
import os
import stat
import sys
from pathlib import Path

from regard.errors import RegardError

STDOUT = Path("-")
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# Errors of systems that cannot open or flush directories.
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF)


def read_file(path: str | Path) -> bytes:
    """Read a file of a model folder.

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
    """Write a file atomically: after a crash it has either the old or the new content, never a part.

    Symbolic links are followed, and a replaced file keeps its mode. Devices, named pipes and the file that standard
    output is redirected to are written directly, since they cannot be replaced.
    """
    try:
        status = _stat(path)
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise RegardError(f"{path}: is a directory.", "Name a file.")
        if status is not None and is_stdout(status):
            _write_stdout(content)
        elif status is not None and not stat.S_ISREG(status.st_mode):
            with open(path, "wb") as file:
                file.write(content)
        else:
            _replace(Path(os.path.realpath(path)), content, status)
    except OSError as error:
        if error.errno in FULL_DISK:
            raise RegardError(
                f"{path}: no space left on the device ({len(content) / 2**20:.0f} MiB needed).",
                "The previous version of the file is intact; free some space and run the same command again.",
            ) from None
        raise RegardError(f"{path}: cannot be written: {error.strerror}.", "Choose another --out.") from None


def write_output(path: Path, content: bytes) -> None:
    """Write the result of a command to a file, or to standard output if the path is "-"."""
    if path == STDOUT:
        _write_stdout(content)
    else:
        write_atomically(path, content)


def _stat(path: Path) -> os.stat_result | None:
    """Status of the file, with links followed; None if it does not exist."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def is_stdout(status: os.stat_result) -> bool:
    """Whether this is the status of the file that standard output is redirected to."""
    try:
        return os.path.samestat(status, os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError, AttributeError):  # stdout is missing or has no file descriptor
        return False


def _write_stdout(content: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def _replace(path: Path, content: bytes, replaced: os.stat_result | None) -> None:
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # left by a crash; opening it might follow a link
        with open(part, "xb") as file:
            if replaced is not None:
                os.chmod(part, stat.S_IMODE(replaced.st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def sync_directory(folder: Path) -> None:
    """Flush a directory to disk, so that new and renamed files in it survive a power failure."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise

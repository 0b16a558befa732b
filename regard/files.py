"""Reading and writing of files: errors name the file, writing is atomic; devices and stdout are written directly.

Everything that writes results calls `check_output_file` or `check_output_folder` first: neither an input nor another
model is ever replaced.
"""

import contextlib
import errno
import fnmatch
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from regard.errors import RegardError

STDOUT = Path("-")
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# Errors of systems that cannot open or flush directories.
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF)
# What a folder contains, by the names of files (patterns): models of any format, token shards, training runs.
_CONTENTS = {
    "config.json": "a model",
    "*.safetensors": "a model",
    "*.onnx": "a model",
    "*.gguf": "a model",
    "model.bin": "a model",
    "dataset.json": "token shards",
    "tokenizer.json": "a tokenizer",
    "target_tokenizer.json": "a tokenizer",
    "training.json": "a model",
    "state": "a training run",
}


def check_output_file(path: str | Path, inputs: Iterable[str | Path | None] = ()) -> None:
    """Raise an error if a file must not be written: an input, a file of a model folder, or in a missing folder.

    >>> check_output_file("no-such-folder/page.html")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such-folder/page.html: there is no folder no-such-folder. Create it first.
    """
    path = Path(path)
    if path == STDOUT:
        return
    if path.is_dir():
        raise RegardError(f"{path}: is a directory.", "Name a file.")
    if not path.parent.is_dir():
        raise RegardError(f"{path}: there is no folder {path.parent}.", "Create it first.")
    if any(_is_same(path, file) for file in inputs):
        raise RegardError(f"{path}: the input and the output are the same file.", "Name another output.")
    folder = path.resolve().parent
    is_content = any(path.resolve().match(pattern) for pattern in _CONTENTS)
    if path.exists() and is_content and any((folder / name).exists() for name in ("config.json", "dataset.json")):
        raise RegardError(f"{path}: the file is part of a model folder or of token shards.", "Name another output.")


def check_output_folder(
    folder: str | Path, inputs: Iterable[str | Path | None] = (), *, allow_content: bool = False
) -> None:
    """Raise an error if a folder must not be written: an input, or one that contains a model or data of any format.

    With `allow_content`, the caller knows the content of the folder and may replace it.

    >>> check_output_folder("")
    Traceback (most recent call last):
    regard.errors.RegardError: The output is the current folder (a path of "" or "."). Name another folder.
    """
    if str(folder) in ("", "."):
        raise RegardError('The output is the current folder (a path of "" or ".").', "Name another folder.")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise RegardError(f"{folder}: a file of that name exists.", "Name another folder.")
    if any(_is_same(folder, path) for path in inputs):
        raise RegardError(f"{folder}: the input and the output are the same folder.", "Name another output.")
    content = folder_content(folder)
    if content and not allow_content:
        raise RegardError(f"{folder} already contains {content}.", "Name another folder, or delete that one first.")


def folder_content(folder: Path) -> str:
    """What a folder contains that must not be replaced, such as "a model (config.json)"; empty if there is nothing."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for pattern, content in _CONTENTS.items():
        for name in fnmatch.filter(names, pattern):
            # An empty folder is left by a run that was killed as it started.
            if not (folder / name).is_dir() or os.listdir(folder / name):
                return f"{content} ({name})"
    return ""


def _is_same(path: Path, other: str | Path | None) -> bool:
    """Whether both paths lead to the same file or folder; an input may also be a text that names no file."""
    try:
        return other is not None and os.path.samefile(path, other)
    except (OSError, ValueError):
        return False


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
    """Write a file of a folder atomically: after a crash it has either the old or the new content, never a part.

    Missing folders are created. Symbolic links are followed, and a replaced file keeps its mode. Devices, named pipes
    and the file that standard output is redirected to are written directly, since they cannot be replaced.
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
            intact = "The previous version of the file is intact; free" if os.path.isfile(path) else "Free"
            raise RegardError(
                f"{path}: no space left on the device ({len(content) / 2**20:.0f} MiB needed).",
                f"{intact} some space and run the same command again.",
            ) from None
        raise RegardError(f"{path}: cannot be written: {error.strerror}.", "Name another output.") from None


def write_output(path: Path, content: bytes) -> None:
    """Write a result to a file, or to standard output if the path is "-"."""
    check_output_file(path)
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

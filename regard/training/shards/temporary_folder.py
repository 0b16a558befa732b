"""The temporary folder of a preparation, which gets its name when it is complete."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.errors import RegardError

LOCK = "prepare.lock"


@contextlib.contextmanager
def temporary_folder(out: Path) -> Iterator[Path]:
    """Yield the folder OUT.part, which is renamed to OUT at the end and removed after an error."""
    if str(out) in ("", "."):
        raise RegardError("--out is empty.", "Pass a folder for the shards, for example --out shards.")
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise RegardError(f"{out} already exists.", "Choose another --out, or delete it first.")
    part = out.with_name(out.name + ".part")
    if part.exists() and not (part / LOCK).exists():
        raise RegardError(f"{part} exists and is not from an interrupted regard prepare.", "Choose another --out.")
    try:
        part.mkdir(parents=True, exist_ok=True)
        with open(part / LOCK, "a", encoding="utf-8") as lock:
            _lock(lock, part)
            try:
                for entry in part.iterdir():  # left by an interrupted process
                    if entry.name != LOCK:
                        entry.unlink()
                yield part
                (part / LOCK).unlink()
                os.replace(part, out)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RegardError(
                f"{out}: no space left on the device; the uncompressed text and the shards must fit.",
                "Free some space, or choose another --out. Nothing was left behind.",
            ) from None
        place = error.filename or part
        raise RegardError(f"{place}: cannot be written: {error.strerror}.", "Choose another --out.") from None


def _lock(file: Any, part: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RegardError(
            f"{part} is in use by another regard prepare.", "Wait for it to end, or choose another --out."
        ) from None
    except OSError:  # the file system does not support locks
        return

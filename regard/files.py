"""Files that are written whole or not at all."""

import contextlib
import errno
import os
from pathlib import Path

from regard.errors import RegardError


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that after a crash at any moment the old one or the new one is there, never half of one."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RegardError(
                f"{path}: no space left on the device ({len(content) / 2**20:.0f} MiB wanted).",
                "What was saved before is still whole; make room and run the same command again.",
            ) from None
        raise RegardError(f"{path}: cannot be written: {error.strerror}.", "Choose another --out.") from None

"""Errors that a user can act on."""

import difflib
import importlib
import shlex
import sys
from collections.abc import Iterable
from typing import Any


class RegardError(Exception):
    """An error that a user can fix: what is wrong, and a hint what to do.

    >>> raise RegardError("pairs.tsv, line 3: no tab.", hint="Write source<TAB>target on every line.")
    Traceback (most recent call last):
    regard.errors.RegardError: pairs.tsv, line 3: no tab. Write source<TAB>target on every line.
    """

    exit_code = 2
    """exit code of the command line"""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} {hint}".strip())
        self.message = message
        self.hint = hint


class Interrupted(RegardError):
    """Stopped by Ctrl-C after the work so far was saved.

    >>> Interrupted("Interrupted at step 7.", "The same command resumes the run.").exit_code
    130
    """

    exit_code = 130


class Preempted(Interrupted):
    """Stopped by SIGTERM or SIGUSR1 after the work so far was saved: a cluster can start the same command again.

    >>> Preempted("Interrupted at step 7.").exit_code  # EX_TEMPFAIL
    75
    """

    exit_code = 75


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Hint that names the closest known name; `otherwise` if none is similar.

    >>> did_you_mean("trian", ["train", "look"]), did_you_mean("x", ["train"], "Use train.")
    ('Did you mean train?', 'Use train.')
    """
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {matches[0]}?" if matches else otherwise


def require_package(name: str, extra: str) -> Any:
    """Import an optional package; if it is missing, the error has the command that installs those of its extra.

    >>> require_package("no_such_package", "gguf")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    regard.errors.RegardError: no_such_package is not installed. Install it with: ... -m pip install "gguf...
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        from importlib import metadata  # slow

        try:
            declared = metadata.requires("regard") or []
        except metadata.PackageNotFoundError:
            declared = []
        needed = [text.partition(";")[0].strip() for text in declared if f'extra == "{extra}"' in text]
        packages = " ".join(f'"{package}"' for package in needed or [name.partition(".")[0]])
        command = f"{shlex.quote(sys.executable or 'python')} -m pip install {packages}"
        raise RegardError(f"{name} is not installed.", f"Install it with: {command}") from None

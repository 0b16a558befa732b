"""Errors that a user can act on."""

import difflib
from collections.abc import Iterable


class RegardError(Exception):
    """Something a user can put right: what happened, and what to do about it.

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
    """Stopped by Ctrl-C or SIGTERM after the work so far was saved.

    >>> Interrupted("Interrupted at step 7.", "The same command resumes the run.").exit_code
    130
    """

    exit_code = 130


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The hint that names the nearest of the known names; `otherwise` where none is near.

    >>> did_you_mean("trian", ["train", "look"]), did_you_mean("x", ["train"], "There is train.")
    ('Did you mean train?', 'There is train.')
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {near[0]}?" if near else otherwise

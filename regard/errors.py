"""Errors that a user can act on."""

import difflib
from collections.abc import Iterable


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

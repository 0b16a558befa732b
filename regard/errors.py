"""The one error that a user of Regard ever sees."""


class RegardError(Exception):
    """Something a user can put right: what happened, and what to do about it.

    >>> raise RegardError("pairs.tsv, line 3: no tab.", hint="Write source<TAB>target on every line.")
    Traceback (most recent call last):
    regard.errors.RegardError: pairs.tsv, line 3: no tab. Write source<TAB>target on every line.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} {hint}".strip())
        self.message = message
        self.hint = hint

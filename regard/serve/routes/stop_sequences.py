"""Stop sequences: an output ends before the first of them."""

from collections.abc import Sequence

from regard.serve.serve_errors import RequestError

MAX_STOP_SEQUENCES = 4


class StopSequences:
    """Cuts a text that arrives piece by piece before the first stop sequence.

    >>> stop = StopSequences(["END"])
    >>> [stop.add(piece) for piece in ("one E", "N", "D two")], stop.is_found
    (['one ', '', ''], True)
    """

    def __init__(self, sequences: Sequence[str]) -> None:
        self.sequences = [sequence for sequence in sequences if sequence]
        self.is_found = False
        self._held = ""

    @classmethod
    def from_field(cls, value: str | Sequence[str] | None) -> "StopSequences":
        """From the field `stop` of a request: a string, a list or nothing."""
        sequences = [] if value is None else [value] if isinstance(value, str) else list(value)
        if len(sequences) > MAX_STOP_SEQUENCES:
            raise RequestError(f"stop has {len(sequences)} sequences; at most {MAX_STOP_SEQUENCES} are allowed.")
        return cls(sequences)

    def add(self, piece: str) -> str:
        """The text that can be shown: the end that may begin a stop sequence is held back."""
        if self.is_found:
            return ""
        text = self._held + piece
        starts = [start for sequence in self.sequences if (start := text.find(sequence)) >= 0]
        if starts:
            self.is_found, self._held = True, ""
            return text[: min(starts)]
        held = max((_overlap(text, sequence) for sequence in self.sequences), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The text held back, at the end."""
        held, self._held = self._held, ""
        return held

    def cut(self, text: str) -> tuple[str, bool]:
        """A whole text before its first stop sequence, and whether there was one.

        >>> StopSequences(["."]).cut("One. Two.")
        ('One', True)
        """
        stop = StopSequences(self.sequences)
        return stop.add(text) + stop.flush(), stop.is_found


def _overlap(text: str, sequence: str) -> int:
    """The length of the longest end of the text that is a beginning of the sequence."""
    lengths = range(min(len(text), len(sequence) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(sequence[:length])), 0)

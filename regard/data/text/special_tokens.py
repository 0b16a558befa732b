"""The ids that mean something to a program: where texts begin and end, what is filled up, what is hidden."""

from dataclasses import dataclass

from regard.ranges import Natural, check_ranges

SPECIALS = ("<pad>", "<unk>", "<sos>", "<eos>")
PAD, UNK, SOS, EOS = range(4)
# Where a tokeniser has it, its id is 4.
MASK_NAME = "<mask>"


@dataclass(frozen=True)
class Special:
    """The special ids of a model: by default those of models trained here; imported ones state theirs.

    `begin` and `end` frame each text that is read, and `between`, if any, comes before a second one (RoBERTa); `sos`
    begins what is written and `forced`, if any, comes after it; `eos` ends it.

    >>> special = Special(begin=7, end=8, between=8)
    >>> special.framed([5, 6]) + special.second([4])
    [7, 5, 6, 8, 8, 4, 8]
    """

    pad: Natural = PAD
    unk: Natural = UNK
    sos: Natural = SOS
    eos: Natural = EOS
    mask: Natural | None = None
    begin: Natural | None = None
    end: Natural | None = None
    forced: Natural | None = None
    between: Natural | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "special.")

    def framed(self, ids: list[int]) -> list[int]:
        """A text as the model reads it."""
        return [*_some(self.begin), *ids, *_some(self.end)]

    def second(self, ids: list[int]) -> list[int]:
        """A text after another that is framed: it has an end of its own, and no beginning."""
        return [*_some(self.between), *ids, *_some(self.end)]

    def begun(self, ids: list[int]) -> list[int]:
        """A text as the model writes it, without its end."""
        return [self.sos, *_some(self.forced), *ids]


def _some(number: int | None) -> list[int]:
    return [] if number is None else [number]


# What each kind of model trained here is given: a source to translate, a text to go on with, a text to read.
TRANSLATING, WRITING, READING = Special(end=EOS), Special(begin=SOS), Special(begin=SOS, end=EOS, mask=len(SPECIALS))

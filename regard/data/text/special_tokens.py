"""Special token ids: padding, unknown, begin and end of a text, mask."""

from dataclasses import dataclass

from regard.ranges import Natural, check_ranges

SPECIAL_TOKEN_NAMES = ("<pad>", "<unk>", "<sos>", "<eos>")
PAD, UNK, SOS, EOS = range(4)
# Id 4 in tokenizers that have a mask token.
MASK_TOKEN = "<mask>"


@dataclass(frozen=True)
class SpecialTokens:
    """Special token ids of a model. The defaults are those of models trained with Regard; imported models set theirs.

    `begin` and `end` surround each input text, and `between`, if set, precedes the second text of a pair (RoBERTa).
    `after_end`, if set, follows `end` (mBART: the source language). Decoder output starts with `sos`, followed by
    `forced` if set (forced BOS token), and ends with `eos` or one of `other_eos`.

    >>> special = SpecialTokens(begin=7, end=8, between=8)
    >>> special.add_special_tokens([5, 6]) + special.add_special_tokens_to_second([4])
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
    other_eos: tuple[Natural, ...] = ()
    after_end: Natural | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "special.")

    @property
    def ends(self) -> tuple[int, ...]:
        """All tokens that end an output."""
        return (self.eos, *self.other_eos)

    @property
    def ids(self) -> list[int]:
        """All ids that are set."""
        one_each = (self.pad, self.unk, self.sos, self.eos, self.mask, self.begin, self.end, self.forced, self.between)
        return [*(token for token in (*one_each, self.after_end) if token is not None), *self.other_eos]

    @property
    def prefix(self) -> list[int]:
        """The ids before an input text."""
        return _optional(self.begin)

    @property
    def suffix(self) -> list[int]:
        """The ids after an input text."""
        return [*_optional(self.end), *_optional(self.after_end)]

    def add_special_tokens(self, ids: list[int]) -> list[int]:
        """Surround the ids of an input text with `begin`, `end` and `after_end`."""
        return [*self.prefix, *ids, *self.suffix]

    def add_special_tokens_to_second(self, ids: list[int]) -> list[int]:
        """Surround the ids of the second text of a pair with `between` and `end`."""
        return [*_optional(self.between), *ids, *_optional(self.end)]

    def make_decoder_input(self, ids: list[int]) -> list[int]:
        """Decoder input for the ids of a target text: `sos`, `forced` if set, and the ids, without `eos`."""
        return [self.sos, *_optional(self.forced), *ids]


def _optional(token: int | None) -> list[int]:
    return [] if token is None else [token]


# Defaults of translators, language models and text encoders trained with Regard.
SEQ2SEQ_TOKENS, CAUSAL_LM_TOKENS, ENCODER_TOKENS = (
    SpecialTokens(end=EOS),
    SpecialTokens(begin=SOS),
    SpecialTokens(begin=SOS, end=EOS, mask=len(SPECIAL_TOKEN_NAMES)),
)

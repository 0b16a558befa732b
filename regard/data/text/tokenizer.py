"""Text to ids and back: tokenisers of words, characters, subwords and bytes, trained on the data at hand.

The work is done by the `tokenizers` library and saved in its own format, so that other tools read our files.
"""

import json
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from regard.data.text.special_tokens import MASK_NAME, SPECIALS, UNK
from regard.errors import RegardError
from regard.files import read_file, write_whole

# The sign that begins a word in the vocabulary, so that decoding knows where the spaces were.
SPACE = "▁"
_LETTER = r"[\p{L}\p{M}\p{N}]"
# Text that was tokenised by the Moses scripts has entities in its words: d&apos; is one word, &quot; another.
_ENTITY = r"&(?:[a-z]+|#[0-9]+);"
_HYPHEN = rf"(?<={_LETTER})-(?={_LETTER})"


def _words(*parts: str) -> pre_tokenizers.PreTokenizer:
    """Words made of `parts`, an apostrophe closing the word before it (l'|homme); every other sign by itself.

    The names of the special tokens fall apart in this ("<", "pad", ">"), so no text can spell one.
    """
    pattern = rf"{SPACE}?(?:{'|'.join(parts)})+['’]?|{SPACE}?[^{SPACE}]|{SPACE}"
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([pre_tokenizers.Metaspace(SPACE), split])


# How each kind cuts a text before it looks at the vocabulary. No two are alike, so a saved file says its kind.
_PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "word": _words(_LETTER, _ENTITY),
    "space": pre_tokenizers.Metaspace(SPACE),
    "char": pre_tokenizers.Split(Regex(r"(?m)."), "isolated"),  # (?m): here, that a dot is a line end too
    "bpe": _words(_LETTER, _ENTITY, _HYPHEN),  # whether t-shirt is one piece, its frequency decides
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
}
KINDS = tuple(_PRE_TOKENIZERS)
# A tokeniser of another program, which came with an imported model.
FOREIGN = "foreign"


def _decoder(kind: str, line_ends: bool = False) -> decoders.Decoder:
    special = {"char": decoders.Fuse(), "bytes": decoders.ByteLevel()}
    if line_ends:
        return decoders.Sequence([decoders.Metaspace(SPACE), decoders.Fuse(), decoders.Replace("\n ", "\n")])
    return special.get(kind, decoders.Metaspace(SPACE))


def _normalizer(
    kind: str, lowercase: bool, exact: bool = False, line_ends: bool = False
) -> normalizers.Normalizer | None:
    steps: list[normalizers.Normalizer] = []
    if exact:
        return normalizers.Lowercase() if lowercase else None
    if kind not in ("bytes", "space"):  # bytes are exact; for "space", signs are symbols, not to be recomposed
        # Characters are taken apart: accents by themselves, and the thousands of Hangul syllables as their few letters.
        steps.append(normalizers.NFD() if kind == "char" else normalizers.NFC())
    if lowercase:
        steps.append(normalizers.Lowercase())
    if line_ends:
        # ^ and $ match at every line here: spaces at both ends of a line are removed. A space after each line end makes
        # the first word of a line the same token as elsewhere; the decoder removes it.
        rules = ((rf"[^\S\n]+|{SPACE}+", " "), ("^ +| +$", ""), (r"\n", "\n "), (r" +\z", ""))
        steps += [normalizers.Replace(Regex(pattern), text) for pattern, text in rules]
    elif kind != "bytes":
        steps += [normalizers.Replace(Regex(rf"[\s{SPACE}]+"), " "), normalizers.Strip()]
    return normalizers.Sequence(steps) if steps else None


class Tokenizer:
    """Text to ids and back. The names of special tokens inside a text are text: no text can make one.

    The kinds are

    - `word`: words and signs of punctuation; what is not in the vocabulary is `<unk>`;
    - `space`: whatever stands between white space (phonemes, text that is already tokenised);
    - `char`: characters;
    - `bpe`: subwords by byte-pair encoding, inside words;
    - `bytes`: the same over bytes, for which nothing is unknown.

    All but `bytes` read any run of white space (and the sign "▁") as one space; `word`, `char` and `bpe` give back
    composed characters (NFC). Up to that, decoding gives back the text that was encoded, if its characters (words) were
    seen.

    >>> tokenizer = Tokenizer.train(["the cat", "the mouse", "l'homme"], "word")
    >>> tokenizer.encode("the mouse"), tokenizer.decode([4, 8])
    ([4, 8], 'the mouse')
    >>> tokenizer.decode(tokenizer.encode("l'homme"))
    "l'homme"
    """

    def __init__(self, library: tokenizers.Tokenizer, kind: str) -> None:
        library.encode_special_tokens = True  # which means: as the text that they are
        self.library = library
        self.kind = kind  # one of KINDS, or FOREIGN

    @cached_property
    def exact(self) -> bool:
        """Whether every character, white space included, is taken as it is (but for its case)."""
        return self.library.normalizer is None or isinstance(self.library.normalizer, normalizers.Lowercase)

    def __eq__(self, other: object) -> bool:
        """Whether the two give every text the same ids: models of equal tokenisers can vote together."""
        return isinstance(other, Tokenizer) and (self is other or self.library.to_str() == other.library.to_str())

    def __hash__(self) -> int:
        return hash(self.library.to_str())

    @staticmethod
    def train(
        texts: Iterable[str],
        kind: str,
        vocab_size: int = 8000,
        lowercase: bool = False,
        *,
        mask: bool = False,
        exact: bool = False,
        line_ends: bool = False,
    ) -> "Tokenizer":
        """Learn a vocabulary of at most `vocab_size` entries, the four special ones and, if wanted, `<mask>` included.

        With `exact`, which is for `char`, characters are taken as they are: line ends and spaces too. With `line_ends`,
        which is for `word`, a line end is a token of its own, and only runs of other white space become one space.

        For a shared tokeniser give the texts of both sides. The same texts give the same tokeniser, byte for byte.
        Every character that occurs has its entry in `bpe` (every byte in `bytes`), even where `vocab_size` is less.
        """
        if kind not in KINDS:
            raise RegardError(f"There is no tokeniser of kind {kind!r}.", hint=f"Choose one of {', '.join(KINDS)}.")
        common: dict[str, Any] = {
            "vocab_size": vocab_size,
            "special_tokens": [*SPECIALS, *[MASK_NAME] * mask],
            "show_progress": False,
        }
        library: tokenizers.Tokenizer
        trainer: trainers.Trainer
        if kind in ("bpe", "bytes"):
            library = tokenizers.Tokenizer(models.BPE(unk_token=SPECIALS[UNK] if kind == "bpe" else None))
            alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else []
            trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **common)
        else:
            library = tokenizers.Tokenizer(models.WordLevel(unk_token=SPECIALS[UNK]))
            trainer = trainers.WordLevelTrainer(**common)
        library.normalizer = _normalizer(kind, lowercase, exact, line_ends)
        library.pre_tokenizer = _PRE_TOKENIZERS[kind]
        library.decoder = _decoder(kind, line_ends)
        library.train_from_iterator(texts, trainer)
        return Tokenizer(library, kind)

    @property
    def vocab_size(self) -> int:
        return self.library.get_vocab_size()

    @cached_property
    def vocabulary(self) -> list[str]:
        """What each id stands for, as plain text: what pre-trained word vectors know it by, and what pictures show.

        A word at the beginning of a word and inside one (after l') are two ids with the same text. A part of a
        character, which `bytes` has, shows as "�".
        """
        special = {index for index, token in self.library.get_added_tokens_decoder().items() if token.special}
        return [
            self.library.id_to_token(index) if index in special else self.library.decode([index])
            for index in range(self.vocab_size)
        ]

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without `<sos>` and `<eos>`."""
        return self.library.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts, on all cores."""
        return [one.ids for one in self.library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special ones are left out."""
        return self.decode_batch([ids])[0]

    def decode_batch(self, ids: Iterable[Iterable[int]]) -> list[str]:
        """`decode` for many sequences, on all cores."""
        texts = self.library.decode_batch([[int(one) for one in row] for row in ids], skip_special_tokens=True)
        if self.kind != "char" or self.exact:
            return texts
        return [unicodedata.normalize("NFC", text) for text in texts]  # what was taken apart

    def pieces(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        """For each id of `encode(text)` the piece of the text that it is, and its place there.

        The space before a word is no part of its piece. Where `bytes` cuts inside a character, each part has all of it.

        >>> Tokenizer.train(["the cat"], "word").pieces("the  cat")
        [('the', (0, 3)), ('cat', (5, 8))]
        """
        offsets = self.library.encode(text, add_special_tokens=False).offsets
        return [_piece(text, start, end) for start, end in offsets]

    def pieces_of(self, ids: Sequence[int]) -> list[tuple[str, tuple[int, int]]]:
        """For each id its piece of `decode(ids)`, and its place there: `pieces` for what a model has written.

        Special ids have an empty piece, and so have the later parts of a character that `bytes` has cut.

        >>> tokenizer = Tokenizer.train(["the cat"], "word")
        >>> tokenizer.pieces_of([*tokenizer.encode("the cat"), 3])  # the end
        [('the', (0, 3)), ('cat', (4, 7)), ('', (7, 7))]
        """
        text = self.decode(ids)
        ends = [len(self.decode(ids[:count])) for count in range(len(ids) + 1)]
        return [_piece(text, start, end) for start, end in pairwise(ends)]

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json."""
        write_whole(Path(path), self.library.to_str(pretty=True).encode())

    @staticmethod
    def load(path: str | Path, *, foreign: bool = False) -> "Tokenizer":
        """Open a file that `save` wrote; or, where that is allowed, any file of the `tokenizers` library."""
        content = read_file(path)
        try:
            library = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # which is all that the library raises
            raise RegardError(f"{path} is not a tokeniser: {error}.") from None
        if foreign:
            return Tokenizer(library, FOREIGN)
        for kind in KINDS:
            if _same_cut(library, _PRE_TOKENIZERS[kind]) and all(
                library.token_to_id(name) == index for index, name in enumerate(SPECIALS)
            ):
                return Tokenizer(library, kind)
        raise RegardError(
            f"{path} is a tokeniser of another program.", hint=f"Regard opens its own kinds: {', '.join(KINDS)}."
        )


def _same_cut(library: tokenizers.Tokenizer, pre_tokenizer: pre_tokenizers.PreTokenizer) -> bool:
    """Whether a tokeniser cuts texts with this very pre-tokeniser; the library compares them only as JSON."""
    other = tokenizers.Tokenizer(models.WordLevel())
    other.pre_tokenizer = pre_tokenizer
    return json.loads(library.to_str())["pre_tokenizer"] == json.loads(other.to_str())["pre_tokenizer"]


def _piece(text: str, start: int, end: int) -> tuple[str, tuple[int, int]]:
    """text[start:end] without the space before it, unless space is all it is; and its place."""
    if not text[start:end].isspace():
        start = end - len(text[start:end].lstrip())
    return text[start:end], (start, end)

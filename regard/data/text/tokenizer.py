"""Tokenizers: words, characters, subwords (BPE) and bytes, trained on the user's data.

They wrap the `tokenizers` library and are saved in its format, so that other tools can read the files.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from regard.data.text.languages import tag_code
from regard.data.text.special_tokens import MASK_TOKEN, SPECIAL_TOKEN_NAMES, UNK
from regard.errors import RegardError
from regard.files import read_file, write_atomically

# Marks the start of a word in the vocabulary, so that decoding restores spaces.
SPACE = "▁"
_LETTER = r"[\p{L}\p{M}\p{N}]"
# Text tokenized by the Moses scripts contains entities: d&apos; is one word, &quot; another.
_ENTITY = r"&(?:[a-z]+|#[0-9]+);"
_HYPHEN = rf"(?<={_LETTER})-(?={_LETTER})"


def _word_pre_tokenizer(*parts: str) -> pre_tokenizers.PreTokenizer:
    """Pre-tokenizer for words made of `parts`. An apostrophe ends the word before it (l'|homme); every other character
    is a word by itself.

    Names of special tokens are split ("<", "pad", ">"), so that no text can produce one.
    """
    pattern = rf"{SPACE}?(?:{'|'.join(parts)})+['’]?|{SPACE}?[^{SPACE}]|{SPACE}"
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([pre_tokenizers.Metaspace(SPACE), split])


def _replace_all(*rules: tuple[str | Regex, str]) -> tuple[normalizers.Normalizer, ...]:
    return tuple(normalizers.Replace(pattern, text) for pattern, text in rules)


_ONE_SPACE = (*_replace_all((Regex(rf"[\s{SPACE}]+"), " ")), normalizers.Strip())
# ^ and $ match at every line: spaces at both ends of a line are removed. A space is added after each newline, so that
# the first word of a line is the same token as elsewhere; the decoder removes it.
_ONE_SPACE_OR_NEWLINES = _replace_all(
    *((Regex(rf"[^\S\n]+|{SPACE}+"), " "), (Regex("^ +| +$"), ""), (Regex(r"\n"), "\n "), (Regex(r" +\z"), ""))
)
_DECODE_NEWLINES = decoders.Sequence([decoders.Metaspace(SPACE), decoders.Fuse(), decoders.Replace("\n ", "\n")])
# The steps that the files of sentencepiece can express.
_SENTENCEPIECE_SPACES = (
    *_replace_all((Regex(" +"), " "), (Regex(r"\A "), "")),
    normalizers.Prepend(SPACE),
    *_replace_all((" ", SPACE), (Regex(rf"{SPACE}+\z"), "")),
)


@dataclass(frozen=True)
class _Kind:
    """The steps of all tokenizers of a kind. Pre-tokenizers differ, so that the kind can be inferred from a file."""

    pre_tokenizer: pre_tokenizers.PreTokenizer
    form: tuple[normalizers.Normalizer, ...] = ()
    """Unicode normalization"""
    spaces: tuple[normalizers.Normalizer, ...] = _ONE_SPACE
    decoder: decoders.Decoder = field(default_factory=lambda: decoders.Metaspace(SPACE))
    bpe: dict[str, Any] | None = None
    """arguments of `models.BPE`; None: whole words"""
    alphabet: Sequence[str] = ()
    """entries that the vocabulary has in any case"""
    all_merges: bool = False
    """whether every pair whose result is an entry is merged, and not only the pairs of the training"""

    def normalizer(self, lowercase: bool, exact: bool, keep_newlines: bool) -> normalizers.Normalizer | None:
        if exact:
            return normalizers.Lowercase() if lowercase else None
        lower = (normalizers.Lowercase(),) if lowercase else ()
        steps = [*self.form, *lower, *(_ONE_SPACE_OR_NEWLINES if keep_newlines else self.spaces)]
        return normalizers.Sequence(steps) if steps else None


_UNK_TOKEN = {"unk_token": SPECIAL_TOKEN_NAMES[UNK]}
_KINDS = {
    "word": _Kind(_word_pre_tokenizer(_LETTER, _ENTITY), (normalizers.NFC(),)),
    "space": _Kind(pre_tokenizers.Metaspace(SPACE)),  # not composed: symbols must not change
    # Characters are decomposed: accents become separate, and thousands of Hangul syllables become a few letters.
    # (?m) means here that a dot also matches a newline.
    "char": _Kind(pre_tokenizers.Split(Regex(r"(?m)."), "isolated"), (normalizers.NFD(),), decoder=decoders.Fuse()),
    # t-shirt becomes one token if it is frequent
    "bpe": _Kind(_word_pre_tokenizer(_LETTER, _ENTITY, _HYPHEN), (normalizers.NFC(),), bpe=_UNK_TOKEN),
    "bytes": _Kind(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        spaces=(),
        decoder=decoders.ByteLevel(),
        bpe={},
        alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ),
    "sentencepiece": _Kind(
        pre_tokenizers.Split(SPACE, "merged_with_next"),
        spaces=_SENTENCEPIECE_SPACES,
        decoder=decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Replace(Regex(r"\A +"), "")]
        ),
        bpe=_UNK_TOKEN | {"fuse_unk": True},
        all_merges=True,
    ),
}
TOKENIZER_KINDS = tuple(_KINDS)
# Tokenizer of an imported model, not trained with Regard.
FOREIGN_KIND = "foreign"
_RESTORE = "Restore the tokenizer from a good copy."
# Limits of the parts of a long text: the library needs half a kilobyte per token while it encodes. Training on a piece
# without (or of) white space takes quadratic time.
PART_CHARS, MAX_PART_CHARS, MAX_PIECE_CHARS = 1 << 15, 1 << 16, 1 << 10
_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
_LONG_PIECE = re.compile(rf"(?<!\S)\S{{{MAX_PIECE_CHARS},}}|(?<!\s)\s{{{MAX_PIECE_CHARS},}}")


class Tokenizer:
    """Converts text to token ids and back. Names of special tokens in a text are encoded as text.

    The kinds are

    - `word`: words and punctuation marks; other words become `<unk>`;
    - `space`: tokens separated by white space (phonemes, text that is already tokenized);
    - `char`: characters;
    - `bpe`: subwords by byte-pair encoding, within words;
    - `bytes`: byte-level BPE, without unknown tokens;
    - `sentencepiece`: BPE between spaces, across punctuation, which a sentencepiece file can express.

    All but `bytes` normalize runs of white space (and "▁") to one space; `sentencepiece` changes spaces only. `word`,
    `char` and `bpe` decode to composed characters (NFC). Apart from that, decoding restores the encoded text if all its
    characters (words) are in the vocabulary.

    >>> tokenizer = Tokenizer.train(["the cat", "the mouse", "l'homme"], "word")
    >>> tokenizer.encode("the mouse"), tokenizer.decode([4, 8])
    ([4, 8], 'the mouse')
    >>> tokenizer.decode(tokenizer.encode("l'homme"))
    "l'homme"
    """

    def __init__(self, library: tokenizers.Tokenizer, kind: str) -> None:
        library.encode_special_tokens = True  # encode names of special tokens as text
        self.backend_tokenizer = library
        self.kind = kind  # one of TOKENIZER_KINDS, or FOREIGN_KIND

    @cached_property
    def is_exact(self) -> bool:
        """Whether characters, including white space, are not normalized (except to lower case)."""
        return self.backend_tokenizer.normalizer is None or isinstance(
            self.backend_tokenizer.normalizer, normalizers.Lowercase
        )

    def __eq__(self, other: object) -> bool:
        """Whether both encode every text the same way, as an ensemble requires."""
        return isinstance(other, Tokenizer) and (
            self is other or self.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
        )

    def __hash__(self) -> int:
        return hash(self.backend_tokenizer.to_str())

    @staticmethod
    def train(
        texts: Iterable[str],
        kind: str,
        vocab_size: int = 8000,
        lowercase: bool = False,
        *,
        mask: bool = False,
        exact: bool = False,
        keep_newlines: bool = False,
        tags: Sequence[str] = (),
    ) -> "Tokenizer":
        """Train a tokenizer with at most `vocab_size` entries, including the four special tokens, with `mask` `<mask>`,
        and the language `tags` (see `language_tag`).

        `exact` (for `char`) keeps characters, newlines and spaces unchanged. `keep_newlines` (for `word`) makes a
        newline a token; runs of other white space still become one space.

        For a shared tokenizer, pass the texts of both sides. Training is deterministic: the same texts give the same
        file, byte for byte. With `bpe` every character that occurs (with `bytes` every byte) has an entry, even if
        `vocab_size` is smaller.
        """
        if kind not in _KINDS:
            raise RegardError(f"Unknown tokenizer kind {kind!r}.", hint=f"Choose one of {', '.join(TOKENIZER_KINDS)}.")
        common: dict[str, Any] = {
            "vocab_size": vocab_size,
            "special_tokens": [*SPECIAL_TOKEN_NAMES, *[MASK_TOKEN] * mask, *tags],
            "show_progress": False,
        }
        style = _KINDS[kind]
        library: tokenizers.Tokenizer
        trainer: trainers.Trainer
        if style.bpe is not None:
            library = tokenizers.Tokenizer(models.BPE(**style.bpe))
            trainer = trainers.BpeTrainer(initial_alphabet=list(style.alphabet), **common)
        else:
            library = tokenizers.Tokenizer(models.WordLevel(**_UNK_TOKEN))
            trainer = trainers.WordLevelTrainer(**common)
        library.normalizer = style.normalizer(lowercase, exact, keep_newlines)
        library.pre_tokenizer = style.pre_tokenizer
        library.decoder = _DECODE_NEWLINES if keep_newlines else style.decoder
        library.train_from_iterator((part for text in texts for part in _training_parts(text)), trainer)
        if style.all_merges:
            _add_all_merges(library)
        return Tokenizer(library, kind)

    @property
    def vocab_size(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    @property
    def largest_id(self) -> int:
        """The largest token id. The ids of an imported tokenizer may have gaps, so it may exceed `vocab_size`.

        >>> tokenizer = Tokenizer.train(["one two"], "word")
        >>> tokenizer.largest_id, tokenizer.vocab_size
        (5, 6)
        """
        return max(self.backend_tokenizer.get_vocab().values(), default=-1)

    @cached_property
    def vocabulary(self) -> list[str]:
        """The text of each id, as used to look up pre-trained word vectors and to label plots.

        The same text at the start of a word and inside a word (after l') has two ids. A part of a character, possible
        with `bytes`, is shown as "�".
        """
        special = self._special_tokens
        return [
            special[index] if index in special else self.backend_tokenizer.decode([index])
            for index in range(self.vocab_size)
        ]

    @property
    def _special_tokens(self) -> dict[int, str]:
        added = self.backend_tokenizer.get_added_tokens_decoder().items()
        return {index: token.content for index, token in added if token.special}

    @cached_property
    def language_tags(self) -> dict[str, int]:
        """The ids of the tags of target languages, by language code; empty for a model of one language pair.

        >>> Tokenizer.train(["the cat"], "word", tags=["<2de>", "<2fr>"]).language_tags
        {'de': 4, 'fr': 5}
        """
        codes = {index: tag_code(token) for index, token in sorted(self._special_tokens.items())}
        return {code: index for index, code in codes.items() if code is not None}

    def label(self, token_id: int) -> str:
        """The text of an id in `vocabulary`; an id beyond it, which imported models may have, is written as a number.

        >>> tokenizer = Tokenizer.train(["the the cat"], "word")
        >>> tokenizer.label(4), tokenizer.label(99)
        ('the', '<99>')
        """
        return self.vocabulary[token_id] if token_id < len(self.vocabulary) else self.entry(token_id) or f"<{token_id}>"

    def entry(self, token_id: int) -> str:
        """The entry of the vocabulary for an id, as the tokenizer file has it: `##ing`, `▁the`, `<unk>`.

        >>> Tokenizer.train(["the cat"], "word").entry(1)
        '<unk>'
        """
        return self.backend_tokenizer.id_to_token(token_id) or ""

    def distinct_names(self, ids: Iterable[int], *, strip: bool = False) -> dict[int, str]:
        """A name of each id: its text or, if several of the ids have the same text, its entry of the vocabulary.

        >>> tokenizer = Tokenizer.train(["the the the other other"], "bpe", vocab_size=40)
        >>> inside, word = (tokenizer.backend_tokenizer.token_to_id(entry) for entry in ("the", "▁the"))
        >>> tokenizer.distinct_names([inside]), tokenizer.distinct_names([inside, word])
        ({11: 'the'}, {11: 'the', 12: '▁the'})
        """
        texts = {i: self.decode([i]) for i in ids}
        texts = {i: (text.strip() if strip else text) or self.label(i) for i, text in texts.items()}
        counts = Counter(texts.values())
        return {i: text if counts[text] == 1 else self.entry(i) or f"<{i}>" for i, text in texts.items()}

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Encode a text, without adding special tokens; with `special_tokens`, names of such tokens in it become them.

        >>> tokenizer = Tokenizer.train(["the the cat"], "word")
        >>> tokenizer.encode("the cat<eos>", special_tokens=True)
        [4, 5, 3]
        """
        backend = self._backend_with_special_tokens if special_tokens else self.backend_tokenizer
        with _library_errors("The tokenizer cannot encode a text"):
            return backend.encode(text, add_special_tokens=False).ids

    @cached_property
    def _backend_with_special_tokens(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self.backend_tokenizer.to_str())
        backend.encode_special_tokens = False
        return backend

    @cached_property
    def special_token_names(self) -> list[str]:
        """The names of the special tokens."""
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return [token.content for token in added.values() if token.special]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts, on all cores."""
        with _library_errors("The tokenizer cannot encode a text"):
            encodings = self.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text; special tokens are left out."""
        return self.decode_batch([ids])[0]

    def decode_batch(self, ids: Iterable[Iterable[int]]) -> list[str]:
        """`decode` for many sequences, on all cores."""
        rows = [[int(token) for token in row] for row in ids]
        with _library_errors("The tokenizer cannot decode ids"):
            texts = self.backend_tokenizer.decode_batch(rows, skip_special_tokens=True)
        if self.kind != "char" or self.is_exact:
            return texts
        return [unicodedata.normalize("NFC", text) for text in texts]  # the normalizer decomposed characters

    def encode_as_pieces(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        """For each id of `encode(text)`, its piece of the text and the (start, end) of that piece.

        Pieces do not include the space before a word, so the piece of a token that is only such a space (Llama's `▁` at
        the start of a text) is empty. If `bytes` splits a character, each part has the full character.

        >>> Tokenizer.train(["the cat"], "word").encode_as_pieces("the  cat")
        [('the', (0, 3)), ('cat', (5, 8))]
        """
        with _library_errors("The tokenizer cannot encode a text"):
            encoding = self.backend_tokenizer.encode(text, add_special_tokens=False)
        return [
            ("", (start, start))
            if entry == SPACE and text[start:end] != " "
            else _strip_leading_space(text, start, end)
            for entry, (start, end) in zip(encoding.tokens, encoding.offsets)
        ]

    def decode_as_pieces(self, ids: Sequence[int]) -> list[tuple[str, tuple[int, int]]]:
        """For each id, its piece of `decode(ids)` and the (start, end) of that piece, for generated ids.

        The piece of a special token is empty, and so are those of the later parts of a character split by `bytes`.

        >>> tokenizer = Tokenizer.train(["the the cat"], "word")
        >>> tokenizer.decode_as_pieces([*tokenizer.encode("the cat"), 3])  # 3 is <eos>
        [('the', (0, 3)), ('cat', (4, 7)), ('', (7, 7))]
        """
        text = self.decode(ids)
        ends = [len(self.decode(ids[:count])) for count in range(len(ids) + 1)]
        return [_strip_leading_space(text, start, end) for start, end in pairwise(ends)]

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json."""
        write_atomically(Path(path), self.backend_tokenizer.to_str(pretty=True).encode())

    @staticmethod
    def load(path: str | Path, *, foreign: bool = False) -> "Tokenizer":
        """Load a file written by `save` or, with `foreign`, any tokenizer.json of the `tokenizers` library."""
        try:
            content = read_file(path).decode()
        except UnicodeDecodeError as error:
            raise RegardError(f"{path} is not a tokenizer file: {error}.", _RESTORE) from None
        with _library_errors(f"{path} is not a tokenizer file"):
            library = tokenizers.Tokenizer.from_str(content)
            # Some errors in a file show only when a text is encoded.
            for inputs in (("a",), ("a", "b")):
                library.decode(library.encode(*inputs).ids)
        if foreign:
            return Tokenizer(library, FOREIGN_KIND)
        for kind, style in _KINDS.items():
            if _has_pre_tokenizer(library, style.pre_tokenizer) and all(
                library.token_to_id(name) == index for index, name in enumerate(SPECIAL_TOKEN_NAMES)
            ):
                tokenizer = Tokenizer(library, kind)
                if tokenizer.largest_id != tokenizer.vocab_size - 1:
                    raise RegardError(
                        f"{path}: the {tokenizer.vocab_size} entries have ids up to {tokenizer.largest_id}.", _RESTORE
                    )
                return tokenizer
        raise RegardError(f"{path}: unsupported tokenizer.", hint=f"Supported kinds: {', '.join(TOKENIZER_KINDS)}.")


def split_text(text: str) -> list[str]:
    """Split before spaces between letters, which no token spans, into parts of at least PART_CHARS characters.

    Where the next such space is beyond MAX_PART_CHARS characters, as in Chinese, the part ends there.

    >>> [len(part) for part in split_text("a " * 40_000)]
    [32769, 32768, 14463]
    """
    parts, start = [], 0
    while True:
        end = start + MAX_PART_CHARS
        if match := _BETWEEN_WORDS.search(text, start + PART_CHARS, end):
            end = match.start()
        parts.append(text[start:end])
        if end >= len(text):
            return parts
        start = end


def _training_parts(text: str) -> Iterator[str]:
    """The parts of a text to train a tokenizer on, without pieces that are too long for that."""
    for part in split_text(text) if len(text) > PART_CHARS else [text]:
        pieces = _LONG_PIECE.finditer(part) if len(part) > MAX_PIECE_CHARS else ()
        cuts = [cut for piece in pieces for cut in range(piece.start() + MAX_PIECE_CHARS, piece.end(), MAX_PIECE_CHARS)]
        yield from (part[start:end] for start, end in pairwise([0, *cuts, len(part)]))


def _add_all_merges(library: tokenizers.Tokenizer) -> None:
    """Merge each pair whose result is an entry, like sentencepiece, and not only the pairs of the training."""
    table = json.loads(library.to_str())["model"]
    known = table["vocab"].keys() - {*SPECIAL_TOKEN_NAMES, MASK_TOKEN}
    merged = dict.fromkeys(piece for piece in map("".join, table["merges"]) if piece in known)
    merges = piece_splits(merged, known)
    library.model = models.BPE(vocab=table["vocab"], merges=merges, unk_token=table["unk_token"], fuse_unk=True)


def piece_splits(pieces: Iterable[str], known: Collection[str]) -> list[tuple[str, str]]:
    """All ways to split each piece into two known ones, in the order of the pieces.

    >>> piece_splits(["ab", "abc"], {"a", "b", "c", "ab", "bc"})
    [('a', 'b'), ('a', 'bc'), ('ab', 'c')]
    """
    cuts = ((piece, cut) for piece in pieces for cut in range(1, len(piece)))
    return [(piece[:cut], piece[cut:]) for piece, cut in cuts if piece[:cut] in known and piece[cut:] in known]


@contextmanager
def _library_errors(problem: str) -> Iterator[None]:
    """Convert errors of the `tokenizers` library: it raises Exception itself, or panics if a file is damaged."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise RegardError(f"{problem}: {error}.", _RESTORE) from None


def _has_pre_tokenizer(library: tokenizers.Tokenizer, pre_tokenizer: pre_tokenizers.PreTokenizer) -> bool:
    """Whether a tokenizer has this pre-tokenizer. They can only be compared as JSON."""
    other = tokenizers.Tokenizer(models.WordLevel())
    other.pre_tokenizer = pre_tokenizer
    return json.loads(library.to_str())["pre_tokenizer"] == json.loads(other.to_str())["pre_tokenizer"]


def _strip_leading_space(text: str, start: int, end: int) -> tuple[str, tuple[int, int]]:
    """text[start:end] without leading space, unless it is all space, with its new (start, end)."""
    if not text[start:end].isspace():
        start = end - len(text[start:end].lstrip())
    return text[start:end], (start, end)

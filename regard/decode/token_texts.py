"""Texts of the tokens of a vocabulary, in which phrases are searched regardless of how they are split into tokens."""

import codecs
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import pre_tokenizers

from regard.data.text.languages import UNSEGMENTED_BLOCKS
from regard.data.text.tokenizer import SPACE, Tokenizer

# A token for one byte, in tokenizers with byte fallback.
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Characters(NamedTuple):
    """The characters that each token of a vocabulary adds to an output."""

    codes: Int[np.ndarray, "V L"]
    """Code points, padded with -1. White space is one code, that of the space."""
    joins: Bool[np.ndarray, "V L"]
    """Whether each character is part of a word (see `joins_words`)."""
    pending: list[bytes]
    """Incomplete characters: their first bytes, which later tokens complete."""
    pending_index: Int[np.ndarray, "V"]
    """For each token the entry of `pending` that it leaves."""

    def active(self, column: int) -> Int[np.ndarray, "A"]:
        """The tokens that have a character in this column."""
        return np.nonzero(self.codes[:, column] >= 0)[0]


class TokenTexts:
    """The UTF-8 text that each token adds to an output, with its leading space. Special tokens have none.

    `whole_words` states that tokens are words: no word continues in the next token. `normalize` and `encode` convert
    phrases as the tokenizer does; without `encode`, a phrase is split into as few tokens as possible.

    >>> TokenTexts([b"", b" cat", b"alog", b" c", b"a"]).matching(b" catalog", 0)
    [3, 1]
    """

    def __init__(
        self,
        texts: Sequence[bytes],
        *,
        joins: Callable[[str], bool] | None = None,
        whole_words: bool = False,
        normalize: Callable[[str], str] = lambda phrase: phrase,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.texts = list(texts)
        self.joins = joins or joins_words
        self.whole_words = whole_words
        self._normalize, self._encode = normalize, encode
        self._characters: dict[bytes, Characters] = {}
        self._ids: dict[bytes, int] = {}
        for token, text in enumerate(self.texts):
            if text:
                self._ids.setdefault(text, token)
        self._max_len = max(map(len, self._ids), default=0)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, size: int) -> "TokenTexts":
        """The texts of a tokenizer, for a model with a vocabulary of this size."""
        library = tokenizer.backend_tokenizer
        normalizer = library.normalizer
        texts = _byte_level_texts(tokenizer) if _is_byte_level(tokenizer) else _decoded_texts(tokenizer)
        return cls(
            [*texts[:size], *[b""] * (size - len(texts))],
            joins=(lambda character: not character.isspace()) if tokenizer.kind == "space" else joins_words,
            whole_words=tokenizer.kind in ("word", "space"),
            normalize=normalizer.normalize_str if normalizer is not None else lambda phrase: phrase,
            encode=tokenizer.encode,
        )

    def normalize(self, phrase: str) -> str:
        """A phrase as the tokenizer normalizes it, with single spaces."""
        return " ".join(self._normalize(phrase).replace(SPACE, " ").split())

    def decode(self, pending: bytes, token: int) -> tuple[str, bytes]:
        """The characters that a token adds after the first bytes of an incomplete one, and the bytes that remain."""
        if not self.texts[token]:
            return "", pending
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(pending + self.texts[token]), decoder.getstate()[0]

    def characters(self, pending: bytes) -> Characters:
        """The characters that each token adds after the first bytes of an incomplete character."""
        if pending not in self._characters:
            self._characters[pending] = self._decode_all(pending)
        return self._characters[pending]

    def canonical(self, text: str) -> list[list[int]]:
        """The token sequences into which the tokenizer splits " " + text or, without the space, text."""
        if self._encode is None:
            return []
        wanted = (b" " + text.encode(), text.encode())
        # The last context shows how the tokenizer splits a phrase that directly follows a word.
        contexts = ["", "a "] if self.joins(text[0]) else ["", "a ", "a"]
        found: list[list[int]] = []
        for context in contexts:
            ids = self._encode(context + text)
            tails = (ids[start:] for start in range(len(ids)))
            found += [tail for tail in tails if b"".join(self.texts[i] for i in tail) in wanted and self.texts[tail[0]]]
        return found

    def matching(self, text: bytes, start: int) -> list[int]:
        """The tokens whose texts `text` has at this position."""
        pieces = (text[start:end] for end in range(start + 1, min(len(text), start + self._max_len) + 1))
        return [self._ids[piece] for piece in pieces if piece in self._ids]

    def _decode_all(self, pending: bytes) -> Characters:
        strings, rest = (
            zip(*(self.decode(pending, token) for token in range(len(self.texts)))) if self.texts else ((), ())
        )
        length = max(map(len, strings), default=0)
        codes = np.full((len(strings), length), -1, dtype=np.int32)
        joins = np.zeros((len(strings), length), dtype=bool)
        properties = {c: (32 if c.isspace() else ord(c), self.joins(c)) for c in set().union(*strings)}
        for row, string in enumerate(strings):
            for column, character in enumerate(string):
                codes[row, column], joins[row, column] = properties[character]
        distinct = {pending: i for i, pending in enumerate(dict.fromkeys(rest))}
        return Characters(
            codes, joins, list(distinct), np.array([distinct[pending] for pending in rest], dtype=np.int64)
        )


@cache
def joins_words(character: str) -> bool:
    """Whether a character belongs to the same word as a neighboring one: letters, marks and digits do, except in
    scripts that are written without spaces.

    >>> [joins_words(character) for character in "é7'猫"]
    [True, True, False, False]
    """
    code = ord(character)
    if any(low <= code <= high for low, high in UNSEGMENTED_BLOCKS):
        return False
    return unicodedata.category(character)[0] in "LMN"


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return "ByteLevel(" in str(tokenizer.backend_tokenizer.decoder)


def _byte_level_texts(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token of byte-level BPE, which writes a byte as a printable character."""
    printable = [b for b in range(256) if chr(b) in set(pre_tokenizers.ByteLevel.alphabet())]
    others = [b for b in range(256) if b not in set(printable)]
    values = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    library = tokenizer.backend_tokenizer
    added = library.get_added_tokens_decoder()
    texts = []
    for i in range(tokenizer.vocab_size):
        token = library.id_to_token(i) or ""
        if i in added:
            texts.append(b"" if added[i].special else token.encode())
        else:
            texts.append(bytes(values[character] for character in token))
    return texts


def _decoded_texts(tokenizer: Tokenizer) -> list[bytes]:
    """The text that each token adds after another one, as the tokenizer's decoder writes it."""
    library = tokenizer.backend_tokenizer
    size = tokenizer.vocab_size
    alone = library.decode_batch([[i] for i in range(size)], skip_special_tokens=True)
    before = next((i for i, text in enumerate(alone) if text.strip() and "�" not in text), 0)
    pairs = library.decode_batch([[before, i] for i in range(size)], skip_special_tokens=True)
    texts = [pair.removeprefix(alone[before]).encode() for pair in pairs]
    if "ByteFallback(" in str(library.decoder):
        for i in range(size):
            if byte := _BYTE.fullmatch(library.id_to_token(i) or ""):
                texts[i] = bytes([int(byte[1], 16)])
    return texts

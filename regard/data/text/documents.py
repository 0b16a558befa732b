"""Plain text to learn a language from: documents from files, a part to validate with, and one long stream of ids."""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Int

from regard.data.text.readers import fields_of, from_json, in_line, name_of, numbered_lines, read_text, stem_suffix
from regard.data.text.special_tokens import Special
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError

VALIDATION_SHARE = 0.1
# Long documents are encoded in parts of about so many characters, so many parts at once.
PART, AT_ONCE = 1 << 15, 32
_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")


def read_documents(files: Sequence[str | Path]) -> list[str]:
    """Documents to learn from, one file after the other, plain or compressed; "-" is stdin.

    A file is one document, character for character: only a BOM is removed, and CR LF becomes LF. A `.jsonl` file has a
    document on each line, under "text". Documents with nothing but white space in them are left out.
    """
    documents = [text for file in files for text in _in_one(file) if text and not text.isspace()]
    if not documents:
        names = " ".join(map(name_of, files)) or "No file"
        raise RegardError(f"{names}: there is no text to learn from.", hint="Give a file with text in it.")
    return documents


def _in_one(file: str | Path) -> list[str]:
    if stem_suffix(file).lower() != ".jsonl":
        return [read_text(file)]
    texts = []
    for number, line in numbered_lines(file, max_bytes=None):  # a document may be a book
        if line.strip():
            with in_line(file, number):
                texts.append(_text(line))
    return texts


def _text(line: str) -> str:
    found = from_json(line)
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise RegardError(f'no text under "text"; {fields_of(found)}.', hint='Write {"text": "…"} on every line.')
    return text


def split_documents(documents: Sequence[str], share: float = VALIDATION_SHARE) -> tuple[list[str], list[str]]:
    """Documents to train with, and the last `share` of the characters to validate with.

    A single document is cut at that very character. Of several the last ones go, as many as come nearest to the share.

    >>> split_documents(["0123456789"], share=0.2)
    (['01234567'], ['89'])
    >>> split_documents(["a b c", "d", "e f"], share=0.3)
    (['a b c', 'd'], ['e f'])
    """
    if not 0 < share < 1:
        raise RegardError(
            f"The share of the text to validate with lies between 0 and 1; it cannot be {share}.", hint="Give 0.1."
        )
    documents = [text for text in documents if text]
    total = sum(map(len, documents))
    if total < 2:
        raise RegardError(
            f"A text of {total} characters is too short to set some aside for validation.",
            hint="Give more text, or validation files of their own.",
        )
    wanted = min(max(1, int(total * (1 - share))), total - 1)  # characters to train with
    if len(documents) == 1:
        return [documents[0][:wanted]], [documents[0][wanted:]]
    ends = list(accumulate(map(len, documents)))[:-1]
    count = 1 + min(range(len(ends)), key=lambda i: abs(ends[i] - wanted))
    return documents[:count], documents[count:]


def encode_documents(documents: Sequence[str], tokenizer: Tokenizer, special: Special) -> Int[np.ndarray, "N"]:
    """All documents as one stream of ids: each begins with `special.begin`, if there is one, and ends with `eos`.

    >>> tokenizer = Tokenizer.train(["a b c"], "word")
    >>> encode_documents(["a b", "c"], tokenizer, Special(begin=2)).tolist()
    [2, 4, 5, 3, 2, 6, 3]
    """
    # The library needs half a kilobyte a token while it encodes: a long text is given to it in parts, a few at a time.
    # Not where a space at the beginning means nothing, or another thing than a space inside.
    safe = tokenizer.encode("a b") == [*tokenizer.encode("a"), *tokenizer.encode(" b")]
    parts = [_parts(document) if safe else [document] for document in documents]
    texts = [part for row in parts for part in row]
    encoded = (
        np.array(ids, np.int32)
        for first in range(0, len(texts), AT_ONCE)
        for ids in tokenizer.encode_batch(texts[first : first + AT_ONCE])
    )
    begin, end = (np.array([] if one is None else [one], np.int32) for one in (special.begin, special.eos))
    return np.concatenate([one for row in parts for one in (begin, *(next(encoded) for _ in row), end)])


def _parts(document: str) -> list[str]:
    """A document cut before spaces between letters, where no token can span the cut; at least PART characters each."""
    borders = [0]
    while found := _BETWEEN_WORDS.search(document, borders[-1] + PART):
        borders.append(found.start())
    return [document[first:last] for first, last in pairwise([*borders, len(document)])]

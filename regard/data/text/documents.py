"""Plain-text documents for language models: reading, validation split, encoding as one stream of token ids."""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Int

from regard.data.text.readers import (
    describe_fields,
    display_name,
    errors_at_line,
    numbered_lines,
    parse_json_line,
    read_text,
    uncompressed_suffix,
)
from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import Tokenizer
from regard.errors import RegardError

VALIDATION_SHARE = 0.1
# Long documents are encoded in parts of about PART_CHARS characters, PARTS_PER_BATCH at a time.
PART_CHARS, PARTS_PER_BATCH = 1 << 15, 32
_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")


def read_documents(files: Sequence[str | Path]) -> list[str]:
    """Read documents from files, plain or compressed; "-" is stdin.

    A file is one document, unchanged except that a BOM is removed and CR LF becomes LF. A `.jsonl` file has one
    document per line, in the field "text". Documents that contain only white space are left out.
    """
    documents = [text for file in files for text in _read_file(file) if text and not text.isspace()]
    if not documents:
        names = " ".join(map(display_name, files)) or "No file"
        raise RegardError(f"{names}: there is no text.", hint="Provide a file that contains text.")
    return documents


def _read_file(file: str | Path) -> list[str]:
    if uncompressed_suffix(file).lower() != ".jsonl":
        return [read_text(file)]
    texts = []
    for number, line in numbered_lines(file, max_bytes=None):  # a document may be a book
        if line.strip():
            with errors_at_line(file, number):
                texts.append(_parse_document(line))
    return texts


def _parse_document(line: str) -> str:
    entry = parse_json_line(line)
    text = entry.get("text") if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise RegardError(
            f'expected text in the field "text"; {describe_fields(entry)}.', hint='Write {"text": "…"} on every line.'
        )
    return text


def split_documents(documents: Sequence[str], share: float = VALIDATION_SHARE) -> tuple[list[str], list[str]]:
    """Split documents into training and validation; validation gets the last `share` of the characters.

    A single document is split at the exact character. Of several, the last ones go to validation, as many as come
    closest to the share.

    >>> split_documents(["0123456789"], share=0.2)
    (['01234567'], ['89'])
    >>> split_documents(["a b c", "d", "e f"], share=0.3)
    (['a b c', 'd'], ['e f'])
    """
    if not 0 < share < 1:
        raise RegardError(f"The validation share must be between 0 and 1, exclusive (got {share}).", hint="Use 0.1.")
    documents = [text for text in documents if text]
    total = sum(map(len, documents))
    if total < 2:
        raise RegardError(
            f"A text of {total} characters is too short for a validation split.",
            hint="Provide more text, or separate validation files.",
        )
    training_chars = min(max(1, int(total * (1 - share))), total - 1)
    if len(documents) == 1:
        return [documents[0][:training_chars]], [documents[0][training_chars:]]
    ends = list(accumulate(map(len, documents)))[:-1]
    count = 1 + min(range(len(ends)), key=lambda i: abs(ends[i] - training_chars))
    return documents[:count], documents[count:]


def encode_documents(documents: Sequence[str], tokenizer: Tokenizer, special: SpecialTokens) -> Int[np.ndarray, "N"]:
    """Encode documents as one stream of ids. Each starts with `special.begin`, if set, and ends with `special.eos`.

    >>> tokenizer = Tokenizer.train(["a b c"], "word")
    >>> encode_documents(["a b", "c"], tokenizer, SpecialTokens(begin=2)).tolist()
    [2, 4, 5, 3, 2, 6, 3]
    """
    # The tokenizers library needs half a kilobyte per token while it encodes, so long texts are encoded in parts, a few
    # at a time. This is only safe if a space at the start of a text is encoded like one inside.
    can_split = tokenizer.encode("a b") == [*tokenizer.encode("a"), *tokenizer.encode(" b")]
    parts = [_split_parts(document) if can_split else [document] for document in documents]
    texts = [part for row in parts for part in row]
    encoded = (
        np.array(ids, np.int32)
        for first in range(0, len(texts), PARTS_PER_BATCH)
        for ids in tokenizer.encode_batch(texts[first : first + PARTS_PER_BATCH])
    )
    begin, end = (np.array([] if token is None else [token], np.int32) for token in (special.begin, special.eos))
    return np.concatenate([ids for row in parts for ids in (begin, *(next(encoded) for _ in row), end)])


def _split_parts(document: str) -> list[str]:
    """Split before spaces between letters, which no token spans, into parts of at least PART_CHARS characters."""
    boundaries = [0]
    while match := _BETWEEN_WORDS.search(document, boundaries[-1] + PART_CHARS):
        boundaries.append(match.start())
    return [document[first:last] for first, last in pairwise([*boundaries, len(document)])]

"""Plain-text documents for language models: reading, validation split, encoding as one stream of token ids."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from regard.data.text.readers import (
    OnOpen,
    describe_fields,
    display_name,
    errors_at_line,
    is_columnar,
    numbered_lines,
    parse_json_line,
    stream_text,
    table_rows,
    uncompressed_suffix,
)
from regard.data.text.special_tokens import SpecialTokens
from regard.data.text.tokenizer import Tokenizer, split_text
from regard.errors import RegardError

VALIDATION_SHARE = 0.1
# Parts of long documents that are encoded at a time.
PARTS_PER_BATCH = 32


class DocumentPart(NamedTuple):
    """A document, or a part of a long one; the parts of a document follow each other."""

    text: str
    is_first: bool


def read_documents(files: Sequence[str | Path], columns: Sequence[str] = ()) -> list[str]:
    """Read documents from files, plain or compressed, or the `.txt` files of a folder; "-" is stdin.

    A file is one document, unchanged except that a BOM is removed and CR LF becomes LF. `.jsonl` and `.parquet` files
    and datasets of the Hugging Face hub have one document per row, in the column "text" or in the one that `columns`
    names. Documents that contain only white space are left out.
    """
    documents: list[list[str]] = []
    for text, is_first in stream_documents(files, columns):
        if is_first:
            documents.append([])
        documents[-1].append(text)
    if not documents:
        raise no_text_error(files)
    return ["".join(parts) for parts in documents]


def no_text_error(files: Sequence[str | Path]) -> RegardError:
    """The error for files without text."""
    names = " ".join(map(display_name, files)) or "No file"
    return RegardError(f"{names}: there is no text.", hint="Provide a file that contains text.")


def stream_documents(
    files: Sequence[str | Path], columns: Sequence[str] = (), *, on_open: OnOpen | None = None
) -> Iterator[DocumentPart]:
    """Yield the documents that `read_documents` reads; long ones from plain text in parts, which no token spans."""
    if len(columns) > 1:
        raise RegardError(f"Documents have one column (got {len(columns)}).", "Name the column of the text.")
    column = columns[0] if columns else "text"
    for file in text_files(files):
        if is_columnar(file):
            for row in table_rows(file, columns=(column,), on_open=on_open):
                with errors_at_line(file, row.number):
                    text = document_from_object(row.value, column)
                if not _is_blank(text):
                    yield DocumentPart(text, True)
        elif uncompressed_suffix(file).lower() == ".jsonl":
            for number, line in numbered_lines(file, max_bytes=None, on_open=on_open):  # a document may be a book
                if line.strip():
                    with errors_at_line(file, number):
                        text = document_from_object(parse_json_line(line), column)
                    if not _is_blank(text):
                        yield DocumentPart(text, True)
        else:
            yield from _split_stream(stream_text(file, on_open=on_open))


def text_files(files: Sequence[str | Path]) -> list[str | Path]:
    """The files; in place of a folder its `.txt` files, plain or compressed, and those of its sub-folders.

    >>> text_files(["a.txt", "-"])
    ['a.txt', '-']
    """
    found: list[str | Path] = []
    for file in files:
        if not Path(file).is_dir():
            found.append(file)
            continue
        below = [path for path in sorted(Path(file).rglob("*")) if uncompressed_suffix(path).lower() == ".txt"]
        if not below:
            raise RegardError(f"{file}: there is no .txt file in this folder.", "Pass files, or a folder with some.")
        found += below
    return found


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


def _split_stream(texts: Iterable[str]) -> Iterator[DocumentPart]:
    """The text of a document, in parts if it is long; white space alone is no part.

    >>> list(_split_stream(["a b", " c"]))
    [DocumentPart(text='a b c', is_first=True)]
    """
    pending, is_first = "", True
    for text in texts:
        pending += text
        if not pending.isspace():
            *parts, pending = split_text(pending)
            for part in parts:
                yield DocumentPart(part, is_first)
                is_first = False
    if pending and not (is_first and pending.isspace()):
        yield DocumentPart(pending, is_first)


def document_from_object(entry: Any, column: str = "text") -> str:
    """The text of a row of a JSONL or Parquet file."""
    text = entry.get(column) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise RegardError(
            f'expected text in the field "{column}"; {describe_fields(entry)}.',
            hint='Write {"text": "…"} on every line, or name the field: --columns FIELD',
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
    parts = [split_text(document) if can_split else [document] for document in documents]
    texts = [part for row in parts for part in row]
    encoded = (
        np.array(ids, np.int32)
        for first in range(0, len(texts), PARTS_PER_BATCH)
        for ids in tokenizer.encode_batch(texts[first : first + PARTS_PER_BATCH])
    )
    begin, end = (np.array([] if token is None else [token], np.int32) for token in (special.begin, special.eos))
    return np.concatenate([ids for row in parts for ids in (begin, *(next(encoded) for _ in row), end)])

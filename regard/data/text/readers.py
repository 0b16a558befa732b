"""Readers of lines, tables and sentence pairs: parallel files, TSV, CSV, JSONL or Parquet, or stdin."""

import codecs
import csv
import difflib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.config_reader import parse_json
from regard.data.text.compression import (
    CORRUPT_DATA_ERRORS,
    MAX_EXPANSION_BYTES,
    MAX_EXPANSION_RATIO,
    STDIN,
    SUFFIXES,
    InputStream,
    open_input,
)
from regard.errors import RegardError, require_package
from regard.ranges import format_value

logger = logging.getLogger("regard")

TextPair = tuple[str, str]
Link = tuple[int, int]
"""indices of a source word and of a target word, in an alignment"""

# Built-in sentence pairs with gold alignments; tools/phrasebook writes the files.
PHRASEBOOK = "phrasebook"
_PHRASEBOOK_FILES = {
    PHRASEBOOK: "phrasebook.tsv.gz",
    f"{PHRASEBOOK}:validation": "phrasebook-validation.tsv.gz",
    f"{PHRASEBOOK}:test": "phrasebook-test.tsv.gz",
}
ROWS = "<rows>"
"""the name of data that are rows instead of files, where names of files are stored"""
MAX_LINE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20

# Known column names: a first row with two of them above the source and target columns is a header.
_SOURCE_NAMES, _TARGET_NAMES = ("source", "src"), ("target", "tgt", "trg")
_ALIGNMENT_NAME = "alignment"
_LINK = re.compile(r"(\d{1,9})-(\d{1,9})")
_COLUMN_NAMES = """
    source src target tgt trg input output text text1 text2 sentence sentence1 sentence2 label translation original
    reference question answer word lemma form inflection singular plural pronunciation phonemes ipa noisy clean
    incorrect correct misspelled misspelt simple complex english french german spanish italian portuguese dutch polish
    czech russian ukrainian turkish arabic hebrew hindi chinese japanese korean vietnamese hungarian finnish swedish
    danish norwegian romanian greek bulgarian latin esperanto
"""
# ISO 639 codes (two and three letters) of languages for which parallel text exists.
_LANGUAGE_CODES = """
    af am ar az be bg bn bs ca cs cy da de el en eo es et eu fa fi fr ga gl gu he hi hr hu hy id is it ja ka kk km kn
    ko la lo lt lv mk ml mn mr ms mt my ne nl no nb nn pa pl ps pt ro ru si sk sl sq sr sv sw ta te th tl tr uk ur uz
    vi xh yi yo zh zu ara bul ces cmn dan deu ell eng epo est fin fra heb hin hun ind isl ita jpn kor lat lit lav nld
    nob pol por ron rus slk slv spa srp swe tha tur ukr vie zho
"""
_KNOWN_NAMES, _KNOWN_CODES = frozenset(_COLUMN_NAMES.split()), frozenset(_LANGUAGE_CODES.split())


OnOpen = Callable[[InputStream], None]
"""called with an input stream after it is opened; its position shows how much of the file has been read"""
PARQUET = ".parquet"
_PAIR_SUFFIXES = (".tsv", ".csv", ".jsonl", PARQUET)
HUB_PREFIX = "hf:"
# Few, since a dictionary page of some kilobytes can hold a text of megabytes that all rows refer to; not slower than
# thousands.
_ROWS_PER_BATCH = 64


def numbered_lines(
    file: str | Path,
    max_bytes: int | None = MAX_LINE_BYTES,
    *,
    on_open: OnOpen | None = None,
    allow_empty: bool = False,
) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file ("-" is stdin), numbered from 1. Lines end at LF only; CR before LF and a BOM are
    removed.

    Errors state the file and the line. A line of more than `max_bytes` is an error; with None, only the limit on
    compressed data applies (`MAX_EXPANSION_BYTES`). So is a file without lines, unless `allow_empty` is set.
    """
    number = 0
    with _convert_read_errors(file, lambda: number):
        with open_input(file) as stream:
            _warn_if_misnamed(file, stream.compression)
            if on_open is not None:
                on_open(stream)
            while raw := _read_raw_line(stream, max_bytes):
                number += 1
                if max_bytes is not None and len(raw) > max_bytes:
                    raise RegardError(
                        f"{display_name(file)}, line {number}: longer than {max_bytes:,} bytes.",
                        hint="Is it a text file, with one sentence per line?",
                    )
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                yield number, raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
        if number == 0 and not allow_empty:
            raise RegardError(f"{display_name(file)} is empty.")


def _read_raw_line(stream: Any, max_bytes: int | None) -> bytes:
    if max_bytes is not None:
        return stream.readline(max_bytes + 1)
    parts = [stream.readline(_CHUNK_BYTES)]
    while parts[-1] and not parts[-1].endswith(b"\n"):
        parts.append(stream.readline(_CHUNK_BYTES))
    return b"".join(parts)


def read_text(file: str | Path) -> str:
    """Read a text file with its line breaks: all that `stream_text` yields."""
    return "".join(stream_text(file))


def stream_text(file: str | Path, *, on_open: OnOpen | None = None) -> Iterator[str]:
    """Yield a text file with its line breaks in parts of about a mebibyte; "-" is stdin. A BOM is removed, CR LF
    becomes LF.

    Lines may have any length; compressed data is limited (`MAX_EXPANSION_BYTES`).
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, carry, data, is_first = 0, "", b"", True
    with _convert_read_errors(file, lambda: line), open_input(file) as stream:
        _warn_if_misnamed(file, stream.compression)
        if on_open is not None:
            on_open(stream)
        while is_first or data:
            data = stream.read(_CHUNK_BYTES)
            if is_first and not data:
                raise RegardError(f"{display_name(file)} is empty.")
            try:
                text = carry + decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start) + 1
                raise
            line += data.count(b"\n")
            if is_first:
                text, is_first = text.removeprefix("\ufeff"), False
            carry = "\r" if data and text.endswith("\r") else ""  # LF may follow
            yield text.removesuffix(carry).replace("\r\n", "\n")


@contextmanager
def _convert_read_errors(file: str | Path, line: Callable[[], int]) -> Iterator[None]:
    """Convert exceptions while reading into RegardErrors; `line` returns the number of the last line read."""
    name = display_name(file)
    try:
        yield
    except FileNotFoundError:
        raise RegardError(f"There is no file {name}.", hint=_suggest_file(Path(file))) from None
    except UnicodeDecodeError:
        hint = "Convert it: iconv -f ENCODING -t UTF-8 FILE."
        if (suffix := Path(file).suffix) in SUFFIXES:
            hint = f"It is not {SUFFIXES[suffix]} data either, despite {suffix}. Download or compress the file again."
        raise RegardError(f"{name}, line {line()}: not UTF-8.", hint=hint) from None
    except OSError as error:
        if isinstance(error, CORRUPT_DATA_ERRORS) or error.errno is None:
            raise _corrupt_data_error(name, line(), error) from None
        raise RegardError(f"{name} cannot be read: {error.strerror or error}.") from None
    except CORRUPT_DATA_ERRORS as error:
        raise _corrupt_data_error(name, line(), error) from None


def _corrupt_data_error(name: str, line: int, error: Exception) -> RegardError:
    return RegardError(
        f"{name}: corrupt compressed data after line {line} ({error}).", hint="Download or compress the file again."
    )


def _warn_if_misnamed(file: str | Path, compression: str) -> None:
    expected = "" if file == STDIN else SUFFIXES.get(Path(file).suffix, "")
    if expected and not compression:
        logger.warning("%s: not %s data, despite its suffix; it is read as plain text.", file, expected)
    elif expected != compression and file != STDIN:
        logger.warning("%s: %s data, despite its suffix; it is decompressed.", file, compression)


def display_name(file: str | Path) -> str:
    """Name of a file in error messages."""
    return "stdin" if file == STDIN else str(file)


@contextmanager
def errors_at_line(file: str | Path, number: int) -> Iterator[None]:
    """Prefix errors raised inside with the file and line.

    >>> with errors_at_line("a.tsv", 3):
    ...     raise RegardError("no tab.")
    Traceback (most recent call last):
    regard.errors.RegardError: a.tsv, line 3: no tab.
    """
    place = "row" if is_columnar(file) else "line"
    try:
        yield
    except RegardError as error:
        raise RegardError(f"{display_name(file)}, {place} {number}: {error.message}", error.hint) from None


def is_columnar(file: str | Path) -> bool:
    """Whether this is a Parquet file or a dataset of the Hugging Face hub, with rows instead of lines.

    >>> is_columnar("pairs.parquet"), is_columnar("hf:imdb:train"), is_columnar("pairs.tsv")
    (True, True, False)
    """
    return is_hub_reference(file) or Path(file).suffix.lower() == PARQUET


def is_table(file: str | Path) -> bool:
    """Whether the name of a file says that it has columns.

    >>> is_table("pairs.tsv.gz"), is_table("train.en")
    (True, False)
    """
    return is_hub_reference(file) or uncompressed_suffix(file) in _PAIR_SUFFIXES


def _suggest_file(path: Path) -> str:
    """Hint for a missing file: files with similar names."""
    if str(path).partition(":")[0] == PHRASEBOOK:
        return f"The built-in sentence pairs, for the task translate, are {', '.join(_PHRASEBOOK_FILES)}."
    if not path.parent.is_dir():
        return f"There is no folder {path.parent} either."
    similar = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=3)
    return f"Did you mean {' or '.join(str(path.parent / name) for name in similar)}?" if similar else ""


def read_lines(file: str | Path) -> list[str]:
    """Read the lines of a text file, plain or compressed; "-" is stdin."""
    return [line for _, line in numbered_lines(file)]


def uncompressed_suffix(file: str | Path) -> str:
    """Suffix of a file name, ignoring that of its compression: .tsv for pairs.tsv.gz."""
    path = Path(file)
    return (path.with_suffix("") if path.suffix in SUFFIXES else path).suffix


# -- tables ------------------------------------------------------------------------------------------------------------


class TableRow(NamedTuple):
    """Row of a TSV or CSV file (`fields`), or object of a JSONL or Parquet file (`value`); `number` is the line where
    it ends, or the number of the row."""

    number: int
    fields: list[str] | None
    value: Any = None


def table_rows(file: str | Path, *, columns: Sequence[str] = (), on_open: OnOpen | None = None) -> Iterator[TableRow]:
    """Yield the rows of a `.tsv`, `.csv`, `.jsonl` or `.parquet` file or of a dataset of the Hugging Face hub (see
    `hub_rows`). Other files and stdin are JSONL if they start with "{", otherwise TSV.

    An empty line is a row without fields. CSV is quoted according to RFC 4180; in TSV, quotes are ordinary characters.
    Of a Parquet file only `columns` are read, if it has them.
    """
    if is_columnar(file):
        rows = hub_rows(str(file)) if is_hub_reference(file) else parquet_rows(file, columns, on_open)
        yield from (TableRow(number, None, value) for number, value in enumerate(rows, 1))
        return
    kind = uncompressed_suffix(file).lower()
    if kind == ".csv":
        yield from _csv_rows(file, on_open)
        return
    for number, line in numbered_lines(file, on_open=on_open):
        if not line.strip():
            yield TableRow(number, [])
            continue
        if kind not in (".tsv", ".jsonl"):
            kind = ".jsonl" if line.lstrip().startswith("{") else ".tsv"
        if kind == ".tsv":
            yield TableRow(number, line.split("\t"))
        else:
            with errors_at_line(file, number):
                value = parse_json_line(line)
            yield TableRow(number, None, value)


def _csv_rows(file: str | Path, on_open: OnOpen | None) -> Iterator[TableRow]:
    reader = csv.reader((line + "\n" for _, line in numbered_lines(file, on_open=on_open)), strict=True)
    try:
        for fields in reader:
            yield TableRow(reader.line_num, fields if any(field.strip() for field in fields) else [])
    except csv.Error as error:
        message = f"{display_name(file)}, line {reader.line_num}: not CSV ({error})."
        raise RegardError(message, hint='Quote fields like "a, b", and double quotes inside a field.') from None


def read_named_rows(file: str | Path) -> list[tuple[int, dict[str, str]]]:
    """Read a CSV or TSV file with a header: the line number of each row, and its fields by lower-case column name."""
    rows = [(row.number, row.fields) for row in table_rows(file) if row.fields]
    names = [name.strip().lower() for name in rows.pop(0)[1]] if rows else []
    named = []
    for number, fields in rows:
        with errors_at_line(file, number):
            if len(fields) != len(names):
                raise RegardError(
                    f"expected {len(names)} columns as in the header, got {len(fields)}.", "Fix the line."
                )
        named.append((number, dict(zip(names, (field.strip() for field in fields)))))
    return named


def column_indices(names: Sequence[str], header: Sequence[str]) -> list[int]:
    """Indices of columns given by name, as in the header, or by number from 1.

    >>> column_indices(["fr", "1"], ["en", "fr"])
    [1, 0]
    """
    known = [name.strip().lower() for name in header]
    indices = []
    for name in names:
        if name.strip().lower() in known:
            indices.append(known.index(name.strip().lower()))
        elif name.isdecimal() and int(name):
            indices.append(int(name) - 1)
        else:
            listed = ", ".join(header[:10]) + (", …" if len(header) > 10 else "")
            raise RegardError(
                f"no column {name!r} in the first row ({listed}).", hint="Use column names, or numbers from 1."
            )
    return indices


def has_named_column(columns: Sequence[str], header: Sequence[str]) -> bool:
    """Whether a first row contains one of these column names, and so is a header. Numbers do not count.

    >>> has_named_column(["en", "2"], ["en", "fr"]), has_named_column(["1", "2"], ["en", "fr"])
    (True, False)
    """
    known = [name.strip().lower() for name in header]
    return any(name.strip().lower() in known for name in columns if not name.isdecimal())


def warn_header_skipped(file: str | Path, header: Sequence[str]) -> None:
    """Log that the first row is a header and is skipped."""
    logger.warning('%s: first line "%s" is a header and is skipped.', display_name(file), "<TAB>".join(header))


# -- pairs -------------------------------------------------------------------------------------------------------------


def find_rows(data: Any, name: str = "data") -> Iterable[Any] | None:
    """The rows of a data frame, or of an iterable of rows such as pairs or dictionaries; None for names of files.

    >>> find_rows(["a.tsv", "b.tsv"]), list(find_rows(pair for pair in [("a", "b")]))
    (None, [('a', 'b')])
    """
    if isinstance(data, str | Path | None):
        return None
    if hasattr(data, "columns"):
        return data.to_dicts() if hasattr(data, "to_dicts") else data.to_dict("records")  # Polars, pandas
    if isinstance(data, dict | bytes) or not isinstance(data, Iterable):
        raise RegardError(
            f"{name} must be files or rows (got {format_value(data)}).",
            'Pass the name of a file, a list of them, or rows such as [("the cat", "le chat"), …].',
        )
    # A list of texts cannot be told from a list of files; files are meant.
    is_files = isinstance(data, list | tuple) and all(isinstance(file, str | Path) for file in data)
    return None if is_files else data


@contextmanager
def data_files(data: Any, fields: Sequence[str], name: str = "data") -> Iterator[list[str]]:
    """The names of the files of data: those that it names, or of a temporary file with its rows (see `find_rows`).

    Rows are dictionaries, or tuples (or a text) with these fields. Errors call the temporary file by `name`.

    >>> with data_files([("a", "b")], ("source", "target")) as files:
    ...     read_pairs(files)
    [('a', 'b')]
    """
    rows = find_rows(data, name)
    if rows is None:
        yield [str(file) for file in ([data] if isinstance(data, str | Path) else data)]
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        _write_rows(rows, file, fields, name)
        try:
            yield [str(file)]
        except RegardError as error:
            raise RegardError(error.message.replace(str(file), name), error.hint) from None


def _write_rows(rows: Iterable[Any], file: Path, fields: Sequence[str], name: str) -> None:
    number = 0
    with file.open("w", encoding="utf-8") as stream:
        for number, row in enumerate(rows, 1):
            values = (row,) if isinstance(row, str) else row.tolist() if isinstance(row, np.ndarray) else row
            if not isinstance(row, Mapping):
                if not isinstance(values, tuple | list) or len(values) != len(fields):
                    raise RegardError(
                        f"{name}, row {number}: expected ({', '.join(fields)}) or a dictionary "
                        f"(got {format_value(row)}).",
                        "Pass such rows, or name their fields with columns=….",
                    )
                values = dict(zip(fields, values))
            stream.write(json.dumps(values, ensure_ascii=False, default=str) + "\n")
    if not number:
        raise RegardError(f"{name} has no rows.", "Pass at least one.")


def read_pairs(files: Sequence[str | Path], columns: Sequence[str] | None = None) -> list[TextPair]:
    """Read pairs of source and target texts: the list of what `stream_pairs` yields."""
    return list(stream_pairs(files, columns))


def stream_pairs(
    files: Sequence[str | Path], columns: Sequence[str] | None = None, *, on_open: OnOpen | None = None
) -> Iterator[TextPair]:
    """Pairs of source and target texts, one at a time.

    - Two parallel files: line n of one is the translation of line n of the other.
    - `.tsv` and `.csv` files: source and target in the first two columns; further columns are ignored (but see
      `read_aligned_pairs`). A header (column names such as source and target, or language codes) is detected, logged
      and skipped. Several files are concatenated.
    - `.jsonl` and `.parquet` files, and datasets of the Hugging Face hub (see `hub_rows`): objects with "source" and
      "target", at the top level or inside "translation". Several files are concatenated.
    - One file with another suffix, or stdin ("-"): JSONL if it starts with "{", otherwise TSV.
    - "phrasebook": the built-in sentence pairs for training; "phrasebook:validation" and "phrasebook:test".

    `columns` selects source and target: column names of the header or fields of JSONL (("en", "fr")), or column numbers
    from 1 (("2", "1")). An empty line is a pair of empty sentences, which cleaning counts and removes.
    """
    if columns and len(columns) != 2:
        raise RegardError(
            f"Sentence pairs need two columns (got {len(columns)}).", hint="Name the source and the target column."
        )
    return _stream_rows(files, tuple(columns or ()), on_open)


def read_aligned_pairs(
    files: Sequence[str | Path], columns: Sequence[str] = ()
) -> tuple[list[TextPair], list[list[Link]] | None]:
    """Read pairs like `read_pairs`, and the alignment of each; None if the files have no alignments.

    An alignment is written as in Moses: "0-0 1-2" links source word 0 to target word 0, and 1 to 2, where words are
    separated by white space. It is in the column or field "alignment" or in the third of `columns`; in tables without a
    header, in the third column, if this starts with a link in the first line.
    """
    if columns and len(columns) not in (2, 3):
        raise RegardError(
            f"Sentence pairs need two columns, or three with an alignment (got {len(columns)}).",
            hint="Name the source, the target and the alignment column.",
        )
    rows = list(_stream_rows(files, tuple(columns), None, with_links=True))
    if all(len(row) == 2 for row in rows):
        return rows, None
    # An empty line is a pair of empty sentences.
    unaligned = [number for number, row in enumerate(rows, 1) if len(row) == 2 and any(row)]
    if unaligned:
        raise RegardError(
            f"{' '.join(map(display_name, files))}: pair {unaligned[0]} has no alignment, but others have one.",
            hint="Write an alignment for every pair; it may be empty.",
        )
    return [(row[0], row[1]) for row in rows], [row[2] if len(row) == 3 else [] for row in rows]


def _stream_rows(
    files: Sequence[str | Path], columns: tuple[str, ...], on_open: OnOpen | None, with_links: bool = False
) -> Iterator[Any]:
    """The pairs of files; with `with_links`, triples of source, target and links where there is an alignment."""
    files = [_resolve_built_in(file) for file in files]
    if len(files) == 2 and not all(map(is_table, files)):
        if columns:
            raise RegardError(
                "Two parallel files have no columns.", hint="Use columns with TSV, CSV, JSONL and Parquet files only."
            )
        return _parallel_pairs(files[0], files[1], on_open)
    if len(files) == 1 or (files and all(map(is_table, files))):
        return (row for file in files for row in _read_pair_table(file, columns, on_open, with_links))
    raise RegardError(
        f"Expected two parallel files, or .tsv, .csv, .jsonl and .parquet files, got {len(files)} files"
        + (f" like {files[0]}." if files else "."),
        hint="Pass a source file and a target file, or one file with source<TAB>target lines.",
    )


def _resolve_built_in(file: str | Path) -> str | Path:
    name = _PHRASEBOOK_FILES.get(str(file))
    return file if name is None else Path(__file__).parents[1] / name


def built_in_part(files: Sequence[str | Path], part: str) -> tuple[str, ...]:
    """The part of built-in data, "validation" or "test", that belongs to their training pairs; none for other files.

    >>> built_in_part(["phrasebook"], "test"), built_in_part(["pairs.tsv"], "test")
    (('phrasebook:test',), ())
    """
    return (f"{PHRASEBOOK}:{part}",) if [str(file) for file in files] == [PHRASEBOOK] else ()


def _parallel_pairs(source: str | Path, target: str | Path, on_open: OnOpen | None) -> Iterator[TextPair]:
    sources, targets = numbered_lines(source, on_open=on_open), numbered_lines(target, on_open=on_open)
    last = [0, 0]  # number of the last line of each file
    for pair in zip_longest(sources, targets):
        if None in pair:
            longer = 0 if pair[1] is None else 1
            last[longer] += 1 + sum(1 for _ in (sources, targets)[longer])
            raise RegardError(
                f"{source} has {last[0]} lines, but {target} has {last[1]}.",
                hint=f"Line n of one must be the translation of line n of the other; "
                f"line {min(last) + 1} has no counterpart.",
            )
        (last[0], source_line), (last[1], target_line) = pair
        yield source_line, target_line


def _read_pair_table(
    file: str | Path, columns: tuple[str, ...], on_open: OnOpen | None, with_links: bool
) -> Iterator[tuple[Any, ...]]:
    needed = (*columns, _ALIGNMENT_NAME) if with_links and len(columns) == 2 else columns
    rows = table_rows(file, columns=needed, on_open=on_open)
    head = list(islice(rows, 2))
    indices, is_csv = [0, 1], uncompressed_suffix(file).lower() == ".csv"
    if head and head[0].fields:
        first_row = head[0].fields
        with errors_at_line(file, head[0].number):
            indices, is_header = _find_pair_columns(columns[:2], *(row.fields or [] for row in head))
            if with_links:
                indices += _find_alignment_column(columns, first_row, is_header)
        if is_header:
            warn_header_skipped(file, first_row)
            del head[0]
    for row in chain(head, rows):
        with errors_at_line(file, row.number):
            if row.fields is None:
                texts: tuple[str, ...] = pair_from_object(row.value, columns[:2])
                if with_links:
                    texts += _alignment_from_object(row.value, columns)
            else:
                texts = _select_fields(row.fields, indices, is_csv) if row.fields else ("",) * len(indices)
            source, target, *alignments = texts
            links = [parse_links(alignment) for alignment in alignments]  # of one alignment, or none
            for links_of_pair in links:
                check_links(links_of_pair, source, target)
        yield source, target, *links


def _find_pair_columns(
    columns: Sequence[str], first_row: Sequence[str], second_row: Sequence[str] = ()
) -> tuple[list[int], bool]:
    """Indices of the source and target columns, and whether the first row is a header."""
    names = [name.strip().lower() for name in first_row]
    if columns:
        indices = column_indices(columns, first_row)
        return indices, has_named_column(columns, first_row) or _is_header(names, second_row, indices)
    for source in _SOURCE_NAMES:
        for target in _TARGET_NAMES:
            if source in names and target in names:
                return [names.index(source), names.index(target)], True
    return [0, 1], _is_header(names, second_row, [0, 1])


def _is_header(names: Sequence[str], second_row: Sequence[str], indices: Sequence[int]) -> bool:
    """Whether both columns have known names, or language codes above longer text."""
    if max(indices) >= len(names):
        return False
    selected = [names[index] for index in indices]
    is_code = [re.split("[-_]", name)[0] in _KNOWN_CODES for name in selected]
    if selected[0] == selected[1] or not all(name in _KNOWN_NAMES or code for name, code in zip(selected, is_code)):
        return False
    if not any(is_code):
        return True
    return max(indices) < len(second_row) and all(len(second_row[index].strip()) > 3 for index in indices)


def _find_alignment_column(columns: Sequence[str], first_row: Sequence[str], is_header: bool) -> list[int]:
    """The index of the column of alignments, or nothing."""
    if len(columns) == 3:
        return column_indices(columns[2:], first_row)
    if is_header:
        return [i for i, name in enumerate(first_row) if name.strip().lower() == _ALIGNMENT_NAME][:1]
    is_aligned = not columns and len(first_row) > 2 and _LINK.fullmatch(first_row[2].partition(" ")[0])
    return [2] if is_aligned else []


def parse_links(text: str) -> list[Link]:
    """The links of an alignment.

    >>> parse_links("0-0 1-2")
    [(0, 0), (1, 2)]
    """
    links = []
    for link in text.split():
        match = _LINK.fullmatch(link)
        if match is None:
            raise RegardError(f"invalid link {link!r}.", 'Write word indices from 0, like "0-0 1-2".')
        links.append((int(match[1]), int(match[2])))
    return links


def check_links(links: Sequence[Link], source: str, target: str) -> None:
    """Raise an error for a link to a word that the source or the target does not have."""
    source_words, target_words = len(source.split()), len(target.split())
    for link in links:
        if link[0] >= source_words or link[1] >= target_words:
            raise RegardError(
                f"the link {link[0]}-{link[1]} is out of range.",
                f"The source has {source_words} words and the target {target_words}, counted from 0.",
            )


def _select_fields(fields: Sequence[str], indices: Sequence[int], is_csv: bool) -> tuple[str, ...]:
    if len(fields) <= max(indices):
        has_no_tab = len(fields) == 1 and not is_csv
        problem = "no tab" if has_no_tab else f"only {len(fields)} column{'s' * (len(fields) > 1)}"
        expected = ["source", "target", "alignment"][: len(indices)]
        raise RegardError(f"{problem}.", hint=f"Write {(',' if is_csv else '<TAB>').join(expected)} on every line.")
    return tuple(fields[index] for index in indices)


def parse_json_line(line: str) -> Any:
    """Parse a line of a JSONL file."""
    try:
        return parse_json(line)
    except (ValueError, RecursionError) as error:
        detail = describe_json_error(error)
        if isinstance(error, json.JSONDecodeError):
            detail = f"{error.msg} at column {error.colno}"
        raise RegardError(f"not JSON ({detail}).", hint="Write one object per line.") from None


def describe_json_error(error: Exception) -> str:
    """The cause of an error of `parse_json` other than a syntax error."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "half a surrogate pair" if isinstance(error, UnicodeError) else "a number has too many digits"


def describe_fields(entry: Any, names: Sequence[str] = ()) -> str:
    """Describe a JSON value without text in the fields `names`, for error messages.

    >>> describe_fields({"en": "a"}, ["source"]), describe_fields({"source": 1}, ["source"])
    ('it has en', '"source" is 1')
    """
    if not isinstance(entry, dict):
        return "it is not an object"
    if names and all(name in entry for name in names):
        name = next(name for name in names if not isinstance(entry[name], str))
        return f'"{name}" is {format_value(entry[name])}'
    return f"it has {', '.join(entry) or 'no fields'}"


def pair_from_object(entry: Any, columns: Sequence[str]) -> TextPair:
    names = columns or ("source", "target")
    if isinstance(entry, dict) and isinstance(entry.get("translation"), dict):
        entry = entry["translation"]
    source, target = (entry.get(name) if isinstance(entry, dict) else None for name in names)
    if not isinstance(source, str) or not isinstance(target, str):
        message = f'expected text in the fields "{names[0]}" and "{names[1]}"; {describe_fields(entry, names)}.'
        raise RegardError(message, hint="Name the two fields: --columns SOURCE TARGET, or columns=(source, target).")
    return source, target


def _alignment_from_object(entry: Any, columns: Sequence[str]) -> tuple[str, ...]:
    name = columns[2] if len(columns) == 3 else _ALIGNMENT_NAME
    inner = entry.get("translation")
    alignment = entry.get(name, inner.get(name) if isinstance(inner, dict) else None)
    if alignment is None and len(columns) < 3:
        return ()
    if not isinstance(alignment, str):
        raise RegardError(
            f'expected text in the field "{name}"; {describe_fields(entry)}.', 'Write links like "0-0 1-2".'
        )
    return (alignment,)


class ReadPosition:
    """The approximate number of bytes read from a file, for progress; like that of an InputStream."""

    def __init__(self) -> None:
        self.position = 0


def is_hub_reference(file: str | Path) -> bool:
    """Whether this names a dataset of the Hugging Face hub instead of a file.

    >>> is_hub_reference("hf:wmt/wmt14:fr-en:train"), is_hub_reference("pairs.tsv")
    (True, False)
    """
    return isinstance(file, str) and file.startswith(HUB_PREFIX)


def parquet_rows(
    file: str | Path, columns: Sequence[str] = (), on_open: Callable[[Any], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as dictionaries; only `columns` are read, if the file has all of them.

    The rows may expand as far as compressed data (`MAX_EXPANSION_BYTES`).
    """
    parquet = require_package("pyarrow.parquet", "parquet")
    position = ReadPosition()
    with _convert_arrow_errors(file):
        size = os.path.getsize(file)
        with parquet.ParquetFile(file, pre_buffer=False) as table:
            if on_open is not None:
                on_open(position)
            names = list(columns) if columns and set(columns) <= set(table.schema_arrow.names) else None
            done, total, expanded = 0, max(1, table.metadata.num_rows), 0
            for batch in table.iter_batches(_ROWS_PER_BATCH, columns=names):
                expanded += batch.nbytes
                if expanded > (limit := max(MAX_EXPANSION_BYTES, MAX_EXPANSION_RATIO * size)):
                    raise RegardError(
                        f"{file}: {size:,} bytes expand to more than {limit >> 20:,} MiB.",
                        "If that is expected, convert the file to JSONL first.",
                    )
                yield from batch.to_pylist()
                done += len(batch)
                position.position = size * done // total


@contextmanager
def _convert_arrow_errors(file: str | Path) -> Iterator[None]:
    arrow = require_package("pyarrow", "parquet")
    try:
        yield
    except FileNotFoundError:
        raise RegardError(f"There is no file {file}.") from None
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise RegardError(f"{file}: not a readable Parquet file ({reason}).", "Download or write it again.") from None


def hub_rows(reference: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dataset of the Hugging Face hub, or of a local folder in one of its formats.

    The reference is hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT; the default split is train. Rows are streamed. In
    offline mode (HF_HUB_OFFLINE=1), the dataset is read from the local cache.
    """
    name, config, split = _parse_reference(reference)
    library = require_package("datasets", "datasets")
    streaming = Path(name).exists() or not library.config.HF_HUB_OFFLINE
    try:
        yield from library.load_dataset(name, config, split=split, streaming=streaming)
    except RegardError:
        raise
    except Exception as error:  # the library raises many kinds of errors: of the network, of readers, its own
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise RegardError(f"{reference}: the dataset cannot be read ({reason}).", "Check name and split.") from None


def _parse_reference(reference: str) -> tuple[str, str | None, str]:
    """Name, config and split of a reference.

    >>> _parse_reference("hf:wmt/wmt14:fr-en:train"), _parse_reference("hf:imdb")
    (('wmt/wmt14', 'fr-en', 'train'), ('imdb', None, 'train'))
    """
    parts = reference.removeprefix(HUB_PREFIX).split(":")
    if not all(parts) or len(parts) > 3:
        raise RegardError(
            f"{reference} is not a reference to a dataset.", "Write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT."
        )
    name, *middle = parts
    return name, middle[0] if len(middle) == 2 else None, middle[-1] if middle else "train"

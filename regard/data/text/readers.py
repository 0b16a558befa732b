"""Sentence pairs from files: two parallel files, TSV, CSV or JSONL; plain or compressed; or standard input."""

import csv
import difflib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.text.compression import BROKEN, STDIN, SUFFIXES, open_input
from regard.errors import RegardError

logger = logging.getLogger("regard")

Pair = tuple[str, str]

MAX_LINE = 1 << 20  # bytes
_CHUNK = 1 << 20
_PAIR_SUFFIXES = (".tsv", ".csv", ".jsonl")
# Names of columns: a first row in which two of them head the two columns that are read is a header.
_SOURCE_NAMES, _TARGET_NAMES = ("source", "src"), ("target", "tgt", "trg")
_COLUMN_NAMES = """
    source src target tgt trg input output text text1 text2 sentence sentence1 sentence2 label translation original
    reference question answer word lemma form inflection singular plural pronunciation phonemes ipa noisy clean
    incorrect correct misspelled misspelt simple complex english french german spanish italian portuguese dutch polish
    czech russian ukrainian turkish arabic hebrew hindi chinese japanese korean vietnamese hungarian finnish swedish
    danish norwegian romanian greek bulgarian latin esperanto
"""
# ISO 639 codes, of two letters and of three, of languages that people have parallel text of.
_LANGUAGE_CODES = """
    af am ar az be bg bn bs ca cs cy da de el en eo es et eu fa fi fr ga gl gu he hi hr hu hy id is it ja ka kk km kn
    ko la lo lt lv mk ml mn mr ms mt my ne nl no nb nn pa pl ps pt ro ru si sk sl sq sr sv sw ta te th tl tr uk ur uz
    vi xh yi yo zh zu ara bul ces cmn dan deu ell eng epo est fin fra heb hin hun ind isl ita jpn kor lat lit lav nld
    nob pol por ron rus slk slv spa srp swe tha tur ukr vie zho
"""
_KNOWN_NAMES, _KNOWN_CODES = frozenset(_COLUMN_NAMES.split()), frozenset(_LANGUAGE_CODES.split())


def numbered_lines(file: str | Path, max_bytes: int | None = MAX_LINE) -> Iterator[tuple[int, str]]:
    """The lines of a file ("-" is stdin), numbered from 1. Only a line feed ends a line; CR LF and a BOM are removed.

    Errors name the file, and the line where there is one. A line of more than `max_bytes` is an error; None: no limit
    but that of compressed data (`EXPANSION_BYTES`).
    """
    number = 0
    with _errors_named(file, lambda: number):
        with open_input(file) as stream:
            _note_misnamed(file, stream.compression)
            while raw := _raw_line(stream, max_bytes):
                number += 1
                if max_bytes is not None and len(raw) > max_bytes:
                    raise RegardError(
                        f"{name_of(file)}, line {number}: longer than {max_bytes:,} bytes.",
                        hint="Is it a text file, with one sentence per line?",
                    )
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                yield number, raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
        if number == 0:
            raise RegardError(f"{name_of(file)} is empty.")


def _raw_line(stream: Any, max_bytes: int | None) -> bytes:
    if max_bytes is not None:
        return stream.readline(max_bytes + 1)
    parts = [stream.readline(_CHUNK)]
    while parts[-1] and not parts[-1].endswith(b"\n"):
        parts.append(stream.readline(_CHUNK))
    return b"".join(parts)


def read_text(file: str | Path) -> str:
    """A whole text file with its line ends; "-" is stdin. A BOM is removed, CR LF becomes LF.

    Lines may have any length; compressed data are bounded (`EXPANSION_BYTES`).
    """
    parts: list[bytes] = []
    data = b""

    def line() -> int:
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            return data.count(b"\n", 0, error.start) + 1
        return sum(part.count(b"\n") for part in parts)

    with _errors_named(file, line):
        with open_input(file) as stream:
            _note_misnamed(file, stream.compression)
            while part := stream.read(_CHUNK):
                parts.append(part)
        data = b"".join(parts)
        if not data:
            raise RegardError(f"{name_of(file)} is empty.")
        return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8").replace("\r\n", "\n")


@contextmanager
def _errors_named(file: str | Path, line: Callable[[], int]) -> Iterator[None]:
    """Errors of reading as sentences; `line` gives the number of the line that was read last."""
    name = name_of(file)
    try:
        yield
    except FileNotFoundError:
        raise RegardError(f"There is no file {name}.", hint=_near(Path(file))) from None
    except UnicodeDecodeError:
        hint = "Convert it: iconv -f ENCODING -t UTF-8 FILE."
        if (suffix := Path(file).suffix) in SUFFIXES:
            hint = f"Nor is it {SUFFIXES[suffix]} data, as {suffix} says. Download or compress the file again."
        raise RegardError(f"{name}, line {line()}: not UTF-8.", hint=hint) from None
    except OSError as error:
        if isinstance(error, BROKEN) or error.errno is None:
            raise _broken(name, line(), error) from None
        raise RegardError(f"{name} cannot be read: {error.strerror or error}.") from None
    except BROKEN as error:
        raise _broken(name, line(), error) from None


def _broken(name: str, line: int, error: Exception) -> RegardError:
    return RegardError(
        f"{name}: broken compressed data after line {line} ({error}).", hint="Download or compress the file again."
    )


def _note_misnamed(file: str | Path, found: str) -> None:
    stated = "" if file == STDIN else SUFFIXES.get(Path(file).suffix, "")
    if stated and not found:
        logger.warning("%s: not %s data, as its name says; it is read as plain text.", file, stated)
    elif stated != found and file != STDIN:
        logger.warning("%s: %s data, though its name does not say so; it is decompressed.", file, found)


def name_of(file: str | Path) -> str:
    """What errors call a file."""
    return "stdin" if file == STDIN else str(file)


@contextmanager
def in_line(file: str | Path, number: int) -> Iterator[None]:
    """An error from inside names the line and the file that it is about.

    >>> with in_line("a.tsv", 3):
    ...     raise RegardError("no tab.")
    Traceback (most recent call last):
    regard.errors.RegardError: a.tsv, line 3: no tab.
    """
    try:
        yield
    except RegardError as error:
        raise RegardError(f"{name_of(file)}, line {number}: {error.message}", error.hint) from None


def _near(path: Path) -> str:
    """Which file may have been meant."""
    if not path.parent.is_dir():
        return f"There is no folder {path.parent} either."
    near = difflib.get_close_matches(path.name, [one.name for one in path.parent.iterdir()], n=3)
    return f"Did you mean {' or '.join(str(path.parent / one) for one in near)}?" if near else ""


def read_lines(file: str | Path) -> list[str]:
    """The lines of a text file, plain or compressed; "-" is stdin."""
    return [line for _, line in numbered_lines(file)]


def stem_suffix(file: str | Path) -> str:
    """The suffix without the compression's: .tsv for pairs.tsv.gz."""
    path = Path(file)
    return (path.with_suffix("") if path.suffix in SUFFIXES else path).suffix


# -- tables ------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of a TSV or CSV file as fields, or a line of a JSONL file as `value`; `number` is the line it ends in."""

    number: int
    fields: list[str] | None
    value: Any = None


def table_rows(file: str | Path) -> Iterator[Row]:
    """The rows of a `.tsv`, `.csv` or `.jsonl` file. Others, and stdin, are JSONL if they begin with "{", else TSV.

    An empty line is a row without fields. CSV is quoted as RFC 4180 says; in TSV, quotes are text.
    """
    kind = stem_suffix(file).lower()
    if kind == ".csv":
        yield from _csv_rows(file)
        return
    for number, line in numbered_lines(file):
        if not line.strip():
            yield Row(number, [])
            continue
        if kind not in (".tsv", ".jsonl"):
            kind = ".jsonl" if line.lstrip().startswith("{") else ".tsv"
        if kind == ".tsv":
            yield Row(number, line.split("\t"))
        else:
            with in_line(file, number):
                found = from_json(line)
            yield Row(number, None, found)


def _csv_rows(file: str | Path) -> Iterator[Row]:
    reader = csv.reader((line + "\n" for _, line in numbered_lines(file)), strict=True)
    try:
        for fields in reader:
            yield Row(reader.line_num, fields if any(field.strip() for field in fields) else [])
    except csv.Error as error:
        message = f"{name_of(file)}, line {reader.line_num}: not CSV ({error})."
        raise RegardError(message, hint='Quote fields as in "a, b", and double the quotes inside.') from None


def named_rows(file: str | Path) -> list[tuple[int, dict[str, str]]]:
    """The rows of a CSV or TSV file by the names of its header, in lower case, and the line that each one ends in."""
    rows = [(row.number, row.fields) for row in table_rows(file) if row.fields]
    names = [name.strip().lower() for name in rows.pop(0)[1]] if rows else []
    found = []
    for number, fields in rows:
        with in_line(file, number):
            if len(fields) != len(names):
                raise RegardError(f"{len(fields)} columns, where the header has {len(names)}.", "Fix that line.")
        found.append((number, dict(zip(names, (field.strip() for field in fields)))))
    return found


def column_places(names: Sequence[str], header: Sequence[str]) -> list[int]:
    """The places, from 0, of columns given by their names in a header or by numbers from 1.

    >>> column_places(["fr", "1"], ["en", "fr"])
    [1, 0]
    """
    known = [name.strip().lower() for name in header]
    places = []
    for name in names:
        if name.strip().lower() in known:
            places.append(known.index(name.strip().lower()))
        elif name.isdecimal() and int(name):
            places.append(int(name) - 1)
        else:
            listed = ", ".join(header[:10]) + (", …" if len(header) > 10 else "")
            raise RegardError(f"no column {name!r} in the first row ({listed}).", hint="Name columns or count from 1.")
    return places


def names_columns(columns: Sequence[str], header: Sequence[str]) -> bool:
    """Whether a first row is a header because it has a column of one of these names.

    >>> names_columns(["en", "2"], ["en", "fr"]), names_columns(["1", "2"], ["en", "fr"])
    (True, False)
    """
    known = [name.strip().lower() for name in header]
    return any(name.strip().lower() in known for name in columns if not name.isdecimal())


def note_header(file: str | Path, header: Sequence[str]) -> None:
    """Say that a first row is a header."""
    logger.warning('%s: first line "%s" is a header and is skipped.', name_of(file), "<TAB>".join(header))


# -- pairs -------------------------------------------------------------------------------------------------------------


def read_pairs(files: Sequence[str | Path], columns: Sequence[str] | None = None) -> list[Pair]:
    """Pairs of source and target.

    - Two parallel files: line n of one belongs to line n of the other.
    - `.tsv` and `.csv` files: source and target in the first two columns; further ones are ignored. A first row that
      is a header (column names such as source and target, or language codes) is skipped, and said to be. Several files
      are read one after the other.
    - `.jsonl` files: objects with "source" and "target", by themselves or inside "translation". Likewise several.
    - One file of another name, or stdin ("-"): JSONL if it begins with "{", otherwise TSV.

    `columns` are the two that are read: by their names in the header, or the fields of JSONL (("en", "fr")); or, in
    tables, by their numbers from 1 (("2", "1")). An empty line is a pair of empty sentences: cleaning counts and
    removes it.
    """
    if columns and len(columns) != 2:
        raise RegardError(
            f"{len(columns)} columns for pairs.", hint="Name two: that of the source, that of the target."
        )
    if len(files) == 2 and not all(stem_suffix(file) in _PAIR_SUFFIXES for file in files):
        if columns:
            raise RegardError("Columns are for TSV, CSV and JSONL; two parallel files have none.")
        return _parallel(*files)
    if len(files) == 1 or (files and all(stem_suffix(file) in _PAIR_SUFFIXES for file in files)):
        return [pair for file in files for pair in _pairs_in(file, tuple(columns or ()))]
    raise RegardError(
        f"Sentence pairs come from two parallel files or from .tsv, .csv and .jsonl files, not from {len(files)} files"
        + (f" like {files[0]}." if files else "."),
        hint="Give the source file and the target file, or source<TAB>target in one.",
    )


def _parallel(source: str | Path, target: str | Path) -> list[Pair]:
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise RegardError(
            f"{source} has {len(sources)} lines, but {target} has {len(targets)}.",
            hint=f"Line n of one must be the translation of line n of the other; "
            f"line {min(len(sources), len(targets)) + 1} has no partner.",
        )
    return list(zip(sources, targets))


def _pairs_in(file: str | Path, columns: tuple[str, ...]) -> Iterator[Pair]:
    rows = table_rows(file)
    head = list(islice(rows, 2))
    places, is_csv = [0, 1], stem_suffix(file).lower() == ".csv"
    if head and head[0].fields:
        with in_line(file, head[0].number):
            places, is_header = _pair_places(columns, *(row.fields or [] for row in head))
        if is_header:
            note_header(file, head[0].fields)
            del head[0]
    for row in chain(head, rows):
        with in_line(file, row.number):
            if row.fields is None:
                pair = _pair_of_object(row.value, columns)
            else:
                pair = _pair_of_fields(row.fields, places, is_csv) if row.fields else ("", "")
        yield pair


def _pair_places(columns: Sequence[str], first: Sequence[str], second: Sequence[str] = ()) -> tuple[list[int], bool]:
    """Where source and target are in a table with these first two rows, and whether the first is a header."""
    names = [name.strip().lower() for name in first]
    if columns:
        places = column_places(columns, first)
        return places, names_columns(columns, first) or _is_header(names, second, places)
    for source in _SOURCE_NAMES:
        for target in _TARGET_NAMES:
            if source in names and target in names:
                return [names.index(source), names.index(target)], True
    return [0, 1], _is_header(names, second, [0, 1])


def _is_header(names: Sequence[str], second: Sequence[str], places: Sequence[int]) -> bool:
    """Whether the columns at two places are headed by names that are known, or by language codes above longer text."""
    if max(places) >= len(names):
        return False
    heads = [names[place] for place in places]
    is_code = [re.split("[-_]", head)[0] in _KNOWN_CODES for head in heads]
    if heads[0] == heads[1] or not all(head in _KNOWN_NAMES or code for head, code in zip(heads, is_code)):
        return False
    return not any(is_code) or (max(places) < len(second) and all(len(second[place].strip()) > 3 for place in places))


def _pair_of_fields(fields: Sequence[str], places: Sequence[int], is_csv: bool) -> Pair:
    if len(fields) <= max(places):
        found = "no tab" if len(fields) == 1 and not is_csv else f"only {len(fields)} column{'s' * (len(fields) > 1)}"
        raise RegardError(f"{found}.", hint=f"Write source{',' if is_csv else '<TAB>'}target on every line.")
    return fields[places[0]], fields[places[1]]


def from_json(line: str) -> Any:
    """What a line of JSONL holds."""
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise RegardError(f"not JSON ({why}).", hint="Write one object per line.") from None


def fields_of(found: Any) -> str:
    """What an error says of an object that lacks something."""
    return f"it has {', '.join(found) or 'no fields'}" if isinstance(found, dict) else "it is not an object"


def _pair_of_object(found: Any, columns: Sequence[str]) -> Pair:
    names = columns or ("source", "target")
    if isinstance(found, dict) and isinstance(found.get("translation"), dict):
        found = found["translation"]
    source, target = (found.get(name) if isinstance(found, dict) else None for name in names)
    if not isinstance(source, str) or not isinstance(target, str):
        message = f'no text under "{names[0]}" and "{names[1]}"; {fields_of(found)}.'
        raise RegardError(message, hint="Name the two fields: --columns SOURCE TARGET")
    return source, target

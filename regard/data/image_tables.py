"""Tables that name pictures: CSV or TSV with a header."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.data.readers import in_line, numbered_lines, stem_suffix
from regard.errors import RegardError

DELIMITERS = {".csv": ",", ".tsv": "\t"}

# Each row by the names of its columns, and the line that it ends in.
Rows = list[tuple[int, dict[str, str]]]


def read_rows(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a table by the names of their columns, and the line that each one ends in."""
    lines = (line + "\n" for _, line in numbered_lines(file))
    reader = csv.reader(lines, delimiter=DELIMITERS[stem_suffix(file).lower()])
    columns: list[str] = []
    for fields in _fields(file, reader):
        if not any(field.strip() for field in fields):
            continue
        if not columns:
            columns = [field.strip().lower() for field in fields]
            continue
        with in_line(file, reader.line_num):
            if len(fields) != len(columns):
                raise RegardError(f"{len(fields)} columns, where the header has {len(columns)}.", "Mend that line.")
        yield reader.line_num, dict(zip(columns, (field.strip() for field in fields)))


def _fields(file: Path, reader: Any) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise RegardError(f"{file}, line {reader.line_num}: not a table ({error}).", "Mend that line.") from None


def cell(row: dict[str, str], column: str) -> str:
    if not row[column]:
        raise RegardError(f"the {column} is empty.", "Fill it in, or take the row out.")
    return row[column]


def number_in(row: dict[str, str], column: str) -> int:
    if not row[column].isdecimal() or len(row[column]) > 9:
        raise RegardError(f"the {column} is {row[column]!r}.", "It must be a whole number.")
    return int(row[column])

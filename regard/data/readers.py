"""Sentence pairs from files as people have them: two parallel files, TSV or JSONL; plain, .gz or .xz; or stdin."""

import difflib
import gzip
import json
import lzma
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from regard.errors import RegardError

Pair = tuple[str, str]

STDIN = "-"
_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
_PAIR_SUFFIXES = (".tsv", ".jsonl")


def numbered_lines(file: str | Path) -> Iterator[tuple[int, str]]:
    """The lines of a file ("-" is stdin), numbered from 1. Only a line feed ends a line; CR LF and a BOM are removed.

    The error for whatever is wrong with the file names it, and the line where there is one.
    """
    for number, line in _lines_with_ends(file):
        yield number, line.removesuffix("\n").removesuffix("\r")


def _lines_with_ends(file: str | Path) -> Iterator[tuple[int, str]]:
    name = name_of(file)
    number = 0
    try:
        with _open(file) as stream:
            for number, raw in enumerate(stream, start=1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                yield number, raw.decode("utf-8")
    except FileNotFoundError:
        raise RegardError(f"There is no file {name}.", hint=_near(Path(file))) from None
    except UnicodeDecodeError:
        hint = "Convert it: iconv -f ENCODING -t UTF-8 FILE."
        raise RegardError(f"{name}, line {number}: not UTF-8.", hint=hint) from None
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        kind = Path(file).suffix.removeprefix(".")
        message = f"{name}: broken {kind} data after line {number} ({error})."
        raise RegardError(message, hint="Download or compress the file again.") from None
    except OSError as error:
        raise RegardError(f"{name} cannot be read: {error.strerror or error}.") from None
    if number == 0:
        raise RegardError(f"{name} is empty.")


def name_of(file: str | Path) -> str:
    """What errors call a file."""
    return "stdin" if file == STDIN else str(file)


@contextmanager
def in_line(file: str | Path, number: int) -> Iterator[None]:
    """An error from inside says which line of which file it is about.

    >>> with in_line("a.tsv", 3):
    ...     raise RegardError("no tab.")
    Traceback (most recent call last):
    regard.errors.RegardError: a.tsv, line 3: no tab.
    """
    try:
        yield
    except RegardError as error:
        raise RegardError(f"{name_of(file)}, line {number}: {error.message}", error.hint) from None


def _open(file: str | Path) -> AbstractContextManager[BinaryIO]:
    if file == STDIN:
        return nullcontext(sys.stdin.buffer)  # line by line as they come; not ours to close
    opener = _OPENERS.get(Path(file).suffix, open)
    return opener(file, "rb")  # type: ignore[operator]


def _near(path: Path) -> str:
    """Which file may have been meant."""
    if not path.parent.is_dir():
        return f"There is no folder {path.parent} either."
    near = difflib.get_close_matches(path.name, [one.name for one in path.parent.iterdir()], n=3)
    return f"Did you mean {' or '.join(str(path.parent / one) for one in near)}?" if near else ""


def read_lines(file: str | Path) -> list[str]:
    """The lines of a text file, .gz or .xz too; "-" is stdin."""
    return [line for _, line in numbered_lines(file)]


def read_text(file: str | Path) -> str:
    """A whole text file with its line ends, .gz or .xz too; "-" is stdin. A BOM is removed, CR LF becomes LF."""
    return "".join(line for _, line in _lines_with_ends(file)).replace("\r\n", "\n")


def read_pairs(files: Sequence[str | Path], columns: tuple[str, str] | None = None) -> list[Pair]:
    """Pairs of source and target.

    - Two parallel files: line n of one belongs to line n of the other.
    - `.tsv` files: source, tab, target; further columns are ignored. Several files are read one after the other.
    - `.jsonl` files: objects with "source" and "target", by themselves or inside "translation". Likewise several.
    - One file of another name, or stdin ("-"): JSONL if it begins with "{", otherwise TSV.

    `columns` names other fields of JSONL (("en", "fr")), or other columns of TSV, counted from 1 (("2", "1")).
    An empty line is a pair of empty sentences: cleaning counts and removes it.
    """
    if len(files) == 2 and not all(stem_suffix(file) in _PAIR_SUFFIXES for file in files):
        if columns is not None:
            raise RegardError("Columns are for TSV and JSONL; two parallel files have none.")
        return _parallel(*files)
    if len(files) == 1 or (files and all(stem_suffix(file) in _PAIR_SUFFIXES for file in files)):
        return [pair for file in files for pair in _in_one(file, columns)]
    raise RegardError(
        f"Sentence pairs come from two parallel files or from .tsv and .jsonl files, not from {len(files)} files"
        + (f" like {files[0]}." if files else "."),
        hint="Give the source file and the target file, or source<TAB>target in one.",
    )


def stem_suffix(file: str | Path) -> str:
    """The suffix without the compression's: .tsv for pairs.tsv.gz."""
    path = Path(file)
    return (path.with_suffix("") if path.suffix in _OPENERS else path).suffix


def _parallel(source: str | Path, target: str | Path) -> list[Pair]:
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise RegardError(
            f"{source} has {len(sources)} lines, but {target} has {len(targets)}.",
            hint=f"Line n of one must be the translation of line n of the other; "
            f"line {min(len(sources), len(targets)) + 1} has no partner.",
        )
    return list(zip(sources, targets))


def _in_one(file: str | Path, columns: tuple[str, str] | None) -> Iterator[Pair]:
    parse = {".tsv": _from_tsv, ".jsonl": _from_json}.get(stem_suffix(file))
    for number, line in numbered_lines(file):
        if not line.strip():
            yield "", ""
            continue
        if parse is None:
            parse = _from_json if line.lstrip().startswith("{") else _from_tsv
        with in_line(file, number):
            pair = parse(line, columns)
        yield pair


def _from_tsv(line: str, columns: tuple[str, str] | None) -> Pair:
    names = columns or ("1", "2")
    if not all(name.isdecimal() and int(name) for name in names):
        raise RegardError("the columns of a TSV file are numbers.", hint='Count from 1: "1" and "2".')
    source, target = map(int, names)
    fields = line.split("\t")
    if len(fields) < max(source, target):
        found = "no tab" if len(fields) == 1 else f"only {len(fields)} columns"
        raise RegardError(f"{found}.", hint="Write source<TAB>target on every line.")
    return fields[source - 1], fields[target - 1]


def from_json(line: str) -> Any:
    """What a line of JSONL holds."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise RegardError(f"not JSON ({error.msg} at column {error.colno}).", hint="Write one object a line.") from None


def fields_of(found: Any) -> str:
    """What an error says of an object that lacks something."""
    return f"it has {', '.join(found) or 'no fields'}" if isinstance(found, dict) else "it is no object"


def _from_json(line: str, columns: tuple[str, str] | None) -> Pair:
    names = columns or ("source", "target")
    found = from_json(line)
    if isinstance(found, dict) and isinstance(found.get("translation"), dict):
        found = found["translation"]
    source, target = (found.get(name) if isinstance(found, dict) else None for name in names)
    if not isinstance(source, str) or not isinstance(target, str):
        message = f'no text under "{names[0]}" and "{names[1]}"; {fields_of(found)}.'
        raise RegardError(message, hint="Name the two columns.")
    return source, target

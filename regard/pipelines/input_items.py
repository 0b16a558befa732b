"""Inputs of any size: the items of files, plain or compressed, of standard input, or of several files (shards)."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import Generic, TypeVar

from regard.data.text.compression import STDIN, InputStream
from regard.data.text.readers import OnOpen, display_name, numbered_lines, stream_pairs, uncompressed_suffix
from regard.errors import RegardError

T = TypeVar("T", str, tuple[str, str])


@dataclass
class InputItems(Generic[T]):
    """The items of an input, in order: lines, or pairs of source and target."""

    name: str
    """name in messages"""
    read: Callable[[OnOpen], Iterator[T]]
    """returns an iterator over the items, and calls its argument with each stream that it opens"""
    unit: str = "line"
    files: tuple[str | Path, ...] = ()
    streams: list[InputStream] = field(default_factory=list)
    """the streams opened so far; their positions show how much has been read"""

    @classmethod
    def from_lines(cls, file: str | Path, *, allow_empty: bool = False) -> "InputItems[str]":
        """The lines of a file, plain or compressed, or of standard input ("-")."""
        file = STDIN if str(file) == STDIN else file
        return InputItems(
            display_name(file),
            lambda on_open: (line for _, line in numbered_lines(file, on_open=on_open, allow_empty=allow_empty)),
            files=(file,),
        )

    @classmethod
    def from_pairs(
        cls, files: str | Path | Sequence[str | Path], columns: Sequence[str] = ()
    ) -> "InputItems[tuple[str, str]]":
        """The pairs of two parallel files, or of TSV, CSV or JSONL files."""
        paths = (files,) if isinstance(files, str | Path) else tuple(files)
        names = [str(path) for path in paths]
        return InputItems(
            " ".join(map(display_name, paths)),
            lambda on_open: stream_pairs(names, columns, on_open=on_open),
            "pair",
            paths,
        )

    def __iter__(self) -> Iterator[T]:
        """Read the items from the beginning."""
        self.streams.clear()
        return self.read(self.streams.append)

    @property
    def is_rereadable(self) -> bool:
        """Whether the items can be read again, which standard input cannot."""
        return STDIN not in map(str, self.files)

    def item_name(self, index: int) -> str:
        """The name of an item in messages."""
        return f"{self.name}, {self.unit} {index + 1}"

    def size(self) -> int | None:
        """The size of the files in bytes; None if it is unknown."""
        try:
            return sum(os.path.getsize(file) for file in self.files)
        except OSError:
            return None

    def position(self) -> int:
        """The number of bytes of the files that have been read."""
        return sum(stream.position for stream in self.streams)

    def encode(self, items: Sequence[T]) -> bytes:
        """The items as bytes, for the hash of the input."""
        return "".join((item if isinstance(item, str) else "\t".join(item)) + "\n" for item in items).encode()


def is_pattern(source: object) -> bool:
    """Whether an input is a pattern for the names of several files, such as part-*.txt.

    >>> is_pattern("part-*.txt"), is_pattern("part-1.txt")
    (True, False)
    """
    return isinstance(source, str | Path) and has_magic(str(source)) and not os.path.exists(source)


def find_shards(
    source: str | Path | InputItems[str], output: str | Path, extension: str | None = None
) -> list[tuple[InputItems[str], Path]]:
    """Each input with its output file: one file, or the files of a pattern with an output folder.

    In the folder, each output is named like its input; `extension` replaces the extensions.
    """
    if isinstance(source, InputItems):
        return [(source, Path(output))]
    if not is_pattern(source):
        return [(InputItems.from_lines(source), Path(output))]
    files = [Path(name) for name in sorted(glob(str(source))) if os.path.isfile(name)]
    if not files:
        raise RegardError(f"No file matches {source}.", "Check the pattern.")
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise RegardError(f"{folder} is a file; the outputs for {source} need a folder.", "Name a folder.")
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise RegardError(f"{folder}: there is no folder {folder.parent}.", "Create it first.") from None
    names = [file.name if extension is None else _stem(file) + extension for file in files]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise RegardError(f"{source}: two inputs would be written to {folder / twice}.", "Use one pattern per folder.")
    return [(InputItems.from_lines(file, allow_empty=True), folder / name) for file, name in zip(files, names)]


def _stem(file: Path) -> str:
    """The name of a file without extension and compression: part-1 for part-1.txt.gz."""
    suffix = uncompressed_suffix(file)
    name = file.name if file.suffix == suffix else file.name.removesuffix(file.suffix)
    return name.removesuffix(suffix)

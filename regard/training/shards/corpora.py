"""The corpora that can be prepared as token shards: how the examples of each task are read and cleaned."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from regard.data.text.cleaning import pair_fault
from regard.data.text.documents import document_from_object, stream_documents
from regard.data.text.readers import OnOpen, errors_at_line, pair_from_object, stream_pairs
from regard.errors import RegardError
from regard.training.recipe import DataConfig

Row = tuple[tuple[str, ...], bool]
"""texts of an example, one per side, and whether it starts a document"""
Rows = Iterator[Row]


@dataclass(frozen=True)
class Corpus:
    """How the examples of a task are read and stored."""

    unit: str
    sides: tuple[str, ...]
    read: Callable[[Any, DataConfig, OnOpen, Counter[str]], Rows]
    """yields the rows of files or of an iterable, and counts the examples that cleaning drops"""
    drops_duplicates: bool = False
    is_stream: bool = False
    is_mixture: bool = False
    """whether the files are different tasks; then the validation examples are shuffled, so that the first ones, on
    which BLEU is computed, are from all of them"""


def _read_pairs(data: Any, config: DataConfig, on_open: OnOpen, dropped: Counter[str]) -> Rows:
    if config.files:
        pairs: Iterator[tuple[str, str]] = stream_pairs(config.files, config.columns, on_open=on_open)
    else:
        pairs = (_pair_of(row, number, config.columns) for number, row in enumerate(data, 1))
    for source, target in itertools.islice(pairs, config.limit or None):
        pair = source.strip(), target.strip()
        if fault := pair_fault(*pair, config.max_ratio):
            dropped[fault] += 1
        else:
            yield pair, True


def _pair_of(row: Any, number: int, columns: Sequence[str]) -> tuple[str, str]:
    if isinstance(row, tuple | list) and len(row) == 2 and all(isinstance(side, str) for side in row):
        return row[0], row[1]
    with errors_at_line("data", number):
        return pair_from_object(row, columns)


def _read_tasks(data: Any, config: DataConfig, on_open: OnOpen, dropped: Counter[str]) -> Rows:
    """The pairs of several files, each with its prefix."""
    files, prefixes = config.files, config.prefixes or ("",) * len(config.files)
    if not files or len(prefixes) != len(files):
        raise RegardError(
            f"prefixes must have one entry per file: expected {len(files)}, got {len(prefixes)}.",
            "Pass files with one prefix each.",
        )
    for file, prefix in zip(files, prefixes):
        one = dataclasses.replace(config, files=(file,), prefixes=())
        for (source, target), is_first in _read_pairs(None, one, on_open, dropped):
            yield (prefix + source, target), is_first


def _first_examples(read: Callable[..., Rows]) -> Callable[..., Rows]:
    """The reader without the rows after the first `data.limit` examples."""

    def read_first(data: Any, config: DataConfig, on_open: OnOpen, dropped: Counter[str]) -> Rows:
        count = 0
        for texts, is_first in read(data, config, on_open, dropped):
            count += is_first
            if config.limit and count > config.limit:
                return
            yield texts, is_first

    return read_first


def _read_documents(data: Any, config: DataConfig, on_open: OnOpen, dropped: Counter[str]) -> Rows:
    if config.files:
        for text, is_first in stream_documents(config.files, config.columns, on_open=on_open):
            yield (text,), is_first
        return
    for number, row in enumerate(data, 1):
        with errors_at_line("data", number):
            text = row if isinstance(row, str) else document_from_object(row, *config.columns)
        if text and not text.isspace():
            yield (text,), True


def _read_lines(data: Any, config: DataConfig, on_open: OnOpen, dropped: Counter[str]) -> Rows:
    """The non-empty lines of documents."""
    pending, end = "", (("",), True)
    for (text,), is_first in itertools.chain(_read_documents(data, config, on_open, dropped), [end]):
        lines = [pending, *text.split("\n")] if is_first else (pending + text).split("\n")
        pending = lines.pop()
        yield from (((line,), True) for line in lines if line.strip())


CORPORA = {
    "translate": Corpus("pairs", ("source", "target"), _read_pairs, drops_duplicates=True),
    "text2text": Corpus("pairs", ("source", "target"), _read_tasks, drops_duplicates=True, is_mixture=True),
    "language": Corpus("documents", ("text",), _first_examples(_read_documents), is_stream=True),
    "mask": Corpus("texts", ("text",), _first_examples(_read_lines)),
}

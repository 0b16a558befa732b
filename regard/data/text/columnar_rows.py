"""Rows of Parquet files and of datasets on the Hugging Face hub, read a few at a time."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.data.text.compression import MAX_EXPANSION_BYTES, MAX_EXPANSION_RATIO
from regard.errors import RegardError, require_package

PARQUET = ".parquet"
HUB_PREFIX = "hf:"
# Few, since a dictionary page of some kilobytes can hold a text of megabytes that all rows refer to; not slower than
# thousands.
_ROWS_PER_BATCH = 64


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

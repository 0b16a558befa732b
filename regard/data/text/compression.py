"""Compressed input: gzip, xz, bzip2 and Zstandard, detected by content, with a limit on the decompressed size."""

import bz2
import gzip
import importlib
import io
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from regard.errors import RegardError, require_package

STDIN = "-"
# Compressed data may expand to this many bytes, or to this multiple of its size if that is more. Text compresses to
# about a fifth; anything that expands further is a decompression bomb, or should be decompressed first by the user.
MAX_EXPANSION_BYTES, MAX_EXPANSION_RATIO = 64 << 20, 100
# Compression by file suffix, and by magic bytes.
SUFFIXES = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstd"}
_MAGIC = {
    b"\x1f\x8b\x08": "gzip",
    b"\xfd7zXZ\x00": "xz",
    b"(\xb5/\xfd": "zstd",
    **{b"BZh%d" % level + block: "bzip2" for level in range(1, 10) for block in (b"1AY&SY", b"\x17rE8P\x90")},
}
_MAX_MAGIC_BYTES = max(map(len, _MAGIC))
CORRUPT_DATA_ERRORS = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
"""exceptions that readers of corrupt data raise; also OSError without errno (bzip2)"""


def detect_compression(head: bytes) -> str:
    """Detect the compression of data by its first bytes; "" if it is not compressed.

    >>> detect_compression(gzip.compress(b"text")), detect_compression(b"text")
    ('gzip', '')
    """
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "")


class InputStream:
    """Stream of bytes, decompressed if needed. `compression` is the detected compression ("" for plain data)."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        buffered: Any = stream if hasattr(stream, "peek") else io.BufferedReader(stream)  # type: ignore[type-var]
        self.name, self.compression = name, detect_compression(buffered.peek(_MAX_MAGIC_BYTES)[:_MAX_MAGIC_BYTES])
        self._counted = _CountingReader(buffered)
        self._stream = _OPENERS[self.compression](self._counted) if self.compression else buffered
        self._size = 0

    @property
    def position(self) -> int:
        """Number of bytes read from the file, before decompression."""
        return self._counted.count if self.compression else self._size

    def read(self, size: int) -> bytes:
        return self._check_expansion(self._stream.read(size))

    def readline(self, limit: int) -> bytes:
        """Read the next line with its line break, but at most `limit` bytes."""
        return self._check_expansion(self._stream.readline(limit))

    def _check_expansion(self, data: bytes) -> bytes:
        self._size += len(data)
        if self.compression and self._size > max(MAX_EXPANSION_BYTES, MAX_EXPANSION_RATIO * self._counted.count):
            raise RegardError(
                f"{self.name}: {self._counted.count:,} bytes of {self.compression} data expand to more than "
                f"{max(MAX_EXPANSION_BYTES, MAX_EXPANSION_RATIO * self._counted.count) >> 20:,} MiB.",
                hint="If that is expected, decompress the file first.",
            )
        return data


@contextmanager
def open_input(file: str | Path) -> Iterator[InputStream]:
    """Open a file, or stdin ("-"), decompressed regardless of its suffix."""
    if file != STDIN:
        with open(file, "rb") as stream:
            yield InputStream(stream, str(file))
        return
    try:
        descriptor = os.dup(sys.stdin.fileno())
    except (OSError, ValueError):  # sys.stdin was replaced by an object that is not a file
        yield InputStream(sys.stdin.buffer, "stdin")
        return
    # A separate buffer: at exit Python waits for the lock of sys.stdin's buffer, which a thread that waits for input
    # would hold.
    with open(descriptor, "rb") as stream:
        yield InputStream(stream, "stdin")


class _CountingReader:
    """Counts the bytes read from a stream."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.count = stream, 0

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.count += len(data)
        return data


class _ZstdReader(io.RawIOBase):
    """Reads Zstandard frames with the package `zstandard`, whose own reader does not detect truncated data."""

    CHUNK_BYTES = 2048  # expands to at most 64 MiB: four bytes are a block of up to 128 KiB

    def __init__(self, stream: _CountingReader, library: Any) -> None:
        self._stream, self._new_frame = stream, library.ZstdDecompressor().decompressobj
        self._error, self._frame, self._inside_frame = library.ZstdError, self._new_frame(), False
        self._buffer = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._buffer:
            data = self._stream.read(self.CHUNK_BYTES)
            if not data:
                if self._inside_frame:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                return 0
            parts = []
            while data:
                try:
                    parts.append(self._frame.decompress(data))
                except self._error as error:
                    raise EOFError(str(error)) from None
                data, self._inside_frame = b"", True
                if self._frame.eof:
                    data, self._frame, self._inside_frame = self._frame.unused_data, self._new_frame(), False
            self._buffer = memoryview(b"".join(parts))
        count = min(len(buffer), len(self._buffer))
        buffer[:count], self._buffer = self._buffer[:count], self._buffer[count:]
        return count


def _open_zstd(stream: _CountingReader) -> Any:
    if sys.version_info >= (3, 14):
        return importlib.import_module("compression.zstd").ZstdFile(stream)
    library = require_package("zstandard", "zstd")
    return io.BufferedReader(_ZstdReader(stream, library), 1 << 16)


_OPENERS: dict[str, Callable[[Any], Any]] = {
    "gzip": lambda stream: gzip.GzipFile(fileobj=stream, mode="rb"),
    "xz": lzma.LZMAFile,
    "bzip2": bz2.BZ2File,
    "zstd": _open_zstd,
}

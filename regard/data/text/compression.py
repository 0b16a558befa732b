"""Compressed input: gzip, xz, bzip2 and Zstandard, recognized by content, with a bound on how far it may expand."""

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

from regard.errors import RegardError

STDIN = "-"
# Compressed data may expand to this many bytes, or to this multiple of their size where that is more. Text compresses
# to a fifth or so; what expands further than this is a decompression bomb, or better decompressed by its owner.
EXPANSION_BYTES, EXPANSION_RATIO = 64 << 20, 100
# What each name ending means, and how data of each kind begin.
SUFFIXES = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstd"}
_MAGIC = {
    b"\x1f\x8b\x08": "gzip",
    b"\xfd7zXZ\x00": "xz",
    b"(\xb5/\xfd": "zstd",
    **{b"BZh%d" % level + block: "bzip2" for level in range(1, 10) for block in (b"1AY&SY", b"\x17rE8P\x90")},
}
_LONGEST_MAGIC = max(map(len, _MAGIC))
BROKEN = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
"""what readers of damaged data raise; bzip2's OSError has no number"""


def compression_of(begin: bytes) -> str:
    """The compression of data by their first bytes; "" for data that are not compressed.

    >>> compression_of(gzip.compress(b"text")), compression_of(b"text")
    ('gzip', '')
    """
    return next((kind for magic, kind in _MAGIC.items() if begin.startswith(magic)), "")


class Input:
    """A stream of bytes, decompressed where it is compressed.

    `compression` is what it was found to be ("" for plain data).
    """

    def __init__(self, stream: BinaryIO, name: str) -> None:
        buffered: Any = stream if hasattr(stream, "peek") else io.BufferedReader(stream)  # type: ignore[type-var]
        self.name, self.compression = name, compression_of(buffered.peek(_LONGEST_MAGIC)[:_LONGEST_MAGIC])
        self._counted = _Counted(buffered)
        self._stream = _OPENERS[self.compression](self._counted) if self.compression else buffered
        self._size = 0

    def read(self, size: int) -> bytes:
        return self._checked(self._stream.read(size))

    def readline(self, limit: int) -> bytes:
        """The next line with its end, or as much of it as `limit` bytes."""
        return self._checked(self._stream.readline(limit))

    def _checked(self, data: bytes) -> bytes:
        self._size += len(data)
        if self.compression and self._size > max(EXPANSION_BYTES, EXPANSION_RATIO * self._counted.count):
            raise RegardError(
                f"{self.name}: {self._counted.count:,} bytes of {self.compression} data expand to more than "
                f"{max(EXPANSION_BYTES, EXPANSION_RATIO * self._counted.count) >> 20:,} MiB.",
                hint="If that is expected, decompress the file first.",
            )
        return data


@contextmanager
def open_input(file: str | Path) -> Iterator[Input]:
    """A file, or standard input ("-"), decompressed whatever its name says."""
    if file != STDIN:
        with open(file, "rb") as stream:
            yield Input(stream, str(file))
        return
    try:
        own = os.dup(sys.stdin.fileno())
    except (OSError, ValueError):  # replaced by something that is no file
        yield Input(sys.stdin.buffer, "stdin")
        return
    # A buffer of our own: a thread that waits for input may hold its lock when Python ends, which waits for that of
    # sys.stdin.
    with open(own, "rb") as stream:
        yield Input(stream, "stdin")


class _Counted:
    """Counts the bytes that are read."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.count = stream, 0

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.count += len(data)
        return data


class _Zstandard(io.RawIOBase):
    """Zstandard frames with the package `zstandard`. Its own reader takes data that are cut off for complete."""

    CHUNK = 2048  # expands to 64 MiB at most: four bytes are a block of up to 128 KiB

    def __init__(self, stream: _Counted, library: Any) -> None:
        self._stream, self._make = stream, library.ZstdDecompressor().decompressobj
        self._error, self._frame, self._begun = library.ZstdError, self._make(), False
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            data = self._stream.read(self.CHUNK)
            if not data:
                if self._begun:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                return 0
            parts = []
            while data:
                try:
                    parts.append(self._frame.decompress(data))
                except self._error as error:
                    raise EOFError(str(error)) from None
                data, self._begun = b"", True
                if self._frame.eof:
                    data, self._frame, self._begun = self._frame.unused_data, self._make(), False
            self._left = memoryview(b"".join(parts))
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def _open_zstd(stream: _Counted) -> Any:
    if sys.version_info >= (3, 14):
        return importlib.import_module("compression.zstd").ZstdFile(stream)
    try:
        library = importlib.import_module("zstandard")
    except ImportError:
        raise RegardError(
            "zstandard, which reads .zst files, is not installed.", 'Get it with: pip install "regard[zstd]"'
        ) from None
    return io.BufferedReader(_Zstandard(stream, library), 1 << 16)


_OPENERS: dict[str, Callable[[Any], Any]] = {
    "gzip": lambda stream: gzip.GzipFile(fileobj=stream, mode="rb"),
    "xz": lzma.LZMAFile,
    "bzip2": bz2.BZ2File,
    "zstd": _open_zstd,
}

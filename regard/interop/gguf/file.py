"""GGUF files: metadata and tensors. Nothing in a file is executed, and each length is checked before it is used.

header       magic "GGUF"   version   number of tensors   number of metadata entries
metadata     name   type   value (repeated); an array is a type, a length and its values
tensors      name   number of dimensions   sizes, innermost first   type   offset of its data (repeated)
data         blocks of quantized numbers, or floats; aligned

All numbers are little-endian; strings have their length in front.
"""

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard.errors import RegardError, require_package

_INTACT = "Replace it with an intact copy."
_VERSIONS = (2, 3)
_BOOL, _STRING, _ARRAY = 7, 8, 9
# Other types of metadata values by their number.
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MAX_DIMENSIONS = 4

T = TypeVar("T")


class StoredTensor(NamedTuple):
    """A tensor of a file: its shape, the number of its type, and the bytes of its rows."""

    shape: tuple[int, ...]
    type: int
    rows: np.ndarray


class GgufFile(NamedTuple):
    """The content of a GGUF file; the data of tensors is mapped, not read."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def read_tensor(self, name: str) -> Tensor:
        """A tensor as float32."""
        stored = self.tensors[name]
        kind = _tensor_type(stored.type, self.path, name)
        try:
            numbers = require_package("gguf", "gguf").dequantize(stored.rows, kind)
        except NotImplementedError:
            raise _unsupported_type(self.path, name, kind.name) from None
        return torch.from_numpy(np.array(numbers, dtype=np.float32, order="C")).view(stored.shape)


def read_gguf(path: str | Path) -> GgufFile:
    """Read the metadata of a GGUF file, and find its tensors.

    >>> read_gguf("no-such.gguf")
    Traceback (most recent call last):
    regard.errors.RegardError: no-such.gguf: the file is missing. Pass a GGUF file.
    """
    path = Path(path)
    if not path.is_file():
        raise RegardError(f"{path}: the file is missing.", "Pass a GGUF file.")
    try:
        content = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise RegardError(f"{path}: cannot be read ({error}).", _INTACT) from None
    try:
        return _read(path, content)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise RegardError(f"{path}: not a GGUF file, or damaged ({error}).", _INTACT) from None


class _Reader:
    """Reads numbers and strings in turn; beyond the end of the file, it raises ValueError."""

    def __init__(self, content: np.ndarray) -> None:
        self.content, self.offset = content, 0

    def take(self, size: int) -> bytes:
        if size > len(self.content) - self.offset:
            raise ValueError("truncated")
        self.offset += size
        return self.content[self.offset - size : self.offset].tobytes()

    def number(self, code: str) -> int:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode()

    def repeat(self, count: int, min_size: int, read: Callable[[], T]) -> list[T]:
        """Several values of at least `min_size` bytes each."""
        if count * min_size > len(self.content) - self.offset:
            raise ValueError("truncated")
        return [read() for _ in range(count)]

    def value(self, kind: int, is_nested: bool = False) -> Any:
        """A value of the metadata."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and not is_nested:
            item_kind, count = self.number("I"), self.number("Q")
            if item_kind in _NUMBERS:
                return self._numbers(item_kind, count)
            return self.repeat(count, 8, lambda: self.value(item_kind, is_nested=True))
        if kind in _NUMBERS:
            return self._numbers(kind, 1)[0]
        raise ValueError(f"metadata of type {kind}")

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind == _BOOL:
            return [bool(value) for value in values]
        # The shortest decimal number: 1e-05 instead of 9.999999747378752e-06.
        return [float(str(value)) for value in values] if dtype.kind == "f" else values.tolist()


def _read(path: Path, content: np.ndarray) -> GgufFile:
    reader = _Reader(content)
    if reader.take(4) != b"GGUF":
        raise ValueError("it does not start with GGUF")
    version = reader.number("I")
    if version not in _VERSIONS:
        raise RegardError(
            f"{path}: version {version} of GGUF is unsupported; expected 2 or 3, little-endian.",
            "Convert the model with a current version of llama.cpp.",
        )
    tensor_count, metadata_count = reader.number("Q"), reader.number("Q")
    metadata = _unique(reader.repeat(metadata_count, 13, lambda: (reader.string(), reader.value(reader.number("I")))))
    entries = _unique(reader.repeat(tensor_count, 24, lambda: (reader.string(), _read_entry(reader))))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment = {alignment!r}")
    start = math.ceil(reader.offset / alignment) * alignment
    tensors = {name: _find_rows(path, name, content[start:], *entry) for name, entry in entries.items()}
    return GgufFile(path, metadata, tensors)


def _unique(pairs: list[tuple[str, T]]) -> dict[str, T]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _read_entry(reader: _Reader) -> tuple[tuple[int, ...], int, int]:
    """Shape, type and offset of a tensor."""
    dimensions = reader.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"a tensor with {dimensions} dimensions")
    shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
    return shape, reader.number("I"), reader.number("Q")


def _find_rows(
    path: Path, name: str, data: np.ndarray, shape: tuple[int, ...], number: int, offset: int
) -> StoredTensor:
    kind = _tensor_type(number, path, name)
    block, block_bytes = require_package("gguf", "gguf").GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise ValueError(f"the tensor {name} has the shape {shape}, but blocks of {block} numbers")
    row_bytes = shape[-1] // block * block_bytes
    end = offset + math.prod(shape[:-1]) * row_bytes
    if end > len(data):
        raise ValueError(f"truncated: the data of {name} is missing")
    return StoredTensor(shape, number, data[offset:end].reshape(*shape[:-1], row_bytes))


def _tensor_type(number: int, path: Path, name: str) -> Any:
    try:
        return require_package("gguf", "gguf").GGMLQuantizationType(number)
    except ValueError:
        raise _unsupported_type(path, name, str(number)) from None


def _unsupported_type(path: Path, name: str, kind: str) -> RegardError:
    return RegardError(
        f"{path}: the type {kind} of the tensor {name} is unsupported.", "Quantize the model to another type, as Q8_0."
    )

"""Images from arrays: .npz files, and idx files in the format of MNIST."""

import functools
import math
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt8
from PIL import Image

from regard.data.images.image_decoding import (
    SUFFIXES,
    DecodedImage,
    ImageHeader,
    ResizeRule,
    count_channels,
    image_errors,
    to_mask_array,
    to_pixel_array,
)
from regard.data.text.compression import (
    CORRUPT_DATA_ERRORS,
    MAX_EXPANSION_BYTES,
    MAX_EXPANSION_RATIO,
    InputStream,
    open_input,
)
from regard.errors import RegardError

# Names of the arrays in an .npz file.
_IMAGES, _LABELS, _MASKS, _NAMES = ("images", "x"), ("labels", "y"), ("masks",), "names"
_CHUNK_BYTES = 1 << 20


class _LoadedArrays(NamedTuple):
    images: Shaped[np.ndarray, "M H W *C"]
    labels: list[str] | None
    masks: Shaped[np.ndarray, "M H W"] | None


@dataclass(frozen=True)
class ImageArrays:
    """Images of one size in the arrays of one or two files, which are read on first use."""

    file: Path
    read: Callable[[], _LoadedArrays]
    fingerprint: str = ""
    labels_file: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file,) if self.labels_file is None else (self.file, self.labels_file)

    @functools.cached_property
    def loaded(self) -> _LoadedArrays:
        return self.read()

    def __len__(self) -> int:
        return len(self.loaded.images)

    def read_header(self) -> ImageHeader:
        images = self.loaded.images
        return ImageHeader(images.shape[1], images.shape[2], count_channels(Image.fromarray(images[0])))

    def decode(self, channels: int, fit: ResizeRule) -> list[DecodedImage]:
        images, labels, masks = self.loaded
        target = fit.target_size(images.shape[1], images.shape[2])
        with image_errors(self.file):
            return [
                DecodedImage(
                    to_pixel_array(Image.fromarray(image), channels, target),
                    None if labels is None else labels[i],
                    None if masks is None else to_mask_array(Image.fromarray(masks[i]), target),
                )
                for i, image in enumerate(images)
            ]


def open_npz(file: Path, part: str, label: str) -> ImageArrays:
    """The arrays images (or x), labels (or y), masks and names of an .npz file.

    `part` selects arrays whose names contain it, such as train_images or x_train. `label` is the name of the label
    array.
    """
    return ImageArrays(file, functools.partial(_load_npz, file, part, label), repr((part, label)))


def _load_npz(file: Path, part: str, label: str) -> _LoadedArrays:
    label_arrays = (label,) if label else _LABELS
    try:
        _check_expansion(file)
        with np.load(file, allow_pickle=False) as arrays:

            def find(names: Sequence[str]) -> np.ndarray | None:
                candidates = [key for name in names for key in (_part_names(name, part) if part else (name,))]
                return next((np.asarray(arrays[name]) for name in candidates if name in arrays), None)

            images, labels, masks = find(_IMAGES), find(label_arrays), find(_MASKS)
            name_array = f"{label}_{_NAMES}" if label else _NAMES
            names = np.asarray(arrays[name_array]) if name_array in arrays else None
            present = list(arrays)
    except RegardError:
        raise
    except (Exception, MemoryError) as error:  # a damaged archive raises almost anything
        message = f"{file}: not a readable .npz file ({str(error) or type(error).__name__})."
        raise RegardError(message, "Write it with numpy.savez.") from None
    missing = _IMAGES if images is None else (label,) if label and labels is None else ()
    if images is None or missing:
        description = f"{' or '.join(missing)}" + (f" of the part {part!r}" if part else "")
        hint = f"Its arrays are {', '.join(present) or 'none'}."
        if not part:
            hint += f" To read arrays such as x_train or train_images, pass {file.name}:train."
        raise RegardError(f"{file} has no array {description}.", hint)
    images = _to_uint8(file, images)
    return _LoadedArrays(
        images,
        None if labels is None else _label_names(file, labels, names, len(images)),
        None if masks is None else _check_masks(file, masks, images.shape[:3]),
    )


def _check_expansion(file: Path) -> None:
    """Raise an error for an archive that is much larger than the file, once it is decompressed."""
    with zipfile.ZipFile(file) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > max(MAX_EXPANSION_BYTES, MAX_EXPANSION_RATIO * file.stat().st_size):
        raise RegardError(
            f"{file}: its arrays expand to {size >> 20:,} MiB, more than {MAX_EXPANSION_RATIO} times its size.",
            "If that is expected, write it with numpy.savez, not numpy.savez_compressed.",
        )


def _part_names(name: str, part: str) -> tuple[str, str]:
    return f"{part}_{name}", f"{name}_{part}"


def _to_uint8(file: Path, images: np.ndarray) -> np.ndarray:
    """Convert images to bytes of shape (M, H, W) or (M, H, W, C)."""
    shape = " x ".join(map(str, images.shape))
    if images.ndim == 4 and images.shape[-1] == 1:
        images = images[..., 0]
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[-1] not in (3, 4)) or not images.size:
        raise RegardError(
            f"{file}: an array of shape {shape} does not hold images.",
            "The axes must be images, rows, columns and optionally 1, 3 or 4 channels.",
        )
    if images.dtype.kind == "f" and images.min() >= 0 and images.max() <= 1:
        images = np.rint(images * 255).astype(np.uint8)
    if images.dtype != np.uint8:
        values = f" with values from {images.min()} to {images.max()}" if images.dtype.kind in "biuf" else ""
        raise RegardError(
            f"{file}: unsupported images of {images.dtype}{values}.", "Store bytes (uint8), or floats from 0 to 1."
        )
    return np.ascontiguousarray(images)


def _label_names(file: Path, labels: np.ndarray, names: np.ndarray | None, count: int) -> list[str]:
    if labels.size != count or labels.dtype.kind not in "iuU":
        raise RegardError(
            f"{file}: {labels.size} labels of {labels.dtype} for {count} images.",
            "Store one label per image, as an integer or text.",
        )
    flat = labels.reshape(-1)
    if names is None or flat.dtype.kind == "U":
        return [str(label) for label in flat.tolist()]
    if names.ndim != 1:
        raise RegardError(f"{file}: {_NAMES} has {names.ndim} axes.", "Store a list of names, one per label.")
    if flat.min() < 0 or flat.max() >= len(names):
        raise RegardError(
            f"{file}: labels from {flat.min()} to {flat.max()}, but {len(names)} names.", "Fix the labels or the names."
        )
    return [str(names[label]) for label in flat]


def _check_masks(file: Path, masks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if masks.shape != shape:
        sizes = [" x ".join(map(str, axes)) for axes in (masks.shape, shape)]
        raise RegardError(
            f"{file}: masks of shape {sizes[0]} for images of shape {sizes[1]}.", "Their shapes must be equal."
        )
    if masks.dtype.kind not in "biu" or masks.min() < 0 or masks.max() > 255:
        raise RegardError(f"{file}: unsupported masks of {masks.dtype}.", "Store classes as integers from 0 to 255.")
    return np.ascontiguousarray(masks, np.uint8)


def open_idx(file: Path, labels: Path | None = None) -> ImageArrays:
    """The images of an idx file. Their labels are in a second file; by default the matching file in the same folder."""
    if not _count_idx_axes(file):
        raise RegardError(
            f"{file}: unsupported kind of image file.",
            f"Pass a folder, a table (.csv, .tsv), .npz, idx, or images ({' '.join(sorted(SUFFIXES))}).",
        )
    if labels is None:
        candidate = file.with_name(re.sub(r"idx[34]", "idx1", file.name.replace("images", "labels")))
        labels = candidate if candidate != file and candidate.is_file() else None
    return ImageArrays(file, functools.partial(_load_idx, file, labels), labels_file=labels)


def _load_idx(file: Path, labels: Path | None) -> _LoadedArrays:
    images = _to_uint8(file, _read_idx(file))
    names = None if labels is None else _label_names(labels, _read_idx(labels), None, len(images))
    return _LoadedArrays(images, names, None)


def is_idx_labels(file: Path) -> bool:
    """Whether this is an idx file of labels."""
    return _count_idx_axes(file) == 1


def _count_idx_axes(file: Path) -> int:
    """Number of axes of the array in an idx file; 0 for other files."""
    try:
        with open_input(file) as stream:
            start = stream.read(4)
    except (OSError, RegardError, *CORRUPT_DATA_ERRORS):
        return 0
    return start[3] if len(start) == 4 and start[:2] == b"\0\0" and 8 <= start[2] <= 14 and start[3] <= 4 else 0


def _read_idx(file: Path) -> UInt8[np.ndarray, "..."]:
    """Read an idx file: two zero bytes, data type, number of axes, their lengths as big-endian words, and the data."""
    try:
        with open_input(file) as stream:
            start = stream.read(4)
            shape = np.frombuffer(stream.read(4 * start[3]), ">u4").tolist()
            size = math.prod(shape)
            data = _read_bytes(stream, size + 1)
    except (OSError, ValueError, IndexError, MemoryError, *CORRUPT_DATA_ERRORS) as error:
        raise RegardError(f"{file}: corrupt idx data ({error}).", "Download the file again.") from None
    if start[2] != 8:
        raise RegardError(f"{file}: its values are not bytes.", "Store it with unsigned bytes (idx-ubyte).")
    if len(shape) != start[3] or len(data) != size:
        expected = " x ".join(map(str, shape))
        raise RegardError(f"{file}: its size does not match its header ({expected} bytes).", "Download the file again.")
    try:
        return np.frombuffer(data, np.uint8).reshape(shape)
    except ValueError as error:  # an axis of length 0 beside huge ones
        raise RegardError(f"{file}: corrupt idx data ({error}).", "Download the file again.") from None


def _read_bytes(stream: InputStream, size: int) -> bytes:
    """Read `size` bytes, or all that are left: in parts, since a damaged header may state any size."""
    parts, count = [], 0
    while count < size and (part := stream.read(min(_CHUNK_BYTES, size - count))):
        parts.append(part)
        count += len(part)
    return b"".join(parts)

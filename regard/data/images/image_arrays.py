"""Arrays of pictures: .npz files, and the idx files of MNIST and its kin."""

import functools
import gzip
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt8
from PIL import Image

from regard.data.images.image_decoding import SUFFIXES, Decoded, Fit, Header, channels_of, mask_of, naming, pixels_of
from regard.errors import RegardError

# What an .npz file calls its arrays.
_IMAGES, _LABELS, _MASKS, _NAMES = ("images", "x"), ("labels", "y"), ("masks",), "names"


class _Loaded(NamedTuple):
    images: Shaped[np.ndarray, "M H W *C"]
    labels: list[str] | None
    masks: Shaped[np.ndarray, "M H W"] | None


@dataclass(frozen=True)
class Arrays:
    """Pictures of one size in the arrays of one file or two, which are read when they are wanted."""

    file: Path
    read: Callable[[], _Loaded]
    told: str = ""
    labels_file: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file,) if self.labels_file is None else (self.file, self.labels_file)

    @functools.cached_property
    def loaded(self) -> _Loaded:
        return self.read()

    def __len__(self) -> int:
        return len(self.loaded.images)

    def header(self) -> Header:
        images = self.loaded.images
        return Header(images.shape[1], images.shape[2], channels_of(Image.fromarray(images[0])))

    def decode(self, channels: int, fit: Fit) -> list[Decoded]:
        images, labels, masks = self.loaded
        target = fit.target(images.shape[1], images.shape[2])
        with naming(self.file):
            return [
                Decoded(
                    pixels_of(Image.fromarray(image), channels, target),
                    None if labels is None else labels[i],
                    None if masks is None else mask_of(Image.fromarray(masks[i]), target),
                )
                for i, image in enumerate(images)
            ]


def open_npz(file: Path, part: str, label: str) -> Arrays:
    """The arrays images (or x), labels (or y), masks and names of an .npz file.

    `part`: those that bear its name as well, such as train_images or x_train. `label`: the name of the labels' array.
    """
    return Arrays(file, functools.partial(_from_npz, file, part, label), repr((part, label)))


def _from_npz(file: Path, part: str, label: str) -> _Loaded:
    labelled = (label,) if label else _LABELS
    try:
        with np.load(file, allow_pickle=False) as arrays:

            def fetched(names: Sequence[str]) -> np.ndarray | None:
                full = [one for name in names for one in (_part_names(name, part) if part else (name,))]
                return next((arrays[one] for one in full if one in arrays), None)

            images, labels, masks = fetched(_IMAGES), fetched(labelled), fetched(_MASKS)
            called = f"{label}_{_NAMES}" if label else _NAMES
            names = arrays.get(called)
            present = list(arrays)
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise RegardError(f"{file}: not arrays that can be read ({error}).", "Write it with numpy.savez.") from None
    lacking = _IMAGES if images is None else (label,) if label and labels is None else ()
    if images is None or lacking:
        told = f"{' or '.join(lacking)}" + (f" of the part {part!r}" if part else "")
        hint = f"It has {', '.join(present) or 'none'}."
        if not part:
            hint += f" Those whose names begin or end in, say, train are read as {file.name}:train."
        raise RegardError(f"{file} has no array {told}.", hint)
    images = _as_bytes(file, images)
    return _Loaded(
        images,
        None if labels is None else _label_names(file, labels, names, len(images)),
        None if masks is None else _as_masks(file, masks, images.shape[:3]),
    )


def _part_names(name: str, part: str) -> tuple[str, str]:
    return f"{part}_{name}", f"{name}_{part}"


def _as_bytes(file: Path, images: np.ndarray) -> np.ndarray:
    """Pictures as bytes of (M, H, W) or (M, H, W, C)."""
    shape = " x ".join(map(str, images.shape))
    if images.ndim == 4 and images.shape[-1] == 1:
        images = images[..., 0]
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[-1] not in (3, 4)) or not images.size:
        raise RegardError(
            f"{file}: an array of {shape} does not hold pictures.",
            "Its axes must be pictures, rows, columns, and perhaps 1, 3 or 4 channels.",
        )
    if images.dtype.kind == "f" and images.min() >= 0 and images.max() <= 1:
        images = np.rint(images * 255).astype(np.uint8)
    if images.dtype != np.uint8:
        raise RegardError(
            f"{file}: pictures of {images.dtype} from {images.min()} to {images.max()} cannot be told.",
            "Store bytes (uint8), or fractions between 0 and 1.",
        )
    return np.ascontiguousarray(images)


def _label_names(file: Path, labels: np.ndarray, names: np.ndarray | None, count: int) -> list[str]:
    if labels.size != count or labels.dtype.kind not in "iuU":
        raise RegardError(
            f"{file}: {labels.size} labels of {labels.dtype} for {count} pictures.",
            "There must be one for each, a whole number or text.",
        )
    flat = labels.reshape(-1)
    if names is None or flat.dtype.kind == "U":
        return [str(one) for one in flat.tolist()]
    if flat.min() < 0 or flat.max() >= len(names):
        raise RegardError(f"{file}: labels from {flat.min()} to {flat.max()}, but {len(names)} names.", "Mend either.")
    return [str(names[one]) for one in flat]


def _as_masks(file: Path, masks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if masks.shape != shape:
        sizes = [" x ".join(map(str, one)) for one in (masks.shape, shape)]
        raise RegardError(f"{file}: masks of {sizes[0]} for pictures of {sizes[1]}.", "They must be as many, as large.")
    if masks.dtype.kind not in "biu" or masks.min() < 0 or masks.max() > 255:
        raise RegardError(f"{file}: masks of {masks.dtype}.", "Number the classes from 0 to 255, as whole numbers.")
    return np.ascontiguousarray(masks, np.uint8)


def open_idx(file: Path, labels: Path | None = None) -> Arrays:
    """The images of an idx file; their labels are in another, which lies beside it where it is not named."""
    if not _idx_axes(file):
        raise RegardError(
            f"{file}: not a kind of file that pictures are read from.",
            f"Give a folder, a table (.csv, .tsv), .npz, idx, or pictures ({' '.join(sorted(SUFFIXES))}).",
        )
    if labels is None:
        beside = file.with_name(re.sub(r"idx[34]", "idx1", file.name.replace("images", "labels")))
        labels = beside if beside != file and beside.is_file() else None
    return Arrays(file, functools.partial(_from_idx, file, labels), labels_file=labels)


def _from_idx(file: Path, labels: Path | None) -> _Loaded:
    images = _as_bytes(file, _read_idx(file))
    names = None if labels is None else _label_names(labels, _read_idx(labels), None, len(images))
    return _Loaded(images, names, None)


def is_idx_labels(file: Path) -> bool:
    """Whether this is an idx file of labels."""
    return _idx_axes(file) == 1


def _open(file: Path) -> Any:
    return gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb")


def _idx_axes(file: Path) -> int:
    """How many axes the array of an idx file has; 0 for other files."""
    try:
        with _open(file) as stream:
            start = stream.read(4)
    except (OSError, EOFError, zlib.error):
        return 0
    return start[3] if len(start) == 4 and start[:2] == b"\0\0" and 8 <= start[2] <= 14 and start[3] <= 4 else 0


def _read_idx(file: Path) -> UInt8[np.ndarray, "..."]:
    """Two zeros, the kind of number, the number of axes, their lengths as big-endian words, and the numbers."""
    try:
        with _open(file) as stream:
            start = stream.read(4)
            shape = np.frombuffer(stream.read(4 * start[3]), ">u4").tolist()
            wanted = math.prod(shape)
            data = stream.read(wanted + 1)
    except (OSError, EOFError, ValueError, IndexError, OverflowError, MemoryError, zlib.error) as error:
        raise RegardError(f"{file}: broken idx data ({error}).", "Download the file again.") from None
    if start[2] != 8:
        raise RegardError(f"{file}: its numbers are not bytes.", "Store it with unsigned bytes (idx-ubyte).")
    if len(shape) != start[3] or len(data) != wanted:
        told = " x ".join(map(str, shape))
        raise RegardError(f"{file}: its header promises {told} bytes, and it has others.", "Download the file again.")
    return np.frombuffer(data, np.uint8).reshape(shape)

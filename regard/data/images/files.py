"""Sources of images: folders with one sub-folder per class, tables of images, arrays (.npz, idx), single files."""

import functools
import math
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Shaped, UInt8
from PIL import Image

from regard.data.images.decoding import (
    SUFFIXES,
    DecodedImage,
    ImageHeader,
    ResizeRule,
    count_channels,
    decode_file,
    image_errors,
    read_header,
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
from regard.data.text.readers import errors_at_line, read_named_rows, uncompressed_suffix
from regard.errors import RegardError

# Columns of a table: the default label column, the image file, its mask, and the split that it belongs to.
LABEL_COLUMN = "label"
_PATH_COLUMNS, _MASK_COLUMN, _SPLIT_COLUMN = ("path", "file", "filename", "image"), "mask", "split"
# Names of folders that contain class folders, and are none.
_SPLITS = ("train", "training", "val", "valid", "validation", "dev", "test")
# Names of the arrays in an .npz file.
_IMAGES, _LABELS, _MASKS, _NAMES = ("images", "x"), ("labels", "y"), ("masks",), "names"
_CHUNK_BYTES = 1 << 20


class ImageSource(Protocol):
    """A file, or a few related files, with one image or several of the same size."""

    @property
    def files(self) -> tuple[Path, ...]: ...

    @property
    def fingerprint(self) -> str:
        """Everything that affects the result except the content of the files; part of the cache key."""

    def __len__(self) -> int: ...

    def read_header(self) -> ImageHeader: ...

    def decode(self, channels: int, fit: ResizeRule) -> list[DecodedImage]: ...


def find_sources(names: Sequence[str | Path], label: str = LABEL_COLUMN) -> list[ImageSource]:
    """Find the images in folders and files; see `read_images` for the supported kinds."""
    sources: list[ImageSource] = []
    remaining = list(names)
    while remaining:
        name = remaining.pop(0)
        labels = Path(remaining.pop(0)) if remaining and is_idx_labels(Path(remaining[0])) else None
        sources += _open_source(name, labels, label)
    if not sources:
        raise RegardError(
            f"{' '.join(map(str, names)) or 'No file'}: no images found.",
            "Pass a folder with one sub-folder of images per class, or a table of image files.",
        )
    return sources


def _open_source(name: str | Path, labels: Path | None, label: str) -> Sequence[ImageSource]:
    path, part = _split_part(name)
    if not path.exists():
        raise RegardError(f"{name}: no such file or folder.", "Fix the name.")
    suffix = uncompressed_suffix(path).lower()
    if path.is_file() and suffix in (".csv", ".tsv"):
        return _read_image_table(path, part, label.lower())
    if path.is_file() and suffix == ".npz":
        return [open_npz(path, part, "" if label == LABEL_COLUMN else label)]
    if part:
        raise RegardError(f"{path} has no part {part!r}.", "Only tables (.csv, .tsv) and .npz files have parts.")
    if path.is_dir():
        return _read_folder(path)
    return [ImageFile(path)] if suffix in SUFFIXES else [open_idx(path, labels)]


def _split_part(name: str | Path) -> tuple[Path, str]:
    """Split FILE:PART, unless a file with that full name exists."""
    file, colon, part = str(name).rpartition(":")
    if colon and not Path(name).exists() and Path(file).exists():
        return Path(file), part
    return Path(name), ""


@dataclass(frozen=True)
class ImageFile:
    """A file with a single image."""

    file: Path
    label: str | None = None
    mask: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file,) if self.mask is None else (self.file, self.mask)

    @property
    def fingerprint(self) -> str:
        return repr(self.label)

    def __len__(self) -> int:
        return 1

    def read_header(self) -> ImageHeader:
        with image_errors(self.file):
            return read_header(self.file)

    def decode(self, channels: int, fit: ResizeRule) -> list[DecodedImage]:
        pixels, mask = decode_file(self.file, self.mask, channels, fit)
        return [DecodedImage(pixels, self.label, mask)]


def _read_folder(folder: Path) -> list[ImageFile]:
    """Images of a folder: one sub-folder per class, two sub-folders "images" and "masks", or images without labels.

    The images of a class, and the masks, may lie in further sub-folders.
    """
    folders, files = _list_folder(folder)
    if folders and files:
        raise RegardError(f"{files[0]} is next to the class folders.", "Move every image into the folder of its class.")
    if {sub_folder.name for sub_folder in folders} == {"images", "masks"}:
        return _pair_with_masks(folder / "images", folder / "masks")
    images = [ImageFile(file) for file in files]
    for class_folder in folders:
        sub_folders, direct_files = _list_folder(class_folder)
        if sub_folders and not direct_files and (len(folders) == 1 or class_folder.name.lower() in _SPLITS):
            raise RegardError(
                f"{class_folder}: the class folder contains only folders, such as {sub_folders[0].name}.",
                "Pass the folder that contains the class folders.",
            )
        class_files = _list_images(class_folder, (folder.resolve(),))
        if not class_files:
            raise RegardError(f"{class_folder}: the class folder contains no images.", "Add images or remove it.")
        images += [ImageFile(file, class_folder.name) for file in class_files]
    return images


def _list_images(folder: Path, parents: tuple[Path, ...] = ()) -> list[Path]:
    """The image files of a folder and, after them, of its sub-folders; a link to a folder above is left out."""
    folders, files = _list_folder(folder)
    parents = (*parents, folder.resolve())
    below = [_list_images(entry, parents) for entry in folders if entry.resolve() not in parents]
    return [*files, *chain.from_iterable(below)]


def _list_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """Sub-folders and image files of a folder, sorted; hidden ones and other files are left out.

    Links are followed. A broken link with the suffix of an image is listed as an image, and fails when it is read.
    """
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith((".", "__")))
    except OSError as error:
        raise RegardError(f"{folder}: the folder cannot be read: {error.strerror}.") from None
    folders = [entry for entry in entries if entry.is_dir()]
    return folders, [entry for entry in entries if entry.suffix.lower() in SUFFIXES and not entry.is_dir()]


def _pair_with_masks(images: Path, masks: Path) -> list[ImageFile]:
    """Pair images with the masks of the same sub-folder and file name, ignoring suffixes."""
    mask_by_stem = {mask.relative_to(masks).with_suffix(""): mask for mask in _list_images(masks)}
    paired = []
    for file in _list_images(images):
        stem = file.relative_to(images).with_suffix("")
        if stem not in mask_by_stem:
            raise RegardError(f"{file} has no mask in {masks}.", f"Add the mask as {stem}.png.")
        paired.append(ImageFile(file, None, mask_by_stem[stem]))
    return paired


def _read_image_table(file: Path, part: str, label: str) -> list[ImageFile]:
    """Images listed in a table."""
    rows = read_named_rows(file)
    if not rows:
        raise RegardError(f"{file} lists no images.", "Write one row per image below the header.")
    columns = list(rows[0][1])
    path_column = next((name for name in _PATH_COLUMNS if name in columns), _PATH_COLUMNS[0])
    required = [path_column]
    required += [label] if label != LABEL_COLUMN else []
    required += [_SPLIT_COLUMN] if part else []
    for column in required:
        if column not in columns:
            raise RegardError(f"{file} has no column {column!r}.", f"Its columns are {', '.join(columns)}.")
    selected = [(number, row) for number, row in rows if not part or row[_SPLIT_COLUMN] == part]
    if not selected:
        known = sorted({row[_SPLIT_COLUMN] for _, row in rows})
        raise RegardError(f"{file}: no row has the split {part!r}.", f"Its splits are {', '.join(known)}.")
    images = []
    for number, row in selected:
        with errors_at_line(file, number):
            name = _get_cell(row, label) if label in row else None
            mask = file.parent / _get_cell(row, _MASK_COLUMN) if _MASK_COLUMN in row else None
            images.append(ImageFile(file.parent / _get_cell(row, path_column), name, mask))
    return images


def _get_cell(row: dict[str, str], column: str) -> str:
    if not row[column]:
        raise RegardError(f"the {column} is empty.", "Fill it in, or remove the row.")
    return row[column]


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
    if np.issubdtype(images.dtype, np.floating) and images.min() >= 0 and images.max() <= 1:
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
    if names is None or np.issubdtype(flat.dtype, np.str_):
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

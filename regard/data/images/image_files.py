"""Sources of images: folders with one sub-folder per class, tables of images, arrays, single files."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

from regard.data.images.image_arrays import is_idx_labels, open_idx, open_npz
from regard.data.images.image_decoding import (
    SUFFIXES,
    DecodedImage,
    ImageHeader,
    ResizeRule,
    decode_file,
    image_errors,
    read_header,
)
from regard.data.text.readers import errors_at_line, read_named_rows, uncompressed_suffix
from regard.errors import RegardError

# Columns of a table: the default label column, the image file, its mask, and the split that it belongs to.
LABEL_COLUMN = "label"
_PATH_COLUMNS, _MASK_COLUMN, _SPLIT_COLUMN = ("path", "file", "filename", "image"), "mask", "split"
# Names of folders that contain class folders, and are none.
_SPLITS = ("train", "training", "val", "valid", "validation", "dev", "test")


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

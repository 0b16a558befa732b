"""The files that people keep pictures in: folders by class, tables that name pictures or tiles of sheets, arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from regard.data.images.image_arrays import is_idx_labels, open_idx, open_npz
from regard.data.images.image_decoding import SUFFIXES, Decoded, Fit, Header, decode, header, naming
from regard.data.images.tile_sheets import SHEET, TILE, cell, sheets_of
from regard.data.text.readers import in_line, named_rows, stem_suffix
from regard.errors import RegardError

# What a table calls the picture's label where nobody says otherwise, its file, its mask, and the part it belongs to.
LABEL = "label"
_PATHS, _MASK, _SPLIT = ("path", "file", "filename", "image"), "mask", "split"


class Source(Protocol):
    """A file, or a few that belong together, with one picture or many of one size."""

    @property
    def files(self) -> tuple[Path, ...]: ...

    @property
    def told(self) -> str:
        """What is known of the pictures without opening the files."""

    def __len__(self) -> int: ...

    def header(self) -> Header: ...

    def decode(self, channels: int, fit: Fit) -> list[Decoded]: ...


def find_sources(names: Sequence[str | Path], label: str = LABEL) -> list[Source]:
    """The pictures behind the names of folders and files; `regard.data.read_images` says which there are."""
    sources: list[Source] = []
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        labels = Path(waiting.pop(0)) if waiting and is_idx_labels(Path(waiting[0])) else None
        sources += _sources_of(name, labels, label)
    if not sources:
        raise RegardError(
            f"{' '.join(map(str, names)) or 'No file'}: there is no picture.",
            "Give a folder with a folder of pictures for each class, or a table that names them.",
        )
    return sources


def _sources_of(name: str | Path, labels: Path | None, label: str) -> Sequence[Source]:
    path, part = _path_and_part(name)
    if not path.exists():
        raise RegardError(f"There is no file or folder {name}.", "Mend its name.")
    suffix = stem_suffix(path).lower()
    if path.is_file() and suffix in (".csv", ".tsv"):
        return _in_table(path, part, label.lower())
    if path.is_file() and suffix == ".npz":
        return [open_npz(path, part, "" if label == LABEL else label)]
    if part:
        raise RegardError(f"{path} has no part {part!r}.", "Tables (.csv, .tsv) and .npz files have parts.")
    if path.is_dir():
        return _in_folder(path)
    return [Photo(path)] if suffix in SUFFIXES else [open_idx(path, labels)]


def _path_and_part(name: str | Path) -> tuple[Path, str]:
    """FILE:PART, where there is no file of that whole name."""
    first, colon, part = str(name).rpartition(":")
    if colon and not Path(name).exists() and Path(first).exists():
        return Path(first), part
    return Path(name), ""


@dataclass(frozen=True)
class Photo:
    """A picture in a file of its own."""

    file: Path
    label: str | None = None
    mask: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file,) if self.mask is None else (self.file, self.mask)

    @property
    def told(self) -> str:
        return repr(self.label)

    def __len__(self) -> int:
        return 1

    def header(self) -> Header:
        with naming(self.file):
            return header(self.file)

    def decode(self, channels: int, fit: Fit) -> list[Decoded]:
        pixels, mask = decode(self.file, self.mask, channels, fit)
        return [Decoded(pixels, self.label, mask)]


def _in_folder(folder: Path) -> list[Photo]:
    """The pictures of a folder: in a folder a class, in two folders "images" and "masks", or just pictures."""
    folders, pictures = _entries(folder)
    if folders and pictures:
        raise RegardError(
            f"{pictures[0]} lies beside the folders of the classes.", "Put every picture into its class's folder."
        )
    if {one.name for one in folders} == {"images", "masks"}:
        return _with_masks(folder / "images", folder / "masks")
    photos = [Photo(picture) for picture in pictures]
    for one in folders:
        deeper, own = _entries(one)
        if not own:
            holds = f"only folders, such as {deeper[0].name}" if deeper else "no picture"
            hint = "Name the folder in which the classes are." if deeper else "Fill it or remove it."
            raise RegardError(f"{one}: the folder of the class {one.name!r} holds {holds}.", hint)
        photos += [Photo(picture, one.name) for picture in own]
    return photos


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """The folders in a folder and the pictures, each sorted; hidden ones and files of other kinds are left out.

    Links are followed. One that leads nowhere is what its name says: a picture, which cannot be read.
    """
    try:
        found = sorted(one for one in folder.iterdir() if not one.name.startswith((".", "__")))
    except OSError as error:
        raise RegardError(f"{folder}: the folder cannot be read: {error.strerror}.") from None
    folders = [one for one in found if one.is_dir()]
    return folders, [one for one in found if one.suffix.lower() in SUFFIXES and not one.is_dir()]


def _with_masks(images: Path, masks: Path) -> list[Photo]:
    """Each picture and the mask whose file has its name, whatever their suffixes."""
    mask_of_name = {mask.stem: mask for mask in _entries(masks)[1]}
    photos = []
    for picture in _entries(images)[1]:
        if picture.stem not in mask_of_name:
            raise RegardError(f"{picture} has no mask in {masks}.", f"Name it {picture.stem}.png there.")
        photos.append(Photo(picture, None, mask_of_name[picture.stem]))
    return photos


def _in_table(file: Path, part: str, label: str) -> Sequence[Source]:
    """The pictures that the rows of a table name, or the tiles of sheets."""
    rows = named_rows(file)
    if not rows:
        raise RegardError(f"{file} names no picture.", "Write a row for each, below the header.")
    columns = list(rows[0][1])
    path = next((name for name in _PATHS if name in columns), None)
    by_sheet = path is None and SHEET in columns
    needed = [TILE] if by_sheet else [path or _PATHS[0]]
    needed += [label] if label != LABEL else []
    needed += [_SPLIT] if part else []
    for column in needed:
        if column not in columns:
            raise RegardError(f"{file} has no column {column!r}.", f"Its columns are {', '.join(columns)}.")
    kept = [(number, row) for number, row in rows if not part or row[_SPLIT] == part]
    if not kept:
        known = sorted({row[_SPLIT] for _, row in rows})
        raise RegardError(f"{file}: no row's split is {part!r}.", f"There are {', '.join(known)}.")
    if path is None:
        return sheets_of(file, rows, kept, label)
    photos = []
    for number, row in kept:
        with in_line(file, number):
            name = cell(row, label) if label in row else None
            mask = file.parent / cell(row, _MASK) if _MASK in row else None
            photos.append(Photo(file.parent / cell(row, path), name, mask))
    return photos

"""Tile sheets: large images of square tiles, numbered row by row from 0 in an index table, with optional masks."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from regard.data.images.image_decoding import (
    SUFFIXES,
    DecodedImage,
    ImageHeader,
    ResizeRule,
    check_mask_size,
    image_errors,
    load_image,
    read_header,
    to_mask_array,
    to_pixel_array,
)
from regard.data.text.readers import errors_at_line
from regard.errors import RegardError

SHEET_COLUMN, TILE_COLUMN, SIDE_COLUMN = "sheet", "tile", "side"
# The masks of the sheet NAME.jpg are in NAME.mask.png.
MASK_SHEET_SUFFIX = ".mask.png"

NamedRows = list[tuple[int, dict[str, str]]]
"""rows of a table: line number, and fields by column name"""


def get_cell(row: dict[str, str], column: str) -> str:
    if not row[column]:
        raise RegardError(f"the {column} is empty.", "Fill it in, or remove the row.")
    return row[column]


def parse_count(row: dict[str, str], column: str) -> int:
    if not row[column].isdecimal() or len(row[column]) > 9:
        raise RegardError(f"the {column} is {row[column]!r}; expected a non-negative integer.", "Fix the value.")
    return int(row[column])


@dataclass(frozen=True)
class TileSheet:
    """Selected tiles of a sheet, and of the sheet of their masks."""

    file: Path
    side: int
    tiles: tuple[int, ...]
    labels: tuple[str | None, ...]
    mask: Path | None

    @property
    def fingerprint(self) -> str:
        return repr((self.side, self.tiles, self.labels))

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file,) if self.mask is None else (self.file, self.mask)

    def __len__(self) -> int:
        return len(self.tiles)

    def read_header(self) -> ImageHeader:
        with image_errors(self.file):
            return ImageHeader(self.side, self.side, read_header(self.file).channels)

    def decode(self, channels: int, fit: ResizeRule) -> list[DecodedImage]:
        target = fit.target_size(self.side, self.side)
        with image_errors(self.file):
            sheet, size = load_image(self.file)
            boxes = [self._box(tile, size) for tile in self.tiles]
            pixels = [to_pixel_array(sheet.crop(box), channels, target) for box in boxes]
        masks: list[UInt8[np.ndarray, "H W"] | None] = [None] * len(boxes)
        if self.mask is not None:
            with image_errors(self.mask):
                sheet, mask_size = load_image(self.mask)
                check_mask_size(mask_size, size, self.file)
                masks = [to_mask_array(sheet.crop(box), target) for box in boxes]
        return list(map(DecodedImage, pixels, self.labels, masks))

    def _box(self, tile: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
        row, column = divmod(tile, max(1, size[1] // self.side))
        left, top = column * self.side, row * self.side
        if left + self.side > size[1] or top + self.side > size[0]:
            raise RegardError(
                f"tile {tile} of {self.side} x {self.side} pixels is outside of the sheet.",
                f"Fix the tile, or state the side of the tiles in a column {SIDE_COLUMN!r} of the index.",
            )
        return left, top, left + self.side, top + self.side


def read_sheets(file: Path, rows: NamedRows, selected: NamedRows, label: str) -> list[TileSheet]:
    """The sheets of the selected rows of an index; the tiles of each sheet are grouped, in the order of the index."""
    tiles: dict[str, list[int]] = {}
    selected_tiles: dict[str, list[tuple[int, str | None]]] = {}
    for number, row in rows:
        with errors_at_line(file, number):
            tiles.setdefault(get_cell(row, SHEET_COLUMN), []).append(parse_count(row, TILE_COLUMN))
    for number, row in selected:
        with errors_at_line(file, number):
            name = get_cell(row, label) if label in row else None
            selected_tiles.setdefault(row[SHEET_COLUMN], []).append((parse_count(row, TILE_COLUMN), name))
    paths = {sheet: _find_sheet(file, sheet) for sheet in tiles}
    sides = {row.get(SIDE_COLUMN, "") for _, row in rows}
    if sides != {""}:
        with errors_at_line(file, rows[0][0]):
            side = parse_count(rows[0][1], SIDE_COLUMN)
            if len(sides) > 1 or not side:
                raise RegardError("the sides of the tiles differ or are 0.", "Use the same side in every row.")
    else:
        side = _infer_side(file, {paths[sheet]: 1 + max(numbers) for sheet, numbers in tiles.items()})
    sheets = []
    for sheet, pairs in selected_tiles.items():
        mask = paths[sheet].with_name(paths[sheet].stem + MASK_SHEET_SUFFIX)
        numbers, names = zip(*pairs)
        sheets.append(TileSheet(paths[sheet], side, numbers, names, mask if mask.exists() else None))
    return sheets


def _find_sheet(index: Path, sheet: str) -> Path:
    """The file of a sheet, whose suffix may be missing in the index."""
    path = index.parent / sheet
    candidates = [
        candidate
        for candidate in (path, *(path.with_name(path.name + suffix) for suffix in sorted(SUFFIXES)))
        if os.path.isfile(candidate)  # unlike Path.is_file, no error for an invalid name
    ]
    if not candidates:
        raise RegardError(f"{index}: the sheet {path} does not exist.", "Fix the name of the sheet.")
    if len(candidates) > 1:
        raise RegardError(
            f"{index}: the sheet {path} may be {candidates[0].name} or {candidates[1].name}.",
            "Write the names of sheets with their suffix.",
        )
    return candidates[0]


def _infer_side(index: Path, counts: dict[Path, int]) -> int:
    """Infer the side of the tiles: the only one with which every sheet is full, except for the end of its last row."""
    sides: set[int] | None = None
    for file, count in counts.items():
        with image_errors(file):
            height, width, _ = read_header(file)
        divisor = math.gcd(height, width)
        possible = {
            side
            for side in range(1, divisor + 1)
            if divisor % side == 0 and 0 <= (height // side) * (width // side) - count < width // side
        }
        sides = possible if sides is None else sides & possible
    if sides is None or len(sides) != 1:
        raise RegardError(
            f"{index}: the size of the tiles is ambiguous.",
            f"Add a column {SIDE_COLUMN!r} with the side of the tiles in pixels.",
        )
    return sides.pop()

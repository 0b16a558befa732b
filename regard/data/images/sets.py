"""Labeled images with optional masks, read from files, folders, tables and arrays into one array of bytes.

Decoded images can be cached: written to a folder once, then memory-mapped.
"""

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from regard.data.batching.batch import IGNORE_INDEX
from regard.data.images.decoding import DecodedImage, ResizeRule
from regard.data.images.files import LABEL_COLUMN, ImageSource, find_sources
from regard.errors import RegardError

# To be incremented when the same files would be stored as different bytes.
_FORMAT = 1
_PIXELS, _MASKS, _LABELS, _SIZES, _FACTS = "pixels.bin", "masks.bin", "labels.npy", "sizes.npy", "facts.json"
# Age in seconds after which an incomplete folder is considered abandoned.
_STALE_SECONDS = 24 * 3600


@dataclass(frozen=True, eq=False)
class ImageStore:
    """Concatenated images with their sizes, labels and statistics."""

    pixels: UInt8[np.ndarray, "bytes"]
    masks: UInt8[np.ndarray, "bytes"] | None
    sizes: Int[np.ndarray, "M 2"]
    """heights and widths"""
    labels: Int[np.ndarray, "M"]
    facts: dict[str, Any]


def build_store(images: Iterable[DecodedImage], skipped: Sequence[str]) -> ImageStore:
    """Build a store in memory. `skipped` may grow while `images` is consumed."""
    pixels, masks = io.BytesIO(), io.BytesIO()
    sizes, labels, facts = _write_images(images, pixels, masks)
    mask_bytes = np.frombuffer(masks.getbuffer(), np.uint8) if facts["mask_values"] else None
    facts["skipped"] = list(skipped)
    return ImageStore(np.frombuffer(pixels.getbuffer(), np.uint8), mask_bytes, sizes, labels, facts)


def open_or_build_store(
    cache: Path,
    options: object,
    sources: Sequence[ImageSource],
    decode: Callable[[], Iterable[DecodedImage]],
    skipped: Sequence[str],
) -> ImageStore:
    """Open the store of these sources in the folder `cache`; build it if it does not exist or the files have changed.

    A cache may hold stores with different `options`; a new store replaces older ones with the same options. Processes
    can build the same store concurrently: each writes its own folder, and the first one to finish renames it to the
    final name.
    """
    key = _digest([repr(options)])[:12]
    folder = cache / f"{key}-{_digest([str(_FORMAT), *map(_fingerprint, sources)])[:20]}"
    store = _open_store(folder)
    if store is not None:
        return store
    part = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        _remove_old(cache, key)
        part.mkdir(parents=True)
        _write_store(part, decode(), skipped)
        try:
            os.rename(part, folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster, and its folder is equivalent
                raise
        store = _open_store(folder)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        problem = "no space left for decoded images" if is_full else f"cannot be written: {error.strerror}"
        raise RegardError(f"{cache}: {problem}.", "Free some space, or choose another cache folder.") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if store is None:
        raise RegardError(f"{folder}: the cache cannot be read back.", "Remove the folder and try again.")
    return store


def _fingerprint(source: ImageSource) -> str:
    """Text that changes whenever the files of a source or its options change.

    Size and modification time are not enough: a file may be replaced by one of equal size and time (`cp -p`,
    `rsync -t`, an unpacked archive). So the inode and the ctime are included, which programs cannot set. They also
    change if the same file is copied or its mode is set; the images are then decoded again. Hashing all files would
    cost about as much as decoding them.
    """
    lines = [source.fingerprint]
    for file in source.files:
        try:
            stat = file.stat()
            times = f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
            lines.append(f"{file.absolute()}: {stat.st_size} {times} {stat.st_ino}")
        except OSError:
            lines.append(f"{file.absolute()}: missing")
    return "\n".join(lines)


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()


def _remove_old(cache: Path, key: str) -> None:
    """Remove outdated stores with the same options, and incomplete folders left by killed processes.

    Processes that have an outdated store open can still use it: mapped files remain until they are unmapped.
    """
    for old in cache.glob(f"{key}-*"):
        with contextlib.suppress(OSError):
            if not old.name.endswith(".part") or time.time() - old.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(old)


def _write_store(folder: Path, images: Iterable[DecodedImage], skipped: Sequence[str]) -> None:
    with ExitStack() as stack:

        def create(name: str) -> BinaryIO:
            return stack.enter_context(open(folder / name, "wb"))

        files = [create(name) for name in (_PIXELS, _MASKS, _SIZES, _LABELS, _FACTS)]
        sizes, labels, facts = _write_images(images, files[0], files[1])
        np.save(files[2], sizes)
        np.save(files[3], labels)
        files[4].write(json.dumps(facts | {"skipped": list(skipped)}).encode())
        for file in files:
            file.flush()
            os.fsync(file.fileno())


def _write_images(
    images: Iterable[DecodedImage], pixels: BinaryIO, masks: BinaryIO
) -> tuple[Int[np.ndarray, "M 2"], Int[np.ndarray, "M"], dict[str, Any]]:
    """Write images one after the other; return their sizes, label ids and statistics."""
    digest = hashlib.sha256()
    sizes: list[tuple[int, int]] = []
    labels: list[str | None] = []
    total, squares = np.zeros(3), np.zeros(3)
    mask_values = np.zeros(256, bool)
    channels, has_masks = 0, False
    for image in images:
        if not sizes:
            channels, has_masks = image.pixels.shape[2], image.mask is not None
        elif (image.label is None) != (labels[0] is None):
            raise RegardError("Some images have labels and others do not.", "Read them separately.")
        elif (image.mask is not None) != has_masks:
            raise RegardError("Some images have masks and others do not.", "Read them separately.")
        sizes.append((image.pixels.shape[0], image.pixels.shape[1]))
        labels.append(image.label)
        histograms = [np.bincount(image.pixels[..., i].reshape(-1), minlength=256) for i in range(channels)]
        total[:channels] += histograms @ np.arange(256)
        squares[:channels] += histograms @ np.arange(256) ** 2
        parts = [(pixels, image.pixels)]
        if image.mask is not None:
            mask_values |= np.bincount(image.mask.reshape(-1), minlength=256) > 0
            parts.append((masks, image.mask))
        digest.update(f"{sizes[-1]} {image.label}".encode(errors="surrogateescape"))
        for stream, array in parts:
            content = array.tobytes()
            digest.update(content)
            stream.write(content)
    names = sorted({label for label in labels if label is not None}, key=_label_order)
    label_id = {name: i for i, name in enumerate(names)}
    count = sum(height * width for height, width in sizes)
    mean = total[:channels] / count
    std = np.sqrt(np.maximum(squares[:channels] / count - mean**2, 0))
    facts = {
        "names": names,
        "channels": channels,
        "mean": (mean / 255).tolist(),
        "std": (std / 255).tolist(),
        "mask_values": np.flatnonzero(mask_values).tolist(),
        "digest": digest.hexdigest(),
    }
    ids = [IGNORE_INDEX if label is None else label_id[label] for label in labels]
    return np.array(sizes, np.int64), np.array(ids, np.int64), facts


def _label_order(name: str) -> tuple[bool, int, str]:
    """Sort key of label names: integers by value, then all others alphabetically."""
    is_integer = name.isascii() and name.isdecimal() and len(name) < 19
    return not is_integer, int(name) if is_integer else 0, name


def _open_store(folder: Path) -> ImageStore | None:
    """Open the store in a folder; None if it does not exist, is incomplete or damaged."""
    try:
        facts = json.loads((folder / _FACTS).read_bytes())
        sizes, labels = np.load(folder / _SIZES), np.load(folder / _LABELS)
        if not _is_valid(facts, sizes, labels):
            return None
        count = int(sizes.prod(1).sum())
        pixels = np.memmap(folder / _PIXELS, np.uint8, "r", shape=(count * facts["channels"],))
        masks = np.memmap(folder / _MASKS, np.uint8, "r", shape=(count,)) if facts["mask_values"] else None
    except Exception:  # damaged files raise almost anything
        return None
    return ImageStore(pixels, masks, sizes, labels, facts)


def _is_valid(facts: Any, sizes: Any, labels: Any) -> bool:
    """Whether facts and arrays of a store have the types and shapes that `_write_images` writes."""
    if not isinstance(facts, dict) or facts.get("channels") not in (1, 3) or not isinstance(facts.get("digest"), str):
        return False
    kinds = {"names": str, "mean": float, "std": float, "mask_values": int, "skipped": str}
    if not all(isinstance(facts.get(name), list) for name in kinds):
        return False
    if not all(type(value) is kind for name, kind in kinds.items() for value in facts[name]):
        return False
    arrays = (sizes, labels)
    if not all(isinstance(array, np.ndarray) and array.dtype == np.int64 for array in arrays) or not len(sizes):
        return False
    return (
        sizes.shape == (len(labels), 2)
        and labels.ndim == 1
        and 0 < sizes.min() <= sizes.max() < 1 << 20
        and all(label == IGNORE_INDEX or 0 <= label < len(facts["names"]) for label in np.unique(labels).tolist())
        and len(facts["mean"]) == len(facts["std"]) == facts["channels"]
        and all(0 <= value < 256 for value in facts["mask_values"])
    )


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

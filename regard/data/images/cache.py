"""Cache of decoded images: written to a folder once, then memory-mapped."""

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int, UInt8

from regard.data.batching.batch import IGNORE_INDEX
from regard.data.images.decoding import DecodedImage
from regard.data.images.files import ImageSource
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

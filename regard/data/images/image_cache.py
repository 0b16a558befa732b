"""Decoded pictures in a folder: written once, and from then on mapped into memory instead of read."""

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

from regard.data.batching.pair_batches import IGNORED
from regard.data.images.image_decoding import Decoded
from regard.data.images.image_files import Source
from regard.errors import RegardError

# Changes when the same files would be stored as other bytes.
_FORMAT = 1
_PIXELS, _MASKS, _LABELS, _SIZES, _FACTS = "pixels.bin", "masks.bin", "labels.npy", "sizes.npy", "facts.json"
# A half-written folder of this age, in seconds, is nobody's any more.
_ABANDONED = 24 * 3600


@dataclass(frozen=True, eq=False)
class Store:
    """Pictures one after the other, and what is known of them all."""

    pixels: UInt8[np.ndarray, "bytes"]
    masks: UInt8[np.ndarray, "bytes"] | None
    sizes: Int[np.ndarray, "M 2"]
    """heights and widths"""
    labels: Int[np.ndarray, "M"]
    facts: dict[str, Any]


def make_store(pictures: Iterable[Decoded], skipped: Sequence[str]) -> Store:
    """A store in memory. `skipped` may grow while the pictures are drawn."""
    pixels, masks = io.BytesIO(), io.BytesIO()
    sizes, labels, facts = _written(pictures, pixels, masks)
    mask_bytes = np.frombuffer(masks.getbuffer(), np.uint8) if facts["mask_values"] else None
    facts["skipped"] = list(skipped)
    return Store(np.frombuffer(pixels.getbuffer(), np.uint8), mask_bytes, sizes, labels, facts)


def cached_store(
    cache: Path,
    which: object,
    sources: Sequence[Source],
    pictures: Callable[[], Iterable[Decoded]],
    skipped: Sequence[str],
) -> Store:
    """The store of these sources in the folder `cache`; it is made where there is none, or the files have changed.

    `which` tells it from others in that folder: a newer one takes the place of those with the same.
    Processes that make the same one at the same time do not disturb each other: each writes a folder of its own, and
    the first to be done gives it the name by which all find it.
    """
    key = _digest([repr(which)])[:12]
    folder = cache / f"{key}-{_digest([str(_FORMAT), *map(_stamp, sources)])[:20]}"
    store = _opened(folder)
    if store is not None:
        return store
    part = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        _remove_old(cache, key)
        part.mkdir(parents=True)
        _write(part, pictures(), skipped)
        try:
            os.rename(part, folder)
        except OSError:
            if not folder.exists():  # otherwise another process was quicker, and its folder is as good
                raise
        store = _opened(folder)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "no space left for decoded pictures" if full else f"cannot be written: {error.strerror}"
        raise RegardError(f"{cache}: {what}.", "Make room, or choose another folder for the cache.") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if store is None:
        raise RegardError(f"{folder}: what was written cannot be read.", "Remove the folder and try again.")
    return store


def _stamp(source: Source) -> str:
    """A text that changes when a source's files or its options do.

    Size and modification time are not enough: a file may be replaced by one of equal size and time (`cp -p`,
    `rsync -t`, an unpacked archive). So the inode and the time of its last change (ctime) count as well, which no
    program can set back. They also change when the same file is copied or its mode is set: the images are then decoded
    once more. Reading all files for a digest would cost about as much as decoding them.
    """
    told = [source.told]
    for file in source.files:
        try:
            state = file.stat()
            times = f"{state.st_mtime_ns} {state.st_ctime_ns}"
            told.append(f"{file.absolute()}: {state.st_size} {times} {state.st_ino}")
        except OSError:
            told.append(f"{file.absolute()}: missing")
    return "\n".join(told)


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()


def _remove_old(cache: Path, key: str) -> None:
    """Removes what was made of the same files before they changed, and what a killed process left behind.

    Whoever has an old one open keeps it: what is mapped stays until it is let go.
    """
    for old in cache.glob(f"{key}-*"):
        with contextlib.suppress(OSError):
            if not old.name.endswith(".part") or time.time() - old.stat().st_mtime > _ABANDONED:
                shutil.rmtree(old)


def _write(folder: Path, pictures: Iterable[Decoded], skipped: Sequence[str]) -> None:
    with ExitStack() as stack:

        def new(name: str) -> BinaryIO:
            return stack.enter_context(open(folder / name, "wb"))

        files = [new(name) for name in (_PIXELS, _MASKS, _SIZES, _LABELS, _FACTS)]
        sizes, labels, facts = _written(pictures, files[0], files[1])
        np.save(files[2], sizes)
        np.save(files[3], labels)
        files[4].write(json.dumps(facts | {"skipped": list(skipped)}).encode())
        for file in files:
            file.flush()
            os.fsync(file.fileno())


def _written(
    pictures: Iterable[Decoded], pixels: BinaryIO, masks: BinaryIO
) -> tuple[Int[np.ndarray, "M 2"], Int[np.ndarray, "M"], dict[str, Any]]:
    """Writes pictures one after the other, and gives their sizes, their labels, and the facts."""
    digest = hashlib.sha256()
    sizes: list[tuple[int, int]] = []
    labels: list[str | None] = []
    total, squares = np.zeros(3), np.zeros(3)
    values = np.zeros(256, bool)
    channels, masked = 0, False
    for picture in pictures:
        if not sizes:
            channels, masked = picture.pixels.shape[2], picture.mask is not None
        elif (picture.label is None) != (labels[0] is None):
            raise RegardError("Some of the pictures have labels, and others none.", "Read them apart.")
        elif (picture.mask is not None) != masked:
            raise RegardError("Some of the pictures have masks, and others none.", "Read them apart.")
        sizes.append((picture.pixels.shape[0], picture.pixels.shape[1]))
        labels.append(picture.label)
        shades = [np.bincount(picture.pixels[..., i].reshape(-1), minlength=256) for i in range(channels)]
        total[:channels] += shades @ np.arange(256)
        squares[:channels] += shades @ np.arange(256) ** 2
        parts = [(pixels, picture.pixels)]
        if picture.mask is not None:
            values |= np.bincount(picture.mask.reshape(-1), minlength=256) > 0
            parts.append((masks, picture.mask))
        digest.update(f"{sizes[-1]} {picture.label}".encode(errors="surrogateescape"))
        for stream, array in parts:
            content = array.tobytes()
            digest.update(content)
            stream.write(content)
    names = sorted({label for label in labels if label is not None}, key=_label_order)
    number = {name: i for i, name in enumerate(names)}
    count = sum(height * width for height, width in sizes)
    mean = total[:channels] / count
    deviation = np.sqrt(np.maximum(squares[:channels] / count - mean**2, 0))
    facts = {
        "names": names,
        "channels": channels,
        "mean": (mean / 255).tolist(),
        "std": (deviation / 255).tolist(),
        "mask_values": np.flatnonzero(values).tolist(),
        "digest": digest.hexdigest(),
    }
    ids = [IGNORED if label is None else number[label] for label in labels]
    return np.array(sizes, np.int64), np.array(ids, np.int64), facts


def _label_order(name: str) -> tuple[bool, int, str]:
    """Whole numbers by their value, before all others by the alphabet."""
    number = name.isascii() and name.isdecimal() and len(name) < 19
    return not number, int(name) if number else 0, name


def _opened(folder: Path) -> Store | None:
    """What a folder holds; None where it is not there, or not whole."""
    try:
        facts = json.loads((folder / _FACTS).read_bytes())
        sizes, labels = np.load(folder / _SIZES), np.load(folder / _LABELS)
        count = int(sizes.prod(1).sum())
        pixels = np.memmap(folder / _PIXELS, np.uint8, "r", shape=(count * facts["channels"],))
        masks = np.memmap(folder / _MASKS, np.uint8, "r", shape=(count,)) if facts["mask_values"] else None
    except (OSError, ValueError, KeyError):
        return None
    return Store(pixels, masks, sizes, labels, facts)

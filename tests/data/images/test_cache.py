import errno
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from regard.data import read_images, read_ragged_images
from regard.data.images import decoding, sets
from regard.errors import RegardError
from tests.data.image_helpers import make_images, to_pillow, write_class_folders

PIXELS = make_images()
LABELS = ["b", "a", "c", "a", "b", "b", "c"]


@pytest.fixture
def photos(folder):
    return write_class_folders("photos", PIXELS, LABELS)


@pytest.fixture
def decoded(monkeypatch):
    """List of the files that are decoded."""
    files = []
    load = decoding.load_image
    monkeypatch.setattr(decoding, "load_image", lambda file, fit=None: files.append(file) or load(file, fit))
    return files


def assert_same(one, other):
    assert (one.pixels == other.pixels).all()
    assert one.labels.tolist() == other.labels.tolist()
    for name in ("names", "mean", "std", "mask_values", "digest", "skipped"):
        assert getattr(one, name) == getattr(other, name)


def test_images_are_decoded_once(photos, decoded):
    first = read_images([photos], cache="deep/cache")
    assert len(decoded) == 7
    again = read_images([photos], cache=Path("deep/cache"))
    assert len(decoded) == 7
    assert isinstance(again.pixels, np.memmap)
    assert_same(first, again)
    assert_same(first, read_images([photos]))
    assert len(decoded) == 14  # no cache without a folder


def test_each_set_of_options_has_its_own_cache(photos, decoded):
    for options in ({}, {"size": 4}, {"channels": 1}, {"on_bad": "skip"}):
        read_images([photos], cache="cache", **options)
    read_ragged_images([photos], patch=2, cache="cache")
    assert len(decoded) == 7 * 5
    assert read_images([photos], cache="cache", size=4).pixels.shape == (7, 4, 4, 3)
    assert read_images([photos], cache="cache", channels=1).pixels.shape == (7, 6, 6, 1)
    assert read_ragged_images([photos], patch=2, cache="cache").sizes.tolist() == [[6, 6]] * 7
    assert len(decoded) == 7 * 5


@pytest.mark.parametrize("by", ["writing", "renaming"])
def test_file_replaced_by_one_of_equal_size_and_time_is_decoded_again(photos, decoded, by):
    """As `cp -p` or `rsync -t` may do."""
    file = Path(photos, "a", "01.png")
    content = [Path(photos, "b", f"0{i}.png") for i in (0, 4)]
    for one in content:  # both must have the same size: PNG readers ignore data after the image
        one.write_bytes(one.read_bytes().ljust(2000, b"\0"))
    file.write_bytes(content[0].read_bytes())
    os.utime(file, ns=(10**18, 10**18))
    other = Path(photos, "a", "other.tmp")
    other.write_bytes(content[1].read_bytes())
    os.utime(other, ns=(10**18, 10**18))
    first = read_images([photos], cache="cache", on_bad="skip")
    count = len(decoded)
    if by == "renaming":
        os.replace(other, file)
    else:
        file.write_bytes(other.read_bytes())
        other.unlink()
        os.utime(file, ns=(10**18, 10**18))
    second = read_images([photos], cache="cache", on_bad="skip")
    assert len(decoded) > count
    assert not (first.pixels == second.pixels).all()


@pytest.mark.parametrize("change", ["content", "time", "more", "fewer", "class"])
def test_changed_files_are_decoded_again(photos, decoded, change):
    first = read_images([photos], cache="cache")
    file = Path(photos, "a", "01.png")
    if change == "content":
        to_pillow(255 - PIXELS[1]).save(file)
    elif change == "time":
        os.utime(file, (1, 1))
    elif change == "more":
        to_pillow(PIXELS[0]).save(Path(photos, "c", "09.png"))
    elif change == "fewer":
        file.unlink()
    else:
        os.rename(Path(photos, "a"), Path(photos, "z"))
    second = read_images([photos], cache="cache")
    assert len(decoded) == 7 + len(second)
    assert (first.digest == second.digest) == (change == "time")
    assert_same(second, read_images([photos]))
    assert len(list(Path("cache").iterdir())) == 1  # the old one was removed
    assert (np.sort(first.pixels, None) == np.sort(PIXELS, None)).all()  # but the open one remains usable


@pytest.mark.parametrize("file", ["pixels.bin", "labels.npy", "sizes.npy", "facts.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_damaged_cache_is_rebuilt(photos, decoded, file, damage):
    first = read_images([photos])
    read_images([photos], cache="cache")
    (path,) = Path("cache").glob(f"*/{file}")
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:  # valid files with other content
        path.write_bytes({".json": b'{"channels": "3"}', ".npy": b"\x93NUMPY\x01\0\2\0{("}.get(path.suffix, b""))
    assert_same(first, read_images([photos], cache="cache"))
    assert_same(first, read_images([photos], cache="cache"))
    assert len(decoded) == 7 * 3


def test_store_finished_by_another_process_is_used(photos, decoded, monkeypatch):
    """Another process is faster: its folder has the final name when ours is complete."""
    write = sets._write_store

    def slow(*arguments):
        write(*arguments)
        monkeypatch.setattr(sets, "_write_store", write)
        assert_same(read_images([photos], cache="cache"), read_images([photos]))

    monkeypatch.setattr(sets, "_write_store", slow)
    images = read_images([photos], cache="cache")
    assert_same(images, read_images([photos]))
    assert len(list(Path("cache").iterdir())) == 1


def read_concurrently(photos, barrier, results):
    barrier.wait()
    results.put(read_images([photos], cache="cache").digest)


def test_concurrent_processes_share_the_cache(photos):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=read_concurrently, args=(photos, barrier, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    digests = {results.get() for _ in workers}
    for worker in workers:
        worker.join()
    assert digests == {read_images([photos]).digest}
    assert [one.suffix for one in Path("cache").iterdir()] == [""]


def test_incomplete_store_is_removed_after_a_day(photos):
    read_images([photos], cache="cache")
    (folder,) = Path("cache").iterdir()
    old, new = Path(f"{folder}.1.part"), Path(f"{folder}.2.part")
    for one in (old, new):
        one.mkdir()
    os.utime(old, (time.time() - 100_000,) * 2)
    os.utime(Path(photos, "a", "01.png"), (1, 1))
    read_images([photos], cache="cache")
    assert not old.exists()
    assert new.exists()


def test_full_disk_is_an_error(photos, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        RegardError, match=r"^cache: no space left for decoded images\. Free some space, or choose another"
    ):
        read_images([photos], cache="cache")
    assert not list(Path("cache").iterdir())
    Path("file").write_text("")
    with pytest.raises(RegardError, match=r"^file: cannot be written: .+\. Free some space"):
        read_images([photos], cache="file")


def test_failed_read_leaves_no_cache(photos):
    Path(photos, "c", "99.png").write_text("nonsense")
    with pytest.raises(RegardError, match="not a readable image"):
        read_images([photos], cache="cache", size=4, channels=3)
    assert not list(Path("cache").iterdir())
    images = read_images([photos], cache="cache", on_bad="skip")
    assert len(images.skipped) == 1
    assert read_images([photos], cache="cache", on_bad="skip").skipped == images.skipped  # from the cache
    with pytest.raises(RegardError, match="not a readable image"):
        read_images([photos], cache="cache")

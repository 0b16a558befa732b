"""Helpers of the data tests: writing files, comparing batches."""

import bz2
import gzip
import importlib
import lzma
import sys

import pytest
import torch


def write(name, content):
    """Write a file, compressed according to its suffix."""
    data = content if isinstance(content, bytes) else content.encode()
    compress = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress, "zst": compress_zstd}
    compressed = compress.get(name.rsplit(".", 1)[-1], bytes)(data)
    with open(name, "wb") as stream:
        stream.write(compressed)
    return name


def compress_zstd(data):
    if sys.version_info >= (3, 14):
        return importlib.import_module("compression.zstd").compress(data)
    return pytest.importorskip("zstandard").compress(data)


def rows(packed):
    """The sequences of a batch, without empty ones."""
    return [row[:length].tolist() for row, length in zip(*packed.padded()) if length]


def tensors(batch):
    """All content of a batch as tensors."""
    parts = [batch.targets, torch.tensor([batch.sentences, batch.tokens])]
    for one in batch.inputs:
        is_tensor = isinstance(one, torch.Tensor)
        parts += [one] if is_tensor else [one.ids, one.positions, one.offsets.starts, torch.tensor([one.max_len])]
    return parts


def same(one, other):
    """Whether two batches are equal."""
    return len(tensors(one)) == len(tensors(other)) and all(map(torch.equal, tensors(one), tensors(other)))


def check_epochs(make_batches, start=2):
    """Check that an epoch depends on seed and epoch number alone, and can be resumed in the middle."""
    used = make_batches(7)
    for number in range(2):
        for _ in used.epoch(number):
            pass
    first, again = list(used.epoch(2)), list(make_batches(7).epoch(2))
    assert len(first) == len(again) > start
    assert all(map(same, first, again))
    assert not all(map(same, first, used.epoch(3)))
    assert not all(map(same, first, make_batches(8).epoch(2)))
    resumed = list(make_batches(7).epoch(2, start))
    assert len(resumed) == len(first) - start
    assert all(map(same, first[start:], resumed))

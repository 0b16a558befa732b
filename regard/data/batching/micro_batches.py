"""Splitting a batch into smaller ones, for a device whose memory is too small for the whole."""

import dataclasses
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regard.attention.offsets import Offsets
from regard.data.batching.batch import Batch
from regard.data.batching.images import RaggedImageBatch, SizeGroup
from regard.layers.packed import Packed


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Split a batch into at most `parts` batches with about as many tokens each; no sequence is divided.

    The sum of the losses of the parts is the loss of the batch, to rounding. On a GPU, this synchronizes.

    >>> from regard.layers.packed import pack
    >>> texts = pack([[5, 6], [7], [8, 9, 10]])
    >>> [part.inputs[0].ids.tolist() for part in split_batch(Batch((texts,), texts.ids, 3, 6), 2)]
    [[5, 6, 7], [8, 9, 10]]
    """
    if parts == 1:
        return [batch]
    if isinstance(batch, RaggedImageBatch):
        return _split_ragged(batch, parts)
    packed = [x for x in batch.inputs if isinstance(x, Packed)]
    starts = [x.offsets.starts.tolist() for x in packed]
    count = len(starts[0]) - 1 if packed else len(batch.targets)
    # Tokens before each sequence, on all sides together.
    before = [sum(column) for column in zip(*starts)] if packed else list(range(count + 1))
    pieces: list[Batch] = []
    for begin, end in pairwise(_boundaries(before, parts)):
        # A tensor has a row for each sequence, or for each token; targets belong to the tokens of the last side.
        rows = {count: slice(begin, end)}
        rows |= {len(x.ids): slice(start[begin], start[end]) for x, start in zip(packed, starts)}
        sentences = max(0, min(end, batch.sentences) - begin)
        pieces.append(
            dataclasses.replace(
                batch,
                inputs=tuple(_slice(x, begin, end, rows) for x in batch.inputs),
                targets=_slice(batch.targets, begin, end, rows),
                sentences=sentences,
                tokens=round(batch.tokens * sentences / max(1, batch.sentences)),
            )
        )
    return pieces


def _boundaries(before: list[int], parts: int) -> list[int]:
    """Indices at which to split sequences with this many tokens before each, and in all.

    >>> _boundaries([0, 2, 3, 6, 6], 2)
    [0, 2, 4]
    """
    total, count = before[-1], len(before) - 1
    boundaries = [0]
    for part in range(1, parts):
        target = total * part / parts
        nearest = min(range(count + 1), key=lambda i: (abs(before[i] - target), i))
        if boundaries[-1] < nearest < count:
            boundaries.append(nearest)
    return [*boundaries, count]


def _slice(x: Any, begin: int, end: int, rows: dict[int, slice]) -> Any:
    if isinstance(x, Packed):
        starts = x.offsets.starts[begin : end + 1]
        first, last = int(starts[0]), int(starts[-1])
        offsets = Offsets(starts - first, last - first, x.offsets.max_len)
        return Packed(x.ids[first:last], offsets, x.positions[first:last])
    return x[rows[len(x)]]


def _split_ragged(batch: RaggedImageBatch, parts: int) -> list[Batch]:
    flat, starts, coordinates, sizes = (x for x in batch.inputs if isinstance(x, Tensor))
    heights = torch.tensor([[group.height, group.width] for group in batch.groups for _ in range(group.images)])
    areas = heights.prod(1).cumsum(0).tolist()
    pixels = [0, *areas]
    channels, patches = len(flat) // pixels[-1], starts.tolist()
    has_masks = len(batch.targets) != len(heights)
    pieces: list[Batch] = []
    for begin, end in pairwise(_boundaries(patches, parts)):
        patch_rows, pixel_rows = slice(patches[begin], patches[end]), slice(pixels[begin], pixels[end])
        groups: list[SizeGroup] = []
        for height, width in heights[begin:end].tolist():
            if groups and groups[-1][1:] == (height, width):
                groups[-1] = groups[-1]._replace(images=groups[-1].images + 1)
            else:
                groups.append(SizeGroup(1, height, width))
        inputs = (
            flat[channels * pixels[begin] : channels * pixels[end]],
            starts[begin : end + 1] - patches[begin],
            coordinates[patch_rows],
            sizes[patch_rows],
        )
        targets = batch.targets[pixel_rows if has_masks else slice(begin, end)]
        sentences = max(0, min(end, batch.sentences) - begin)
        pieces.append(RaggedImageBatch(inputs, targets, sentences, len(inputs[2]), tuple(groups), batch.augment))
    return pieces

"""The batches of a run, from any position in the data."""

import itertools
from collections.abc import Generator, Iterator

import torch

from regard.data.batching.pair_batches import Batch, prefetch
from regard.data.batching.rank_slice import RankSlice
from regard.training.tasks.task import BatchSource


def stream_batches(
    batches: BatchSource, first_epoch: int, start: int, part: RankSlice, device: torch.device
) -> Generator[tuple[int, int, Batch], None, None]:
    """Yield epoch, batch index and this rank's part of the batch, on `device`, from batch `start` of `first_epoch`."""

    def load_batches() -> Iterator[tuple[int, int, Batch]]:
        for epoch in itertools.count(first_epoch):
            first = start if epoch == first_epoch else 0
            for index, batch in enumerate(batches.epoch(epoch, first, part), first):
                yield epoch, index, batch.pin_memory() if device.type == "cuda" else batch

    for epoch, index, batch in prefetch(load_batches()):
        yield epoch, index, batch.to(device, non_blocking=True)


def batch_groups(
    batches: BatchSource, first_epoch: int, start: int, part: RankSlice, device: torch.device, size: int
) -> Generator[tuple[int, int, list[Batch]], None, None]:
    """For each update: epoch and batch index after it, and its `size` batches of this rank."""
    group: list[Batch] = []
    for epoch, index, batch in stream_batches(batches, first_epoch, start, part, device):
        group.append(batch)
        if len(group) == size:
            yield epoch, index + 1, group
            group = []

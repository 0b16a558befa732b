"""Captured updates on a GPU: a small model's step is hundreds of launches, replayed here as one."""

import dataclasses
from collections.abc import Callable

import torch

from regard.attention.offsets import Offsets
from regard.data import Batch
from regard.layers.packed import Packed
from regard.train.losses import LossParts

# Ordinary updates of a shape before it is captured, so that every library has made its choices and buffers.
WARM_UP = 2


class GraphedUpdate:
    """Wraps an update of one batch. Batches have constant shapes but for a few values of max_len: a graph for each."""

    def __init__(self, update: Callable[[list[Batch]], LossParts]) -> None:
        self.update = update
        self.seen: dict[tuple, int] = {}
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Batch, LossParts]] = {}
        self.stream = torch.cuda.Stream()

    def __call__(self, group: list[Batch]) -> LossParts:
        (batch,) = group
        shape = (batch.source.max_len, batch.target_in.max_len)
        if self.seen.get(shape, 0) < WARM_UP:
            self.seen[shape] = self.seen.get(shape, 0) + 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                parts = self.update(group)
            torch.cuda.current_stream().wait_stream(self.stream)
            return parts
        if shape not in self.graphs:
            still = _copied(batch)
            graph = torch.cuda.CUDAGraph()
            # The thread that prepares batches goes on meanwhile, and may ask for page-locked memory.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                parts = self.update([still])
            self.graphs[shape] = (graph, still, parts)
        graph, still, parts = self.graphs[shape]
        _overwrite(still, batch)
        graph.replay()
        return LossParts(*(part.clone() for part in parts))


def _tensors(batch: Batch) -> list[torch.Tensor]:
    return [
        tensor for side in (batch.source, batch.target_in) for tensor in (side.ids, side.offsets.starts, side.positions)
    ] + [batch.target_out]


def _copied(batch: Batch) -> Batch:
    """The same batch in tensors of its own, with nothing derived from them kept."""
    sides = [
        Packed(
            side.ids.clone(),
            Offsets(side.offsets.starts.clone(), side.offsets.total, side.offsets.max_len),
            side.positions.clone(),
        )
        for side in (batch.source, batch.target_in)
    ]
    return dataclasses.replace(batch, source=sides[0], target_in=sides[1], target_out=batch.target_out.clone())


def _overwrite(still: Batch, batch: Batch) -> None:
    for mine, other in zip(_tensors(still), _tensors(batch)):
        mine.copy_(other, non_blocking=True)

"""Captured updates on a GPU: a small model's step is hundreds of launches, replayed here as one."""

import dataclasses
from collections.abc import Callable

import torch

from regard.attention.offsets import Offsets
from regard.data import Batch
from regard.layers.packed import Packed
from regard.training.losses import LossParts

# Ordinary updates of a shape before it is captured, so that every library has made its choices and buffers.
WARM_UP = 2


class GraphedUpdate:
    """Wraps an update of one batch. Batches have constant shapes but for a few values of max_len: a graph for each."""

    def __init__(self, update: Callable[[list[Batch]], LossParts]) -> None:
        self.update = update
        self.seen: dict[tuple, int] = {}
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Batch, LossParts]] = {}
        self.stream = torch.cuda.Stream()
        # One graph's working memory is another's: they never run at once, and what they give is copied.
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, group: list[Batch]) -> LossParts:
        (batch,) = group
        if not batch.repeats:  # what is captured would not be what the next batch needs
            return self.update(group)
        shape = tuple(one.max_len if isinstance(one, Packed) else one.shape for one in batch.inputs)
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
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                parts = self.update([still])
            self.graphs[shape] = (graph, still, parts)
        graph, still, parts = self.graphs[shape]
        _overwrite(still, batch)
        graph.replay()
        return LossParts(*(part.clone() for part in parts))


def _tensors(batch: Batch) -> list[torch.Tensor]:
    tensors = [batch.targets]
    for one in batch.inputs:
        tensors += [one.ids, one.offsets.starts, one.positions] if isinstance(one, Packed) else [one]
    return tensors


def _copied(batch: Batch) -> Batch:
    """The same batch in tensors of its own, with nothing derived from them kept."""
    inputs = tuple(_copy(one) if isinstance(one, Packed) else one.clone() for one in batch.inputs)
    return dataclasses.replace(batch, inputs=inputs, targets=batch.targets.clone())


def _copy(one: Packed) -> Packed:
    offsets = Offsets(one.offsets.starts.clone(), one.offsets.total, one.offsets.max_len)
    return Packed(one.ids.clone(), offsets, one.positions.clone())


def _overwrite(still: Batch, batch: Batch) -> None:
    for mine, other in zip(_tensors(still), _tensors(batch)):
        mine.copy_(other, non_blocking=True)

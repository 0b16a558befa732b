"""Updates as CUDA graphs: the hundreds of kernel launches of an update are replayed as one."""

import dataclasses
from collections.abc import Callable

import torch

from regard.attention.offsets import Offsets
from regard.data.batching.pair_batches import Batch
from regard.layers.packed import Packed
from regard.training.losses import LossParts

# Eager updates of a shape before it is captured, so that libraries have tuned their kernels and allocated buffers.
WARM_UP = 2


class GraphedUpdate:
    """Wraps an update of one batch and captures one graph per shape; shapes only differ in a few values of max_len."""

    def __init__(self, update: Callable[[list[Batch]], LossParts]) -> None:
        self.update = update
        self.warm_up_counts: dict[tuple, int] = {}
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Batch, LossParts]] = {}
        self.stream = torch.cuda.Stream()
        # The graphs share one memory pool: they never run concurrently, and their outputs are copied.
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, group: list[Batch]) -> LossParts:
        (batch,) = group
        # Its operations depend on its content, so a graph would not fit the next batch.
        if not batch.supports_cuda_graph:
            return self.update(group)
        shape = tuple(x.max_len if isinstance(x, Packed) else x.shape for x in batch.inputs)
        if self.warm_up_counts.get(shape, 0) < WARM_UP:
            self.warm_up_counts[shape] = self.warm_up_counts.get(shape, 0) + 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                parts = self.update(group)
            torch.cuda.current_stream().wait_stream(self.stream)
            return parts
        if shape not in self.graphs:
            static_batch = _clone_batch(batch)
            graph = torch.cuda.CUDAGraph()
            # The thread that prepares batches keeps running, and may allocate page-locked memory.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                parts = self.update([static_batch])
            self.graphs[shape] = (graph, static_batch, parts)
        graph, static_batch, parts = self.graphs[shape]
        _copy_into(static_batch, batch)
        graph.replay()
        return LossParts(*(part.clone() for part in parts))


def _tensors(batch: Batch) -> list[torch.Tensor]:
    tensors = [batch.targets]
    for x in batch.inputs:
        tensors += [x.ids, x.offsets.starts, x.positions] if isinstance(x, Packed) else [x]
    return tensors


def _clone_batch(batch: Batch) -> Batch:
    """A copy of the batch in new tensors, without cached values derived from them."""
    inputs = tuple(_clone_packed(x) if isinstance(x, Packed) else x.clone() for x in batch.inputs)
    return dataclasses.replace(batch, inputs=inputs, targets=batch.targets.clone())


def _clone_packed(packed: Packed) -> Packed:
    offsets = Offsets(packed.offsets.starts.clone(), packed.offsets.total, packed.offsets.max_len)
    return Packed(packed.ids.clone(), offsets, packed.positions.clone())


def _copy_into(static_batch: Batch, batch: Batch) -> None:
    for target, source in zip(_tensors(static_batch), _tensors(batch)):
        target.copy_(source, non_blocking=True)

"""Updates as CUDA graphs: the hundreds of kernel launches of an update are replayed as one."""

import dataclasses
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from regard.attention.offsets import Offsets
from regard.data.batching.batch import IGNORE_INDEX, Batch
from regard.layers.packed import Packed
from regard.training.distributed import UPDATE_TIMEOUT
from regard.training.losses import LossParts

if TYPE_CHECKING:
    from regard.training.loop import Trainer

# Eager updates of a shape before it is captured, so that libraries have tuned their kernels and allocated buffers.
WARM_UP = 2


class GraphedUpdate:
    """Wraps an update of one batch and captures one graph per shape; there are only a few shapes.

    Several ranks must all capture, replay or launch an update directly, since NCCL does not mix these. They get batches
    of the same shapes at the same updates, and `agree` tells whether all of them can capture, or have captured, the
    update; it gets the error that prevented this rank from capturing it. After a disagreement nothing is captured, and
    graphs of other shapes are still replayed.
    """

    def __init__(
        self,
        update: Callable[[list[Batch]], LossParts],
        agree: Callable[[Exception | None], bool] | None = None,
    ) -> None:
        self.update, self.agree = update, agree
        self.captures = True
        self.warm_up_counts: dict[tuple, int] = {}
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Batch, LossParts]] = {}
        self.stream = torch.cuda.Stream()
        # The graphs share one memory pool: they never run concurrently, and their outputs are copied.
        self.pool = torch.cuda.graph_pool_handle()
        self.timer = ReplayTimer(UPDATE_TIMEOUT, _end_process) if agree is not None else None

    def __call__(self, group: list[Batch]) -> LossParts:
        (batch,) = group
        # Its operations depend on its content, so a graph would not fit the next batch.
        if not batch.supports_cuda_graph:
            return self.update(group)
        shape = batch_shape(batch)
        if self.warm_up_counts.get(shape, 0) < WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                parts = self.update(group)
            torch.cuda.current_stream().wait_stream(self.stream)
            # Not before: if the batch does not fit into memory, this rank repeats the update in parts.
            self.warm_up_counts[shape] = self.warm_up_counts.get(shape, 0) + 1
            return parts
        if shape not in self.graphs:
            captured = self._capture(batch) if self.captures else None
            if captured is None:
                return self.update(group)
            self.graphs[shape] = captured
        graph, static_batch, parts = self.graphs[shape]
        _copy_into(static_batch, batch)
        graph.replay()
        if self.timer is not None:
            event = torch.cuda.Event()
            event.record()
            self.timer.watch(event)
        return LossParts(*(part.clone() for part in parts))

    def _capture(self, batch: Batch) -> tuple[torch.cuda.CUDAGraph, Batch, LossParts] | None:
        """Capture an update of a batch of this shape; None if not all ranks can."""
        if self.agree is None:
            return self._capture_here(batch)
        captured, error = None, None
        self.captures = self.agree(None)
        if self.captures:
            try:
                captured = self._capture_here(batch)
            except Exception as exception:
                error = exception
            self.captures = self.agree(error)
        return captured if self.captures else None

    def _capture_here(self, batch: Batch) -> tuple[torch.cuda.CUDAGraph, Batch, LossParts]:
        static_batch, graph = _clone_batch(batch), torch.cuda.CUDAGraph()
        # Other threads keep running: the one that prepares batches may allocate page-locked memory, and one of the
        # process group checks whether collective operations have ended.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            parts = self.update([static_batch])
        return graph, static_batch, parts


def capture_step(trainer: "Trainer") -> Callable[[list[Batch]], LossParts]:
    """The training step of a trainer on a GPU, captured as CUDA graphs if possible."""
    step, config, workers = trainer.training_step, trainer.config, trainer.workers
    is_eager = trainer.is_sharded and config.optimizer == "muon"
    if config.accumulate > 1 or is_eager:
        return step
    if workers.update_group is None:
        return GraphedUpdate(step) if trainer.state.micro_batches == 1 else step

    def agree(error: Exception | None = None) -> bool:
        """Whether all ranks can capture the update, or have captured it; otherwise none does, as NCCL requires."""
        is_split = trainer.state.micro_batches > 1  # the parts of a batch have different shapes
        if not workers.any(error is not None or is_split)[0]:
            return True
        trainer.loss.zero_grad()
        reason = f": {str(error).splitlines()[0]}" if error is not None and str(error) else ""
        trainer.run_log.warn(f"A rank cannot capture updates as CUDA graphs{reason}. They run without, more slowly.")
        return False

    return GraphedUpdate(step, agree)


class ReplayTimer:
    """Calls a function if a replayed update takes too long: NCCL has no time limit inside CUDA graphs.

    `watch` gets the event after each replay. A thread checks the events until all have ended.
    """

    def __init__(self, timeout: timedelta, on_timeout: Callable[[], object], interval: float = 5.0) -> None:
        self.timeout, self.on_timeout, self.interval = timeout.total_seconds(), on_timeout, interval
        self.pending: deque[tuple[float, Any]] = deque()
        self.added = threading.Event()
        threading.Thread(target=self._check, name="replay timer", daemon=True).start()

    def watch(self, event: Any) -> None:
        """Add the event that follows a replay."""
        self.pending.append((time.monotonic() + self.timeout, event))
        self.added.set()

    def _check(self) -> None:
        while True:
            if not self.pending:
                self.added.wait()
                self.added.clear()
            time.sleep(self.interval)
            while self.pending and self.pending[0][1].query():
                self.pending.popleft()
            if self.pending and time.monotonic() > self.pending[0][0]:
                self.on_timeout()
                return


def _end_process() -> None:
    """End this process, as the time limit of NCCL does: the thread of the update cannot be interrupted."""
    minutes = UPDATE_TIMEOUT.total_seconds() / 60
    print(f"regard: the exchange of gradients did not end within {minutes:.0f} minutes.", file=sys.stderr, flush=True)
    os._exit(1)


def batch_shape(batch: Batch) -> tuple:
    """Everything about the shapes of a batch on which the operations of an update depend.

    >>> from regard.layers.packed import pack
    >>> batch_shape(Batch((pack([[5, 6], [7]]),), torch.zeros(3), 2, 3))
    ((torch.Size([3]), 2, 2), torch.Size([3]))
    """
    inputs = ((x.ids.shape, len(x), x.max_len) if isinstance(x, Packed) else x.shape for x in batch.inputs)
    return (*inputs, batch.targets.shape)


def _is_text(batch: Batch) -> bool:
    return isinstance(batch.inputs[0], Packed)


def _tensors(batch: Batch) -> list[torch.Tensor]:
    tensors = [batch.targets]
    for x in batch.inputs:
        tensors += [x.ids, x.offsets.starts, x.positions] if isinstance(x, Packed) else [x]
    return tensors


def _clone_batch(batch: Batch) -> Batch:
    """A copy of the batch in new tensors, without cached values derived from them."""
    inputs = tuple(_clone_packed(x) if isinstance(x, Packed) else x.clone() for x in batch.inputs)
    # The graph also serves batches of other numbers of sequences: see `_copy_into`.
    sentences = max(1, batch.sentences) if _is_text(batch) else batch.sentences
    return dataclasses.replace(batch, inputs=inputs, targets=batch.targets.clone(), sentences=sentences)


def _clone_packed(packed: Packed) -> Packed:
    offsets = Offsets(packed.offsets.starts.clone(), packed.offsets.total, packed.offsets.max_len)
    return Packed(packed.ids.clone(), offsets, packed.positions.clone())


def _copy_into(static_batch: Batch, batch: Batch) -> None:
    for target, source in zip(_tensors(static_batch), _tensors(batch)):
        target.copy_(source, non_blocking=True)
    if _is_text(batch) and not batch.sentences:  # padding for a rank without a sequence
        static_batch.targets.fill_(IGNORE_INDEX)

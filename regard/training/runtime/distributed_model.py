"""A model on the ranks of a run: replicated (DDP) or sharded (FSDP2)."""

import contextlib
import copy
import itertools
import time

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from regard.data.batching.rank_slice import RankSlice
from regard.training.guards import BatchTooLargeError, detect_out_of_memory, refuse_to_split
from regard.training.plan import Cost, peak_memory
from regard.training.recipe import TrainConfig
from regard.training.runtime.data_parallel import TaskLoss, gather_weights, replicate, shard
from regard.training.runtime.workers import Workers, report_dead_ranks
from regard.training.tasks.task import BatchSource, Task


class DistributedModel:
    """The weights that this rank updates, and the loss that it computes with them.

    Rank 0 also has `full`, the model that is validated and saved: the EMA of the weights or the weights themselves. Of
    a sharded model it is a full copy, which `gather` updates.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        config: TrainConfig,
        workers: Workers,
        device: torch.device,
        batches: BatchSource,
        *,
        is_resumed: bool,
        is_silent: bool,
    ) -> None:
        self.model, self.config, self.workers, self.device = model, config, workers, device
        model.train()
        if workers.update_group is not None and not is_resumed:
            workers.broadcast(model.parameters())
        self.is_sharded = workers.update_group is not None and config.sharding == "fsdp"
        self.loss = TaskLoss(task, model, config, device)
        self.cost: Cost | None = None
        """time and memory of a forward and a backward pass, for the plan of a new run"""
        measures_cost = not is_resumed and (not is_silent or self.is_sharded)  # all ranks of a sharded model take part
        is_rank_0 = workers.rank == 0
        if self.is_sharded:
            self.ema_model = copy.deepcopy(model) if config.ema else None
            self.full = copy.deepcopy(model).to(device) if is_rank_0 else None
            mesh = DeviceMesh.from_group(workers.update_group, device.type)
            shard(self.loss, mesh, torch.bfloat16 if config.precision == "bfloat16" else None)
            if measures_cost:
                self.cost = self._measure_cost(batches, workers.part)
            if self.ema_model is not None:
                shard(self.ema_model, mesh)
        else:
            model.to(device)
            self.ema_model = copy.deepcopy(model) if config.ema and is_rank_0 else None
            self.full = self.ema_model or model
            if measures_cost:
                self.cost = self._measure_cost(batches, workers.part)
            if workers.size > 1 and workers.update_group is not None:
                batch = next(batches.epoch(0, 0, workers.part)).to(device)
                with refuse_to_split(1, workers.rank), report_dead_ranks():
                    replicate(self.loss, workers.update_group, batch)

    def gather(self) -> None:
        """Copy the weights of a sharded model to `full` of rank 0."""
        if self.is_sharded:
            with report_dead_ranks():
                gather_weights(self.ema_model or self.model, self.full)

    def _measure_cost(self, batches: BatchSource, part: RankSlice) -> Cost:
        """Measure time and peak memory of a forward and a backward pass; the gradients are discarded."""
        times = []
        for batch in itertools.islice(batches.epoch(0, 0, part), 3):
            start = time.monotonic()
            # Unless it is sharded, the first update splits a batch that does not fit.
            refuse = (
                refuse_to_split(1, self.workers.rank) if self.is_sharded else contextlib.suppress(BatchTooLargeError)
            )
            with report_dead_ranks(), refuse, detect_out_of_memory():
                self.loss(batch.to(self.device)).loss.backward()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.monotonic() - start)
        self.loss.zero_grad()
        return Cost(min(times), peak_memory(self.device))

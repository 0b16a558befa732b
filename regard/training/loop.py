"""The training loop: batches, forward, backward, update, validation, checkpoints. `guards.py` has what can go wrong."""

import contextlib
import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.data.batching.batch import Batch, RankSlice, prefetch
from regard.devices import find_device
from regard.errors import RegardError
from regard.evaluation.text_metrics import margin_key
from regard.models import ModelConfig, make_model
from regard.training.checkpoint import (
    STEPS,
    AsyncSaver,
    Checkpoint,
    CheckpointStore,
    RunSaver,
    TrainState,
    gather_state,
    is_extended,
    load_like,
    restore_state,
    unique_parameters,
)
from regard.training.cuda_graphs import capture_step
from regard.training.datasets import Dataset, count_units
from regard.training.distributed import DistributedModel, Workers, accumulating, report_dead_ranks
from regard.training.guards import (
    LossGuard,
    LossStatistics,
    Position,
    SkippedUpdate,
    agree_on_micro_batches,
    catch_out_of_memory,
    interrupt,
    is_batch_too_large,
    mark_non_finite,
    roll_back,
    split_batches,
    start_decay_if_due,
    stop_signals,
)
from regard.training.log import RunLog
from regard.training.losses import LossParts
from regard.training.machine import make_autocast
from regard.training.optimizers import make_optimizer, scale_gradients, set_learning_rate, step_optimizer, update_ema
from regard.training.recipe import TASKS, Recipe
from regard.training.schedules import Schedule, parse_duration
from regard.training.tasks.task import BatchSource, evaluate_loss

# With a time budget: updates between two checks of the clock.
CLOCK_CHECK_INTERVAL = 10


@dataclass(frozen=True)
class RunSpec:
    """Everything that an update of the weights needs; rank 0 sends it to the other workers."""

    recipe: Recipe
    out: Path
    provenance: dict[str, Any]
    model: ModelConfig
    batches: BatchSource
    checkpoint: Path | None = None
    """the checkpoint from which the run is resumed"""


class Validation(NamedTuple):
    """What rank 0 validates and saves: the pipeline, on the validation split, which is also encoded as batches."""

    pipeline: Any
    dataset: Dataset[Any]
    batches: Iterable[Batch]


class Trainer:
    """The training loop of one process. Rank 0, which gets `validation`, also validates, logs and saves."""

    def __init__(
        self,
        spec: RunSpec,
        workers: Workers,
        run_log: RunLog,
        started: float,
        validation: Validation | None = None,
    ) -> None:
        self.spec, self.workers, self.run_log, self.validation = spec, workers, run_log, validation
        self.task, self.config = TASKS[spec.recipe.task], spec.recipe.train
        config, is_new = self.config, spec.checkpoint is None
        self.is_rank_0, self.device = validation is not None, find_device(config.device)
        model = validation.pipeline.model if validation is not None else build_model(spec)
        measures_cost = is_new and not run_log.is_silent
        self.distributed = DistributedModel(
            model, spec.recipe, workers, self.device, spec.batches, is_new=is_new, measures_cost=measures_cost
        )
        self.model, self.ema_model, self.loss = model, self.distributed.ema_model, self.distributed.loss
        self.is_sharded = self.distributed.is_sharded
        if validation is not None:
            self.pipeline = replace(validation.pipeline, model=self.distributed.full)
        self.parameters = unique_parameters(model)
        self.optimizer = make_optimizer(
            config.optimizer, model, config.lr, config.beta2, config.weight_decay, config.momentum
        )
        self.schedule = Schedule(config.schedule, config.lr, config.warmup, config.steps)

        precision: Any = "bfloat16" if config.precision == "bfloat16" else "float32"
        self.state = TrainState(spec.provenance, workers.size, precision)
        if spec.checkpoint is not None:
            self.restore(spec.checkpoint)
        # The time budget includes the time of earlier processes of the same run.
        self.budget, self.started = parse_duration(config.time), started - self.state.seconds
        if self.budget:
            run_log.deadline = self.started + self.budget
        self.guard = LossGuard(self.device, skips_spikes=config.skip_spikes)
        self.store = CheckpointStore(spec.out, config.keep_checkpoints)
        shards = AsyncSaver(workers, self.store) if self.is_sharded else None
        self.saver = RunSaver(self.store, run_log, None if is_new else self.state.step, shards)
        self.is_save_due = False
        self.is_saved = False
        """whether the model of the last validation was saved"""
        self.unlogged: list[LossParts] = []
        self.restored_updates = 0
        """updates of an earlier process since the last log line: they count for the loss, not for the speed"""
        self.skipped: list[SkippedUpdate] = []
        """skipped updates of this process"""
        self.restore_counters()
        self.timed_from = time.monotonic()

    def run(self) -> None:
        """Update the weights until the schedule ends, validation stalls or a signal arrives."""
        config = self.config
        if self.spec.checkpoint is None:
            if config.keep_every:
                self.save_snapshot()  # the untrained model
            self.checkpoint()  # marks the folder as belonging to this run
        self.captured_step = self.capture_step()
        self.timed_from = time.monotonic()
        position = Position(self.state.epoch, self.state.batch)
        stream = self.batches(position, self.workers.part, self.device)
        with self.run_log, stop_signals() as signals, contextlib.closing(stream) as batches:
            while not self.state.done and self.state.step < self.last_step:
                self.update(*next(batches))
                logs, saves, keeps = map(self.is_due, (config.log_every, config.save_every, config.keep_every))
                validates = self.is_due(config.validate_every) or self.state.step == self.last_step
                reads = logs or saves or keeps or validates
                # On a GPU, reading the losses waits for all updates so far. All ranks read them at the same steps.
                if reads or self.device.type == "cpu":
                    self.read_losses()
                    if self.guard.has_failed:
                        roll_back(self)
                        self.captured_step = self.capture_step()
                        continue
                if reads:
                    agree_on_micro_batches(self)
                if logs:
                    self.log()
                paused = time.monotonic()
                if keeps:
                    self.save_snapshot()
                if validates:
                    self.validate()
                self.timed_from += time.monotonic() - paused
                # The other ranks wait here while rank 0 validates.
                self.state.done, is_interrupted = self.workers.any(self.state.done, bool(signals))
                if validates or (self.budget and self.is_due(CLOCK_CHECK_INTERVAL)):
                    start_decay_if_due(self, validates)
                self.is_save_due |= saves
                if self.is_save_due or is_interrupted or self.state.done:
                    self.read_losses()
                    # Between skipped updates the weights may be the reason for skipping.
                    if self.state.done or not self.guard.streak:
                        self.checkpoint()
                if is_interrupted and not self.state.done:
                    interrupt(self, signals)
        del self.captured_step  # a reference to this object, which would keep its memory

    def update(self, epoch: int, batch: int, batches: list[Batch]) -> None:
        """Update the weights once; `epoch` and `batch` are the position in the data after the update."""
        state, parts = self.state, None
        while parts is None:
            # All randomness of an update is a function of seed, step and part of the batch: a resumed run repeats it,
            # and ranks that share a part have equal dropout.
            torch.manual_seed(_update_seed(self.config.seed, state.step, self.workers.part.rank))
            set_learning_rate(self.optimizer, self.schedule.rate(state.step, state.decay_start))
            try:
                parts = self.captured_step(batches)
            except Exception as error:
                if not is_batch_too_large(error):
                    raise
            if parts is None:
                split_batches(self, batches)
                if self.workers.size == 1:  # several ranks decide together when they capture the next graph
                    self.captured_step = self.capture_step()  # for smaller batches
        self.guard.add(state.step + 1, Position(state.epoch, state.batch), parts)
        state.step, state.epoch, state.batch = state.step + 1, epoch, batch
        self.run_log.advance(state.step)
        if self.ema_model is not None:
            update_ema(self.ema_model, self.model, self.config.ema, state.step)

    def training_step(self, batches: list[Batch]) -> LossParts:
        """Forward and backward passes of this worker's batches, and the optimizer step, without GPU synchronization."""
        totals = LossParts(*(torch.zeros((), device=self.device) for _ in LossParts._fields))
        micro_batches = [part for batch in batches for part in batch.split(self.state.micro_batches)]
        step, rank = self.state.step + 1, self.workers.rank
        for index, micro_batch in enumerate(micro_batches, 1):
            is_last = index == len(micro_batches)
            # Before ranks exchange gradients, one that is out of memory may split its batches; the others wait for it.
            exchanges = self.is_sharded or (is_last and self.workers.size > 1)
            with report_dead_ranks(), accumulating(self.loss, is_last):
                with catch_out_of_memory(step, rank, can_split=not self.is_sharded):
                    parts = self.loss(micro_batch)
                with catch_out_of_memory(step, rank, can_split=not exchanges):
                    parts.loss.backward()
            for total, value in zip(totals, parts):
                total += value.detach()
        self.workers.sum(totals)
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = scale_gradients(grads, totals.tokens, self.config.clip)
        result = mark_non_finite(totals, norm)
        step_optimizer(self.optimizer, self.guard.accepts(result))
        self.loss.zero_grad()
        return result

    def capture_step(self) -> Callable[[list[Batch]], LossParts]:
        """The training step; on a GPU, captured as CUDA graphs."""
        return capture_step(self) if self.device.type == "cuda" else self.training_step

    def validate(self) -> None:
        """Compute the validation metrics, save the model unless an earlier one is better, and end a stalled run."""
        self.distributed.gather()
        if self.validation is None:
            return
        config, state = self.config, self.state
        autocast = make_autocast(config, self.device)
        scores = evaluate_loss(self.task, self.pipeline.model, self.validation.batches, autocast)
        scores |= self.task.validation_scores(self.pipeline, self.validation.dataset)
        self.model.train()
        self.run_log.add(state.step, "validation", **scores)
        metric = {"loss": -scores["nll"], "last": float(state.step), **scores}[config.validate_by]
        # An earlier model is kept only if it is better beyond noise: the best of many validations is a lottery.
        margin, improves = scores.get(margin_key(config.validate_by), 0.0), state.improves(metric, scores["nll"])
        self.is_saved = improves or state.equals_best(metric, scores["nll"], margin)
        state.stale = 0 if improves else state.stale + 1
        if improves:
            state.best = metric, -scores["nll"]
        if self.is_saved:
            state.best_step = state.step
            self.pipeline.training |= {"step": state.step, "validation": scores, "selected_by": config.validate_by}
            self.saver.save_model(self.spec.out, self.pipeline)
        state.done = state.step == self.last_step or (self.has_stalled and config.schedule != "wsd")

    def checkpoint(self) -> None:
        """Write everything that a resumed run needs."""
        if self.budget:  # without a budget, identical runs write identical bytes
            self.state.seconds = time.monotonic() - self.started
        self.state.unlogged = [[float(part) for part in parts] for parts in self.unlogged]
        self.state.losses = self.guard.statistics.to_list()
        if self.is_rank_0 or self.is_sharded:
            tensors = gather_state(self.model, self.optimizer, self.ema_model)
            checkpoint = Checkpoint(tensors, self.state.to_json())
            self.saver.save_checkpoint(checkpoint, self.state.step, is_last=self.state.done)
        self.workers.wait()
        self.is_save_due = False

    def restore(self, path: Path) -> None:
        """Return to a checkpoint."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        checkpoint = load_like(path, self.parameters, parameters)
        if self.ema_model is None:  # only rank 0 has the EMA weights
            checkpoint.tensors = {k: v for k, v in checkpoint.tensors.items() if not k.startswith("average.")}
        make_error = functools.partial(_mismatch_error, path)
        restore_state(checkpoint.tensors, self.model, self.optimizer, self.ema_model, make_error)
        self.state = TrainState.from_json(checkpoint.metadata)
        if is_extended(self.spec.recipe, self.state):
            self.state.decay_start, self.state.stale, self.state.done = None, 0, False
        self.state.provenance = self.spec.provenance

    def restore_counters(self) -> None:
        """Continue the log and the statistics of the loss where the state was saved."""
        self.unlogged = [LossParts(*(torch.tensor(x, device=self.device) for x in row)) for row in self.state.unlogged]
        self.restored_updates, self.skipped = len(self.unlogged), []
        self.guard.reset(LossStatistics.from_list(self.state.losses))

    def read_losses(self) -> None:
        """Read the losses since the last call, and warn about skipped updates."""
        applied, skipped = self.guard.inspect()
        self.unlogged += applied
        self.skipped += skipped
        self.state.skipped += len(skipped)
        if skipped:
            reason, count = skipped[-1].describe(float(self.guard.limit)), count_units(len(skipped), "updates")
            self.run_log.warn(f"{reason}; {count} skipped, the weights are unchanged.")

    def log(self) -> None:
        """Log the metrics of the updates since the last log line; the speed covers the updates of this process only."""
        if not self.unlogged:  # all were skipped
            return
        columns = [torch.stack(column).double() for column in zip(*self.unlogged)]
        self.guard.learn((columns[0] / columns[2].clamp(min=1)).tolist())
        loss, nll, tokens = (float(column.sum()) for column in columns)
        tokens = max(1.0, tokens)
        seconds = time.monotonic() - self.timed_from
        processed = sum(float(parts.tokens) for parts in self.unlogged[self.restored_updates :])
        speed = {f"{self.task.unit}s_per_second": round(processed / seconds)}
        rate = self.schedule.rate(self.state.step - 1, self.state.decay_start)
        self.run_log.add(self.state.step, "train", loss=loss / tokens, nll=nll / tokens, lr=rate, **speed)
        self.unlogged, self.restored_updates, self.timed_from = [], 0, time.monotonic()

    def save_snapshot(self) -> None:
        """Save the model of this step to its own folder."""
        self.distributed.gather()
        if self.is_rank_0:
            step = self.state.step
            snapshot = replace(self.pipeline, training={**self.spec.provenance, "step": step})
            self.saver.save_model(self.spec.out / STEPS / f"{step:06}", snapshot)

    def batches(
        self, start: Position, part: RankSlice, device: torch.device
    ) -> Generator[tuple[int, int, list[Batch]], None, None]:
        """For each update from `start` on: epoch and batch index after it, and its batches, of each the `part`."""

        def load_batches() -> Iterator[tuple[int, int, Batch]]:
            for epoch in itertools.count(start.epoch):
                first = start.batch if epoch == start.epoch else 0
                for index, batch in enumerate(self.spec.batches.epoch(epoch, first, part), first):
                    yield epoch, index, batch.pin_memory() if device.type == "cuda" else batch

        group: list[Batch] = []
        for epoch, index, batch in prefetch(load_batches()):
            group.append(batch.to(device, non_blocking=True))
            if len(group) == self.config.accumulate:
                yield epoch, index + 1, group
                group = []

    def is_due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    @property
    def last_step(self) -> int:
        return self.schedule.end(self.state.decay_start)

    @property
    def has_stalled(self) -> bool:
        """Whether too many validations brought no improvement."""
        return 0 < self.config.patience <= self.state.stale


def build_model(spec: RunSpec) -> Any:
    """The model with its random initial weights, which depend on the seed alone."""
    torch.manual_seed(spec.recipe.train.seed)
    return make_model(spec.model)


def _update_seed(seed: int, step: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(repr((seed, step, rank)).encode()).digest()[:8], "little")


def _mismatch_error(path: Path, reason: str) -> RegardError:
    return RegardError(
        f"{path}: the checkpoint belongs to a different model: {reason}.", "Nothing was changed; choose another --out."
    )

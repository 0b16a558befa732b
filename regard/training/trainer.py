"""A training run from top to bottom: recipe, data, model, updates, validation, checkpoints."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from regard.data.batching.batch_splitting import split_batch
from regard.data.batching.pair_batches import Batch, prefetch
from regard.data.batching.rank_slice import WHOLE, RankSlice
from regard.devices import find_device
from regard.errors import RegardError
from regard.pipelines import load, write_tokenizers
from regard.training.checkpoint import STEPS, Checkpoint, gather_state, restore_state, unique_parameters
from regard.training.datasets import Dataset, count_units
from regard.training.fine_tuning import fine_tuning_recipe
from regard.training.losses import LossParts
from regard.training.optim.optimizers import make_optimizer, scale_gradients, set_learning_rate, step_if, update_ema
from regard.training.optim.schedules import DECAY_RATIO, Schedule, parse_duration
from regard.training.recipe import Recipe, resolve_cache_folder
from regard.training.run.bad_batch import repeated_failure_error, write_report
from regard.training.run.checkpoint_store import CheckpointStore, read_checkpoint_facts
from regard.training.run.loss_guard import (
    MAX_SKIPPED,
    LossGuard,
    LossStatistics,
    Position,
    SkippedUpdate,
    mark_non_finite,
)
from regard.training.run.run_folder import LOSSES, METRICS, check_output_folder, check_same_run, read_state
from regard.training.run.run_log import RunLog, plot_losses, read_metrics
from regard.training.run.run_plan import Cost, describe_plan, peak_memory
from regard.training.run.run_saver import RunSaver
from regard.training.run.run_setup import (
    Rank0Resources,
    RunSpec,
    build_model,
    check_task_settings,
    check_tensor_parallel,
    choose_tokenizers,
    configured_machine,
    count_ranks,
    is_extended,
    make_provenance,
    open_run_folder,
    prepare_run,
)
from regard.training.run.state import TrainState
from regard.training.run.stop_signals import interrupted_error, stop_signals
from regard.training.runtime.cuda_graphs import GraphedUpdate
from regard.training.runtime.data_parallel import TaskLoss, accumulating, gather_weights, replicate, shard
from regard.training.runtime.memory import check_model_size
from regard.training.runtime.out_of_memory import (
    BatchTooLargeError,
    cannot_split_error,
    detect_out_of_memory,
    does_not_fit_error,
    is_batch_too_large,
    split_notice,
)
from regard.training.runtime.precision import make_autocast, resolve_precision
from regard.training.runtime.sharded_checkpoint import AsyncSaver, load_like
from regard.training.runtime.tensor_parallel import TensorParallel
from regard.training.runtime.workers import (
    Workers,
    join_torchrun,
    report_dead_ranks,
    run_torchrun_rank,
    start_workers,
    torchrun_rank,
)
from regard.training.tasks import TASKS, read_dataset
from regard.training.tasks.task import BatchSource, evaluate_loss

# With a time budget: updates between two checks of the clock, and the share of the budget for everything but the last
# validation.
CLOCK_CHECK_INTERVAL, TIME_SHARE = 10, 0.97


def run_recipe(
    recipe: Recipe,
    out: str | Path,
    *,
    start_from: str | Path | None = None,
    dataset: Dataset[Any] | None = None,
    quiet: bool = False,
    dry_run: bool = False,
) -> Any:
    """Train a model, write it to the folder `out`, and return the pipeline that `load(out)` opens.

    An interrupted run in `out` is resumed; a finished one is extended if the recipe allows more steps. `start_from` is
    a model folder to fine-tune: its weights, tokenizers and sizes are used. `dataset` replaces the recipe's files. With
    `dry_run` the plan is printed, nothing is trained or written, and None is returned.

    Under torchrun, rank 0 does all this, and the other ranks only train: for them, the result is None.

    >>> run_recipe(Recipe(), "model")  # doctest: +SKIP
    """
    if torchrun_rank():
        return None if dry_run else run_torchrun_rank()
    started, out, task = time.monotonic(), Path(out), TASKS[recipe.task]
    check_task_settings(recipe, task)
    if not dry_run:
        check_output_folder(out)
    origin = load(start_from, "cpu") if start_from is not None else None
    if origin is not None:
        recipe = fine_tuning_recipe(recipe, origin.model.config, start_from)
    check_tensor_parallel(recipe)
    dataset = dataset or read_dataset(recipe.task, resolve_cache_folder(recipe.data, out), quiet=quiet)
    check_model_size(recipe, task, dataset)
    provenance = make_provenance(recipe, dataset, start_from)

    with open_run_folder(out, dry_run) as folder:
        checkpoint = CheckpointStore(folder).find_intact(lambda line: print(f"regard: {line}", file=sys.stderr))
        state = read_state(checkpoint) if checkpoint else None
        if state is None:
            # Written before the first step; a resumed run reads them back.
            write_tokenizers(folder, *choose_tokenizers(recipe, task, dataset, origin))
        else:
            check_same_run(out, state, provenance)
        if state is not None and state.done and not is_extended(recipe, state):
            if not quiet:
                print(f"{out}: the run is already finished ({count_units(state.step, 'steps')}).", file=sys.stderr)
            if torchrun_rank() is not None:
                with join_torchrun() as workers:
                    workers.connect(None)
        else:
            _run(recipe, folder, checkpoint, state, dataset, origin, provenance, started, quiet, dry_run)
        if dry_run:
            return None
        try:
            plot_losses(read_metrics(out / METRICS), out / LOSSES, task.unit)
        except RegardError as error:  # the model is saved
            print(f"regard: {error.message}", file=sys.stderr)
    return load(out, recipe.train.device)


def _run(
    recipe: Recipe,
    folder: Path,
    checkpoint: Path | None,
    state: TrainState | None,
    dataset: Dataset[Any],
    origin: Any,
    provenance: dict[str, Any],
    started: float,
    quiet: bool,
    dry_run: bool,
) -> None:
    with configured_machine(recipe.train):
        size = count_ranks(recipe, state)
        recipe = resolve_precision(recipe, state.precision if state else None)
        with Workers(size=size) if dry_run else start_workers(size) as workers:
            # While the other workers start, rank 0 encodes the data and builds the model for all of them.
            spec, resources = prepare_run(recipe, folder, checkpoint, dataset, origin, provenance)
            step = state.step if state else 0
            run_log = RunLog(
                folder / METRICS,
                recipe.train.steps,
                step,
                is_silent=quiet,
                writes_files=not dry_run,
                wandb_mode=recipe.train.wandb,
                recipe=provenance["recipe"],
            )
            if not dry_run:
                workers.connect(spec)
            trainer = Trainer(spec, workers, run_log, started, resources)
            if dry_run:
                trainer.print_plan()
            else:
                trainer.run()


def run_worker(spec: RunSpec, workers: Workers) -> None:
    """Train in a worker process other than rank 0: updates of the weights, without validation, logs or files."""
    run_log = RunLog(spec.out / METRICS, spec.recipe.train.steps, is_silent=True, writes_files=False)
    with configured_machine(spec.recipe.train):
        Trainer(spec, workers, run_log, time.monotonic()).run()


class Trainer:
    """The training loop of one process. Rank 0, which gets `resources`, also validates, logs and saves."""

    def __init__(
        self,
        spec: RunSpec,
        workers: Workers,
        run_log: RunLog,
        started: float,
        resources: Rank0Resources | None = None,
    ) -> None:
        self.spec, self.workers, self.run_log = spec, workers, run_log
        self.resources: Any = resources
        self.is_rank_0 = resources is not None
        self.task, self.config = TASKS[spec.recipe.task], spec.recipe.train
        config = self.config
        self.device = find_device(config.device)
        self.autocast = make_autocast(config, self.device)
        self.store = CheckpointStore(spec.out, config.keep_checkpoints)
        self._make_model()
        self.parameters = unique_parameters(self.model)
        self.optimizer = make_optimizer(config.optimizer, self.model, config.lr, config.beta2, config.weight_decay)
        self.schedule = Schedule(config.schedule, config.lr, config.warmup, config.steps)

        precision: Any = "bfloat16" if config.precision == "bfloat16" else "float32"
        self.state = TrainState(spec.provenance, workers.size, precision)
        if spec.checkpoint is not None:
            self._restore(spec.checkpoint)
        # The time budget includes the time of earlier processes of the same run.
        self.budget, self.started = parse_duration(config.time), started - self.state.seconds
        self.guard = LossGuard(self.device, skips_spikes=config.skip_spikes)
        self.saver = RunSaver(self.store, run_log, self.state.step if spec.checkpoint else None)
        self.is_save_due = False
        self.unlogged: list[LossParts] = []
        self.restored_updates = 0
        """updates of an earlier process since the last log line: they count for the loss, not for the speed"""
        self.skipped: list[SkippedUpdate] = []
        """skipped updates of this process"""
        self._restore_counters()
        self.timed_from = time.monotonic()

    def _make_model(self) -> None:
        """Build the model and distribute it over the ranks: `loss` computes the training loss of this rank.

        Only rank 0 has `pipeline`, which is validated and saved: the EMA of the weights or the weights themselves. Of a
        sharded model it is a full copy, which `_gather` updates.
        """
        spec, config, workers, resources = self.spec, self.config, self.workers, self.resources
        self.model = resources.pipeline.model if resources is not None else build_model(spec)
        self.model.train()
        if workers.update_group is not None and spec.checkpoint is None:
            workers.broadcast(self.model.parameters())
        self.tensor_parallel: TensorParallel | None = None
        if workers.update_group is not None and config.tensor_parallel > 1:
            workers.tensor_parallel = config.tensor_parallel
            self.tensor_parallel = TensorParallel(workers, self.device, is_sharded=config.sharding == "fsdp")
        is_fsdp = workers.update_group is not None and config.sharding == "fsdp"
        self.is_sharded = is_fsdp or self.tensor_parallel is not None
        self.shards = AsyncSaver(workers, self.store) if self.is_sharded else None
        self.loss = TaskLoss(self.task, self.model, config, self.device)
        if self.is_sharded:
            self.ema_model = copy.deepcopy(self.model) if config.ema else None
            full = copy.deepcopy(self.model).to(self.device) if self.is_rank_0 else None
            dtype = torch.bfloat16 if config.precision == "bfloat16" else None
            self._shard(self.loss, self.model, dtype)
            self.cost = self._measure_cost(self.loss)
            if self.ema_model is not None:
                self._shard(self.ema_model, self.ema_model)
        else:
            self.model.to(self.device)
            self.ema_model = copy.deepcopy(self.model) if config.ema and self.is_rank_0 else None
            full = self.ema_model or self.model
            self.cost = self._measure_cost(self.loss)
            if workers.size > 1 and workers.update_group is not None:
                batch = next(spec.batches.epoch(0, 0, workers.part)).to(self.device)
                with self._refuse_to_split(1), report_dead_ranks():
                    replicate(self.loss, workers.update_group, batch)
        if resources is not None:
            self.pipeline = replace(resources.pipeline, model=full)

    def _shard(self, module: nn.Module, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Divide a model, which `module` contains, over the ranks, in place."""
        if self.tensor_parallel is not None:
            self.tensor_parallel.divide(model)
            model.to(self.device)  # the buffers
        if self.config.sharding == "fsdp":
            all_ranks = DeviceMesh.from_group(self.workers.update_group, self.device.type)
            shard(module, self.tensor_parallel.mesh["data"] if self.tensor_parallel is not None else all_ranks, dtype)

    def run(self) -> None:
        """Update the weights until the schedule ends, validation stalls or a signal arrives."""
        config = self.config
        self.print_plan()
        if self.spec.checkpoint is None:
            if config.keep_every:
                self.save_step_folder()  # the untrained model
            self.checkpoint()  # marks the folder as belonging to this run
        apply_batches = self._make_update()
        self.timed_from = time.monotonic()
        with self.run_log, stop_signals() as signals, contextlib.closing(self._batch_groups()) as groups:
            while not self.state.done and self.state.step < self.last_step:
                group = next(groups)
                while not self.update(apply_batches, *group):
                    if self.workers.size == 1:  # several ranks decide together when they capture the next graph
                        apply_batches = self._make_update()  # for smaller batches
                logs, saves, keeps = map(self._is_due, (config.log_every, config.save_every, config.keep_every))
                validates = self._is_due(config.validate_every) or self.state.step == self.last_step
                is_due = logs or saves or keeps or validates
                # On a GPU, reading the losses waits for all updates so far. All ranks read them at the same steps.
                if is_due or self.device.type == "cpu":
                    self.inspect()
                    if self.guard.has_failed:
                        self.roll_back()
                        apply_batches = self._make_update()
                        continue
                if is_due:
                    self._share_batch_parts()
                if logs:
                    self.log()
                paused = time.monotonic()
                if keeps:
                    self.save_step_folder()
                if validates:
                    self.validate()
                self.timed_from += time.monotonic() - paused
                # The other ranks wait here while rank 0 validates.
                self.state.done, interrupted = self.workers.any(self.state.done, bool(signals))
                if validates or (self.budget and self._is_due(CLOCK_CHECK_INTERVAL)):
                    self.decay_if_due(validates)
                self.is_save_due |= saves
                if self.is_save_due or interrupted or self.state.done:
                    self.inspect()
                    # Between skipped updates the weights may be the reason for skipping.
                    if self.state.done or not self.guard.streak:
                        self.checkpoint()
                if interrupted and not self.state.done:
                    self.interrupt(signals)

    def _make_update(self) -> Callable[[list[Batch]], LossParts]:
        """The function that updates the weights; on a GPU, captured as CUDA graphs."""
        is_single, is_muon = self.workers.update_group is None, self.config.optimizer == "muon"
        is_eager = self.tensor_parallel is not None or (self.is_sharded and is_muon)
        if self.device.type != "cuda" or self.config.accumulate > 1 or is_eager:
            return self._apply_batches
        if is_single:
            return GraphedUpdate(self._apply_batches) if self.state.batch_parts == 1 else self._apply_batches
        return GraphedUpdate(self._apply_batches, self._agree_on_capture)

    def _agree_on_capture(self, error: Exception | None = None) -> bool:
        """Whether all ranks can capture the update, or have captured it; otherwise none does, as NCCL requires.

        `error` is the reason why this rank did not capture it.
        """
        is_split = self.state.batch_parts > 1  # the parts of a batch have different shapes
        if not self.workers.any(error is not None or is_split)[0]:
            return True
        self.loss.zero_grad()
        reason = f": {str(error).splitlines()[0]}" if error is not None and str(error) else ""
        self.run_log.warn(f"A rank cannot capture updates as CUDA graphs{reason}. They run without, more slowly.")
        return False

    @property
    def last_step(self) -> int:
        return self.schedule.end(self.state.decay_start)

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def print_plan(self) -> None:
        """Print the plan with the measured time of an update; a resumed run prints its first step instead."""
        if self.state.step:
            self.run_log.print_lines(f"Resuming from step {self.state.step:,} of {self.config.steps:,}.")
        elif not self.run_log.is_silent:
            resources = self.resources
            plan = describe_plan(
                self.spec.recipe,
                self.task,
                resources.dataset,
                self.pipeline.model,
                resources.note,
                self.cost,
                self.workers.size,
                self.device,
                resources.is_fine_tuned,
                resources.vectors,
            )
            self.run_log.print_lines(*plan)

    def update(
        self, apply_batches: Callable[[list[Batch]], LossParts], epoch: int, batch: int, batches: list[Batch]
    ) -> bool:
        """Update the weights once; `epoch` and `batch` are the position in the data after the update.

        Returns False, without any change, if the batches did not fit into memory; they are split further next time.
        """
        config, state = self.config, self.state
        # All randomness of an update is a function of seed, step and part of the batch: a resumed run repeats it, and
        # ranks that share a part have equal dropout.
        torch.manual_seed(_update_seed(config.seed, state.step, self.workers.part.rank))
        set_learning_rate(self.optimizer, self.schedule.rate(state.step, state.decay_start))
        parts = None
        try:
            parts = apply_batches(batches)
        except Exception as error:
            if isinstance(error, RegardError) or not is_batch_too_large(error):
                raise
        if parts is None:
            self._split_batches(batches)
            return False
        self.guard.add(state.step + 1, Position(state.epoch, state.batch), parts)
        state.step, state.epoch, state.batch = state.step + 1, epoch, batch
        self.run_log.advance(state.step)
        if self.ema_model is not None:
            update_ema(self.ema_model, self.model, config.ema, state.step)
        return True

    def _apply_batches(self, batches: list[Batch]) -> LossParts:
        """Forward and backward passes of this worker's batches, and the optimizer step, without GPU synchronization."""
        totals = [torch.zeros((), device=self.device) for _ in LossParts._fields]
        parts = [part for batch in batches for part in split_batch(batch, self.state.batch_parts)]
        for index, part in enumerate(parts, 1):
            for total, value in zip(totals, self._backward(part, is_last=index == len(parts))):
                total += value
        self.workers.sum(totals)
        if self.tensor_parallel is not None:
            self.tensor_parallel.sum_gradients(self.parameters)
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = scale_gradients(grads, totals[2], self.config.clip)
        result = mark_non_finite(LossParts(*totals), norm)
        step_if(self.optimizer, self.guard.accepts(result))
        self.loss.zero_grad()
        return result

    def _backward(self, batch: Batch, is_last: bool) -> LossParts:
        """Add the gradients of a batch; after the last one of an update, all ranks exchange them.

        Out of memory before the exchange, the rank may split its batches; the others wait for it.
        """
        exchanges = is_last and self.workers.size > 1
        with report_dead_ranks(), accumulating(self.loss, is_last):
            with self._refuse_to_split(self.state.step + 1) if self.is_sharded else detect_out_of_memory():
                parts = self.loss(batch)
            with self._refuse_to_split(self.state.step + 1) if self.is_sharded or exchanges else detect_out_of_memory():
                parts.loss.backward()
        return LossParts(*(part.detach() for part in parts))

    def _split_batches(self, batches: list[Batch]) -> None:
        """Process batches in twice as many parts from now on, after one did not fit into memory."""
        self.loss.zero_grad()
        state = self.state
        if state.batch_parts >= max(batch.sentences for batch in batches):
            raise self._rank_error(does_not_fit_error(state.step + 1))
        self._set_batch_parts(2 * state.batch_parts)

    @contextlib.contextmanager
    def _refuse_to_split(self, step: int) -> Iterator[None]:
        """Out of memory is an error, since other ranks already exchange weights or gradients."""
        try:
            with detect_out_of_memory():
                yield
        except BatchTooLargeError:
            raise self._rank_error(cannot_split_error(step)) from None

    def _rank_error(self, error: RegardError) -> RegardError:
        """An error of this rank alone, which is printed here: rank 0 only notices that this process ended."""
        if not self.is_rank_0:
            print(f"regard: rank {self.workers.rank}: {error}", file=sys.stderr, flush=True)
        return error

    def _set_batch_parts(self, parts: int) -> None:
        self.state.batch_parts = parts
        self.run_log.warn(split_notice(self.state.step + 1, parts))

    def _share_batch_parts(self) -> None:
        """Use the largest number of parts of all ranks, so that one number in the state serves a resumed run."""
        if self.workers.size > 1:
            exponents = torch.zeros(32)
            exponents[self.state.batch_parts.bit_length() - 1] = 1
            self.workers.sum([exponents])
            parts = 2 ** int(exponents.nonzero().max())
            if parts > self.state.batch_parts:
                self._set_batch_parts(parts)

    def _batch_groups(self) -> Generator[tuple[int, int, list[Batch]], None, None]:
        """For each update: epoch and batch index after it, and the batches of this worker."""
        group: list[Batch] = []
        state = self.state
        stream = _stream_batches(self.spec.batches, state.epoch, state.batch, self.workers.part, self.device)
        for epoch, index, batch in stream:
            group.append(batch)
            if len(group) == self.config.accumulate:
                yield epoch, index + 1, group
                group = []

    def inspect(self) -> None:
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

    def validate(self) -> None:
        """Compute the validation metrics, save the best model, and count validations without improvement."""
        self._gather()
        if not self.is_rank_0:
            return
        config, state, resources = self.config, self.state, self.resources
        scores = evaluate_loss(self.task, self.pipeline.model, resources.batches, self.autocast)
        scores |= self.task.validation_scores(self.pipeline, resources.dataset)
        self.model.train()
        self.run_log.add(state.step, "validation", **scores)
        metric = {"loss": -scores["nll"], "last": float(state.step), **scores}[config.validate_by]
        if state.improves(metric, scores["nll"]):
            state.best, state.best_step, state.stale = (metric, -scores["nll"]), state.step, 0
            self.pipeline.training |= {"step": state.step, "validation": scores, "selected_by": config.validate_by}
            self.saver.save_model(self.spec.out, self.pipeline)
        else:
            state.stale += 1
        state.done = state.step == self.last_step or (self._has_stalled() and config.schedule != "wsd")

    def _gather(self) -> None:
        """Copy the weights of a sharded model to the pipeline of rank 0."""
        if self.is_sharded:
            with report_dead_ranks():
                gather_weights(self.ema_model or self.model, self.pipeline.model if self.is_rank_0 else None)

    def _has_stalled(self) -> bool:
        return 0 < self.config.patience <= self.state.stale

    def decay_if_due(self, validated: bool) -> None:
        """Start the decay of the schedule "wsd" if validation has stalled or the time budget is nearly used up.

        Rank 0 decides for all workers. A decision by the clock is saved at once, so that a resumed run repeats it.
        """
        state, schedule = self.state, self.schedule
        if self.config.schedule != "wsd" or state.decay_start is not None or state.step >= schedule.planned_decay:
            return
        is_late = bool(self.budget) and time.monotonic() - self.started >= TIME_SHARE * self.budget / (1 + DECAY_RATIO)
        stalled = validated and self._has_stalled()
        decided, is_late = self.workers.any(self.is_rank_0 and (is_late or stalled), self.is_rank_0 and is_late)
        if decided:
            state.decay_start = state.step
            reason = (
                f"validation stalled ({state.stale} without improvement)"
                if stalled
                else "the time budget is nearly used up"
            )
            self.run_log.print_lines(
                f"step {state.step}: {reason}; the learning rate decays until step {self.last_step}."
            )
            self.run_log.steps = self.last_step
            self.is_save_due |= is_late

    def checkpoint(self) -> None:
        """Write everything that a resumed run needs."""
        if self.budget:  # without a budget, identical runs write identical bytes
            self.state.seconds = time.monotonic() - self.started
        self.state.unlogged = [[float(part) for part in parts] for parts in self.unlogged]
        self.state.losses = self.guard.statistics.to_list()
        if self.is_rank_0 or self.is_sharded:
            tensors = gather_state(self.model, self.optimizer, self.ema_model)
            checkpoint = Checkpoint(tensors, self.state.to_json())
            if self.shards is not None:
                self.saver.save_shards(self.shards, checkpoint, self.state.step, is_last=self.state.done)
            else:
                self.saver.save_checkpoint(checkpoint, self.state.step, is_last=self.state.done)
        self.workers.wait()
        self.is_save_due = False

    def _restore(self, path: Path) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        checkpoint = load_like(path, self.parameters, parameters)
        if self.ema_model is None:  # only rank 0 has the EMA weights
            checkpoint.tensors = {k: v for k, v in checkpoint.tensors.items() if not k.startswith("average.")}
        make_error = functools.partial(_mismatch_error, path)
        restore_state(checkpoint.tensors, self.model, self.optimizer, self.ema_model, make_error)
        self.state = TrainState.from_json(checkpoint.facts)
        if is_extended(self.spec.recipe, self.state):
            self.state.decay_start, self.state.stale, self.state.done = None, 0, False
        self.state.provenance = self.spec.provenance

    def _restore_counters(self) -> None:
        """Continue the log and the statistics of the loss where the state was saved."""
        self.unlogged = [LossParts(*(torch.tensor(x, device=self.device) for x in row)) for row in self.state.unlogged]
        self.restored_updates, self.skipped = len(self.unlogged), []
        self.guard.reset(LossStatistics.from_list(self.state.losses))

    def roll_back(self) -> None:
        """Return to the last checkpoint and continue with the data after the skipped updates.

        A second failure, at most `save_every` updates after the first, ends the run with a report of the batch. All
        ranks come to the same decision, since their losses are equal.
        """
        failed, skipped = self.state, self.skipped[-MAX_SKIPPED]
        self._wait_for_shards()
        path = self.store.find_intact(self.run_log.warn) if self.is_rank_0 else None
        step = torch.tensor(read_checkpoint_facts(path)["step"] if path else 0)
        self.workers.broadcast([step])
        if failed.failed_step is not None and skipped.step <= failed.failed_step + self.config.save_every:
            if self.is_rank_0:
                self._report_batch(skipped)
            raise repeated_failure_error(self.spec.out, skipped.describe(float(self.guard.limit)), int(step))
        self._restore(self.store.find(int(step)))
        self.state = dataclasses.replace(
            self.state,
            epoch=failed.epoch,
            batch=failed.batch,
            # The model folder holds the best model so far, which may be newer than the checkpoint.
            best=failed.best,
            best_step=failed.best_step,
            skipped=failed.skipped,
            failed_step=skipped.step,
            batch_parts=failed.batch_parts,
        )
        self._restore_counters()
        self.timed_from = time.monotonic()
        if self.is_rank_0:
            self.run_log.truncate_after(self.state.step)
        self.run_log.warn(
            f"{MAX_SKIPPED} updates in a row were skipped; the run returns to the checkpoint of step {self.state.step} "
            "and continues with the batches after them."
        )

    def _report_batch(self, skipped: SkippedUpdate) -> None:
        """Write the batches of a skipped update to state/bad_batch.json."""
        stream = _stream_batches(self.spec.batches, *skipped.start, WHOLE, torch.device("cpu"))
        with contextlib.closing(stream) as batches:
            group = itertools.islice(batches, self.config.accumulate)
            write_report(self.spec.out, skipped, [batch for _, _, batch in group], self.pipeline.tokenizers)

    def save_step_folder(self) -> None:
        """Save the model of this step to its own folder."""
        self._gather()
        if self.is_rank_0:
            step = self.state.step
            snapshot = replace(self.pipeline, training={**self.spec.provenance, "step": step})
            self.saver.save_model(self.spec.out / STEPS / f"{step:06}", snapshot)

    def interrupt(self, signals: list[int]) -> None:
        """End all ranks after a signal to any of them; before the first validation, save the current model."""
        number = torch.tensor(signals[0] if signals else signal.SIGTERM)
        self.workers.broadcast([number])
        self._gather()
        self._wait_for_shards()
        if self.is_rank_0 and self.state.best is None:
            self.pipeline.training |= {"step": self.state.step}
            self.saver.save_model(self.spec.out, self.pipeline)
        raise interrupted_error(int(number), self.saver.saved_step, self.spec.out)

    def _wait_for_shards(self) -> None:
        """Wait for the sharded checkpoint that is being written."""
        if self.shards is not None:
            self.saver.wait_for_shards(self.shards)

    def _measure_cost(self, loss: nn.Module) -> Any:
        """Measure time and peak memory of a forward and a backward pass, for the plan; the gradients are discarded.

        All ranks of a sharded model take part.
        """
        if (self.run_log.is_silent and not self.is_sharded) or self.spec.checkpoint is not None:
            return None
        times = []
        for batch in itertools.islice(self.spec.batches.epoch(0, 0, self.workers.part), 3):
            start = time.monotonic()
            # Unless it is sharded, the first update splits a batch that does not fit.
            refuse = self._refuse_to_split(1) if self.is_sharded else contextlib.suppress(BatchTooLargeError)
            with report_dead_ranks(), refuse, detect_out_of_memory():
                loss(batch.to(self.device)).loss.backward()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.monotonic() - start)
        loss.zero_grad()
        return Cost(min(times), peak_memory(self.device))


def _stream_batches(
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


def _mismatch_error(path: Path, reason: str) -> RegardError:
    return RegardError(
        f"{path}: the checkpoint belongs to a different model: {reason}.", "Nothing was changed; choose another --out."
    )


def _update_seed(seed: int, step: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(repr((seed, step, rank)).encode()).digest()[:8], "little")

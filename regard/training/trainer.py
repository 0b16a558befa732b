"""A training run from top to bottom: recipe, data, model, updates, validation, checkpoints."""

import contextlib
import copy
import hashlib
import itertools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.batching.pair_batches import Batch, prefetch
from regard.devices import find_device
from regard.errors import Interrupted, RegardError
from regard.pipelines import load, save, write_tokenizers
from regard.training.checkpoint import Checkpoint, gather_state, restore_state, save_step_folder, unique_parameters
from regard.training.datasets import Dataset, count_units
from regard.training.fine_tuning import fine_tuning_recipe
from regard.training.losses import LossParts
from regard.training.optim.optimizers import make_optimizer, scale_gradients, set_learning_rate, update_ema
from regard.training.optim.schedules import DECAY_RATIO, Schedule, parse_duration
from regard.training.recipe import Recipe, resolve_cache_folder
from regard.training.run.run_folder import LOSSES, METRICS, STATE, check_output_folder, check_same_run, read_state
from regard.training.run.run_log import RunLog, plot_losses, read_metrics
from regard.training.run.run_plan import Cost, describe_plan, peak_memory
from regard.training.run.run_setup import (
    Rank0Resources,
    RunSpec,
    build_model,
    check_task_settings,
    configured_machine,
    is_extended,
    make_provenance,
    open_run_folder,
    prepare_run,
)
from regard.training.run.state import TrainState
from regard.training.runtime.compilation import compiled_features
from regard.training.runtime.cuda_graphs import GraphedUpdate
from regard.training.runtime.memory import check_model_size
from regard.training.runtime.precision import make_autocast, resolve_precision
from regard.training.runtime.workers import Workers, start_workers
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

    >>> run_recipe(Recipe(), "model")  # doctest: +SKIP
    """
    started, out, task = time.monotonic(), Path(out), TASKS[recipe.task]
    check_task_settings(recipe, task)
    if not dry_run:
        check_output_folder(out)
    origin = load(start_from, "cpu") if start_from is not None else None
    if origin is not None:
        recipe = fine_tuning_recipe(recipe, origin.model.config, start_from)
    dataset = dataset or read_dataset(recipe.task, resolve_cache_folder(recipe.data, out), quiet=quiet)
    check_model_size(recipe, task, dataset)
    provenance = make_provenance(recipe, dataset, start_from)

    with open_run_folder(out, dry_run) as folder:
        state = read_state(folder)
        if state is None:
            # Written before the first step; a resumed run reads them back.
            tokenizers = origin.tokenizers if origin is not None else task.make_tokenizers(dataset, recipe.tokenizer)
            write_tokenizers(folder, *tokenizers)
        else:
            check_same_run(out, state, provenance)
        if state is not None and state.done and not is_extended(recipe, state):
            if not quiet:
                print(f"{out}: the run is already finished ({count_units(state.step, 'steps')}).", file=sys.stderr)
        else:
            _run(recipe, folder, state, dataset, origin, provenance, started, quiet, dry_run)
        if dry_run:
            return None
        plot_losses(read_metrics(out / METRICS), out / LOSSES, task.unit)
    return load(out, recipe.train.device)


def _run(
    recipe: Recipe,
    folder: Path,
    state: TrainState | None,
    dataset: Dataset[Any],
    origin: Any,
    provenance: dict[str, Any],
    started: float,
    quiet: bool,
    dry_run: bool,
) -> None:
    with configured_machine(recipe, state) as size:
        recipe = resolve_precision(recipe, state.precision if state else None)
        with Workers(size=size) if dry_run else start_workers(size) as workers:
            # While the other workers start, rank 0 encodes the data and builds the model for all of them.
            spec, resources = prepare_run(recipe, folder, dataset, origin, provenance, size)
            step = state.step if state else 0
            run_log = RunLog(folder / METRICS, recipe.train.steps, step, is_silent=quiet, writes_files=not dry_run)
            trainer = Trainer(spec, workers, run_log, started, resources)
            if dry_run:
                trainer.print_plan()
            else:
                workers.connect(spec)
                trainer.run()


def run_worker(spec: RunSpec, workers: Workers) -> None:
    """Train in a worker process other than rank 0: updates of the weights, without validation, logs or files."""
    run_log = RunLog(spec.out / METRICS, spec.recipe.train.steps, is_silent=True, writes_files=False)
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

        self.model = resources.pipeline.model if resources is not None else build_model(spec)
        self.model.to(self.device).train()
        self.parameters = unique_parameters(self.model)
        self.features = compiled_features(self.model) if config.compile else self.model.features
        # With EMA, the averaged weights are validated and saved.
        self.ema_model = copy.deepcopy(self.model) if config.ema and self.is_rank_0 else None
        if resources is not None:
            self.pipeline = replace(resources.pipeline, model=self.ema_model or self.model)

        self.optimizer = make_optimizer(config.optimizer, self.model, config.lr, config.beta2, config.weight_decay)
        self.schedule = Schedule(config.schedule, config.lr, config.warmup, config.steps)

        precision: Any = "bfloat16" if config.precision == "bfloat16" else "float32"
        self.state = TrainState(spec.provenance, workers.size, precision)
        self.state_path = spec.out / STATE
        if self.state_path.exists():
            self._restore()
        # The time budget includes the time of earlier processes of the same run.
        self.budget, self.started = parse_duration(config.time), started - self.state.seconds
        self.unlogged = [LossParts(*(torch.tensor(x, device=self.device) for x in row)) for row in self.state.unlogged]
        self.restored_updates = len(self.unlogged)
        """updates of an earlier process since the last log line: they count for the loss, not for the speed"""
        self.timed_from = time.monotonic()

    def run(self) -> None:
        """Update the weights until the schedule ends, validation stalls or a signal arrives."""
        config, state = self.config, self.state
        self.workers.broadcast(list(self.parameters.values()))
        self.print_plan()
        if self.is_rank_0 and not self.state_path.exists():
            if config.keep_every:
                self.save_step_folder()  # the untrained model
            self.checkpoint()  # marks the folder as belonging to this run
        is_captured = self.device.type == "cuda" and config.accumulate == 1
        apply_batches = GraphedUpdate(self._apply_batches) if is_captured else self._apply_batches
        self.timed_from = time.monotonic()
        with self.run_log, _stop_signals() as signals, contextlib.closing(self._batch_groups()) as groups:
            while not state.done and state.step < self.last_step:
                parts = self.update(apply_batches, *next(groups))
                logs, saves, keeps = map(self._is_due, (config.log_every, config.save_every, config.keep_every))
                validates = self._is_due(config.validate_every) or state.step == self.last_step
                if logs:
                    self.log()
                if self.is_rank_0:
                    if logs or saves or keeps or validates or signals:
                        self._check_loss(parts.loss)
                    paused = time.monotonic()
                    if keeps:
                        self.save_step_folder()
                    if validates:
                        self.validate()
                    self.timed_from += time.monotonic() - paused
                if validates or (self.budget and self._is_due(CLOCK_CHECK_INTERVAL)):
                    self.decay_if_due(validates)
                if self.is_rank_0 and (saves or signals or state.done):
                    self.checkpoint()
                if self.is_rank_0 and signals and not state.done:
                    self.interrupt()

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
                self.model,
                resources.note,
                self._measure_cost(),
                self.workers.size,
                self.device,
                resources.is_fine_tuned,
                resources.vectors,
            )
            self.run_log.print_lines(*plan)

    def update(
        self, apply_batches: Callable[[list[Batch]], LossParts], epoch: int, batch: int, batches: list[Batch]
    ) -> LossParts:
        """Update the weights once; `epoch` and `batch` are the position in the data after the update."""
        config, state = self.config, self.state
        # All randomness of an update is a function of seed, step and rank, so that a resumed run repeats it.
        torch.manual_seed(_update_seed(config.seed, state.step, self.workers.rank))
        set_learning_rate(self.optimizer, self.schedule.rate(state.step, state.decay_start))
        parts = apply_batches(batches)
        self.unlogged.append(parts)
        state.step, state.epoch, state.batch = state.step + 1, epoch, batch
        self.run_log.advance(state.step)
        if self.ema_model is not None:
            update_ema(self.ema_model, self.model, config.ema, state.step)
        return parts

    def _apply_batches(self, batches: list[Batch]) -> LossParts:
        """Forward and backward passes of this worker's batches, and the optimizer step, without GPU synchronization."""
        totals = [torch.zeros((), device=self.device) for _ in LossParts._fields]
        for batch in batches:
            with self.autocast():
                parts = self.task.loss(self.model, self.features, batch, self.config)
            parts.loss.backward()
            for total, part in zip(totals, parts):
                total += part.detach()
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters.values()]
        self.workers.sum([*grads, *totals])
        parts = LossParts(*totals)
        scale_gradients(grads, parts.tokens, self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return parts

    def _batch_groups(self) -> Generator[tuple[int, int, list[Batch]], None, None]:
        """For each update: epoch and batch index after it, and the batches of this worker."""
        group: list[Batch] = []
        for epoch, index, batch in _stream_batches(self.spec.batches, self.state.epoch, self.state.batch, self.device):
            group.append(batch)
            if len(group) == self.config.accumulate * self.workers.size:
                yield epoch, index + 1, group[self.workers.rank :: self.workers.size]
                group = []

    def log(self) -> None:
        """Log the metrics of the updates since the last log line; the speed covers the updates of this process only."""
        loss, nll, tokens = (float(torch.stack(column).double().sum()) for column in zip(*self.unlogged))
        tokens = max(1.0, tokens)
        seconds = time.monotonic() - self.timed_from
        processed = sum(float(parts.tokens) for parts in self.unlogged[self.restored_updates :])
        speed = {f"{self.task.unit}s_per_second": round(processed / seconds)}
        rate = self.schedule.rate(self.state.step - 1, self.state.decay_start)
        self.run_log.add(self.state.step, "train", loss=loss / tokens, nll=nll / tokens, lr=rate, **speed)
        self.unlogged, self.restored_updates, self.timed_from = [], 0, time.monotonic()

    def validate(self) -> None:
        """Compute the validation metrics, save the best model, and count validations without improvement."""
        config, state, resources = self.config, self.state, self.resources
        scores = evaluate_loss(self.task, self.pipeline.model, resources.batches, self.autocast)
        scores |= self.task.validation_scores(self.pipeline, resources.dataset)
        self.model.train()
        self.run_log.add(state.step, "validation", **scores)
        metric = {"loss": -scores["nll"], "last": float(state.step), **scores}[config.validate_by]
        if state.improves(metric, scores["nll"]):
            state.best, state.best_step, state.stale = (metric, -scores["nll"]), state.step, 0
            self.pipeline.training |= {"step": state.step, "validation": scores, "selected_by": config.validate_by}
            save(self.spec.out, self.pipeline)
        else:
            state.stale += 1
        state.done = state.step == self.last_step or (self._has_stalled() and config.schedule != "wsd")

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
        decision = torch.tensor([float(self.is_rank_0 and (is_late or stalled))])
        self.workers.sum([decision])
        if decision.item():
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
            if self.is_rank_0 and is_late:
                self.checkpoint()

    def checkpoint(self) -> None:
        """Write everything that a resumed run needs."""
        if self.budget:  # without a budget, identical runs write identical bytes
            self.state.seconds = time.monotonic() - self.started
        self.state.unlogged = [[float(part) for part in parts] for parts in self.unlogged]
        Checkpoint(gather_state(self.model, self.optimizer, self.ema_model), self.state.to_json()).save(self.state_path)

    def _restore(self) -> None:
        checkpoint = Checkpoint.load(self.state_path)
        if not self.is_rank_0:  # only rank 0 has the EMA weights
            checkpoint.tensors = {k: v for k, v in checkpoint.tensors.items() if not k.startswith("average.")}
        restore_state(checkpoint.tensors, self.model, self.optimizer, self.ema_model, self._mismatch_error)
        self.state = TrainState.from_json(checkpoint.facts)
        if is_extended(self.spec.recipe, self.state):
            self.state.decay_start, self.state.stale, self.state.done = None, 0, False
        self.state.provenance = self.spec.provenance

    def save_step_folder(self) -> None:
        """Save the model of this step to its own folder."""
        save_step_folder(self.spec.out, self.pipeline, self.state.step, self.spec.provenance)

    def interrupt(self) -> None:
        """End the run after a signal; before the first validation, save the current model."""
        if self.state.best is None:
            self.pipeline.training |= {"step": self.state.step}
            save(self.spec.out, self.pipeline)
        raise Interrupted(
            f"Interrupted; everything up to step {self.state.step} is saved in {self.spec.out}.",
            "Run the same command to resume.",
        )

    def _check_loss(self, loss: Tensor) -> None:
        """Raise an error for a non-finite loss, before anything is saved."""
        if not math.isfinite(float(loss)):
            raise RegardError(
                f"The loss is not finite at step {self.state.step}; {self.spec.out} holds the last checkpoint.",
                "Train again with another --out and a smaller train.lr or a longer train.warmup.",
            )

    def _mismatch_error(self, reason: str) -> RegardError:
        return RegardError(
            f"{self.state_path}: the checkpoint belongs to a different model: {reason}.",
            "Nothing was changed; choose another --out.",
        )

    def _measure_cost(self) -> Cost:
        """Measure time and peak memory of a forward and a backward pass; the gradients are discarded."""
        times = []
        for batch in itertools.islice(self.spec.batches.epoch(0), 3):
            start = time.monotonic()
            with self.autocast():
                loss = self.task.loss(self.model, self.features, batch.to(self.device), self.config).loss
            loss.backward()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.monotonic() - start)
        self.optimizer.zero_grad()
        return Cost(min(times), peak_memory(self.device))


def _stream_batches(
    batches: BatchSource, first_epoch: int, start: int, device: torch.device
) -> Generator[tuple[int, int, Batch], None, None]:
    """Yield epoch, batch index and batch without end, from batch `start` of `first_epoch`; batches are on `device`."""

    def load_batches() -> Iterator[tuple[int, int, Batch]]:
        for epoch in itertools.count(first_epoch):
            first = start if epoch == first_epoch else 0
            for index, batch in enumerate(batches.epoch(epoch, first), first):
                yield epoch, index, batch.pin_memory() if device.type == "cuda" else batch

    for epoch, index, batch in prefetch(load_batches()):
        yield epoch, index, batch.to(device, non_blocking=True)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Yield a list to which SIGINT and SIGTERM append their number; a second signal raises KeyboardInterrupt.

    An update must not be interrupted, so the signal is only recorded, and the training loop checks the list.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def record(number: int, _frame: Any) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    before = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _update_seed(seed: int, step: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(repr((seed, step, rank)).encode()).digest()[:8], "little")

"""A training run from top to bottom: recipe, data, model, updates, validation, checkpoints."""

import contextlib
import copy
import hashlib
import itertools
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data import Batch, prefetch
from regard.errors import Interrupted, RegardError
from regard.models import ModelConfig, ViTConfig, make_model
from regard.pipelines import (
    Translator,
    bundle_of,
    fill_weights,
    find_device,
    load,
    pipeline_kind,
    read_tokenizers,
    save,
    write_tokenizers,
)
from regard.training.checkpoint import Checkpoint, gather_state, keep_step, restore_state, unique_parameters
from regard.training.datasets import Dataset
from regard.training.fine_tuning import HEADS, fine_tuned_recipe, initial_weights
from regard.training.losses import LossParts
from regard.training.optim.optimizers import make_optimizer, scale_gradients, set_rate, update_ema
from regard.training.optim.schedules import DECAY_RATIO, Schedule, parse_duration
from regard.training.pretrained_embeddings import VectorCoverage, use_vectors
from regard.training.recipe import Recipe, recipe_table, with_cache
from regard.training.run_folder import (
    LOSSES,
    METRICS,
    STATE,
    locked,
    read_state,
    refuse_foreign_files,
    refuse_other_run,
)
from regard.training.run_log import Report, draw_losses, read_metrics
from regard.training.run_plan import Cost, describe_plan, peak_memory
from regard.training.runtime.allocator import keep_freed_memory
from regard.training.runtime.compilation import compiled_features
from regard.training.runtime.cuda_graphs import GraphedUpdate
from regard.training.runtime.memory import check_sizes
from regard.training.runtime.precision import autocast_of, settle_precision
from regard.training.runtime.workers import Workers, start_workers, usable_workers
from regard.training.state import TrainState
from regard.training.tasks import TASKS, read_dataset
from regard.training.tasks.task import EpochsOfBatches, Shape, Task, evaluate_loss
from regard.version import __version__

# Smaller shares per worker are not worth the exchange of gradients.
MOST_WORKERS, LEAST_TOKENS, LEAST_IMAGES = 16, 512, 8
# With a time budget: updates between two looks at the clock, and the share of the budget that is left for the last
# validation.
CLOCK_EVERY, TIME_SHARE = 10, 0.97


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    start_from: str | Path | None = None,
    dataset: Dataset[Any] | None = None,
    quiet: bool = False,
    dry_run: bool = False,
) -> Any:
    """Trains a model into the folder `out`; an interrupted run is resumed, and a finished one extended by more steps.

    `start_from` is a model folder to fine-tune: its weights, tokenizers and sizes are used. A `dataset` that was read
    before is used instead of the recipe's files. With `dry_run` the plan is printed, and nothing is trained or written.
    Returns what `load` opens `out` as.

    >>> train(Recipe(), "model")  # doctest: +SKIP
    """
    started, out, task = time.monotonic(), Path(out), TASKS[recipe.task]
    _check(recipe, task)
    if not dry_run:
        refuse_foreign_files(out)
    origin = load(start_from, "cpu") if start_from is not None else None
    if origin is not None:
        recipe = fine_tuned_recipe(recipe, origin.model.config, start_from)
    dataset = dataset or read_dataset(recipe.task, with_cache(recipe.data, out), quiet=quiet)
    check_sizes(recipe, task, dataset)
    provenance = _provenance(recipe, dataset, start_from)

    with _run_folder(out, dry_run) as folder:
        state = read_state(folder)
        if state is None:
            # The tokenizers are written before the first step, and never change.
            tokenizers = origin.tokenizers if origin is not None else task.make_tokenizers(dataset, recipe.tokenizer)
            write_tokenizers(folder, *tokenizers)
        else:
            refuse_other_run(out, state, provenance)
        if state is not None and state.done and not _extends(recipe, state):
            if not quiet:
                print(f"{out} holds the finished run: {state.step} steps.", file=sys.stderr)
        else:
            _run(recipe, folder, state, dataset, origin, provenance, started, quiet, dry_run)
        if dry_run:
            return None
        draw_losses(read_metrics(out / METRICS), out / LOSSES, task.unit)
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
    with _configured_machine(recipe, state) as size:
        recipe = settle_precision(recipe, state.precision if state else None)
        with Workers(size=size) if dry_run else start_workers(size) as workers:
            # While the other workers start, rank 0 encodes the data and builds the model, once for all of them.
            job, evaluation = _prepare(recipe, folder, dataset, origin, provenance, size)
            report = Report(folder / METRICS, recipe.train.steps, state.step if state else 0, quiet, not dry_run)
            trainer = Trainer(job, workers, report, started, evaluation)
            if dry_run:
                trainer.print_plan()
            else:
                workers.connect(job)
                trainer.run()


@dataclass(frozen=True)
class Job:
    """What rank 0 sends to every other worker: all that an update of the weights needs."""

    recipe: Recipe
    out: Path
    provenance: dict[str, Any]
    model: ModelConfig
    batches: EpochsOfBatches


@dataclass(frozen=True)
class Evaluation:
    """What rank 0 needs beside the job: the validation split, and the model with its tokenizers, to be saved."""

    dataset: Dataset[Any]
    batches: Iterable[Batch]
    bundle: Any
    note: str
    is_fine_tuned: bool
    vectors: list[VectorCoverage]


def _prepare(
    recipe: Recipe, out: Path, dataset: Dataset[Any], origin: Any, provenance: dict[str, Any], workers: int
) -> tuple[Job, Evaluation]:
    """Encodes the data and builds the model with its initial weights, those of `origin` if there is one."""
    config, task, family = recipe.train, TASKS[recipe.task], pipeline_kind(recipe.model)
    special = family.special if origin is None else origin.special
    tokenizers = read_tokenizers(out, foreign=special != family.special) if family.sides else ()
    model_config = task.complete_config(recipe.model, dataset, tokenizers)
    shape = Shape(
        config.batch_tokens // workers,
        config.seed,
        # Captured updates on a GPU need constant shapes; a CPU would only compute the padding.
        constant=find_device(config.device).type == "cuda",
        images=max(1, config.batch_images // workers),
    )
    batches, validation, note = task.encode(dataset, tokenizers, special, recipe, model_config, shape)
    job = Job(recipe, out, provenance, model_config, batches)
    model = _build_model(job)
    if origin is not None:
        fill_weights(model, initial_weights(model, origin.model), provenance["start_from"], may_differ=HEADS)
    vectors = use_vectors(model, config, *tokenizers) if tokenizers else []
    bundle = bundle_of(model, tokenizers, dict(provenance), special)
    if isinstance(origin, Translator) and not recipe.data.languages:
        bundle.languages = origin.languages
    return job, Evaluation(dataset, validation, bundle, note, origin is not None, vectors)


def _build_model(job: Job) -> Any:
    torch.manual_seed(job.recipe.train.seed)
    return make_model(job.model)


def work(job: Job, workers: Workers) -> None:
    """The work of every process but rank 0: updates of the weights."""
    report = Report(job.out / METRICS, job.recipe.train.steps, silent=True, writes=False)
    Trainer(job, workers, report, time.monotonic()).run()


class Trainer:
    """Updates the weights of a model. Rank 0, which has an `evaluation`, also validates, logs and saves."""

    def __init__(
        self, job: Job, workers: Workers, report: Report, started: float, evaluation: Evaluation | None = None
    ) -> None:
        self.job, self.workers, self.report = job, workers, report
        self.evaluation: Any = evaluation
        self.is_rank_0 = evaluation is not None
        self.task, self.config = TASKS[job.recipe.task], job.recipe.train
        config = self.config
        self.device = find_device(config.device)
        self.autocast = autocast_of(config, self.device)

        self.model = evaluation.bundle.model if evaluation is not None else _build_model(job)
        self.model.to(self.device).train()
        self.parameters = unique_parameters(self.model)
        self.features = compiled_features(self.model) if config.compile else self.model.features
        # The moving average of the weights is what is validated and saved.
        self.ema_model = copy.deepcopy(self.model) if config.ema and self.is_rank_0 else None
        if evaluation is not None:
            self.bundle = replace(evaluation.bundle, model=self.ema_model or self.model)

        self.optimizer = make_optimizer(config.optimizer, self.model, config.lr, config.beta2, config.weight_decay)
        self.schedule = Schedule(config.schedule, config.lr, config.warmup, config.steps)

        precision: Any = "bfloat16" if config.precision == "bfloat16" else "float32"
        self.state = TrainState(job.provenance, workers.size, precision)
        self.state_path = job.out / STATE
        if self.state_path.exists():
            self._restore()
        # A time budget counts from the start of this process, less the time of earlier ones.
        self.budget, self.started = parse_duration(config.time), started - self.state.seconds
        self.unlogged = [LossParts(*(torch.tensor(x, device=self.device) for x in row)) for row in self.state.unlogged]
        self.restored = len(self.unlogged)
        """updates of an earlier process since the last log line: they count for the loss, not for the speed"""
        self.timed_from = time.monotonic()

    def run(self) -> None:
        """Updates the weights until the schedule ends, validation stalls or a signal arrives."""
        config, state = self.config, self.state
        self.workers.broadcast(list(self.parameters.values()))
        self.print_plan()
        if self.is_rank_0 and not self.state_path.exists():
            if config.keep_every:
                self.keep_step()  # the untrained model first
            self.checkpoint()  # from here on the folder belongs to this run
        is_captured = self.device.type == "cuda" and config.accumulate == 1
        apply_batches = GraphedUpdate(self._apply_batches) if is_captured else self._apply_batches
        self.timed_from = time.monotonic()
        with self.report, _stop_signals() as signals, contextlib.closing(self._batch_groups()) as groups:
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
                        self.keep_step()
                    if validates:
                        self.validate()
                    self.timed_from += time.monotonic() - paused
                if validates or (self.budget and self._is_due(CLOCK_EVERY)):
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
        """Prints what the run will do, with the measured time of an update, or the step from which it resumes."""
        if self.state.step:
            self.report.say(f"Resuming from step {self.state.step:,} of {self.config.steps:,}.")
        elif not self.report.silent:
            evaluation, cost = self.evaluation, self._measure_cost()
            size, tuned = self.workers.size, evaluation.is_fine_tuned
            recipe, dataset, note = self.job.recipe, evaluation.dataset, evaluation.note
            plan = describe_plan(
                recipe, self.task, dataset, self.model, note, cost, size, self.device, tuned, evaluation.vectors
            )
            self.report.say(*plan)

    def update(
        self, apply_batches: Callable[[list[Batch]], LossParts], epoch: int, batch: int, batches: list[Batch]
    ) -> LossParts:
        """One update of the weights; `epoch` and `batch` are the position in the data after it."""
        config, state = self.config, self.state
        # All randomness of an update is a function of these three, so that a resumed run repeats it.
        torch.manual_seed(_mix_seed(config.seed, state.step, self.workers.rank))
        set_rate(self.optimizer, self.schedule.rate(state.step, state.decay_start))
        parts = apply_batches(batches)
        self.unlogged.append(parts)
        state.step, state.epoch, state.batch = state.step + 1, epoch, batch
        self.report.advance(state.step)
        if self.ema_model is not None:
            update_ema(self.ema_model, self.model, config.ema, state.step)
        return parts

    def _apply_batches(self, batches: list[Batch]) -> LossParts:
        """Forward and backward passes of this worker's batches, and the optimizer's step; never waits for a GPU."""
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
        """This worker's batches for each update, with the position in the data after them: epoch and batch."""
        group: list[Batch] = []
        for epoch, index, batch in _stream(self.job.batches, self.state.epoch, self.state.batch, self.device):
            group.append(batch)
            if len(group) == self.config.accumulate * self.workers.size:
                yield epoch, index + 1, group[self.workers.rank :: self.workers.size]
                group = []

    def log(self) -> None:
        """Adds the metrics of the updates since the last log line; the speed is that of this process's updates."""
        loss, nll, tokens = (float(torch.stack(column).double().sum()) for column in zip(*self.unlogged))
        tokens = max(1.0, tokens)
        seconds = time.monotonic() - self.timed_from
        processed = sum(float(parts.tokens) for parts in self.unlogged[self.restored :])
        speed = {f"{self.task.unit}s_per_second": round(processed / seconds)}
        rate = self.schedule.rate(self.state.step - 1, self.state.decay_start)
        self.report.add(self.state.step, "train", loss=loss / tokens, nll=nll / tokens, lr=rate, **speed)
        self.unlogged, self.restored, self.timed_from = [], 0, time.monotonic()

    def validate(self) -> None:
        """Measures on the validation split, saves the best model, and counts validations without improvement."""
        config, state, evaluation = self.config, self.state, self.evaluation
        scores = evaluate_loss(self.task, self.bundle.model, evaluation.batches, self.autocast)
        scores |= self.task.validation_scores(self.bundle, evaluation.dataset)
        self.model.train()
        self.report.add(state.step, "validation", **scores)
        metric = {"loss": -scores["nll"], "last": float(state.step), **scores}[config.validate_by]
        if state.improves(metric, scores["nll"]):
            state.best, state.best_step, state.stale = (metric, -scores["nll"]), state.step, 0
            self.bundle.training |= {"step": state.step, "validation": scores, "selected_by": config.validate_by}
            save(self.job.out, self.bundle)
        else:
            state.stale += 1
        state.done = state.step == self.last_step or (self._has_stalled() and config.schedule != "wsd")

    def _has_stalled(self) -> bool:
        return 0 < self.config.patience <= self.state.stale

    def decay_if_due(self, validated: bool) -> None:
        """Starts the decay of the schedule "wsd" when validation has stalled or the time budget is nearly used.

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
            why = f"validation stalled ({state.stale} without improvement)" if stalled else "the time budget is used"
            self.report.say(f"step {state.step}: {why}; the learning rate decays until step {self.last_step}.")
            self.report.steps = self.last_step
            if self.is_rank_0 and is_late:
                self.checkpoint()

    def checkpoint(self) -> None:
        """Writes everything that a resumed run needs."""
        if self.budget:  # without one, equal runs write equal bytes
            self.state.seconds = time.monotonic() - self.started
        self.state.unlogged = [[float(part) for part in parts] for parts in self.unlogged]
        Checkpoint(gather_state(self.model, self.optimizer, self.ema_model), self.state.to_json()).save(self.state_path)

    def _restore(self) -> None:
        checkpoint = Checkpoint.load(self.state_path)
        if not self.is_rank_0:  # which alone has the average
            checkpoint.tensors = {k: v for k, v in checkpoint.tensors.items() if not k.startswith("average.")}
        restore_state(checkpoint.tensors, self.model, self.optimizer, self.ema_model, self._other_model)
        self.state = TrainState.from_json(checkpoint.facts)
        if _extends(self.job.recipe, self.state):
            self.state.decay_start, self.state.stale, self.state.done = None, 0, False
        self.state.provenance = self.job.provenance

    def keep_step(self) -> None:
        """Writes the model as it is now into a folder of its own."""
        keep_step(self.job.out, self.bundle, self.state.step, self.job.provenance)

    def interrupt(self) -> None:
        """Ends the run after a signal, with a model to try even before the first validation."""
        if self.state.best is None:
            self.bundle.training |= {"step": self.state.step}
            save(self.job.out, self.bundle)
        raise Interrupted(
            f"Interrupted; everything up to step {self.state.step} is saved in {self.job.out}.",
            "The same command resumes the run.",
        )

    def _check_loss(self, loss: Tensor) -> None:
        """A loss that is not finite ends the run before anything is saved."""
        if not math.isfinite(float(loss)):
            raise RegardError(
                f"The loss is not a number at step {self.state.step}; {self.job.out} holds what was saved before.",
                "Begin again in another --out with a smaller train.lr or more train.warmup.",
            )

    def _other_model(self, why: str) -> RegardError:
        return RegardError(
            f"{self.state_path}: the checkpoint is of another model: {why}.",
            "Nothing was changed; choose another --out.",
        )

    def _measure_cost(self) -> Cost:
        """Time and peak memory of a forward and a backward pass; the gradients are not used."""
        times = []
        for batch in itertools.islice(self.job.batches.epoch(0), 3):
            start = time.monotonic()
            with self.autocast():
                loss = self.task.loss(self.model, self.features, batch.to(self.device), self.config).loss
            loss.backward()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.monotonic() - start)
        self.optimizer.zero_grad()
        return Cost(min(times), peak_memory(self.device))


def _stream(
    batches: EpochsOfBatches, epoch: int, start: int, device: torch.device
) -> Generator[tuple[int, int, Batch], None, None]:
    """Batches without end from batch `start` of an epoch on, each with its epoch and index, moved to the device."""

    def ahead() -> Iterator[tuple[int, int, Batch]]:
        for number in itertools.count(epoch):
            first = start if number == epoch else 0
            for index, batch in enumerate(batches.epoch(number, first), first):
                yield number, index, batch.pin_memory() if device.type == "cuda" else batch

    for number, index, batch in prefetch(ahead()):
        yield number, index, batch.to(device, non_blocking=True)


def _check(recipe: Recipe, task: Task) -> None:
    config = recipe.train
    if config.validate_by not in ("loss", "last", *task.metrics):
        raise RegardError(
            f"train.validate_by = {config.validate_by!r} does not fit the task {recipe.task}.",
            f"Choose train.validate_by from: {', '.join(('loss', *task.metrics, 'last'))}.",
        )
    if config.time and config.schedule != "wsd":
        raise RegardError(
            f"train.time needs the schedule wsd, whose decay can begin at any step (got {config.schedule}).",
            "Set train.schedule to wsd, or leave out train.time.",
        )


def _extends(recipe: Recipe, state: TrainState) -> bool:
    """Whether the recipe allows more steps, or more time, than the run of this state had."""
    before = state.provenance["recipe"]["train"]
    more_time = bool(before["time"]) and parse_duration(recipe.train.time) > parse_duration(before["time"])
    return recipe.train.steps > before["steps"] or more_time


def _provenance(recipe: Recipe, dataset: Dataset[Any], start_from: str | Path | None) -> dict[str, Any]:
    """Where a model comes from, for training.json."""
    return {
        "recipe": recipe_table(recipe),
        "data": dataset.fingerprints,
        "start_from": str(start_from) if start_from is not None else None,
        "versions": {"regard": __version__, "torch": torch.__version__},
    }


@contextlib.contextmanager
def _run_folder(out: Path, dry_run: bool) -> Iterator[Path]:
    """The folder of the run, locked; a temporary one for a dry run."""
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="regard-") as folder:
            yield Path(folder)
    else:
        with locked(out):
            yield out


@contextlib.contextmanager
def _configured_machine(recipe: Recipe, state: TrainState | None) -> Iterator[int]:
    """The settings of threads and memory that were measured to be fastest (benchmarks/README.md).

    Yields the number of workers. A resumed run keeps its number, which decides what makes up an update.
    """
    config = recipe.train
    device, threads = find_device(config.device), torch.get_num_threads()
    size = 1
    if device.type == "cpu":
        keep_freed_memory()
        size = usable_workers(config.workers or _suggested_workers(recipe)) if state is None else state.workers
        torch.set_num_threads(1)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
    try:
        yield size
    finally:
        torch.set_num_threads(threads)


def _suggested_workers(recipe: Recipe) -> int:
    """One worker per core, as long as each has a large enough share of the batch, with room for any example."""
    config = recipe.train
    if pipeline_kind(recipe.model).sides:
        shares = config.batch_tokens // max(LEAST_TOKENS, recipe.model.max_len)
    elif isinstance(recipe.model, ViTConfig) and recipe.data.longest:
        largest = recipe.model.prefix + (recipe.data.longest // recipe.model.patch) ** 2
        shares = config.batch_tokens // max(LEAST_TOKENS, largest)
    else:
        shares = config.batch_images // LEAST_IMAGES
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MOST_WORKERS, shares))


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list to which Ctrl-C and SIGTERM add an entry; a second signal raises KeyboardInterrupt.

    An update must not be interrupted, so the signal is only recorded, and the loop checks the list between updates.
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


def _mix_seed(*numbers: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little")

"""The training loop: updates, validation, checkpoints."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.data.batching.batch import WHOLE, Batch, RankSlice, prefetch
from regard.devices import find_device
from regard.errors import RegardError
from regard.models import ModelConfig, make_model
from regard.pipelines import load
from regard.pipelines.folder import model_from_weights
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
    read_checkpoint_facts,
    restore_state,
    unique_parameters,
)
from regard.training.cuda_graphs import GraphedUpdate
from regard.training.datasets import Dataset, count_units
from regard.training.distributed import DistributedModel, Workers, accumulating, report_dead_ranks
from regard.training.guards import (
    MAX_SKIPPED,
    LossGuard,
    LossStatistics,
    Position,
    SkippedUpdate,
    detect_out_of_memory,
    does_not_fit_error,
    interrupted_error,
    is_batch_too_large,
    mark_non_finite,
    refuse_to_split,
    repeated_failure_error,
    report_rank_error,
    split_notice,
    stop_signals,
    write_report,
)
from regard.training.log import RunLog
from regard.training.losses import LossParts
from regard.training.machine import make_autocast
from regard.training.optimizers import make_optimizer, scale_gradients, set_learning_rate, step_if, update_ema
from regard.training.recipe import Recipe
from regard.training.schedules import DECAY_RATIO, Schedule, parse_duration
from regard.training.tasks import TASKS
from regard.training.tasks.task import BatchSource, evaluate_loss


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


# With a time budget: updates between two checks of the clock, and the share of the budget for everything but the last
# validation.
CLOCK_CHECK_INTERVAL, TIME_SHARE = 10, 0.97


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
        self.spec, self.workers, self.run_log = spec, workers, run_log
        self.validation: Any = validation
        self.is_rank_0 = validation is not None
        self.task, self.config = TASKS[spec.recipe.task], spec.recipe.train
        config = self.config
        self.device = find_device(config.device)
        self.autocast = make_autocast(config, self.device)
        self.store = CheckpointStore(spec.out, config.keep_checkpoints)
        self.distributed = DistributedModel(
            validation.pipeline.model if validation is not None else build_model(spec),
            self.task,
            config,
            workers,
            self.device,
            spec.batches,
            is_resumed=spec.checkpoint is not None,
            is_silent=run_log.is_silent,
        )
        self.model, self.ema_model = self.distributed.model, self.distributed.ema_model
        self.loss, self.is_sharded = self.distributed.loss, self.distributed.is_sharded
        self.shards = AsyncSaver(workers, self.store) if self.is_sharded else None
        if validation is not None:
            self.pipeline = replace(validation.pipeline, model=self.distributed.full)
        self.parameters = unique_parameters(self.model)
        self.optimizer = make_optimizer(config.optimizer, self.model, config.lr, config.beta2, config.weight_decay)
        self.schedule = Schedule(config.schedule, config.lr, config.warmup, config.steps)

        precision: Any = "bfloat16" if config.precision == "bfloat16" else "float32"
        self.state = TrainState(spec.provenance, workers.size, precision)
        if spec.checkpoint is not None:
            self._restore(spec.checkpoint)
        # The time budget includes the time of earlier processes of the same run.
        self.budget, self.started = parse_duration(config.time), started - self.state.seconds
        if self.budget:
            run_log.deadline = self.started + self.budget
        self.guard = LossGuard(self.device, skips_spikes=config.skip_spikes)
        self.saver = RunSaver(self.store, run_log, self.state.step if spec.checkpoint else None)
        self.is_save_due = False
        self.is_best = False
        """whether the last validation is the best so far"""
        self.unlogged: list[LossParts] = []
        self.restored_updates = 0
        """updates of an earlier process since the last log line: they count for the loss, not for the speed"""
        self.skipped: list[SkippedUpdate] = []
        """skipped updates of this process"""
        self._restore_counters()
        self.timed_from = time.monotonic()

    def run(self) -> Any:
        """Update the weights until the schedule ends, validation stalls or a signal arrives.

        Returns the pipeline of the best validation, on rank 0.
        """
        config = self.config
        if self.spec.checkpoint is None:
            if config.keep_every:
                self.save_step_folder()  # the untrained model
            self.checkpoint()  # marks the folder as belonging to this run
        apply_batches = self._make_update()
        self.timed_from = time.monotonic()
        with self.run_log, stop_signals() as signals, contextlib.closing(self._batches()) as groups:
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
        return self._best_pipeline() if self.is_rank_0 else None

    def _best_pipeline(self) -> Any:
        """The pipeline that `load` opens; its weights are in memory if the last validation was the best."""
        if not self.is_best:
            return load(self.spec.out, self.config.device)
        pipeline, model, folder = self.pipeline, self.pipeline.model, self.spec.out.resolve()
        # A new model with the same weights, without what training attached to them, such as hooks and gradients.
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        model = model_from_weights(model.config, weights, folder).to(self.device).eval()
        return replace(pipeline.as_saved(), model=model, folders=frozenset([folder]))

    def _make_update(self) -> Callable[[list[Batch]], LossParts]:
        """The function that updates the weights; on a GPU, captured as CUDA graphs."""
        is_single, is_muon = self.workers.update_group is None, self.config.optimizer == "muon"
        is_eager = self.is_sharded and is_muon
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
        parts = [part for batch in batches for part in batch.split(self.state.batch_parts)]
        for index, part in enumerate(parts, 1):
            for total, value in zip(totals, self._backward(part, is_last=index == len(parts))):
                total += value
        self.workers.sum(totals)
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
            with refuse_to_split(self.state.step + 1, self.workers.rank) if self.is_sharded else detect_out_of_memory():
                parts = self.loss(batch)
            with (
                refuse_to_split(self.state.step + 1, self.workers.rank)
                if self.is_sharded or exchanges
                else detect_out_of_memory()
            ):
                parts.loss.backward()
        return LossParts(*(part.detach() for part in parts))

    def _split_batches(self, batches: list[Batch]) -> None:
        """Process batches in twice as many parts from now on, after one did not fit into memory."""
        self.loss.zero_grad()
        state = self.state
        if state.batch_parts >= max(batch.sentences for batch in batches):
            raise report_rank_error(does_not_fit_error(state.step + 1), self.workers.rank)
        self._set_batch_parts(2 * state.batch_parts)

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

    def _batches(self) -> Generator[tuple[int, int, list[Batch]], None, None]:
        state, config = self.state, self.config
        part, batches = self.workers.part, self.spec.batches
        return batch_groups(batches, state.epoch, state.batch, part, self.device, config.accumulate)

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
        self.distributed.gather()
        if not self.is_rank_0:
            return
        config, state, validation = self.config, self.state, self.validation
        scores = evaluate_loss(self.task, self.pipeline.model, validation.batches, self.autocast)
        scores |= self.task.validation_scores(self.pipeline, validation.dataset)
        self.model.train()
        self.run_log.add(state.step, "validation", **scores)
        metric = {"loss": -scores["nll"], "last": float(state.step), **scores}[config.validate_by]
        self.is_best = state.improves(metric, scores["nll"])
        if self.is_best:
            state.best, state.best_step, state.stale = (metric, -scores["nll"]), state.step, 0
            self.pipeline.training |= {"step": state.step, "validation": scores, "selected_by": config.validate_by}
            self.saver.save_model(self.spec.out, self.pipeline)
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
        self._restore(self.store.path(int(step)))
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
        stream = stream_batches(self.spec.batches, *skipped.start, WHOLE, torch.device("cpu"))
        with contextlib.closing(stream) as batches:
            group = itertools.islice(batches, self.config.accumulate)
            write_report(self.spec.out, skipped, [batch for _, _, batch in group], self.pipeline.tokenizers)

    def save_step_folder(self) -> None:
        """Save the model of this step to its own folder."""
        self.distributed.gather()
        if self.is_rank_0:
            step = self.state.step
            snapshot = replace(self.pipeline, training={**self.spec.provenance, "step": step})
            self.saver.save_model(self.spec.out / STEPS / f"{step:06}", snapshot)

    def interrupt(self, signals: list[int]) -> None:
        """End all ranks after a signal to any of them; before the first validation, save the current model."""
        number = torch.tensor(signals[0] if signals else signal.SIGTERM)
        self.workers.broadcast([number])
        self.distributed.gather()
        self._wait_for_shards()
        if self.is_rank_0 and self.state.best is None:
            self.pipeline.training |= {"step": self.state.step}
            self.saver.save_model(self.spec.out, self.pipeline)
        raise interrupted_error(int(number), self.saver.saved_step, self.spec.out)

    def _wait_for_shards(self) -> None:
        """Wait for the sharded checkpoint that is being written."""
        if self.shards is not None:
            self.saver.wait_for_shards(self.shards)


def _mismatch_error(path: Path, reason: str) -> RegardError:
    return RegardError(
        f"{path}: the checkpoint belongs to a different model: {reason}.", "Nothing was changed; choose another --out."
    )


def _update_seed(seed: int, step: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(repr((seed, step, rank)).encode()).digest()[:8], "little")


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


def build_model(spec: RunSpec) -> Any:
    """The model with its random initial weights, which depend on the seed alone."""
    torch.manual_seed(spec.recipe.train.seed)
    return make_model(spec.model)

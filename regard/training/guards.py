"""Guards of a run: non-finite losses and spikes, which are skipped or rolled back, out of memory, signals, and time."""

import contextlib
import json
import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.data.batching.batch import WHOLE, Batch
from regard.errors import Interrupted, Preempted, RegardError
from regard.files import write_atomically
from regard.layers.packed import Packed
from regard.training.losses import LossParts
from regard.training.schedules import DECAY_RATIO

if TYPE_CHECKING:
    from regard.training.loop import Trainer

# With a time budget: its share for everything but the last validation.
TIME_SHARE = 0.97
# Skipped updates in a row after which the run returns to its last checkpoint.
MAX_SKIPPED = 3
# Statistics of the loss: updates in the moving average, updates before any loss counts as a spike, and the first
# updates, whose mean is the loss at the start.
WINDOW, MIN_UPDATES, START_UPDATES = 200, 100, 10
# A spike is this many standard deviations above the mean, and at least this multiple of it.
DEVIATIONS, MULTIPLE = 10.0, 2.0


# -- losses


@dataclass
class LossStatistics:
    """Moving average and variance of the loss per token, and its mean at the start of the run.

    >>> statistics = LossStatistics()
    >>> for loss in [4.0, 3.0] * 100:
    ...     statistics.add(loss)
    >>> round(statistics.limit, 1)  # 3.5 + 10 standard deviations
    8.5
    """

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0
    start: float = 0.0

    def add(self, loss: float) -> None:
        """Add the loss per token of an update."""
        self.count += 1
        share, change = 1 / min(self.count, WINDOW), loss - self.mean
        self.mean += share * change
        self.variance = (1 - share) * (self.variance + share * change**2)
        if self.count <= START_UPDATES:
            self.start = self.mean

    @property
    def limit(self) -> float:
        """The loss from which on an update is skipped.

        A spike is ten standard deviations above the mean, at least twice the mean, and at least half the loss at the
        start: a model with a loss near 0 may meet a batch that it does not know yet.
        """
        if self.count < MIN_UPDATES:
            return math.inf
        return max(self.mean + DEVIATIONS * math.sqrt(self.variance), MULTIPLE * self.mean, self.start / 2)

    def to_list(self) -> list[float]:
        return list(astuple(self))

    @staticmethod
    def from_list(values: list[float]) -> "LossStatistics":
        if not values:
            return LossStatistics()
        mean, variance, count, start = values
        return LossStatistics(mean, variance, int(count), start)


class Position(NamedTuple):
    """A position in the data: the batch with this index of this epoch is the next one."""

    epoch: int
    batch: int


class SkippedUpdate(NamedTuple):
    """An update that was not applied: its step, the position in the data before it, and its loss per token."""

    step: int
    start: Position
    loss: float

    def describe(self, limit: float) -> str:
        """The reason.

        >>> SkippedUpdate(7, Position(0, 6), math.nan).describe(5.0)
        'Step 7: the loss or its gradient is not finite'
        """
        if not math.isfinite(self.loss):
            return f"Step {self.step}: the loss or its gradient is not finite"
        return f"Step {self.step}: the loss is {self.loss:.4g}, which is a spike (from {limit:.4g} on)"


class LossGuard:
    """Decides on the device which updates are applied, without synchronization; `inspect` reads the decisions.

    >>> guard = LossGuard(torch.device("cpu"), skips_spikes=True)
    >>> guard.accepts(LossParts(*torch.tensor([6.0, 6.0, 2.0])))
    tensor(True)
    >>> guard.accepts(LossParts(*torch.tensor([torch.nan, 6.0, 2.0])))
    tensor(False)
    """

    def __init__(self, device: torch.device, *, skips_spikes: bool) -> None:
        self.statistics, self.skips_spikes = LossStatistics(), skips_spikes
        self.limit = torch.full((), math.inf, device=device)
        self.pending: list[tuple[int, Position, LossParts]] = []
        """step, start and loss of the updates that were not inspected yet"""
        self.streak = 0
        """skipped updates in a row, up to the last inspection"""

    def accepts(self, parts: LossParts) -> Bool[Tensor, ""]:
        """Whether the update is applied: the loss is below the limit, which no NaN and no infinity is."""
        return _is_below(parts, self.limit)

    def add(self, step: int, start: Position, parts: LossParts) -> None:
        """Add an update for the next inspection."""
        self.pending.append((step, start, parts))

    def inspect(self) -> tuple[list[LossParts], list[SkippedUpdate]]:
        """Read the updates since the last call: the losses of those that were applied, and those that were skipped.

        Ends with the update that completes `MAX_SKIPPED` in a row, until `reset`: ranks that read more often than
        others come to the same result. Synchronizes with the device.
        """
        if self.has_failed or not self.pending:
            self.pending = []
            return [], []
        columns = LossParts(*(torch.stack(column).cpu() for column in zip(*(parts for _, _, parts in self.pending))))
        accepted, losses = _is_below(columns, self.limit.cpu()).tolist(), columns.loss / columns.tokens.clamp(min=1)
        applied: list[LossParts] = []
        skipped: list[SkippedUpdate] = []
        for (step, start, parts), is_accepted, loss in zip(self.pending, accepted, losses.tolist()):
            self.streak = 0 if is_accepted else self.streak + 1
            if is_accepted:
                applied.append(parts)
            else:
                skipped.append(SkippedUpdate(step, start, loss))
            if self.has_failed:
                break
        self.pending = []
        return applied, skipped

    @property
    def has_failed(self) -> bool:
        """Whether too many updates in a row were skipped."""
        return self.streak >= MAX_SKIPPED

    def learn(self, losses: list[float]) -> None:
        """Add losses per token of applied updates to the statistics, which set the limit of the next updates."""
        for loss in losses:
            self.statistics.add(loss)
        self._set_limit()

    def reset(self, statistics: LossStatistics) -> None:
        """Return to the statistics of a checkpoint."""
        self.statistics, self.streak, self.pending = statistics, 0, []
        self._set_limit()

    def _set_limit(self) -> None:
        self.limit.fill_(self.statistics.limit if self.skips_spikes else math.inf)


def _is_below(parts: LossParts, limit: Tensor) -> Tensor:
    return parts.loss.abs() < limit * parts.tokens.clamp(min=1)


def mark_non_finite(parts: LossParts, norm: Float[Tensor, ""]) -> LossParts:
    """The same loss, or NaN if the gradient norm is not finite.

    >>> one = torch.tensor(1.0)
    >>> mark_non_finite(LossParts(one, one, one), torch.tensor(torch.inf)).loss
    tensor(nan)
    """
    return parts._replace(loss=parts.loss + 0.0 * norm)


BAD_BATCH = Path("state", "bad_batch.json")
# Examples in a report, and tokens or targets of each.
MAX_EXAMPLES, MAX_TOKENS = 1000, 40


def roll_back(trainer: "Trainer") -> None:
    """Return to the last checkpoint and continue with the data after the skipped updates.

    A second failure, at most `save_every` updates after the first, ends the run with a report of the batch. All ranks
    come to the same decision, since their losses are equal.
    """
    failed, skipped, out = trainer.state, trainer.skipped[-MAX_SKIPPED], trainer.spec.out
    trainer.saver.wait()
    path = trainer.store.find_intact(trainer.run_log.warn) if trainer.is_rank_0 else None
    step = torch.tensor(int(path.name.removeprefix("step-")) if path else 0)
    trainer.workers.broadcast([step])
    if failed.failed_step is not None and skipped.step <= failed.failed_step + trainer.config.save_every:
        if trainer.is_rank_0:
            with contextlib.closing(trainer.batches(skipped.start, WHOLE, torch.device("cpu"))) as stream:
                write_report(out, skipped, next(stream)[2], trainer.pipeline.tokenizers)
        raise RegardError(
            f"{skipped.describe(float(trainer.guard.limit))}, again after the run returned to the checkpoint of step "
            f"{int(step)}; {out / BAD_BATCH} describes the batch.",
            "Look for invalid examples in it, or train again with another --out and a smaller train.lr or a longer "
            "train.warmup.",
        )
    trainer.restore(trainer.store.path(int(step)))
    trainer.state = replace(
        trainer.state,
        epoch=failed.epoch,
        batch=failed.batch,
        # The model folder holds the best model so far, which may be newer than the checkpoint.
        best=failed.best,
        best_step=failed.best_step,
        skipped=failed.skipped,
        failed_step=skipped.step,
        micro_batches=failed.micro_batches,
    )
    trainer.restore_counters()
    trainer.timed_from = time.monotonic()
    if trainer.is_rank_0:
        trainer.run_log.truncate_after(trainer.state.step)
    trainer.run_log.warn(
        f"{MAX_SKIPPED} updates in a row were skipped; the run returns to the checkpoint of step {trainer.state.step} "
        "and continues with the batches after them."
    )


def write_report(out: Path, update: SkippedUpdate, batches: list[Batch], tokenizers: tuple[Any, ...]) -> None:
    """Write step, position in the data, loss and examples of a failed update; texts are decoded."""
    report = {
        "step": update.step,
        "epoch": update.start.epoch,
        "batch": update.start.batch,
        "loss": update.loss if math.isfinite(update.loss) else str(update.loss),
        "batches": [describe_batch(batch, tokenizers) for batch in batches],
    }
    write_atomically(out / BAD_BATCH, (json.dumps(report, ensure_ascii=False, indent=1) + "\n").encode())


def describe_batch(batch: Batch, tokenizers: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Size, lengths and first tokens of a batch.

    >>> from regard.layers.packed import pack
    >>> texts = pack([[5, 6], [7]])
    >>> describe_batch(Batch((texts,), texts.ids, 2, 3))["inputs"]
    [{'lengths': [2, 1], 'ids': [[5, 6], [7]]}]
    """
    inputs: list[dict[str, Any]] = []
    for index, x in enumerate(batch.inputs):
        if not isinstance(x, Packed):
            inputs.append({"shape": list(x.shape)})
            continue
        lengths = x.offsets.lengths[: batch.sentences].tolist()
        rows = [row.tolist() for row in x.ids[: sum(lengths)].split(lengths)][:MAX_EXAMPLES]
        inputs.append({"lengths": lengths, "ids": [row[:MAX_TOKENS] for row in rows]})
        if tokenizers:
            tokenizer = tokenizers[min(index, len(tokenizers) - 1)]
            inputs[-1]["texts"] = [tokenizer.decode(row) for row in rows]
    report = {"sequences": batch.sentences, "tokens": batch.tokens, "inputs": inputs}
    if len(batch.targets) and not any(isinstance(x, Packed) for x in batch.inputs):
        report["targets"] = batch.targets.flatten()[:MAX_EXAMPLES].tolist()
    return report


# -- memory


class BatchTooLargeError(Exception):
    """A forward or backward pass ran out of memory; the weights are unchanged."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory could not be allocated.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."))
    True
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


@contextlib.contextmanager
def catch_out_of_memory(step: int, rank: int, *, can_split: bool = True) -> Iterator[None]:
    """Raise out-of-memory errors as BatchTooLargeError; where the other ranks already exchange weights or gradients, so
    that the batch cannot be split, as a RegardError. Activations that their tracebacks refer to are freed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        raise (BatchTooLargeError() if can_split else report_rank_error(_cannot_split_error(step), rank)) from None


def report_rank_error(error: RegardError, rank: int) -> RegardError:
    """An error of this rank alone, printed here unless it is rank 0, which only notices that the process ended."""
    if rank:
        print(f"regard: rank {rank}: {error}", file=sys.stderr, flush=True)
    return error


def is_batch_too_large(error: BaseException | None) -> bool:
    """Whether an error is, or followed from, a BatchTooLargeError, as in the capture of a CUDA graph."""
    if isinstance(error, RegardError):
        return False
    while error is not None and not isinstance(error, BatchTooLargeError):
        error = error.__context__
    return error is not None


def split_batches(trainer: "Trainer", batches: list[Batch]) -> None:
    """Process batches in twice as many parts from now on, after one did not fit into memory."""
    trainer.loss.zero_grad()
    state = trainer.state
    if state.micro_batches >= max(batch.sentences for batch in batches):
        raise report_rank_error(_does_not_fit_error(state.step + 1), trainer.workers.rank)
    _set_micro_batches(trainer, 2 * state.micro_batches)


def agree_on_micro_batches(trainer: "Trainer") -> None:
    """Use the largest number of parts of all ranks, so that one number in the state serves a resumed run."""
    if trainer.workers.size > 1:
        exponents = torch.zeros(32)
        exponents[trainer.state.micro_batches.bit_length() - 1] = 1
        trainer.workers.sum([exponents])
        count = 2 ** int(exponents.nonzero().max())
        if count > trainer.state.micro_batches:
            _set_micro_batches(trainer, count)


def _set_micro_batches(trainer: "Trainer", count: int) -> None:
    trainer.state.micro_batches = count
    trainer.run_log.warn(
        f"Step {trainer.state.step + 1}: out of memory. From now on every batch is processed in {count} parts, with "
        "the same result to rounding. To avoid this, lower train.batch_tokens (images: train.batch_images) and raise "
        "train.accumulate by the same factor in the next run."
    )


def _cannot_split_error(step: int) -> RegardError:
    """The error for a batch that cannot be split, since other ranks already exchange weights or gradients."""
    return RegardError(
        f"Out of memory at step {step}, while ranks exchanged weights or gradients.",
        "Run the same command with more ranks, each of which then gets a smaller part of every batch; or start a new "
        "run with a lower train.batch_tokens (images: train.batch_images) and a higher train.accumulate.",
    )


def _does_not_fit_error(step: int) -> RegardError:
    """The error for a single sequence or image that does not fit into memory."""
    return RegardError(
        f"Out of memory at step {step}, although the batch was processed one sequence at a time.",
        "Use a smaller model, lower model.max_len (images: data.size or data.longest), or train on a device with more "
        "memory.",
    )


# -- signals


# SIGUSR1 does not exist on Windows.
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Yield a list to which SIGINT, SIGTERM and SIGUSR1 append their number; a second SIGINT raises KeyboardInterrupt.

    An update must not be interrupted, so the signal is only recorded, and the training loop checks the list. A cluster
    may send SIGTERM while the run still saves because of SIGUSR1, so these two never interrupt.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def record(number: int, _frame: Any) -> None:
        signals.append(number)
        if number == signal.SIGINT and len(signals) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, record) for number in _SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt(trainer: "Trainer", signals: list[int]) -> None:
    """End all ranks after a signal to any of them; before the first validation, save the current model.

    The exit code is 130 for Ctrl-C and 75 otherwise.
    """
    number = torch.tensor(signals[0] if signals else signal.SIGTERM)
    trainer.workers.broadcast([number])
    trainer.distributed.gather()
    trainer.saver.wait()
    if trainer.is_rank_0 and trainer.state.best is None:
        trainer.pipeline.training |= {"step": trainer.state.step}
        trainer.saver.save_model(trainer.spec.out, trainer.pipeline)
    error = Interrupted if int(number) == signal.SIGINT else Preempted
    raise error(
        f"Interrupted; everything up to step {trainer.saver.best_step} is saved in {trainer.spec.out}.",
        "Run the same command to resume.",
    )


# -- time


def start_decay_if_due(trainer: "Trainer", validated: bool) -> None:
    """Start the decay of the schedule "wsd" if validation has stalled or the time budget is nearly used up.

    Rank 0 decides for all workers. A decision by the clock is saved at once, so that a resumed run repeats it.
    """
    state, schedule, is_rank_0 = trainer.state, trainer.schedule, trainer.is_rank_0
    if schedule.name != "wsd" or state.decay_start is not None or state.step >= schedule.planned_decay:
        return
    elapsed, latest = time.monotonic() - trainer.started, TIME_SHARE * trainer.budget / (1 + DECAY_RATIO)
    is_late, is_stalled = bool(trainer.budget) and elapsed >= latest, validated and trainer.has_stalled
    is_due, is_late = trainer.workers.any(is_rank_0 and (is_late or is_stalled), is_rank_0 and is_late)
    if is_due:
        state.decay_start = state.step
        reason = "the time budget is nearly used up"
        if is_stalled:
            reason = f"validation stalled ({state.stale} without improvement)"
        last = trainer.run_log.steps = trainer.last_step
        trainer.run_log.print_lines(f"step {state.step}: {reason}; the learning rate decays until step {last}.")
        trainer.is_save_due |= is_late

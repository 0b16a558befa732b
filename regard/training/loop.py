"""The training loop: one function that can be read from top to bottom."""

import contextlib
import hashlib
import itertools
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data import Batch, prefetch
from regard.errors import Interrupted, RegardError
from regard.folder import (
    OPENED,
    Translator,
    bundle_of,
    fill_weights,
    find_device,
    load,
    read_tokenizers,
    save,
    write_tokenizers,
)
from regard.models import ViTConfig, family_of, make_model
from regard.training.allocator import keep_freed_memory
from regard.training.checkpoint import Checkpoint, gather_state, keep_step, restore_state, unique_parameters
from regard.training.compiling import compiled_features
from regard.training.going_on import HEADS, taking_over, weights_for
from regard.training.graphs import GraphedUpdate
from regard.training.losses import LossParts
from regard.training.memory import check_sizes
from regard.training.optim import make_optimizer, scale_gradients, set_rate
from regard.training.precision import autocast_of, settle_precision
from regard.training.recipe import Recipe, recipe_table, with_cache
from regard.training.report import Report, draw_losses, read_metrics
from regard.training.run_folder import (
    LOSSES,
    METRICS,
    STATE,
    locked,
    read_state,
    refuse_foreign_files,
    refuse_other_run,
)
from regard.training.run_plan import Cost, describe_plan, peak_memory
from regard.training.schedules import DECAY_RATIO, Schedule, parse_duration
from regard.training.state import TrainState
from regard.training.tasks import TASKS, read_data
from regard.training.tasks.base import Autocast, Corpus, EpochsOfBatches, Shape, Task, evaluate_loss
from regard.training.team import Team, lead, usable_workers
from regard.training.vectors import use_vectors
from regard.version import __version__

# A share of fewer tokens or pictures than this would not be worth the exchange of gradients.
MOST_WORKERS, LEAST_TOKENS, LEAST_PICTURES = 16, 512, 8
# Updates between two looks at the clock, where there is a time budget; of which a part is left for the last validation.
CLOCK_EVERY, TIME_SHARE = 10, 0.97


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    start_from: str | Path | None = None,
    corpus: Corpus | None = None,
    quiet: bool = False,
    dry_run: bool = False,
) -> Any:
    """Trains a model into the folder `out`; an interrupted run is resumed, and a finished one extended by more steps.

    `start_from` is a model folder to fine-tune: its weights, tokenizers and sizes are used. A `corpus` that was read
    already is used as it is. With `dry_run` the plan is printed, and nothing is trained or written. Returns what `load`
    opens `out` as.

    >>> train(Recipe(), "model")  # doctest: +SKIP
    """
    began, out = time.monotonic(), Path(out)
    task = TASKS[recipe.task]
    _check(recipe, task)
    origin = load(start_from, "cpu") if start_from is not None else None
    if origin is not None:
        recipe = taking_over(recipe, origin.model.config, start_from)
    corpus = corpus or read_data(recipe.task, with_cache(recipe.data, out), quiet=quiet)
    check_sizes(recipe, task, corpus)
    provenance = _provenance(recipe, corpus, start_from)
    order: dict[str, Any] = {"corpus": corpus, "provenance": provenance, "start_from": start_from, "quiet": quiet}
    order |= {"began": began, "dry_run": dry_run}

    def begin(folder: Path) -> None:
        """The tokenizers are written before the first step, and never change."""
        write_tokenizers(
            folder, *(origin.tokenizers if origin is not None else task.make_tokenizers(corpus, recipe.tokenizer))
        )

    def run(folder: Path, state: TrainState | None) -> None:
        with _arranged(recipe, state) as size:
            settled = settle_precision(recipe, state.precision if state else None)
            settings = order | {"recipe": settled, "out": folder}
            with lead(size, settings) as team:
                work(team, **settings)

    if dry_run:
        with tempfile.TemporaryDirectory(prefix="regard-") as folder:
            begin(Path(folder))
            run(Path(folder), None)
        return None
    refuse_foreign_files(out)
    with locked(out):
        state = read_state(out)
        if state is None:
            begin(out)
        else:
            refuse_other_run(out, state, provenance)
        if state is not None and state.done and not _extends(recipe, state):
            if not quiet:
                print(f"{out} holds the finished run: {state.step} steps.", file=sys.stderr)
        else:
            run(out, state)
        draw_losses(read_metrics(out / METRICS), out / LOSSES, task.unit)
    return load(out, recipe.train.device)


def _check(recipe: Recipe, task: Task) -> None:
    config = recipe.train
    if config.validate_by not in ("loss", "last", *task.qualities):
        raise RegardError(
            f"train.validate_by = {config.validate_by!r} does not fit the task {recipe.task}.",
            f"Choose train.validate_by from: {', '.join(('loss', *task.qualities, 'last'))}.",
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


def work(
    team: Team,
    recipe: Recipe,
    out: Path,
    corpus: Corpus,
    provenance: dict[str, Any],
    start_from: str | Path | None,
    quiet: bool,
    began: float,
    dry_run: bool,
) -> None:
    """What each worker does; the first (rank 0) also validates, reports and saves."""
    config, state_path = recipe.train, out / STATE
    device = find_device(config.device)
    autocast = autocast_of(config, device)
    task = TASKS[recipe.task]
    origin = load(start_from, "cpu") if start_from is not None else None
    opened = OPENED[family_of(recipe.model)]
    special = opened.special if origin is None else origin.special
    tokenizers = read_tokenizers(out, foreign=special != opened.special) if opened.sides else ()
    model_config = task.sized(recipe.model, corpus, tokenizers)
    # Shapes that never change are what a GPU's captured steps need; a CPU would only compute the filling.
    shape = Shape(
        config.batch_tokens // team.size,
        config.seed,
        constant=device.type == "cuda",
        images=max(1, config.batch_images // team.size),
    )
    batches, validation, note = task.encode(corpus, tokenizers, special, recipe, model_config, shape)
    torch.manual_seed(config.seed)
    model = make_model(model_config)
    if origin is not None:
        fill_weights(model, weights_for(model, origin.model), Path(str(start_from)), may_differ=HEADS)
    vectors = use_vectors(model, config, *tokenizers) if tokenizers else []
    model.to(device).train()
    parameters = unique_parameters(model)
    optimizer = make_optimizer(config.optimizer, model, config.lr, config.beta2, config.weight_decay)
    schedule, budget = Schedule(config.schedule, config.lr, config.warmup, config.steps), parse_duration(config.time)
    average = {name: p.detach().clone() for name, p in parameters.items()} if config.ema else None
    state = TrainState(provenance, team.size, "bfloat16" if config.precision == "bfloat16" else "float32")
    if state_path.exists():
        resumed = Checkpoint.load(state_path)
        restore_state(resumed.tensors, model, optimizer, average, lambda why: _other_model(state_path, why))
        state = TrainState.from_json(resumed.facts)
        if _extends(recipe, state):
            state.decay_start, state.stale, state.done = None, 0, False
        state.provenance = provenance
    # Where the budget is counted from: this process's start, less what earlier ones took.
    began -= state.seconds

    leads = team.rank == 0
    bundle = bundle_of(model, tokenizers, dict(provenance), special)
    if isinstance(origin, Translator) and not recipe.data.languages:
        bundle.languages = origin.languages
    features = compiled_features(model) if config.compile else model.features

    def update(group: list[Batch]) -> LossParts:
        """One update of the weights from this worker's share of batches; never waits for a GPU."""
        sums = [torch.zeros((), device=device) for _ in LossParts._fields]
        for batch in group:
            with autocast():
                parts = task.loss(model, features, batch, config)
            parts.loss.backward()
            for total, part in zip(sums, parts):
                total += part.detach()
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters.values()]
        team.sum([*grads, *sums])
        parts = LossParts(*sums)
        scale_gradients(grads, parts.tokens, config.clip)
        optimizer.step()
        optimizer.zero_grad()
        return parts

    run_update = GraphedUpdate(update) if device.type == "cuda" and config.accumulate == 1 else update

    report = Report(out / METRICS, config.steps, state.step, silent=quiet or not leads, writes=leads and not dry_run)
    if state.step:
        report.say(f"Resuming from step {state.step:,} of {config.steps:,}.")
    elif not report.silent or dry_run:
        cost = _measure_cost(lambda batch: task.loss(model, features, batch, config).loss, batches, autocast, device)
        optimizer.zero_grad()
        report.say(
            *describe_plan(recipe, task, corpus, model, note, cost, team.size, device, origin is not None, vectors)
        )
    if dry_run:
        return

    def checkpoint() -> None:
        if budget:  # without one the same run writes the same bytes
            state.seconds = time.monotonic() - began
        state.unlogged = [[float(part) for part in parts] for parts in sums]
        Checkpoint(gather_state(model, optimizer, average), state.to_json()).save(state_path)

    def validate() -> None:
        """Measures on the validation split, keeps the best model, and counts validations without a better one."""
        with _weights(model, average):
            scores = evaluate_loss(task, model, validation, autocast) | task.judge(bundle, corpus)
            model.train()
            report.add(state.step, "validation", **scores)
            metric = {"loss": -scores["nll"], "last": float(state.step), **scores}[config.validate_by]
            if state.improves(metric, scores["nll"]):
                state.best, state.best_step, state.stale = (metric, -scores["nll"]), state.step, 0
                bundle.training |= {"step": state.step, "validation": scores, "selected_by": config.validate_by}
                save(out, bundle)
            else:
                state.stale += 1

    def decay_if_due(stalled: bool) -> None:
        """Lets the learning rate of "wsd" decay once validation has stalled or the time budget is nearly used.

        Rank 0 decides, and every worker follows. A decision by the clock is saved at once: a resumed run repeats it.
        """
        if config.schedule != "wsd" or state.decay_start is not None or state.step >= schedule.planned_decay:
            return
        late = bool(budget) and time.monotonic() - began >= TIME_SHARE * budget / (1 + DECAY_RATIO)
        decision = torch.tensor([float(leads and (late or stalled))])
        team.sum([decision])
        if decision.item():
            state.decay_start = state.step
            why = f"validation stalled ({state.stale} without improvement)" if stalled else "the time budget is used"
            report.say(f"step {state.step}: {why}; the learning rate decays until step {schedule.end(state.step)}.")
            report.steps = schedule.end(state.step)
            if leads and late:
                checkpoint()

    def keep() -> None:
        with _weights(model, average):
            keep_step(out, bundle, state.step, provenance)

    sums = [LossParts(*(torch.tensor(part, device=device) for part in parts)) for parts in state.unlogged]
    restored = len(sums)  # of an earlier process: they count for the loss, not for the speed
    group: list[Batch] = []
    since = time.monotonic()
    if leads and not state_path.exists():
        if config.keep_every:
            keep()  # the untrained model first
        checkpoint()  # from here on the folder is this run's
    stop = False
    with report, _stop_requests() as requested:
        for epoch, index, batch in _stream(batches, state.epoch, state.batch, device):
            if stop or state.step >= schedule.end(state.decay_start):
                break
            group.append(batch)
            if len(group) < config.accumulate * team.size:
                continue
            # All that is random in an update is a function of these three: a resumed run needs no other memory of it.
            torch.manual_seed(_mixed(config.seed, state.step, team.rank))
            set_rate(optimizer, schedule.rate(state.step, state.decay_start))
            parts = run_update(group[team.rank :: team.size])
            sums.append(parts)
            group = []
            state.step, state.epoch, state.batch = state.step + 1, epoch, index + 1
            step, last = state.step, state.step == schedule.end(state.decay_start)
            report.advance(step)
            if average is not None:
                _follow(average, model, config.ema, step)
            if step % config.log_every == 0:
                seconds = time.monotonic() - since
                _log(report, step, sums, restored, schedule.rate(step - 1, state.decay_start), seconds, task.unit)
                sums, restored, since = [], 0, time.monotonic()
            due = step % config.validate_every == 0 or last
            stalled = False
            if leads:
                kept = config.keep_every > 0 and step % config.keep_every == 0
                if due or kept or requested or step % config.save_every == 0 or step % config.log_every == 0:
                    _refuse_nonsense(parts.loss, step, out)
                paused = time.monotonic()
                if kept:
                    keep()
                if due:
                    validate()
                    stalled = 0 < config.patience <= state.stale
                    state.done = stop = last or (stalled and config.schedule != "wsd")
                since += time.monotonic() - paused
            if due or (budget and step % CLOCK_EVERY == 0):
                decay_if_due(stalled)
            if not leads:
                continue
            if step % config.save_every == 0 or stop or requested:
                checkpoint()
            if requested and not stop:
                if state.best is None:  # so that there is a model to try
                    bundle.training |= {"step": step}
                    with _weights(model, average):
                        save(out, bundle)
                raise Interrupted(
                    f"Interrupted; everything up to step {step} is saved in {out}.",
                    "The same command resumes the run.",
                )


def _measure_cost(
    loss: Callable[[Batch], Tensor], batches: EpochsOfBatches, autocast: Autocast, device: torch.device
) -> Cost:
    """Time and peak memory of a forward and a backward pass; the gradients are not used."""
    times = []
    for batch in itertools.islice(batches.epoch(0), 3):
        start = time.monotonic()
        with autocast():
            value = loss(batch.to(device))
        value.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic() - start)
    return Cost(min(times), peak_memory(device))


def _stream(
    batches: EpochsOfBatches, epoch: int, start: int, device: torch.device
) -> Generator[tuple[int, int, Batch], None, None]:
    """Batches without end from that place on, each with its epoch and number, moved to the device ahead of its use."""

    def ahead() -> Iterator[tuple[int, int, Batch]]:
        for number in itertools.count(epoch):
            first = start if number == epoch else 0
            for index, batch in enumerate(batches.epoch(number, first), first):
                yield number, index, batch.pin_memory() if device.type == "cuda" else batch

    for number, index, batch in prefetch(ahead()):
        yield number, index, batch.to(device, non_blocking=True)


@contextlib.contextmanager
def _arranged(recipe: Recipe, before: TrainState | None) -> Iterator[int]:
    """The arrangement of the machine that was measured to be fastest (benchmarks/README.md); gives the team's size.

    A run goes on with as many as it began: they decide what makes up an update.
    """
    config = recipe.train
    device, threads = find_device(config.device), torch.get_num_threads()
    size = 1
    if device.type == "cpu":
        keep_freed_memory()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if OPENED[family_of(recipe.model)].sides:
            shares = config.batch_tokens // max(LEAST_TOKENS, recipe.model.max_len)  # each holds any sentence
        elif isinstance(recipe.model, ViTConfig) and recipe.data.longest:
            largest = recipe.model.prefix + (recipe.data.longest // recipe.model.patch) ** 2
            shares = config.batch_tokens // max(LEAST_TOKENS, largest)
        else:
            shares = config.batch_images // LEAST_PICTURES
        size = config.workers or max(1, min(cores, MOST_WORKERS, shares))
        # A resumed run keeps its number of workers, which decides what makes up an update.
        size = usable_workers(size) if before is None else before.workers
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


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """A list that gets an entry when somebody asks to stop (Ctrl-C, SIGTERM); a second request ends at once.

    An update must not be cut in two, so the signal is only noted, and the loop looks at it between updates.
    """
    requested: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return

    def note(number: int, _frame: Any) -> None:
        if requested:
            raise KeyboardInterrupt
        requested.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _weights(model: torch.nn.Module, average: dict[str, Tensor] | None) -> Iterator[None]:
    """Puts the averaged weights into the model for a while."""
    if average is None:
        yield
        return
    parameters = unique_parameters(model)
    own = {name: p.detach().clone() for name, p in parameters.items()}
    try:
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(average[name])
        yield
    finally:
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(own[name])


@torch.no_grad()
def _follow(average: dict[str, Tensor], model: torch.nn.Module, decay: float, step: int) -> None:
    """Exponential moving average; a young one follows faster, so that it forgets the random start."""
    decay = min(decay, step / (step + 10))
    torch._foreach_lerp_(list(average.values()), list(unique_parameters(model).values()), 1 - decay)


def _log(
    report: Report, step: int, sums: list[LossParts], restored: int, rate: float, seconds: float, unit: str
) -> None:
    """Adds a line of metrics over the updates since the last one; the speed is that of this process's updates."""
    loss, nll, tokens = (float(torch.stack(column).double().sum()) for column in zip(*sums))
    tokens = max(1.0, tokens)
    speed = {f"{unit}s_per_second": round(sum(float(parts.tokens) for parts in sums[restored:]) / seconds)}
    report.add(step, "train", loss=loss / tokens, nll=nll / tokens, lr=rate, **speed)


def _refuse_nonsense(loss: Tensor, step: int, out: Path) -> None:
    """Before anything is saved: a model that has lost its mind must not take the place of a good one."""
    if not math.isfinite(float(loss)):
        raise RegardError(
            f"The loss is not a number at step {step}; {out} holds what was saved before.",
            "Begin again in another --out with a smaller train.lr or more train.warmup.",
        )


def _provenance(recipe: Recipe, corpus: Corpus, start_from: str | Path | None) -> dict[str, Any]:
    """What training.json tells of where a model comes from."""
    return {
        "recipe": recipe_table(recipe),
        "data": corpus.fingerprints,
        "start_from": str(start_from) if start_from is not None else None,
        "versions": {"regard": __version__, "torch": torch.__version__},
    }


def _mixed(*numbers: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little")


def _other_model(path: Path, why: str) -> RegardError:
    return RegardError(
        f"{path}: the checkpoint is of another model: {why}.", "Nothing was changed; choose another --out."
    )

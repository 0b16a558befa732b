"""The training loop: one function that can be read from top to bottom."""

import contextlib
import hashlib
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data import Batch, prefetch
from regard.errors import RegardError
from regard.folder import OPENED, bundle_of, fill_weights, find_device, load, read_tokenizers, save, write_tokenizers
from regard.models import ViTConfig, family_of, make_model
from regard.train.allocator import keep_freed_memory
from regard.train.checkpoint import Checkpoint, gather_state, keep_step, restore_state, unique_parameters
from regard.train.compiling import compiled_features
from regard.train.going_on import HEADS, taking_over, weights_for
from regard.train.graphs import GraphedUpdate
from regard.train.losses import LossParts
from regard.train.optim import make_optimizer, scale_gradients, schedule, set_rate
from regard.train.precision import autocast_of, settle_precision
from regard.train.recipe import Recipe, recipe_table, with_cache
from regard.train.report import Report, draw_losses, read_metrics
from regard.train.tasks import TASKS, read_data
from regard.train.tasks.base import Corpus, EpochsOfBatches, Shape, evaluate_loss
from regard.train.team import Team, lead, usable_workers
from regard.train.vectors import use_vectors
from regard.version import __version__

# What may differ between a run and its continuation, since it does not change what is computed.
MAY_CHANGE = {"train.device", "train.log_every", "train.save_every", "train.keep_every", "data.cache"}
STATE, METRICS = Path("state") / "last.safetensors", "metrics.jsonl"
# A share of fewer tokens or pictures than this would not be worth the exchange of gradients.
MOST_WORKERS, LEAST_TOKENS, LEAST_PICTURES = 16, 512, 8


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    start_from: str | Path | None = None,
    corpus: Corpus | None = None,
    quiet: bool = False,
) -> Any:
    """Trains a model and leaves it in the folder `out`; a run that was cut off goes on where it was.

    `start_from` is a model folder whose weights, tokenisers and sizes are taken over. A `corpus` that was read
    already is used as it is. Gives what `load` opens `out` as.

    >>> train(Recipe(), "model")  # doctest: +SKIP
    """
    out = Path(out)
    task = TASKS[recipe.task]
    if recipe.train.validate_by not in ("loss", "last", *task.qualities):
        raise RegardError(
            f"A model trained to {recipe.task} is not judged by {recipe.train.validate_by}.",
            f"Choose train.validate_by from: {', '.join(('loss', *task.qualities, 'last'))}.",
        )
    origin = load(start_from, "cpu") if start_from is not None else None
    if origin is not None:
        recipe = taking_over(recipe, origin.model.config, start_from)
    corpus = corpus or read_data(recipe.task, with_cache(recipe.data, out), quiet=quiet)
    provenance = _provenance(recipe, corpus, start_from)
    before = _claim(out, provenance)
    if before is None:
        # The tokenisers are written before the first step, and never change.
        if origin is not None:
            write_tokenizers(out, *origin.tokenizers)
        else:
            write_tokenizers(out, *task.make_tokenizers(corpus, recipe.tokenizer))
    if before is not None and before["done"]:
        if not quiet:
            print(f"{out} holds the whole run already: {before['step']} steps.", file=sys.stderr)
    else:
        with _arranged(recipe, before) as size:
            settled = settle_precision(recipe, before["precision"] if before else None)
            order: dict[str, Any] = {"recipe": settled, "out": out, "corpus": corpus}
            order |= {"provenance": provenance, "start_from": start_from, "quiet": quiet}
            with lead(size, order) as team:
                work(team, **order)
    draw_losses(read_metrics(out / METRICS), out / "loss.png", task.unit)
    return load(out, recipe.train.device)


def work(
    team: Team,
    recipe: Recipe,
    out: Path,
    corpus: Corpus,
    provenance: dict[str, Any],
    start_from: str | Path | None,
    quiet: bool,
) -> None:
    """What each member of the team does; the leader (rank 0) also validates, reports and saves."""
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
    if tokenizers:
        use_vectors(model, config, *tokenizers)
    model.to(device).train()
    parameters = unique_parameters(model)
    optimizer = make_optimizer(config.optimizer, model, config.lr, config.beta2, config.weight_decay)
    rate = schedule(config.schedule, config.lr, config.warmup, config.steps)
    average = {name: p.detach().clone() for name, p in parameters.items()} if config.ema else None
    facts: dict[str, Any] = {
        "step": 0,
        "epoch": 0,
        "batch": 0,
        "best": None,
        "best_step": 0,
        "waiting": 0,
        "done": False,
        "workers": team.size,
        "precision": config.precision,
        "provenance": provenance,
    }
    if state_path.exists():
        resumed = Checkpoint.load(state_path)
        restore_state(resumed.tensors, model, optimizer, average, lambda why: _other_model(state_path, why))
        facts = resumed.facts

    leads = team.rank == 0
    bundle = bundle_of(model, tokenizers, dict(provenance), special)
    report = Report(out / METRICS, config.steps, facts["step"], silent=quiet or not leads, writes=leads)
    report.say(corpus.describe(), note, _describe(model, device, team))
    features = compiled_features(model) if config.compile else model.features

    def update(group: list[Batch]) -> LossParts:
        """One update of the weights from this member's share of batches; never waits for a GPU."""
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

    def checkpoint() -> None:
        Checkpoint(gather_state(model, optimizer, average), facts).save(state_path)

    def validate() -> None:
        """Measures on the validation set, keeps the best model, and counts how long there was no better one."""
        with _weights(model, average):
            scores = evaluate_loss(task, model, validation, autocast) | task.judge(bundle, corpus)
            model.train()
            report.add(facts["step"], "validation", **scores)
            measure = {"loss": -scores["nll"], "last": facts["step"], **scores}[config.validate_by]
            if facts["best"] is None or measure > facts["best"]:
                facts.update(best=measure, best_step=facts["step"], waiting=0)
                bundle.training |= {"step": facts["step"], "validation": scores}
                save(out, bundle)
            else:
                facts["waiting"] += 1

    def keep() -> None:
        with _weights(model, average):
            keep_step(out, bundle, facts["step"], provenance)

    if leads and not state_path.exists():
        if config.keep_every:
            keep()  # what is not trained at all, to begin with
        checkpoint()  # from now on the folder is this run's, and a model in it is never taken for a stranger's
    sums: list[LossParts] = []
    group: list[Batch] = []
    since = time.monotonic()
    stop = False
    with report, _stop_requests() as requested:
        for epoch, index, batch in _stream(batches, facts["epoch"], facts["batch"], device):
            if stop or facts["step"] >= config.steps:
                break
            group.append(batch)
            if len(group) < config.accumulate * team.size:
                continue
            # All that is random in an update is a function of these three: a resumed run needs no other memory of it.
            torch.manual_seed(_mixed(config.seed, facts["step"], team.rank))
            set_rate(optimizer, rate(facts["step"]))
            parts = run_update(group[team.rank :: team.size])
            sums.append(parts)
            group = []
            facts.update(step=facts["step"] + 1, epoch=epoch, batch=index + 1)
            step = facts["step"]
            if average is not None:
                _follow(average, model, config.ema, step)
            if step % config.log_every == 0:
                _log(report, step, sums, rate(step - 1), time.monotonic() - since, task.unit)
                sums, since = [], time.monotonic()
            if not leads:
                continue
            due = step % config.validate_every == 0 or step == config.steps
            kept = config.keep_every > 0 and step % config.keep_every == 0
            if due or kept or requested or step % config.save_every == 0 or step % config.log_every == 0:
                _refuse_nonsense(parts.loss, step, out)
            paused = time.monotonic()
            if kept:
                keep()
            if due:
                validate()
                facts["done"] = stop = step == config.steps or 0 < config.patience <= facts["waiting"]
            since += time.monotonic() - paused
            if step % config.save_every == 0 or stop or requested:
                checkpoint()
            if requested and not stop:
                raise RegardError(
                    f"Interrupted; everything up to step {step} is saved in {out}.",
                    "The same command goes on from there.",
                )


def _claim(out: Path, provenance: dict[str, Any]) -> dict[str, Any] | None:
    """Makes sure that `out` is free, or holds this very run; gives the facts of what it has done so far."""
    if (out / STATE).exists():
        facts = Checkpoint.load(out / STATE).facts
        here = _flat(json.loads(json.dumps(provenance)))  # as it looks when it comes back from a file
        there = _flat(facts["provenance"])
        for key in here:
            name = key.removeprefix("recipe.")
            if there.get(key) == here[key] or name in MAY_CHANGE or key.startswith("versions."):
                continue
            other = f"{name} = {there.get(key)!r}, not {here[key]!r}"
            raise RegardError(
                f"{out} holds a run with {'other data' if key.startswith('data.') else other}.",
                "Repeat its own settings and data to go on with it, or choose another --out.",
            )
        return facts
    if (out / "config.json").exists():
        raise RegardError(f"{out} holds a model already.", "Choose another --out, or delete that folder first.")
    try:
        (out / STATE).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RegardError(f"{out}: cannot be made: {error.strerror}.", "Choose another --out.") from None
    return None


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


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
def _arranged(recipe: Recipe, before: dict[str, Any] | None) -> Iterator[int]:
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
        size = usable_workers(size) if before is None else before["workers"]
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


def _log(report: Report, step: int, sums: list[LossParts], rate: float, seconds: float, unit: str) -> None:
    loss, nll, tokens = (float(torch.stack(column).double().sum()) for column in zip(*sums))
    tokens = max(1.0, tokens)
    speed = {f"{unit}s_per_second": round(tokens / seconds)}
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


def _describe(model: torch.nn.Module, device: torch.device, team: Team) -> str:
    size = sum(p.numel() for p in model.parameters())
    where = device.type if team.size == 1 else f"{team.size} processes"
    return f"{type(model).__name__} of {size / 1e6:.2f} M parameters on {where}"


def _mixed(*numbers: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little")


def _other_model(path: Path, why: str) -> RegardError:
    return RegardError(
        f"{path}: the checkpoint is of another model: {why}.", "Nothing was changed; choose another --out."
    )

"""A run of a recipe: data, tokenizers and workers around the training loop of `trainer.py`."""

import copy
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.pipelines import Pipeline, check_storable, load, write_tokenizers
from regard.training.datasets import Dataset, count_units
from regard.training.fine_tuning import StartFrom, fine_tuning_recipe, origin_name
from regard.training.log import RunLog, plot_losses, read_metrics
from regard.training.recipe import Recipe, resolve_cache_folder
from regard.training.run.checkpoint_store import CheckpointStore
from regard.training.run.run_folder import LOSSES, METRICS, check_run_folder, check_same_run, read_state
from regard.training.run.run_setup import (
    RunSpec,
    check_task_settings,
    choose_tokenizers,
    configured_machine,
    count_ranks,
    is_extended,
    make_provenance,
    open_run_folder,
    prepare_run,
)
from regard.training.run.state import TrainState
from regard.training.runtime.memory import check_model_size
from regard.training.runtime.precision import resolve_precision
from regard.training.runtime.workers import Workers, join_torchrun, run_torchrun_rank, start_workers, torchrun_rank
from regard.training.tasks import TASKS, read_dataset
from regard.training.trainer import Trainer


def run_recipe(
    recipe: Recipe,
    out: str | Path,
    *,
    start_from: StartFrom | None = None,
    dataset: Dataset[Any] | None = None,
    quiet: bool = False,
    dry_run: bool = False,
) -> Any:
    """Train a model, write it to the folder `out`, and return the pipeline that `load(out)` opens.

    An interrupted run in `out` is resumed; a finished one is extended if the recipe allows more steps. `start_from` is
    a model to fine-tune: its weights, tokenizers and sizes are used. `dataset` replaces the recipe's files. With
    `dry_run` the plan is printed, nothing is trained or written, and None is returned.

    Under torchrun, rank 0 does all this, and the other ranks only train: for them, the result is None.

    >>> run_recipe(Recipe(), "model")  # doctest: +SKIP
    """
    if torchrun_rank():
        return None if dry_run else run_torchrun_rank()
    with configured_machine(recipe.train):
        return _run(recipe, Path(out), start_from, dataset, quiet, dry_run)


def _run(
    recipe: Recipe,
    out: Path,
    start_from: StartFrom | None,
    dataset: Dataset[Any] | None,
    quiet: bool,
    dry_run: bool,
) -> Any:
    started, task, name = time.monotonic(), TASKS[recipe.task], origin_name(start_from)
    check_task_settings(recipe, task)
    if not dry_run:
        check_run_folder(out, [*recipe.data.files, *recipe.data.validation, name])
    origin = _open_origin(start_from) if start_from is not None else None
    if origin is not None:
        recipe = fine_tuning_recipe(recipe, origin.model.config, name)
    dataset = dataset or read_dataset(recipe.task, resolve_cache_folder(recipe.data, out), quiet=quiet)
    check_model_size(recipe, task, dataset)
    provenance = make_provenance(recipe, dataset, name, origin)

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
            _train(recipe, folder, checkpoint, state, dataset, origin, provenance, started, quiet, dry_run)
        if dry_run:
            return None
        try:
            plot_losses(read_metrics(out / METRICS), out / LOSSES, task.unit)
        except RegardError as error:  # the model is saved
            print(f"regard: {error.message}", file=sys.stderr)
    return load(out, recipe.train.device)


def _open_origin(start_from: StartFrom) -> Any:
    """The pipeline of the model to fine-tune, on the CPU."""
    if not isinstance(start_from, Pipeline):
        return load(start_from, "cpu")
    check_storable(start_from)  # its config and parameters are used
    if start_from.device.type == "cpu":
        return start_from
    copied: Any = start_from
    return dataclasses.replace(copied, model=copy.deepcopy(copied.model).cpu())


def _train(
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

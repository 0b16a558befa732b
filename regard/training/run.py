"""A run of a recipe: data, tokenizers and workers around the training loop of `loop.py`."""

import copy
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from regard.data.text.languages import add_directions
from regard.data.text.tokenizer import FOREIGN_KIND
from regard.devices import find_device
from regard.errors import RegardError
from regard.pipelines import (
    Pipeline,
    TextEncoder,
    Translator,
    check_storable,
    load,
    load_weights,
    make_pipeline,
    pipeline_class,
    read_tokenizers,
    write_tokenizers,
)
from regard.training.checkpoint import CheckpointStore, TrainState
from regard.training.datasets import Dataset, count_units
from regard.training.fine_tuning import HEAD_PARAMETERS, StartFrom, fine_tuning_recipe, initial_weights, origin_name
from regard.training.log import RunLog, plot_losses, read_metrics
from regard.training.loop import Rank0Resources, RunSpec, Trainer, build_model
from regard.training.machine import check_model_size, configured_machine, count_ranks, resolve_precision
from regard.training.multilingual import select_training_languages
from regard.training.pretrained_embeddings import init_embeddings
from regard.training.recipe import Recipe, resolve_cache_folder
from regard.training.resume import (
    LOSSES,
    METRICS,
    check_run_folder,
    check_same_run,
    is_extended,
    make_provenance,
    open_run_folder,
    read_state,
)
from regard.training.shards.folder import shard_files
from regard.training.tasks import TASKS, read_dataset
from regard.training.tasks.task import BatchShape, Task
from regard.training.workers import Workers, join_torchrun, run_torchrun_rank, start_workers, torchrun_rank


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


def check_task_settings(recipe: Recipe, task: Task) -> None:
    """Raise an error for training settings that contradict each other or the task."""
    config = recipe.train
    if recipe.tokenizer.dropout and shard_files(recipe.data.files):
        raise RegardError(
            "tokenizer.dropout needs text; the data are token shards.", "Train on the files, or leave it out."
        )
    if config.validate_by not in ("loss", "last", *task.metrics):
        raise RegardError(
            f"train.validate_by = {config.validate_by!r} is not a metric of the task {recipe.task}.",
            f"Choose train.validate_by from: {', '.join(('loss', *task.metrics, 'last'))}.",
        )
    if config.time and config.schedule != "wsd":
        raise RegardError(
            f"train.time needs the schedule wsd, whose decay can start at any step (got {config.schedule}).",
            "Set train.schedule to wsd, or remove train.time.",
        )


def choose_tokenizers(recipe: Recipe, task: Task, dataset: Dataset[Any], origin: Any) -> tuple[Any, ...]:
    """The tokenizers of a new run: those of the model to fine-tune, of token shards, or new ones."""
    if origin is None:
        return dataset.tokenizers or task.make_tokenizers(dataset, recipe.tokenizer)
    if dataset.tokenizers and any(one != other for one, other in zip(dataset.tokenizers, origin.tokenizers)):
        raise RegardError(
            "The token shards were made with other tokenizers than those of the model to fine-tune.",
            "Prepare the data again: regard prepare --tokenizer MODEL",
        )
    return origin.tokenizers


def prepare_run(
    recipe: Recipe,
    out: Path,
    checkpoint: Path | None,
    dataset: Dataset[Any],
    origin: Any,
    provenance: dict[str, Any],
) -> tuple[RunSpec, Rank0Resources]:
    """Encode the data and build the model; its initial weights are those of the pipeline `origin`, if there is one."""
    config, task, family = recipe.train, TASKS[recipe.task], pipeline_class(recipe.model)
    if isinstance(origin, Translator):
        origin = select_training_languages(origin, recipe.data)
    special = family.special if origin is None else origin.special
    # Special ids do not tell the formats apart: those of ALBERT are the ids of Regard.
    is_foreign = origin is not None and any(one.kind == FOREIGN_KIND for one in origin.tokenizers)
    tokenizers = read_tokenizers(out, foreign=is_foreign) if family.tokenizer_count else ()
    model_config = task.complete_config(recipe.model, dataset, tokenizers)
    shape = BatchShape(
        config.batch_tokens,
        config.seed,
        # CUDA graphs need constant shapes; on a CPU the padding would only cost time.
        constant=find_device(config.device).type == "cuda",
        images=config.batch_images,
    )
    batches, validation, note = task.encode(dataset, tokenizers, special, recipe, model_config, shape)
    spec = RunSpec(recipe, out, provenance, model_config, batches, checkpoint)
    model = build_model(spec)
    if origin is not None:
        weights = initial_weights(model, origin.model)
        load_weights(model, weights, provenance["start_from"], allow_mismatch=HEAD_PARAMETERS)
    vectors = init_embeddings(model, config, *tokenizers) if tokenizers else []
    pipeline = make_pipeline(model, tokenizers, dict(provenance), special)
    if isinstance(origin, Translator):
        # A model that is fine-tuned on some of its language pairs keeps the others.
        keeps = tokenizers[0].language_tags or not pipeline.language_pairs
        pairs = (*origin.language_pairs, *pipeline.language_pairs) if keeps else pipeline.language_pairs
        pipeline.language_pairs = add_directions(pairs, both=False)
        pipeline.language_tokens = origin.language_tokens
        pipeline.source_language, pipeline.target_language = origin.source_language, origin.target_language
    if hasattr(origin, "decoding") and type(origin) is type(pipeline):
        pipeline.decoding = origin.decoding
    if isinstance(origin, TextEncoder) and isinstance(pipeline, TextEncoder):
        pipeline.sentence = origin.sentence
    return spec, Rank0Resources(dataset, validation, pipeline, note, origin is not None, vectors)

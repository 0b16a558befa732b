"""A run: from data and a recipe to a model folder. `regard.train` and the command `regard train` are runs."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from regard.config_reader import read_toml
from regard.data.text.readers import ROWS, data_files, find_rows
from regard.data.text.tokenizer import FOREIGN_KIND
from regard.devices import find_device
from regard.errors import RegardError
from regard.interop.export_targets import ExportTarget
from regard.pipelines import (
    ImageModel,
    TextEncoder,
    TextGenerator,
    Translator,
    load,
    load_weights,
    make_pipeline,
    pipeline_class,
    read_tokenizers,
    write_tokenizers,
)
from regard.pipelines.folder import model_from_weights
from regard.recipes import find_recipe
from regard.training.checkpoint import (
    LOSSES,
    METRICS,
    CheckpointStore,
    check_run_folder,
    check_same_run,
    is_extended,
    open_run_folder,
    read_state,
    read_stored_recipe,
)
from regard.training.datasets import Dataset, count_units
from regard.training.distributed import (
    Workers,
    count_ranks,
    join_torchrun,
    run_torchrun_rank,
    start_workers,
    torchrun_rank,
    torchrun_size,
)
from regard.training.fine_tuning import (
    HEAD_PARAMETERS,
    Origin,
    StartFrom,
    fine_tuning_recipe,
    initial_weights,
    open_origin,
)
from regard.training.log import RunLog, plot_losses, read_metrics
from regard.training.loop import RunSpec, Trainer, Validation, build_model
from regard.training.machine import check_model_size, configured_machine, resolve_precision
from regard.training.plan import describe_plan
from regard.training.pretrained_embeddings import VectorCoverage, init_embeddings
from regard.training.recipe import (
    Recipe,
    nest_overrides,
    recipe_from_dict,
    recipe_to_dict,
    replace_named,
    resolve_cache_folder,
)
from regard.training.shards.dataset import ShardedDataset, shard_files, shards_task
from regard.training.tasks import TASKS, check_recipe, read_dataset, restrict_recipe, suggest_recipe
from regard.training.tasks.task import BatchShape
from regard.version import __version__

if TYPE_CHECKING:
    from regard.pipelines.folder import AnyPipeline

Data = str | Path | Sequence[str | Path] | Iterable[Any]
# Fields of rows that are tuples; of other tasks, a row is a text.
_FIELDS = {"translate": ("source", "target"), "text2text": ("source", "target"), "classify": ("text", "label")}


@overload
def train(
    data: Data | None = None,
    out: str | Path = "model",
    *,
    task: Literal["translate", "text2text"] = "translate",
    recipe: None = None,
    dry_run: Literal[False] = False,
    **options: Any,
) -> Translator: ...
@overload
def train(
    data: Data | None = None,
    out: str | Path = "model",
    *,
    task: Literal["language"],
    dry_run: Literal[False] = False,
    **options: Any,
) -> TextGenerator: ...
@overload
def train(
    data: Data | None = None,
    out: str | Path = "model",
    *,
    task: Literal["mask", "classify", "answer", "tag"],
    dry_run: Literal[False] = False,
    **options: Any,
) -> TextEncoder: ...
@overload
def train(
    data: Data | None = None,
    out: str | Path = "model",
    *,
    task: Literal["classify-images", "segment", "mask-images"],
    dry_run: Literal[False] = False,
    **options: Any,
) -> ImageModel: ...
@overload
def train(
    data: Data | None = None,
    out: str | Path = "model",
    *,
    task: str | None = None,
    recipe: str | Path | Recipe | None = None,
    start_from: StartFrom | None = None,
    export_for: ExportTarget | None = None,
    quiet: bool = False,
    dry_run: bool = False,
    **overrides: Any,
) -> "AnyPipeline | None": ...
def train(
    data: Data | None = None,
    out: str | Path = "model",
    *,
    task: str | None = None,
    recipe: str | Path | Recipe | None = None,
    start_from: StartFrom | None = None,
    export_for: ExportTarget | None = None,
    quiet: bool = False,
    dry_run: bool = False,
    **overrides: Any,
) -> "AnyPipeline | None":
    """Train a model on files or rows; whatever is not specified is chosen from the data.

    `data` names one or more files ("phrasebook": the built-in data) or a folder of token shards (see
    `regard.prepare`), or is an iterable of rows: pairs, dictionaries with the fields of a JSONL file, or a data frame.
    `out` is the model folder to write. `task` is "translate" unless the recipe or the shards name
    another one. `recipe` is a Recipe, the path of a TOML file or the name of a packaged recipe. Further keyword
    arguments override keys of the recipe: sections as dictionaries or config objects (`train={"steps": 3000}`), or
    single keys (`steps=3000`). `start_from` is a model to fine-tune: its folder, or what `regard.load` returns;
    `export_for` restricts the model to a form that this export target supports.

    An interrupted run is resumed by the same call. Random numbers, default types and gradient modes of PyTorch are
    those of the run while it trains, and afterwards those of the caller; in several threads, one training waits for
    the other. With `dry_run` the plan is printed and nothing is trained. Returns
    the pipeline that `regard.load(out)` returns; in a script that torchrun started, only on rank 0.

    >>> translator = train("pairs.tsv", out="model", steps=3000)  # doctest: +SKIP
    >>> translator("The cat chased the mouse.")  # doctest: +SKIP
    'Le chat a chassé la souris.'
    """
    if torchrun_rank():  # rank 0 reads the data, prints and writes
        if not dry_run:
            run_torchrun_rank()
        return None
    name = "the recipe" if recipe is None or isinstance(recipe, Recipe) else str(recipe)
    if isinstance(recipe, Recipe):
        table = recipe_to_dict(recipe)
    else:
        table = {} if recipe is None else read_toml(find_recipe(str(recipe)))
    if task is not None:
        table["task"] = task
    columns = overrides.get("columns") or overrides.get("data", {}).get("columns")
    fields = columns or _FIELDS.get(table.get("task", "translate"), ("text",))
    rows: dict[str, Any] = {}  # the parts of the data that are rows, under the name that recipes have for them
    with ExitStack() as stack:
        files = None if data is None else stack.enter_context(data_files(data, fields))
        if data is not None and find_rows(data) is not None:
            rows["files"] = (ROWS,)
        if find_rows(overrides.get("validation"), "validation") is not None:
            validation = stack.enter_context(data_files(overrides["validation"], fields, "validation"))
            overrides, rows["validation"] = overrides | {"validation": validation}, (ROWS,)
        table = add_shards_task(table, files)
        plain = recipe_from_dict(table, origin=name)
        nested = nest_overrides(overrides, plain)
        if files is not None:
            nested["data"] = {**nested.get("data", {}), "files": files}
        chosen = recipe_from_dict(nested, plain, "regard.train")
        options: Any = dict(start_from=start_from, export_for=export_for, quiet=quiet, dry_run=dry_run)
        setup = complete_recipe(chosen, table, nested, out, **options)
    setup = setup._replace(recipe=replace(setup.recipe, data=replace(setup.recipe.data, **rows)))
    return run(setup, out, quiet=quiet, dry_run=dry_run)


def add_shards_task(table: dict[str, Any], files: Sequence[str] | None) -> dict[str, Any]:
    """The table with the task of the token shards that `files` (or the table) name, if it has no task of its own.

    >>> add_shards_task({}, ["pairs.tsv"])
    {}
    """
    data = table.get("data")
    task = shards_task(files or (data.get("files") if isinstance(data, dict) else None))
    return {"task": task, **table} if task else table


def _keyword(key: str) -> str:
    return {"data.files": "data=…", "for": "export_for"}.get(key, key)


class Setup(NamedTuple):
    """A complete recipe, and what was read to complete it."""

    recipe: Recipe
    dataset: Dataset[Any]
    origin: Origin | None = None
    """the model to fine-tune"""
    suggested: Recipe | None = None
    """the recipe that was suggested for the data"""


def complete_recipe(
    chosen: Recipe,
    table: Mapping[str, Any],
    overrides: Mapping[str, Any],
    out: str | Path,
    *,
    start_from: StartFrom | None = None,
    export_for: ExportTarget | None = None,
    quiet: bool = False,
    dry_run: bool = False,
    key_name: Callable[[str], str] = _keyword,
) -> Setup:
    """Read the data, and choose from them what `table` and `overrides` do not name.

    `chosen` is the recipe that was read from the two tables. A run that is resumed keeps its recipe, apart from what
    they name. Errors spell keys by `key_name`.
    """
    data = chosen.data
    if "files" not in {**table.get("data", {}), **overrides.get("data", {})}:
        raise RegardError("No training data is given.", f"Pass {key_name('data.files')}.")
    if export_for and start_from:
        raise RegardError(
            f"A model to fine-tune cannot be restricted to a form for {export_for}.", f"Leave out {key_name('for')}."
        )
    origin = None if start_from is None else open_origin(start_from)
    if not dry_run:  # before reading the data, which may take long
        check_run_folder(Path(out), [*data.files, *data.validation, origin and origin.name])
    dataset = read_dataset(chosen.task, resolve_cache_folder(data, out), quiet=quiet)
    base, suggested = read_stored_recipe(out), None
    if base is None or base.task != chosen.task:
        base = suggested = suggest_recipe(chosen.task, dataset, origin is not None)
        if chosen.train.time:  # only the decay of this schedule can start early
            base = replace(base, train=replace(base.train, schedule="wsd"))
    if export_for:
        base = restrict_recipe(base, export_for)
    is_sharded = isinstance(dataset, ShardedDataset)
    if is_sharded:
        base = replace(base, tokenizer=dataset.tokenizer_config)
    recipe = replace_named(base, chosen, table, overrides)
    if is_sharded:
        _check_tokenizer(recipe, dataset, key_name)
    if origin is not None:
        _check_origin(overrides, recipe, origin, key_name)
    if export_for:
        check_recipe(recipe, export_for)
    return Setup(recipe, dataset, origin, suggested)


def _check_tokenizer(recipe: Recipe, dataset: ShardedDataset, key_name: Callable[[str], str]) -> None:
    """Raise an error for tokenizer settings that contradict those of token shards."""
    for name, value in asdict(dataset.tokenizer_config).items():
        if name != "dropout" and getattr(recipe.tokenizer, name) != value:
            raise RegardError(
                f"The token shards were prepared with tokenizer.{name} = {value!r}, not "
                f"{getattr(recipe.tokenizer, name)!r}.",
                f"Leave out {key_name(f'tokenizer.{name}')}, or prepare the data again.",
            )


def _check_origin(overrides: Mapping[str, Any], recipe: Recipe, origin: Origin, key_name: Callable[[str], str]) -> None:
    """Raise an error for overrides that contradict the model to fine-tune."""
    for name in overrides.get("tokenizer", {}):
        if name != "dropout":  # used only during training
            raise RegardError(
                f"Fine-tuning uses the tokenizers of {origin.name}.", f"Leave out {key_name(f'tokenizer.{name}')}."
            )
    model = fine_tuning_recipe(recipe, origin).model
    for name, value in overrides.get("model", {}).items():
        current = getattr(model, name, value)
        if current != value:
            raise RegardError(
                f"Fine-tuning uses the model of {origin.name}, whose {name} is {current} (got {value}).",
                f"Leave out {key_name(f'model.{name}')}.",
            )


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
    origin = None if start_from is None else open_origin(start_from)
    if not dry_run:
        check_run_folder(Path(out), [*recipe.data.files, *recipe.data.validation, origin and origin.name])
    dataset = dataset or read_dataset(recipe.task, resolve_cache_folder(recipe.data, out), quiet=quiet)
    return run(Setup(recipe, dataset, origin), out, quiet=quiet, dry_run=dry_run)


def run(setup: Setup, out: str | Path, *, quiet: bool, dry_run: bool) -> Any:
    """Train with a complete recipe, in a folder that was checked; returns the pipeline, of a dry run None."""
    started, recipe, out = time.monotonic(), setup.recipe, Path(out)
    check_settings(recipe)
    if setup.origin is not None:
        recipe = fine_tuning_recipe(recipe, setup.origin)
    check_model_size(recipe, setup.dataset, torchrun_size())
    setup = setup._replace(recipe=recipe)
    provenance = make_provenance(setup)
    with configured_machine(recipe.train), open_run_folder(out, dry_run) as folder:
        checkpoint = CheckpointStore(folder).find_intact(lambda line: print(f"regard: {line}", file=sys.stderr))
        state = read_state(checkpoint) if checkpoint else None
        if state is not None:
            check_same_run(out, state, provenance)
        if state is not None and state.done and not is_extended(recipe, state):
            if not quiet:
                print(f"{out}: the run is already finished ({count_units(state.step, 'steps')}).", file=sys.stderr)
            if torchrun_rank() is not None:
                with join_torchrun() as workers:
                    workers.connect(None)
            pipeline = load(out, recipe.train.device)
        else:
            tokenizers = choose_tokenizers(setup, folder, is_resumed=state is not None, writes=not dry_run)
            size = count_ranks(recipe, state.workers if state else None)
            setup = setup._replace(recipe=resolve_precision(recipe, state.precision if state else None))
            with Workers(size=size) if dry_run else start_workers(size) as workers:
                # While the other workers start, rank 0 encodes the data and builds the model for all of them.
                spec, validation, note, vectors = prepare(setup, tokenizers, provenance, folder, checkpoint)
                run_log = RunLog(
                    folder / METRICS,
                    recipe.train.steps,
                    state.step if state else 0,
                    is_silent=quiet,
                    writes_files=not dry_run,
                    wandb_mode=recipe.train.wandb,
                    recipe=provenance["recipe"],
                )
                if not dry_run:
                    workers.connect(spec)
                trainer = Trainer(spec, workers, run_log, started, validation)
                if state is not None:
                    run_log.print_lines(f"Resuming from step {state.step:,} of {recipe.train.steps:,}.")
                elif not quiet:
                    run_log.print_lines(
                        *describe_plan(setup, trainer.pipeline.model, note, trainer.distributed.cost, vectors)
                    )
                if dry_run:
                    return None
                trainer.run()
                pipeline = best_pipeline(trainer)
        try:
            plot_losses(read_metrics(out / METRICS), out / LOSSES, TASKS[recipe.task].unit)
        except RegardError as error:  # the model is saved
            print(f"regard: {error.message}", file=sys.stderr)
    return pipeline


def best_pipeline(trainer: Trainer) -> Any:
    """The pipeline that `load` opens after a run; its weights are in memory if the last validation saved it."""
    folder = trainer.spec.out
    if not trainer.is_saved:
        return load(folder, trainer.config.device)
    pipeline, model = trainer.pipeline.as_saved(), trainer.pipeline.model
    # A new model with the same weights, without what training attached to them, such as hooks and gradients.
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    model = model_from_weights(model.config, weights, folder).to(trainer.device).eval()
    return replace(pipeline, model=model, folders=frozenset([folder.resolve()]))


def run_worker(spec: RunSpec, workers: Workers) -> None:
    """Train in a worker process other than rank 0: updates of the weights, without validation, logs or files."""
    run_log = RunLog(spec.out / METRICS, spec.recipe.train.steps, is_silent=True, writes_files=False)
    with configured_machine(spec.recipe.train):
        Trainer(spec, workers, run_log, time.monotonic()).run()


def check_settings(recipe: Recipe) -> None:
    """Raise an error for training settings that contradict each other or the task."""
    config, task = recipe.train, TASKS[recipe.task]
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


def make_provenance(setup: Setup) -> dict[str, Any]:
    """The origin of a model, as stored in training.json: recipe, data fingerprints, parent model and versions.

    What an imported parent model says of its tokens and prompts (its chat template) stays true of the new one.
    """
    origin = setup.origin
    imported = None if origin is None else origin.pipeline.training.get("imported")
    provenance = ({} if imported is None else {"imported": imported}) | {
        "recipe": recipe_to_dict(setup.recipe),
        "data": setup.dataset.fingerprints,
        "start_from": None if origin is None else origin.name,
        "versions": {"regard": __version__, "torch": torch.__version__},
    }
    return json.loads(json.dumps(provenance))  # as it is read back from the file


def choose_tokenizers(setup: Setup, folder: Path, *, is_resumed: bool, writes: bool) -> tuple[Any, ...]:
    """The tokenizers of source and target: those of the interrupted run, the model to fine-tune or token shards, or
    new ones. Those of a new run are written to its folder; images have none."""
    recipe, dataset, origin = setup.recipe, setup.dataset, setup.origin and setup.origin.pipeline
    if not pipeline_class(recipe.model).tokenizer_count:
        return ()
    if is_resumed:
        # Special ids do not tell the formats apart: those of ALBERT are the ids of Regard.
        is_foreign = origin is not None and any(tokenizer.kind == FOREIGN_KIND for tokenizer in origin.tokenizers)
        return read_tokenizers(folder, foreign=is_foreign)
    tokenizers = dataset.tokenizers
    if origin is not None:
        if tokenizers and any(given != other for given, other in zip(tokenizers, origin.tokenizers)):
            raise RegardError(
                "The token shards were made with other tokenizers than those of the model to fine-tune.",
                "Prepare the data again: regard prepare --tokenizer MODEL",
            )
        tokenizers = origin.tokenizers
    tokenizers = tokenizers or TASKS[recipe.task].make_tokenizers(dataset, recipe.tokenizer)
    if writes:
        write_tokenizers(folder, *tokenizers)
    return tokenizers[0], tokenizers[-1]


def prepare(
    setup: Setup,
    tokenizers: tuple[Any, ...],
    provenance: dict[str, Any],
    folder: Path,
    checkpoint: Path | None,
) -> tuple[RunSpec, Validation, str, list[VectorCoverage]]:
    """Encode the data and build the model: what all ranks need, what rank 0 validates, and two notes for the plan."""
    recipe, config, task = setup.recipe, setup.recipe.train, TASKS[setup.recipe.task]
    origin = setup.origin and setup.origin.pipeline
    if origin is not None:
        origin = task.adapt_origin(origin, recipe.data)
    special = pipeline_class(recipe.model).special if origin is None else origin.special
    model_config = task.complete_config(recipe.model, setup.dataset, tokenizers)
    shape = BatchShape(
        config.batch_tokens,
        config.seed,
        # CUDA graphs need constant shapes; on a CPU the padding would only cost time.
        constant=find_device(config.device).type == "cuda",
        images=config.batch_images,
    )
    batches, validation, note = task.encode(setup.dataset, tokenizers, special, recipe, model_config, shape)
    spec = RunSpec(recipe, folder, provenance, model_config, batches, checkpoint)
    model = build_model(spec)
    if origin is not None:
        load_weights(model, initial_weights(model, origin.model), provenance["start_from"], HEAD_PARAMETERS)
    has_vectors = bool(config.source_vectors or config.target_vectors)
    vectors = init_embeddings(model, config, *tokenizers) if has_vectors and tokenizers else []
    pipeline = make_pipeline(model, tokenizers, dict(provenance), special)
    if origin is not None:
        pipeline.inherit_settings(origin)
    return spec, Validation(pipeline, setup.dataset, validation), note, vectors

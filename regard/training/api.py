"""One-call training: `regard.train`, which the command `regard train` shares."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, overload

from regard.config_reader import read_toml
from regard.errors import RegardError
from regard.interop.export_targets import ExportTarget
from regard.pipelines import ImageModel, TextEncoder, TextGenerator, Translator
from regard.pipelines.folder import AnyPipeline
from regard.recipes import find_recipe
from regard.training.datasets import Dataset, find_rows, write_rows
from regard.training.fine_tuning import StartFrom, fine_tuning_recipe, origin_config, origin_name
from regard.training.recipe import Recipe, nest_overrides, recipe_from_dict, recipe_to_dict, resolve_cache_folder
from regard.training.resume import check_run_folder, read_stored_recipe
from regard.training.run import run_recipe
from regard.training.shards.dataset import ShardedDataset, shards_task
from regard.training.tasks import check_recipe, read_dataset, restrict_recipe, suggest_recipe
from regard.training.workers import run_torchrun_rank, torchrun_rank

Data = str | Path | Sequence[str | Path] | Iterable[Any]
ROWS = "<rows>"
"""the name of data that were passed as rows, in recipes"""
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
) -> AnyPipeline | None: ...
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
) -> AnyPipeline | None:
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
    if isinstance(recipe, Recipe):
        table, origin = recipe_to_dict(recipe), "the recipe"
    else:
        table, origin = (read_toml(find_recipe(str(recipe))), str(recipe)) if recipe is not None else ({}, "the recipe")
    if task is not None:
        table["task"] = task
    rows, files = find_rows(data), None
    with ExitStack() as stack:
        if rows is not None:
            file = Path(stack.enter_context(tempfile.TemporaryDirectory()), "rows.jsonl")
            given = overrides.get("columns") or overrides.get("data", {}).get("columns")
            write_rows(rows, file, given or _FIELDS.get(table.get("task", "translate"), ("text",)))
            files = [str(file)]
        elif data is not None:
            files = [str(file) for file in ([data] if isinstance(data, str | Path) else data)]
        table = add_shards_task(table, files)
        nested = nest_overrides(overrides, recipe_from_dict(table, origin=origin))
        if files is not None:
            nested["data"] = {**nested.get("data", {}), "files": files}
        options: Any = dict(start_from=start_from, export_for=export_for, quiet=quiet, dry_run=dry_run)
        try:
            complete, dataset = resolve_recipe(table, nested, out, origin=origin, **options)
        except RegardError as error:
            if rows is None:
                raise
            raise RegardError(error.message.replace(str(file), "data"), error.hint) from None
    if rows is not None:
        complete = dataclasses.replace(complete, data=dataclasses.replace(complete.data, files=(ROWS,)))
    return run_recipe(complete, out, start_from=start_from, dataset=dataset, quiet=quiet, dry_run=dry_run)


def _keyword(key: str) -> str:
    return {"data.files": "data=…", "for": "export_for"}.get(key, key)


def add_shards_task(table: dict[str, Any], files: Sequence[str] | None) -> dict[str, Any]:
    """The table with the task of the token shards that `files` (or the table) name, if it has no task of its own.

    >>> add_shards_task({}, ["pairs.tsv"])
    {}
    """
    data = table.get("data")
    task = shards_task(files or (data.get("files") if isinstance(data, dict) else None))
    return {"task": task, **table} if task else table


def resolve_recipe(
    table: Mapping[str, Any],
    overrides: Mapping[str, Any],
    out: str | Path,
    *,
    origin: str = "the recipe",
    overrides_origin: str = "regard.train",
    start_from: StartFrom | None = None,
    export_for: ExportTarget | None = None,
    quiet: bool = False,
    dry_run: bool = False,
    key_name: Callable[[str], str] = _keyword,
) -> tuple[Recipe, Dataset[Any]]:
    """Read the data and complete a recipe: overrides first, then the table, then the stored run or a suggestion.

    `overrides` are nested tables. Errors name `origin` and `overrides_origin`, and spell keys by `key_name`.
    """
    # Task and family determine which other keys exist.
    plain = recipe_from_dict(table, origin=origin)
    chosen = {"task": overrides.get("task", plain.task)}
    if "family" in overrides.get("model", {}):
        chosen["model"] = {"family": overrides["model"]["family"]}
    plain = recipe_from_dict(chosen, plain, overrides_origin)
    plain = recipe_from_dict(overrides, plain, overrides_origin)
    data, origin_model = plain.data, origin_name(start_from)
    if "files" not in {**table.get("data", {}), **overrides.get("data", {})}:
        raise RegardError("No training data is given.", f"Pass {key_name('data.files')}.")
    if export_for and start_from:
        raise RegardError(
            f"The model to fine-tune, {origin_model}, cannot be restricted to a form for {export_for}.",
            f"Leave out {key_name('for')}.",
        )
    if not dry_run:
        # before reading the data, which may take long
        check_run_folder(Path(out), [*data.files, *data.validation, origin_model])
    dataset = read_dataset(plain.task, resolve_cache_folder(data, out), quiet=quiet)
    # A resumed run keeps its recipe, apart from what is overridden.
    stored = read_stored_recipe(out)
    if stored is not None and stored.task == plain.task:
        base = stored
    else:
        base = suggest_recipe(plain.task, dataset, start_from is not None)
        if plain.train.time:  # only its decay can start early
            base = base.override(schedule="wsd")
    if export_for:
        base = restrict_recipe(base, export_for)
    if isinstance(dataset, ShardedDataset):
        base = dataclasses.replace(base, tokenizer=dataset.tokenizer_config)
    recipe = recipe_from_dict(overrides, recipe_from_dict(table, base, origin), overrides_origin)
    if isinstance(dataset, ShardedDataset):
        _refuse_other_tokenizer(recipe, dataset, key_name)
    if start_from is not None:
        _refuse_ignored(overrides, recipe, start_from, key_name)
    if export_for:
        check_recipe(recipe, export_for)
    return recipe, dataset


def _refuse_other_tokenizer(recipe: Recipe, dataset: ShardedDataset, key_name: Callable[[str], str]) -> None:
    """Raise an error for tokenizer settings that contradict those of token shards."""
    for name, value in dataclasses.asdict(dataset.tokenizer_config).items():
        if name != "dropout" and getattr(recipe.tokenizer, name) != value:
            raise RegardError(
                f"The token shards were prepared with tokenizer.{name} = {value!r}, not "
                f"{getattr(recipe.tokenizer, name)!r}.",
                f"Leave out {key_name(f'tokenizer.{name}')}, or prepare the data again.",
            )


def _refuse_ignored(
    overrides: Mapping[str, Any], recipe: Recipe, start_from: StartFrom, key_name: Callable[[str], str]
) -> None:
    """Raise an error for overrides that contradict the model to fine-tune."""
    origin = origin_name(start_from)
    for name in overrides.get("tokenizer", {}):
        if name != "dropout":  # used only during training
            raise RegardError(
                f"Fine-tuning uses the tokenizers of {origin}.", f"Leave out {key_name(f'tokenizer.{name}')}."
            )
    model = fine_tuning_recipe(recipe, origin_config(start_from), origin).model
    for name, value in overrides.get("model", {}).items():
        current = getattr(model, name, value)
        if current != value:
            raise RegardError(
                f"Fine-tuning uses the model of {origin}, whose {name} is {current} (got {value}).",
                f"Leave out {key_name(f'model.{name}')}.",
            )

"""Recipes: the configuration of a training run, read from TOML into frozen dataclasses; and the tasks by name."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from regard.config_reader import check_keys, fill_config
from regard.data.images.augmentation import AugmentConfig
from regard.data.text.readers import PHRASEBOOK
from regard.errors import RegardError, did_you_mean
from regard.models import FAMILIES, ModelConfig, TransformerConfig, family_name
from regard.ranges import (
    Count,
    Fraction,
    Natural,
    NonNegative,
    OneOf,
    OptionalImageSide,
    Positive,
    Range,
    Rate,
    Seed,
    check_ranges,
    check_value,
    format_value,
    register,
)
from regard.training.optimizers import OptimizerName
from regard.training.schedules import ScheduleName, parse_duration

if TYPE_CHECKING:
    from regard.training.tasks.task import Task

TokenizerKind = Literal["word", "space", "char", "bpe", "bytes", "sentencepiece"]
CACHE = "regard-cache"
TASKS: "dict[str, Task]" = {}
TaskName = Annotated[str, OneOf(TASKS)]


def register_task(name: str, task: "Task") -> None:
    """Add a task: recipes, `train` and `regard train --task` then accept it by name.

    A task whose class has the same module and name replaces the earlier one.

    >>> register_task("translate", TASKS["language"])
    Traceback (most recent call last):
    regard.errors.RegardError: The task 'translate' is already registered, by ...TranslateTask. Choose another name.
    """
    register(TASKS, "task", name, task, type)


def families_for(task: str) -> tuple[str, ...]:
    """Model families that can be trained for a task; the first is the default.

    >>> families_for("translate")
    ('transformer', 'seq2seq')
    """
    return TASKS[task].families


@dataclass(frozen=True)
class DataConfig:
    """Training and validation data: files, columns, cleaning and image sizes."""

    files: tuple[str, ...] = (PHRASEBOOK,)
    """two parallel files, or TSV, CSV, JSONL or Parquet files; plain, .gz, .xz, .bz2 or .zst; "-": standard input;
    "hf:NAME:SPLIT": a dataset of the Hugging Face hub; a folder of token shards (regard prepare); "phrasebook":
    built-in sentence pairs. Images: a folder, a table (.csv), .npz or idx files"""
    validation: tuple[str, ...] = ()
    """validation files; without them, a part of the training data"""
    limit: Natural = 0
    """number of training examples to read, the first ones (of each file of text2text, of each language pair); 0: all"""
    columns: tuple[str, ...] = ()
    """columns of source and target, of text and label, or of word and tag: header names, JSONL fields, or numbers
    from 1"""
    languages: tuple[str, ...] = ()
    """codes of the source and target languages (en fr), stored in the model folder for exports and servers; for one
    model of several language pairs, the pair of each file (en-de en-fr)"""
    both_directions: bool = False
    """train every language pair also in the opposite direction"""
    sampling_temperature: Annotated[float, Range(low=1, high=100)] = 1.0
    """several language pairs: temperature T of sampling; a pair of n sentence pairs is sampled in proportion to
    n^(1/T), so that 1 is proportional and 5 favors pairs with little data (Arivazhagan et al. 2019)"""
    max_ratio: Annotated[float, Range(low=1)] = 9.0
    """maximum ratio of the lengths of both sides, in characters; pairs beyond it (by more than 20 characters) are
    dropped"""
    prefixes: tuple[str, ...] = ()
    """text2text: prefix of the sources of each file, which names the task to the model"""
    weights: tuple[Positive, ...] = ()
    """text2text: relative sampling weight of each file; the file with the smallest weight is used once per epoch"""
    size: OptionalImageSide = 0
    """images: side of the square to which they are resized and cropped, in pixels; 0: their original size"""
    longest: OptionalImageSide = 0
    """images of different sizes: maximum side in pixels; the aspect ratio is kept; 0: all images have one size"""
    patch: OptionalImageSide = 0
    """images of different sizes: patch size of the model, in pixels; sides are multiples of it; 0: chosen from
    data.longest"""
    channels: Annotated[int, Range(low=0, high=3)] = 0
    """images: 1 (gray) or 3 (color); 0: gray if all images are gray"""
    label: str = "label"
    """images: column or array with the labels"""
    on_bad: Literal["stop", "skip"] = "stop"
    """images: handling of unreadable files"""
    cache: str = ""
    """images: folder for decoded images; by default regard-cache next to the model folder"""

    def __post_init__(self) -> None:
        check_ranges(self, "data.")


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizers, which are trained on the training data before the first step."""

    kind: TokenizerKind = "bpe"
    target_kind: TokenizerKind | None = None
    """kind of the target tokenizer, if it differs"""
    vocab_size: Annotated[int, Range(low=6, high=10_000_000, hint="It includes up to 5 special tokens.")] = 8000
    shared: bool = True
    """one tokenizer for source and target"""
    lowercase: bool = False
    dropout: Fraction = 0.0
    """BPE-dropout (Provilkov et al. 2020): probability of skipping a merge during training"""

    def __post_init__(self) -> None:
        check_ranges(self, "tokenizer.")


@dataclass(frozen=True)
class TrainConfig:
    """Optimization, validation, checkpoints and hardware."""

    steps: Count = 4000
    """number of training steps"""
    batch_tokens: Count = 4096
    """maximum tokens per batch, on the source or target side; for images of different sizes, patches per batch"""
    batch_images: Count = 256
    """images per batch, if all images have one size"""
    accumulate: Annotated[int, Range(low=1, high=10_000)] = 1
    """batches per update"""
    optimizer: OptimizerName = "adam"
    lr: Annotated[float, Range(above=0, high=100)] = 2e-3
    """peak learning rate"""
    schedule: ScheduleName = "cosine"
    warmup: Natural = 400
    beta2: Rate = 0.98
    momentum: Rate = 0.9
    """momentum of sgd; 0: plain gradient descent"""
    weight_decay: Annotated[float, Range(low=0, high=100)] = 0.0
    clip: NonNegative = 1.0
    """maximum gradient norm; 0: no clipping"""
    label_smoothing: Rate = 0.1
    r_drop: Annotated[float, Range(low=0, high=1000)] = 0.0
    """weight of the divergence between two passes with different dropout (α/2 of R-Drop, Liang et al. 2021); 0: off"""
    ema: Rate = 0.0
    """decay of the exponential moving average of the weights, which is validated and saved; 0: no averaging"""
    seed: Seed = 1
    """random seed"""
    source_vectors: str = ""
    """word vectors (word2vec or GloVe text format) as initial source embeddings"""
    target_vectors: str = ""
    """word vectors as initial target embeddings"""
    validate_every: Count = 500
    validate_by: Literal["loss", "bleu", "chrf", "exact_match", "accuracy", "f1", "iou", "last"] = "loss"
    """metric that selects the saved model, if the task has it (ties are broken by the loss); last: the last model"""
    patience: Natural = 0
    """validations without improvement before training ends (schedule wsd: before the decay starts); 0: no limit"""
    time: str = ""
    """time budget, such as 10m or 1h30m; the decay starts early enough to meet it (schedule wsd)"""
    skip_spikes: bool = True
    """skip updates whose loss is far above that of the previous ones; non-finite ones are always skipped"""
    save_every: Count = 500
    keep_checkpoints: Count = 2
    """number of checkpoints to keep"""
    keep_every: Natural = 0
    """steps between model snapshots, saved as model folders under steps/; 0: none"""
    log_every: Count = 50
    wandb: Literal["off", "offline", "online"] = "off"
    """log to Weights & Biases; offline: into the folder wandb, without a network"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """training device"""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on CUDA, and on CPUs with bfloat16 instructions for models of width 256 or more; else float32"""
    workers: Annotated[int, Range(low=0, high=256)] = 0
    """single-threaded processes that share every update on a CPU; 0: one per core"""
    sharding: Literal["none", "fsdp"] = "none"
    """several processes: none: each holds the whole model (DDP); fsdp: they divide weights, gradients and optimizer
    state among them (FSDP2)"""
    compile: bool = False
    deterministic: bool = False
    """bit-exact reproducibility on a GPU, slightly slower"""

    def __post_init__(self) -> None:
        check_ranges(self, "train.")
        parse_duration(self.time)


@dataclass(frozen=True)
class Recipe:
    """The full configuration of a training run."""

    task: TaskName = "translate"
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelConfig = field(default_factory=TransformerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """augmentation of training images"""

    def __post_init__(self) -> None:
        check_ranges(self)
        family_name(self.model)  # an error if the family is not registered

    def override(self, **overrides: Any) -> "Recipe":
        """A copy with other values: sections as dictionaries, or single keys that only one section has.

        >>> recipe = Recipe().override(model={"width": 64}, steps=10)
        >>> recipe.model.width, recipe.train.steps
        (64, 10)
        """
        return recipe_from_dict(nest_overrides(overrides, self), self, "Recipe.override")


SECTIONS = ("data", "tokenizer", "model", "train", "augment")
# Model settings that are derived from the tokenizers and the data; a recipe cannot set them.
DERIVED = frozenset(
    {
        "source_vocab",
        "target_vocab",
        "shared_vocab",
        "vocab",
        "labels",
        "problem_type",
        "image_height",
        "image_width",
        "longest_side",
    }
)


def recipe_from_dict(table: Mapping[str, Any], base: Recipe | None = None, origin: str = "the recipe") -> Recipe:
    """A recipe from nested tables; missing keys have their value from `base`.

    >>> recipe_from_dict({"train": {"steps": 10}}).train.steps
    10
    """
    base = base or Recipe()
    check_keys(table, ["task", *SECTIONS], origin)
    for section in SECTIONS:
        if not isinstance(table.get(section, {}), Mapping):
            raise RegardError(f"{origin}: {section} must be a table.", f"Write [{section}] and its keys below it.")
    task = check_value(TaskName, table.get("task", base.task), f"{origin}: task")
    model_table = dict(table.get("model", {}))
    supported, base_family = families_for(task), family_name(base.model)
    family = model_table.pop("family", base_family if base_family in supported else supported[0])
    check_value(Literal[tuple(FAMILIES)], family, f"{origin}: model.family")
    if family not in supported:
        raise RegardError(
            f"{origin}: the model family {family} does not support the task {task}.",
            f"Set model.family to {' or '.join(supported)}.",
        )
    if family != base_family:
        base = dataclasses.replace(base, model=FAMILIES[family].config())
    tables = {**table, "model": model_table}
    sections = {
        # The defaults of the classes are not those of `regard train`, which chooses values from the data.
        name: fill_config(
            getattr(base, name),
            tables.get(name, {}),
            origin,
            f"{name}.",
            derived=DERIVED,
            value_hint="Leave it out for the default.",
        )
        for name in SECTIONS
    }
    return Recipe(task=task, **sections)


def replace_named(base: Recipe, chosen: Recipe, *tables: Mapping[str, Any]) -> Recipe:
    """`base` with the values that the tables name, taken from `chosen`, the recipe that was read from them.

    >>> chosen = recipe_from_dict({"train": {"steps": 10}})
    >>> replace_named(Recipe().override(lr=1.0), chosen, {"train": {"steps": 10}}).train.lr
    1.0
    """
    if type(base.model) is not type(chosen.model):
        base = dataclasses.replace(base, model=type(chosen.model)())
    sections: dict[str, Any] = {}
    for section in SECTIONS:
        config = getattr(chosen, section)
        named = {key for table in tables for key in table.get(section, ())}
        values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config) if item.name in named}
        sections[section] = dataclasses.replace(getattr(base, section), **values)
    return Recipe(task=chosen.task, **sections)


def nest_overrides(overrides: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Overrides as nested tables: a single key moves to the section that has it; `score` sets all scores of the model.

    >>> nest_overrides({"steps": 10, "score": "dot", "model": {"width": 8}}, Recipe())["model"]
    {'width': 8, 'encoder_score': 'dot', 'decoder_score': 'dot', 'cross_score': 'dot'}
    >>> nest_overrides({"dropout": 0.1}, Recipe())
    Traceback (most recent call last):
    regard.errors.RegardError: dropout is a key of tokenizer and model. Write for example model={"dropout": …}.
    """
    tables = {key: _as_table(key, value) for key, value in overrides.items() if key in ("task", *SECTIONS)}
    family = overrides.get("family", dict(tables.get("model", {})).get("family"))
    if "task" in tables and family is None and tables["task"] in TASKS:
        family = families_for(tables["task"])[0]
    model: Any = FAMILIES[family].config if family in FAMILIES else recipe.model
    keys = {
        section: [entry.name for entry in dataclasses.fields(config) if entry.name not in DERIVED]
        for section, config in ((name, model if name == "model" else getattr(recipe, name)) for name in SECTIONS)
    }
    keys["model"].append("family")
    scores = [name for name in keys["model"] if name == "score" or name.endswith("_score")]
    for key, value in overrides.items():
        if key in tables:
            continue
        if key == "score" and scores:
            tables["model"] = {**tables.get("model", {}), **dict.fromkeys(scores, value)}
            continue
        sections = [section for section in SECTIONS if key in keys[section]]
        if not sections:
            known = [*SECTIONS, "task", "out", *(name for names in keys.values() for name in names)]
            raise RegardError(f"Unknown key {key}.", did_you_mean(key, known, "See: regard train --help-all"))
        if len(sections) > 1:
            raise RegardError(
                f"{key} is a key of {' and '.join(sections)}.", f'Write for example {sections[-1]}={{"{key}": …}}.'
            )
        tables[sections[0]] = {**tables.get(sections[0], {}), key: value}
    return tables


def _as_table(name: str, value: Any) -> Any:
    """The keys of a section that is given as a dictionary or a config object."""
    if name == "task" or isinstance(value, Mapping):
        return value
    kinds = [family.config for family in FAMILIES.values()] if name == "model" else [type(getattr(Recipe(), name))]
    if isinstance(value, tuple(kinds)):
        return _section_to_dict(value)
    raise RegardError(
        f"{name} must be a table of keys (got {format_value(value)}).", f'Write for example {name}={{"key": value}}.'
    )


def _section_to_dict(config: Any) -> dict[str, Any]:
    """A section of a recipe as a table; a model with its family, and without what is derived from the data."""
    table = {key: value for key, value in dataclasses.asdict(config).items() if key not in DERIVED}
    is_model = any(type(config) is family.config for family in FAMILIES.values())
    return {"family": family_name(config), **table} if is_model else table


def resolve_cache_folder(data: DataConfig, out: str | Path) -> DataConfig:
    """Set the folder for decoded images, if it is not set: regard-cache next to the model folder.

    >>> resolve_cache_folder(DataConfig(), "/models/pets").cache
    '/models/regard-cache'
    """
    return data if data.cache else dataclasses.replace(data, cache=str(Path(out).absolute().parent / CACHE))


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as nested tables that `recipe_from_dict` reads back.

    >>> recipe_from_dict(recipe_to_dict(Recipe())) == Recipe()
    True
    """
    return {"task": recipe.task, **{name: _section_to_dict(getattr(recipe, name)) for name in SECTIONS}}


if TYPE_CHECKING:
    from regard.training.tasks.task import Task

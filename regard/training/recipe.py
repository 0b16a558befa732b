"""A recipe: what to train, on what, and how. TOML in, frozen dataclasses out; unknown keys are errors."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from regard.config_reader import check_keys, fill_config
from regard.data.images.augmentation import AugmentConfig
from regard.errors import RegardError, did_you_mean
from regard.models import FAMILIES, ModelConfig, TransformerConfig, family_of
from regard.ranges import (
    Count,
    Natural,
    NonNegative,
    OptionalSide,
    Positive,
    Range,
    Rate,
    Seed,
    Share,
    check_ranges,
    check_value,
)
from regard.training.optim.optimizers import OptimizerName
from regard.training.optim.schedules import ScheduleName, parse_duration
from regard.training.registry import TASKS, TaskName, families_for

TokenizerKind = Literal["word", "space", "char", "bpe", "bytes"]
PHRASEBOOK = "phrasebook"
CACHE = "regard-cache"


@dataclass(frozen=True)
class DataConfig:
    """Where the sentence pairs, the texts or the pictures come from, and which of them are kept."""

    files: tuple[str, ...] = (PHRASEBOOK,)
    """two parallel files, or TSV, CSV or JSONL files; plain, .gz, .xz, .bz2 or .zst; "-": standard input;
    "phrasebook": built in. Pictures: a folder, a table (.csv), .npz, idx"""
    validation: tuple[str, ...] = ()
    """the same for validation; without it a part of the data is set aside"""
    columns: tuple[str, ...] = ()
    """columns of source and target, or of text and label: names of a header or of JSONL fields, or numbers from 1"""
    languages: tuple[str, ...] = ()
    """codes of the source and target languages (en fr), kept in the model folder for exports and servers"""
    max_ratio: Annotated[float, Range(low=1)] = 9.0
    """pairs whose one side has this many times the other's characters (20 of grace) are dropped"""
    phrasebook_size: Annotated[int, Range(low=2, high=10_000_000)] = 40_000
    """how many pairs the phrasebook makes"""
    prefixes: tuple[str, ...] = ()
    """text2text: what each file's sources begin with, so that the model knows the task"""
    weights: tuple[Positive, ...] = ()
    """text2text: how often each file's pairs are seen, against each other; the least is seen once an epoch"""
    size: OptionalSide = 0
    """pictures: the side that they are scaled and cut to, in pixels; 0: the size that they have"""
    longest: OptionalSide = 0
    """pictures: each keeps its own size and proportions, no side longer than this, in pixels; 0: all have one size"""
    patch: OptionalSide = 0
    """pictures of their own sizes: sides are multiples of this, the model's patch; 0: as suits the longest"""
    channels: Annotated[int, Range(low=0, high=3)] = 0
    """pictures: 1 (grey), 3 (colour), 0: grey if all of them are"""
    label: str = "label"
    """pictures: the column, or the array, that holds the labels"""
    on_bad: Literal["stop", "skip"] = "stop"
    """pictures: what is done about a file that cannot be read"""
    cache: str = ""
    """pictures: the folder in which they are kept decoded; without one regard-cache, beside the model's"""

    def __post_init__(self) -> None:
        check_ranges(self, "data.")


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes tokens; learned from the training data before the first step."""

    kind: TokenizerKind = "bpe"
    target_kind: TokenizerKind | None = None
    """of the target side, where it differs"""
    vocab_size: Annotated[int, Range(low=1, high=10_000_000)] = 8000
    shared: bool = True
    """one tokeniser for both sides"""
    lowercase: bool = False
    dropout: Share = 0.0
    """BPE-dropout (Provilkov et al. 2020): the probability that a merge is skipped while training"""

    def __post_init__(self) -> None:
        check_ranges(self, "tokenizer.")


@dataclass(frozen=True)
class TrainConfig:
    """How long, how fast, how careful."""

    steps: Count = 4000
    batch_tokens: Count = 4096
    """tokens of either side in a batch: a batch closes when one side is full; patches of pictures of their own sizes"""
    batch_images: Count = 256
    """pictures in a batch, if they have one size"""
    accumulate: Annotated[int, Range(low=1, high=10_000)] = 1
    """batches per update"""
    optimizer: OptimizerName = "adam"
    lr: Positive = 2e-3
    schedule: ScheduleName = "cosine"
    warmup: Natural = 400
    beta2: Rate = 0.98
    weight_decay: NonNegative = 0.0
    clip: NonNegative = 1.0
    """largest norm of the gradient; 0: no limit"""
    label_smoothing: Rate = 0.1
    r_drop: NonNegative = 0.0
    """weight of the divergence between two passes with different dropout (R-Drop's α/2); 0: one pass"""
    ema: Rate = 0.0
    """decay of the moving average of the weights that is validated and saved; 0: the weights themselves"""
    seed: Seed = 1
    source_vectors: str = ""
    """word vectors (word2vec or GloVe text format) as initial embeddings"""
    target_vectors: str = ""
    validate_every: Count = 500
    validate_by: Literal["loss", "bleu", "chrf", "exact_match", "accuracy", "f1", "iou", "last"] = "loss"
    """metric that selects the model, where the task has it (ties are broken by the loss); or last: the last model"""
    patience: Natural = 0
    """validations without improvement before training ends (schedule wsd: before the learning rate decays); 0: never"""
    time: str = ""
    """time budget, such as 10m or 1h30m: the learning rate decays in time for it (schedule wsd)"""
    save_every: Count = 500
    keep_every: Natural = 0
    """steps after which the model as it is then is kept, in a folder of its own under steps; 0: never"""
    log_every: Count = 50
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on CUDA, and on CPUs that multiply it where the model is at least 256 wide; float32 elsewhere"""
    workers: Annotated[int, Range(low=0, high=256)] = 0
    """processes of one thread each that share every update on a CPU; 0: one for each core"""
    compile: bool = False
    deterministic: bool = False
    """on a GPU: the same bits every time, a little slower"""

    def __post_init__(self) -> None:
        check_ranges(self, "train.")
        parse_duration(self.time)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a run computes."""

    task: TaskName = "translate"
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelConfig = field(default_factory=TransformerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """what is done to pictures while they are learned from"""

    def __post_init__(self) -> None:
        check_ranges(self)
        family_of(self.model)  # an error if the family is not registered

    def override(self, **overrides: Any) -> "Recipe":
        """A copy with other values: sections as dictionaries, or single keys that only one section has.

        >>> recipe = Recipe().override(model={"width": 64}, steps=10)
        >>> recipe.model.width, recipe.train.steps
        (64, 10)
        """
        return recipe_from(nest_overrides(overrides, self), self, "Recipe.override")


SECTIONS = ("data", "tokenizer", "model", "train", "augment")
# Filled in from the tokenisers and the data, never by a user.
DERIVED = frozenset(
    {"source_vocab", "target_vocab", "shared_vocab", "vocab", "labels", "image_height", "image_width", "longest_side"}
)


def recipe_from(table: Mapping[str, Any], base: Recipe | None = None, origin: str = "the recipe") -> Recipe:
    """A recipe from nested tables; what they do not say is as in `base`.

    >>> recipe_from({"train": {"steps": 10}}).train.steps
    10
    """
    base = base or Recipe()
    check_keys(table, ["task", *SECTIONS], origin)
    for section in SECTIONS:
        if not isinstance(table.get(section, {}), Mapping):
            raise RegardError(f"{origin}: {section} should be a table.", f"Write [{section}] and its keys below it.")
    task = check_value(TaskName, table.get("task", base.task), f"{origin}: task")
    model_table = dict(table.get("model", {}))
    known, own = families_for(task), family_of(base.model)
    family = model_table.pop("family", own if own in known else known[0])
    check_value(Literal[tuple(FAMILIES)], family, f"{origin}: model.family")
    if family not in known:
        raise RegardError(f"{origin}: a {family} cannot be trained to {task}.", f"Choose from: {', '.join(known)}.")
    if family != own:
        base = dataclasses.replace(base, model=FAMILIES[family].config())
    tables = {**table, "model": model_table}
    sections = {
        name: fill_config(getattr(base, name), tables.get(name, {}), origin, f"{name}.", derived=DERIVED)
        for name in SECTIONS
    }
    return Recipe(task=task, **sections)


def nest_overrides(overrides: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Overrides as nested tables: a single key moves to the section that has it; `score` sets all scores of the model.

    >>> nest_overrides({"steps": 10, "score": "dot", "model": {"width": 8}}, Recipe())["model"]
    {'width': 8, 'encoder_score': 'dot', 'decoder_score': 'dot', 'cross_score': 'dot'}
    >>> nest_overrides({"dropout": 0.1}, Recipe())
    Traceback (most recent call last):
    regard.errors.RegardError: dropout is a key of tokenizer and model. Write for example model={"dropout": …}.
    """
    tables = {key: value for key, value in overrides.items() if key in ("task", *SECTIONS)}
    family = overrides.get("family", dict(tables.get("model", {})).get("family"))
    if "task" in tables and family is None and tables["task"] in TASKS:
        family = families_for(tables["task"])[0]
    model: Any = FAMILIES[family].config if family in FAMILIES else recipe.model
    keys = {
        section: [one.name for one in dataclasses.fields(config) if one.name not in DERIVED]
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
            known = [*SECTIONS, "task", *(name for names in keys.values() for name in names)]
            raise RegardError(f"Unknown key {key}.", did_you_mean(key, known, "See: regard train --help-all"))
        if len(sections) > 1:
            raise RegardError(
                f"{key} is a key of {' and '.join(sections)}.", f'Write for example {sections[-1]}={{"{key}": …}}.'
            )
        tables[sections[0]] = {**tables.get(sections[0], {}), key: value}
    return tables


def with_cache(data: DataConfig, out: str | Path) -> DataConfig:
    """The data with a folder for decoded pictures: beside the model's, where none is named.

    >>> with_cache(DataConfig(), "/models/pets").cache
    '/models/regard-cache'
    """
    return data if data.cache else dataclasses.replace(data, cache=str(Path(out).absolute().parent / CACHE))


def recipe_table(recipe: Recipe) -> dict[str, Any]:
    """The recipe as nested tables that `recipe_from` reads back.

    >>> recipe_from(recipe_table(Recipe())) == Recipe()
    True
    """
    table = dataclasses.asdict(recipe)
    table["model"] = {"family": family_of(recipe.model)} | {
        key: value for key, value in table["model"].items() if key not in DERIVED
    }
    return table

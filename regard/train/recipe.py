"""A recipe: what to train, on what, and how. TOML in, frozen dataclasses out; unknown keys are errors."""

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from regard.data.augmentation import AugmentConfig
from regard.errors import RegardError
from regard.models import FAMILIES, ModelConfig, TransformerConfig, family_of
from regard.train.optim import OptimizerName
from regard.train.schedules import ScheduleName

TaskName = Literal[
    "translate", "text2text", "language", "mask", "classify", "answer", "classify-images", "segment", "mask-images"
]
# The families that can be trained for each task; the first is taken where none is named.
FAMILIES_FOR: dict[TaskName, tuple[str, ...]] = {
    "translate": ("transformer", "seq2seq"),
    "text2text": ("transformer",),
    "language": ("gpt",),
    "mask": ("bert",),
    "classify": ("bert",),
    "answer": ("bert",),
    "classify-images": ("vit",),
    "segment": ("vit",),
    "mask-images": ("vit",),
}
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
    max_ratio: float = 9.0
    """pairs whose one side has this many times the other's characters (20 of grace) are dropped"""
    phrasebook_size: int = 40_000
    """how many pairs the phrasebook makes"""
    prefixes: tuple[str, ...] = ()
    """text2text: what each file's sources begin with, so that the model knows the task"""
    weights: tuple[float, ...] = ()
    """text2text: how often each file's pairs are seen, against each other; the least is seen once an epoch"""
    size: int = 0
    """pictures: the side that they are scaled and cut to, in pixels; 0: the size that they have"""
    longest: int = 0
    """pictures: each keeps its own size and proportions, no side longer than this, in pixels; 0: all have one size"""
    patch: int = 0
    """pictures of their own sizes: sides are multiples of this, the model's patch; 0: as suits the longest"""
    channels: int = 0
    """pictures: 1 (grey), 3 (colour), 0: grey if all of them are"""
    label: str = "label"
    """pictures: the column, or the array, that holds the labels"""
    on_bad: Literal["stop", "skip"] = "stop"
    """pictures: what is done about a file that cannot be read"""
    cache: str = ""
    """pictures: the folder in which they are kept decoded; without one regard-cache, beside the model's"""


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes tokens; learned from the training data before the first step."""

    kind: TokenizerKind = "bpe"
    target_kind: TokenizerKind | None = None
    """of the target side, where it differs"""
    vocab_size: int = 8000
    shared: bool = True
    """one tokeniser for both sides"""
    lowercase: bool = False
    dropout: float = 0.0
    """BPE-dropout (Provilkov et al. 2020): the probability that a merge is skipped while training"""


@dataclass(frozen=True)
class TrainConfig:
    """How long, how fast, how careful."""

    steps: int = 4000
    batch_tokens: int = 4096
    """tokens of either side in a batch: a batch closes when one side is full; patches of pictures of their own sizes"""
    batch_images: int = 256
    """pictures in a batch, if they have one size"""
    accumulate: int = 1
    """batches per update"""
    optimizer: OptimizerName = "adam"
    lr: float = 2e-3
    schedule: ScheduleName = "cosine"
    warmup: int = 400
    beta2: float = 0.98
    weight_decay: float = 0.0
    clip: float = 1.0
    """largest norm of the gradient; 0: no limit"""
    label_smoothing: float = 0.1
    r_drop: float = 0.0
    """weight of the divergence between two passes with different dropout (R-Drop's α/2); 0: one pass"""
    ema: float = 0.0
    """decay of the moving average of the weights that is validated and saved; 0: the weights themselves"""
    seed: int = 1
    source_vectors: str = ""
    """word vectors (word2vec or GloVe text format) as initial embeddings"""
    target_vectors: str = ""
    validate_every: int = 500
    validate_by: Literal["loss", "bleu", "chrf", "exact_match", "accuracy", "f1", "iou", "last"] = "loss"
    """metric that selects the model, where the task has it (ties are broken by the loss); or last: the last model"""
    patience: int = 0
    """validations without improvement before training ends (schedule wsd: before the learning rate decays); 0: never"""
    time: str = ""
    """time budget, such as 10m or 1h30m: the learning rate decays in time for it (schedule wsd)"""
    save_every: int = 500
    keep_every: int = 0
    """steps after which the model as it is then is kept, in a folder of its own under steps; 0: never"""
    log_every: int = 50
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on CUDA, float32 elsewhere"""
    workers: int = 0
    """processes of one thread each that share every update on a CPU; 0: one for each core"""
    compile: bool = False
    deterministic: bool = False
    """on a GPU: the same bits every time, a little slower"""


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


SECTIONS = ("data", "tokenizer", "model", "train", "augment")
# Filled in from the tokenisers and the data, never by a user.
DERIVED = frozenset(
    {"source_vocab", "target_vocab", "shared_vocab", "vocab", "labels", "image_height", "image_width", "longest_side"}
)


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "a list"}


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table of a recipe file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RegardError(f"{path}: there is no such recipe.", "Name a .toml file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RegardError(f"{path}: not a recipe in TOML: {error}.", "Mend that line.") from None


def recipe_from(table: Mapping[str, Any], base: Recipe | None = None, origin: str = "the recipe") -> Recipe:
    """A recipe from nested tables; what they do not say is as in `base`.

    >>> recipe_from({"train": {"steps": 10}}).train.steps
    10
    """
    base = base or Recipe()
    _refuse_unknown(table, ["task", *SECTIONS], "", origin)
    for section in SECTIONS:
        if not isinstance(table.get(section, {}), Mapping):
            raise RegardError(f"{origin}: {section} should be a table.", f"Write [{section}] and its keys below it.")
    task = table.get("task", base.task)
    if task not in FAMILIES_FOR:
        raise RegardError(f"{origin}: task {task!r} is not known.", f"Choose from: {', '.join(FAMILIES_FOR)}.")
    model_table = dict(table.get("model", {}))
    known, own = FAMILIES_FOR[task], family_of(base.model)
    family = model_table.pop("family", own if own in known else known[0])
    if family not in FAMILIES:
        raise RegardError(f"{origin}: model.family {family!r} is not known.", f"Choose from: {', '.join(FAMILIES)}.")
    if family not in known:
        raise RegardError(f"{origin}: a {family} cannot be trained to {task}.", f"Choose from: {', '.join(known)}.")
    model_base = base.model if family == family_of(base.model) else FAMILIES[family].config()
    return Recipe(
        task=task,
        data=_fill(base.data, table.get("data", {}), "data", origin),
        tokenizer=_fill(base.tokenizer, table.get("tokenizer", {}), "tokenizer", origin),
        model=_fill(model_base, model_table, "model", origin),
        train=_fill(base.train, table.get("train", {}), "train", origin),
        augment=_fill(base.augment, table.get("augment", {}), "augment", origin),
    )


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


def _fill(config: Any, table: Mapping[str, Any], section: str, origin: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(config) if f.name not in DERIVED}
    _refuse_unknown(table, fields, f"{section}.", origin)
    changes = {}
    for key, value in table.items():
        present = getattr(config, key)
        if isinstance(present, tuple):
            value = tuple(value) if isinstance(value, list | tuple) else (value,)
            numbers = get_args(fields[key].type)[0] is float
            if numbers and all(isinstance(one, float | int) and not isinstance(one, bool) for one in value):
                value = tuple(map(float, value))
            elif numbers:
                raise RegardError(f"{origin}: {section}.{key} = {value!r} should be numbers.", "For example [1, 0.5].")
            elif not all(isinstance(one, str) for one in value):
                raise RegardError(f"{origin}: {section}.{key} = {value!r} should be names.", 'For example ["a.tsv"].')
        elif isinstance(present, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if present is not None and value is not None and type(value) is not type(present):
            raise RegardError(
                f"{origin}: {section}.{key} = {value!r} should be {_KINDS[type(present)]}.",
                f"Its default is {present!r}.",
            )
        choices = _choices(fields[key].type)
        if choices and value not in choices:
            raise RegardError(f"{origin}: {section}.{key} = {value!r} is not known.", f"Choose from: {_list(choices)}.")
        changes[key] = value
    return dataclasses.replace(config, **changes)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """What a Literal allows, and None where it is optional; nothing for other annotations."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    literal = [choice for part in parts for choice in _choices(part)]
    return (*literal, None) if literal and NoneType in parts else ()


def _refuse_unknown(table: Mapping[str, Any], known: Iterable[str], prefix: str, origin: str) -> None:
    known = list(known)
    for key in table:
        if key not in known and not (prefix == "model." and key == "family"):
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise RegardError(f"{origin}: unknown key {prefix}{key}.", f"Did you mean {prefix}{near[0]}?")


def _list(choices: Iterable[str]) -> str:
    return ", ".join(filter(None, choices))

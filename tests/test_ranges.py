"""Validation of config fields from Python, recipes, the command line and config.json."""

import contextlib
import dataclasses
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.attention import SCORES, Score, register_score
from regard.cli import main
from regard.data import Tokenizer
from regard.data.images.augmentation import AugmentConfig
from regard.data.text.special_tokens import SpecialTokens
from regard.decode import DecodeConfig
from regard.errors import RegardError
from regard.layers import POSITIONS, PositionalEncoding, register_positions
from regard.models import FAMILIES, GPT, GPTConfig, TransformerConfig, family_name, make_model, register_family
from regard.pipelines import load, make_pipeline
from regard.ranges import Range, check_value
from regard.training import (
    TASKS,
    DataConfig,
    Recipe,
    TokenizerConfig,
    TrainConfig,
    TranslateTask,
    read_toml,
    recipe_from_dict,
    register_task,
)
from regard.training.recipe import DERIVED, SECTIONS
from tests.training.test_recipe import as_toml

MODELS = [family.config for family in FAMILIES.values()]
CONFIGS = [DataConfig, TokenizerConfig, TrainConfig, AugmentConfig, DecodeConfig, SpecialTokens, Recipe, *MODELS]
FIELDS = [(config, field) for config in CONFIGS for field in dataclasses.fields(config)]


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "text"),
    [
        (Range(low=1), [1, 2.5], [0, -1, math.nan, math.inf], "at least 1"),
        (Range(above=0), [1e-300], [0, -0.0, math.nan, math.inf, -math.inf], "above 0"),
        (Range(low=0, below=1), [0, 0.999], [1, 1.5, -0.1], "at least 0 and below 1"),
        (Range(low=0, high=1), [0, 1], [1.0001], "between 0 and 1"),
        (Range(above=0, infinite=True), [math.inf], [-math.inf, math.nan], "above 0"),
        (Range(high=1000), [-5], [1001, math.nan], "at most 1,000"),
        (Range(), [0, -1e30], [math.nan, math.inf], "finite"),
    ],
    ids=str,
)
def test_range_membership_and_text(limits, inside, outside, text):
    assert all(value in limits for value in inside)
    assert not any(value in limits for value in outside)
    assert str(limits) == text


@pytest.mark.parametrize(("config", "field"), FIELDS, ids=lambda one: getattr(one, "name", None) or one.__name__)
def test_every_numeric_field_declares_its_range(config, field):
    """Every int or float field has a Range, except the pixel mean, which may be any finite number."""

    def has_no_range(annotation: Any) -> bool:
        if get_origin(annotation) is Annotated:
            return not any(isinstance(one, Range) for one in annotation.__metadata__) and has_no_range(
                annotation.__origin__
            )
        return annotation in (int, float) or any(map(has_no_range, get_args(annotation)))

    assert field.name == "mean" or not has_no_range(field.type)


@pytest.mark.parametrize("config", CONFIGS)
def test_defaults_are_valid(config):
    assert config() == dataclasses.replace(config())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig(lr=math.nan), "train.lr must be above 0 and at most 100 (got nan). The default is 0.002."),
        (lambda: TrainConfig(lr=-1), "train.lr must be above 0 and at most 100 (got -1)."),
        (lambda: TrainConfig(lr=1e10), "train.lr must be above 0 and at most 100 (got 10000000000.0)."),
        (lambda: TrainConfig(weight_decay=1e6), "train.weight_decay must be between 0 and 100 (got 1000000.0)."),
        (lambda: TrainConfig(r_drop=1e6), "train.r_drop must be between 0 and 1,000 (got 1000000.0)."),
        (lambda: TokenizerConfig(vocab_size=3), "tokenizer.vocab_size must be between 6 and 10,000,000 (got 3). It in"),
        (lambda: AugmentConfig(mixup=1e6), "augment.mixup must be between 0 and 100 (got 1000000.0)."),
        (lambda: DecodeConfig(suppress_sequences=((-1,),)), "suppress_sequences[0][0] must be at least 0 (got -1)."),
        (lambda: TrainConfig(lr=10**400), "train.lr must be a number that a float can hold (got 1000"),
        (lambda: TrainConfig(steps=0), "train.steps must be at least 1 (got 0)."),
        (lambda: TrainConfig(steps="10"), "train.steps must be an integer (got '10')."),
        (lambda: TrainConfig(steps=1.5), "train.steps must be an integer (got 1.5)."),
        (lambda: TrainConfig(steps=True), "train.steps must be an integer (got True)."),
        (lambda: TrainConfig(steps=None), "train.steps must be an integer (got None)."),
        (lambda: TrainConfig(steps=10**5000), "train.steps must be at most 1,000,000,000 (got a very large int)."),
        (lambda: TrainConfig(validate_every=0), "train.validate_every must be at least 1 (got 0)."),
        (lambda: TrainConfig(save_every=0), "train.save_every must be at least 1 (got 0)."),
        (lambda: TrainConfig(log_every=0), "train.log_every must be at least 1 (got 0)."),
        (lambda: TrainConfig(accumulate=0), "train.accumulate must be between 1 and 10,000 (got 0)."),
        (lambda: TrainConfig(workers=-1), "train.workers must be between 0 and 256 (got -1)."),
        (lambda: TrainConfig(label_smoothing=1.0), "train.label_smoothing must be at least 0 and below 1 (got 1.0)."),
        (lambda: TrainConfig(ema=1.0), "train.ema must be at least 0 and below 1 (got 1.0)."),
        (lambda: TrainConfig(beta2=1), "train.beta2 must be at least 0 and below 1 (got 1)."),
        (lambda: TrainConfig(clip=-1), "train.clip must be at least 0 (got -1)."),
        (
            lambda: TrainConfig(optimizer="adm"),
            "train.optimizer must be one of adam, adamw, muon, sgd (got 'adm').",
        ),
        (lambda: TrainConfig(source_vectors="a\0b"), "train.source_vectors must be text without NUL characters"),
        (lambda: TransformerConfig(dropout=1.5), "model.dropout must be at least 0 and below 1 (got 1.5)."),
        (lambda: TransformerConfig(width=0), "model.width must be at least 1 (got 0)."),
        (lambda: TransformerConfig(encoder_layers=10**6), "model.encoder_layers must be between 1 and 10,000"),
        (lambda: TokenizerConfig(dropout=2), "tokenizer.dropout must be between 0 and 1 (got 2)."),
        (lambda: DataConfig(files="a.tsv"), "data.files must be a list (got 'a.tsv')."),
        (lambda: DataConfig(max_ratio=0.5), "data.max_ratio must be at least 1 (got 0.5)."),
        (lambda: DecodeConfig(beam=1001), "beam must be between 1 and 1,000 (got 1001)."),
        (lambda: DecodeConfig(patience=0), "patience must be above 0 (got 0)."),
        (lambda: DecodeConfig(temperature=0), "temperature must be between 0.001 and 1,000 (got 0). For the most"),
        (lambda: SpecialTokens(mask=-1), "special.mask must be at least 0 (got -1)."),
        (lambda: Recipe(task="sing"), "task must be one of translate, "),
        (lambda: Recipe(train={"steps": 3}), "train must be a TrainConfig (got {'steps': 3})."),
        (lambda: Recipe(model=3), "model must be the config of a registered model family (got 3)."),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_invalid_value_in_python_is_an_error(make, message):
    with pytest.raises(RegardError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_limits_that_are_valid():
    assert DecodeConfig(patience=math.inf).patience == math.inf
    assert DecodeConfig(max_ratio=1e308).limit(1000) == 256
    config = DataConfig(files=["a.tsv"], max_ratio=3)
    assert (config.files, type(config.max_ratio)) == (("a.tsv",), float)
    zero = TrainConfig(clip=0, patience=0, keep_every=0, workers=0, ema=0, r_drop=0)  # never, no limit, one per core
    assert zero.clip == 0.0


# Any value in any field, from Python, recipes, the command line and config.json

plain = st.one_of(
    st.integers(),
    st.sampled_from([0, 1, -1, 10**9, 10**19, 2**63, 10**400]),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.sampled_from(["nan", "1e999", "adam", "phrasebook", "\0", "3"]),
)
values = st.one_of(plain, st.none(), st.recursive(plain, st.lists, max_leaves=5), st.dictionaries(st.text(), plain))
fuzzed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def is_valid(config: Any, field: dataclasses.Field) -> bool:
    """Whether the value of a field is valid."""
    return attempt(lambda: check_value(field.type, getattr(config, field.name), field.name))[1] == ""


def attempt(make: Callable[[], Any]) -> tuple[Any, str]:
    """The result and an empty text, or None and the error message; other exceptions fail the test."""
    try:
        return make(), ""
    except RegardError as error:
        return None, str(error)


@given(st.sampled_from(FIELDS), values)
@settings(fuzzed, max_examples=300)
def test_python_creates_a_config_or_raises_an_error(case, value):
    config, field = case
    config_or_none, error = attempt(lambda: config(**{field.name: value}))
    assert field.name in error or is_valid(config_or_none, field)


RECIPE_FIELDS = [
    (section, field)
    for section, config in zip(SECTIONS, (DataConfig, TokenizerConfig, TransformerConfig, TrainConfig, AugmentConfig))
    for field in dataclasses.fields(config)
    if field.name not in DERIVED
]


@given(st.sampled_from(RECIPE_FIELDS), values)
@settings(fuzzed, max_examples=200)
def test_recipe_is_valid_or_the_error_names_the_file(tmp_path, case, value):
    section, field = case
    path = tmp_path / "recipe.toml"
    if isinstance(value, str):
        text = f"{field.name} = {json.dumps(value)}"
    elif value is None or isinstance(value, dict):
        text = f"{field.name} = {{}}"
    else:
        text = as_toml({field.name: value}) if isinstance(value, list) else f"{field.name} = {as_text(value)}"
    path.write_text(f"[{section}]\n{text}\n", encoding="utf-8", errors="surrogatepass")
    recipe, error = attempt(lambda: recipe_from_dict(read_toml(path), origin=str(path)))
    assert error.startswith(f"{path}: ") or is_valid(getattr(recipe, section), field)


def as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


@pytest.fixture(scope="module")
def occupied(tmp_path_factory) -> tuple[Path, Path]:
    """Sentence pairs, and an output folder that already holds a model."""
    folder = tmp_path_factory.mktemp("occupied")
    pairs = folder / "pairs.tsv"
    pairs.write_text("".join(f"word {i}\tmot {i}\n" for i in range(50)), encoding="utf-8")
    (folder / "out").mkdir()
    (folder / "out" / "config.json").write_text("{}", encoding="utf-8")
    return pairs, folder / "out"


@given(st.sampled_from(RECIPE_FIELDS), plain)
@settings(fuzzed, max_examples=12)
def test_command_line_exits_with_2_and_writes_nothing(occupied, case, value):
    pairs, out = occupied
    section, field = case
    words = ["--data", str(pairs)] if (section, field.name) != ("data", "files") else []
    words += ["--out", str(out), f"--{section}.{field.name.replace('_', '-')}"]
    words.append(str(value) if is_printable(value) else "9" * 5000)
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        assert main(["train", *words]) == 2
    assert "Traceback" not in error.getvalue()
    assert [path.name for path in out.iterdir()] == ["config.json"]


def is_printable(value: Any) -> bool:
    """Whether Python can print the value: not an integer of thousands of digits."""
    return not isinstance(value, int) or abs(value) < 10**1000


SMALL: dict[str, dict[str, Any]] = {
    "transformer": dict(width=16, heads=2, feedforward=32, encoder_layers=1, decoder_layers=1, dropout=0.3, max_len=12),
    "seq2seq": dict(width=16, dropout=0.3, max_len=12),
    "gpt": dict(width=16, heads=2, layers=1, feedforward=32, max_len=12),
    "bert": dict(width=16, heads=2, layers=1, feedforward=32, max_len=12),
    "vit": dict(width=16, heads=2, layers=1, feedforward=32, image_height=8, image_width=8, patch=4, labels=("a", "b")),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """One model folder per family."""
    tokenizer = Tokenizer.train(["one two three"], "word", mask=True)
    made = {}
    for family, sizes in SMALL.items():
        config = FAMILIES[family].config(**sizes)
        vocabularies = [
            f.name for f in dataclasses.fields(config) if f.name in ("vocab", "source_vocab", "target_vocab")
        ]
        config = dataclasses.replace(config, **dict.fromkeys(vocabularies, tokenizer.vocab_size))
        tokenizers = (tokenizer, tokenizer) if vocabularies else ()
        made[family] = tmp_path_factory.mktemp("models") / family
        make_pipeline(make_model(config).eval(), tokenizers, {}).save(made[family])
    return made


FOLDER_FIELDS = [(family, f) for family, one in FAMILIES.items() for f in dataclasses.fields(one.config)]


@given(st.sampled_from(FOLDER_FIELDS), values)
@settings(fuzzed, max_examples=150)
def test_config_json_is_valid_or_the_error_names_the_folder(folders, case, value):
    family, field = case
    path = folders[family] / "config.json"
    before = path.read_text(encoding="utf-8")
    path.write_text(json.dumps(json.loads(before) | {field.name: value}), encoding="utf-8")
    try:
        bundle, error = attempt(lambda: load(folders[family], "cpu"))
    finally:
        path.write_text(before, encoding="utf-8")
    assert str(folders[family]) in error or is_valid(bundle.model.config, field)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value", [0, 1, 7, 64, 10**9, 10**18, 0.0, 1.0, math.nan])
def test_wrong_numbers_in_config_json(folders, family, value):
    """One wrong size at a time: an error message, and no memory allocated for it."""
    path = folders[family] / "config.json"
    before = path.read_text(encoding="utf-8")
    try:
        for field in dataclasses.fields(FAMILIES[family].config):
            path.write_text(json.dumps(json.loads(before) | {field.name: value}), encoding="utf-8")
            bundle, error = attempt(lambda: load(folders[family], "cpu"))
            assert str(folders[family]) in error or is_valid(bundle.model.config, field)
    finally:
        path.write_text(before, encoding="utf-8")


CELLS = {
    "score": """
@register_score("new")
class Mine(Score):
    def pair_scores(self, q, k):
        return q @ k.mT
""",
    "family": """
class MineConfig(GPTConfig): ...
class Mine(GPT): ...
register_family("new", MineConfig, Mine, pipeline="text_generator")
""",
    "task": """
class Mine(TranslateTask): ...
register_task("new", Mine())
""",
    "positional encoding": """
@register_positions("new")
class Mine(PositionalEncoding): ...
""",
}


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_that_runs_again_replaces_what_it_registered(kind, monkeypatch):
    registry: dict[str, Any] = {
        "score": SCORES,
        "family": FAMILIES,
        "task": TASKS,
        "positional encoding": POSITIONS,
    }[kind]
    monkeypatch.setitem(registry, "new", None)  # removed after the test
    del registry["new"]
    names = dict(__name__="__main__", GPT=GPT, GPTConfig=GPTConfig, Score=Score, TranslateTask=TranslateTask)
    names |= dict(register_score=register_score, register_family=register_family, register_task=register_task)
    names |= dict(register_positions=register_positions, PositionalEncoding=PositionalEncoding)
    first = dict(names)
    exec(CELLS[kind], first)
    exec(CELLS[kind], names)
    entry = registry["new"]
    defined = {"family": lambda: entry.model, "task": lambda: type(entry)}.get(kind, lambda: entry)()
    assert defined is names["Mine"] is not first["Mine"]
    if kind == "family":  # a model of the earlier cell can still be saved
        assert family_name(first["MineConfig"]()) == "new"
    with pytest.raises(RegardError, match=rf"The {kind} 'new' is already registered, by __main__.Mine\."):
        exec(CELLS[kind].replace("Mine", "Other"), names)

"""The config reader: damaged files, unknown keys, invalid values."""

from dataclasses import dataclass

import pytest

from regard.config_reader import fill_config, json_bytes, read_json, read_toml
from regard.errors import RegardError
from regard.ranges import Count, check_ranges


@dataclass(frozen=True)
class Config:
    width: Count = 8
    heads: Count = 2
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.width % self.heads:
            raise RegardError("width must be a multiple of heads.", "Change one of them.")


def error_message(call) -> str:
    with pytest.raises(RegardError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"\xff{}", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is repeated"),
        (b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}", "lists or tables are nested too deeply"),
        (b'{"a": ' + b"[" * 100_000, "lists or tables are nested too deeply"),
    ],
)
def test_error_names_the_damaged_json_file(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert error_message(lambda: read_json(path)).startswith(f"{path}: {message}")


def test_repeated_keys_are_allowed_without_unique_keys(tmp_path):
    path = tmp_path / "vocab.json"
    path.write_bytes(b'{"a": 1, "a": 2}')
    assert read_json(path, unique_keys=False) == {"a": 2}


def test_json_round_trip(tmp_path):
    table = {"labels": ["été", "hiver"], "width": 8, "norm": None}
    (tmp_path / "a.json").write_bytes(json_bytes(table))
    assert read_json(tmp_path / "a.json") == table


def test_deeply_nested_toml_is_an_error(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("a = " + "[" * 60 + "]" * 60)
    assert error_message(lambda: read_toml(path)).startswith(f"{path}: lists or tables are nested too deeply")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"widht": 3}, "c.json: unknown key model.widht. Did you mean model.width?"),
        ({"heads": 2, "derived": 1}, "c.json: unknown key model.derived."),
        ({"width": 0}, "c.json: model.width must be at least 1 (got 0). The default is 8."),
        ({"width": "8"}, "c.json: model.width must be an integer (got '8')."),
        ({"names": [1]}, "c.json: model.names[0] must be text (got 1)."),
        ({"heads": 3}, "c.json: width must be a multiple of heads. Change one of them."),
    ],
)
def test_error_names_file_and_key(table, message):
    assert error_message(lambda: fill_config(Config(), table, "c.json", "model.")).startswith(message)


def test_table_fills_a_config():
    assert fill_config(Config(), {"width": 12, "names": "one"}, "c.json") == Config(width=12, names=("one",))
    assert error_message(lambda: fill_config(Config(), {"width": 2}, "c.json", derived={"width"})).startswith(
        "c.json: unknown key width. Did you mean"
    )
    assert error_message(lambda: fill_config(Config(), {"width": 0}, "c.json", hint="Fix it.")).endswith("Fix it.")

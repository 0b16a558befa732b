"""The config reader: files that are damaged, keys that are unknown, values that a config refuses."""

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


def refusal(call) -> str:
    with pytest.raises(RegardError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"\xff{}", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is stated twice"),
        (b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}", "lists or tables are nested too deeply"),
        (b'{"a": ' + b"[" * 100_000, "lists or tables are nested too deeply"),
    ],
)
def test_a_damaged_json_file_is_named(tmp_path, content, says):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert refusal(lambda: read_json(path)).startswith(f"{path}: {says}")


def test_files_of_other_programs_may_repeat_a_key(tmp_path):
    path = tmp_path / "vocab.json"
    path.write_bytes(b'{"a": 1, "a": 2}')
    assert read_json(path, unique_keys=False) == {"a": 2}


def test_json_is_read_as_it_was_written(tmp_path):
    table = {"labels": ["été", "hiver"], "width": 8, "norm": None}
    (tmp_path / "a.json").write_bytes(json_bytes(table))
    assert read_json(tmp_path / "a.json") == table


def test_deep_toml_is_refused(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("a = " + "[" * 60 + "]" * 60)
    assert refusal(lambda: read_toml(path)).startswith(f"{path}: lists or tables are nested too deeply")


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"widht": 3}, "c.json: unknown key model.widht. Did you mean model.width?"),
        ({"heads": 2, "derived": 1}, "c.json: unknown key model.derived."),
        ({"width": 0}, "c.json: model.width must be at least 1 (got 0). The default is 8."),
        ({"width": "8"}, "c.json: model.width must be an integer (got '8')."),
        ({"names": [1]}, "c.json: model.names[0] must be text (got 1)."),
        ({"heads": 3}, "c.json: width must be a multiple of heads. Change one of them."),
    ],
)
def test_what_a_table_gets_wrong_is_named_with_its_file(table, says):
    assert refusal(lambda: fill_config(Config(), table, "c.json", "model.")).startswith(says)


def test_a_table_fills_a_config():
    assert fill_config(Config(), {"width": 12, "names": "one"}, "c.json") == Config(width=12, names=("one",))
    assert refusal(lambda: fill_config(Config(), {"width": 2}, "c.json", derived={"width"})).startswith(
        "c.json: unknown key width. Did you mean"
    )
    assert refusal(lambda: fill_config(Config(), {"width": 0}, "c.json", hint="Fix it.")).endswith("Fix it.")

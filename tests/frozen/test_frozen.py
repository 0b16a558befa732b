"""Outputs, losses, exported files and pages have the values that they had when they were frozen (see cases.py)."""

import functools
import json
import math
from typing import Any

import pytest

from tests.frozen.cases import CASES, compute
from tests.frozen.models import MODELS, VALUES, initial_statistics

RELATIVE = 1e-4
ABSOLUTE = 1e-5  # log-probabilities near zero are rounded like the logits


@functools.cache
def frozen(group: str) -> dict[str, Any]:
    return json.loads((VALUES / f"{group}.json").read_text(encoding="utf-8"))


def differences(values: Any, expected: Any, place: str = "") -> list[str]:
    """Where values differ from the expected ones: numbers by more than 1e-4 of their size, anything else at all."""
    if isinstance(expected, float) and isinstance(values, int | float):
        is_close = math.isclose(values, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        return [] if is_close else [f"{place}: {values}, not {expected}"]
    if type(values) is not type(expected):
        return [f"{place}: {values!r}, not {expected!r}"]
    if isinstance(expected, dict):
        keys = {*values} ^ {*expected}
        found = [f"{place}.{key}: missing or new" for key in sorted(keys)]
        shared = [key for key in expected if key not in keys]
        return found + [line for key in shared for line in differences(values[key], expected[key], f"{place}.{key}")]
    if isinstance(expected, list):
        if len(values) != len(expected):
            return [f"{place}: {len(values)} entries, not {len(expected)}"]
        pairs = enumerate(zip(values, expected))
        return [line for i, (x, y) in pairs for line in differences(x, y, f"{place}[{i}]")]
    return [] if values == expected else [f"{place}: {values!r}, not {expected!r}"]


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, cases in CASES.items() for name in cases])
def test_values_are_the_frozen_ones(group, name, tmp_path):
    values = json.loads(json.dumps(compute(group, name, tmp_path)))
    found = differences(values, frozen(group)[name])
    assert not found, "\n".join(found[:20])


@pytest.mark.parametrize("name", MODELS)
def test_new_models_have_weights_of_the_same_spread(name):
    """Random weights may be drawn in another order: only their distribution is frozen."""
    expected = frozen("initial")[name]
    for key, (mean, spread, count) in initial_statistics(name).items():
        old_mean, old_spread, old_count = expected[key]
        assert count == old_count, key
        assert spread == pytest.approx(old_spread, rel=5 / math.sqrt(count)), key
        assert mean == pytest.approx(old_mean, abs=1e-7 + 7 * old_spread / math.sqrt(count)), key


def test_every_frozen_value_is_checked():
    groups = {group: [*cases] for group, cases in CASES.items()} | {"initial": [*MODELS]}
    assert {path.stem for path in VALUES.glob("*.json")} == {*groups, "shapes"}
    assert {group: [*frozen(group)] for group in groups} == groups


def test_changed_values_are_found():
    expected = {"tokens": [3, 4], "scores": [[-1.0, 2e-6], 0.5], "text": "a"}
    assert not differences({"tokens": [3, 4], "scores": [[-1.00001, 1e-5], 0.50001], "text": "a"}, expected)
    changes = [
        {"tokens": [3, 5]},
        {"tokens": [3]},
        {"scores": [[-1.001, 2e-6], 0.5]},
        {"scores": [[-1.0, 4e-5], 0.5]},
        {"scores": [[-1.0, 2e-6], 0.501]},
        {"scores": [[math.nan, 2e-6], 0.5]},
        {"text": "b"},
        {"more": 1},
    ]
    assert [len(differences(expected | change, expected)) for change in changes] == [1] * len(changes)

"""Readers and server on valid inputs, on the stored corpus and on random changes of them: success or a RegardError."""

import json
import random
import subprocess
import sys

import pytest

from tests.fuzz.mutation import mutate
from tests.fuzz.replay import CORPUS
from tests.fuzz.targets import TARGETS


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    """A process for all inputs: a crash must not end the tests, and its memory and side effects are restricted.

    Targets with compiled kernels have another one.
    """
    names = [[name for name in TARGETS if TARGETS[name].compiles is compiles] for compiles in (False, True)]
    return [result for some in names for result in replay(some)]


def replay(names: list[str]) -> list[dict[str, str]]:
    command = [sys.executable, "-m", "tests.fuzz.replay", *names]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    last = f" after {lines[-1]['target']}, {lines[-1]['input']}" if lines else ""
    assert process.returncode == 0, f"crashed{last}: {process.stderr[-2000:]}"
    return lines


def test_readers_succeed_or_raise_regard_errors(results):
    failures = [f"{one['target']}, {one['input']}: {one['traceback']}" for one in results if "traceback" in one]
    assert failures == []


def test_all_seeds_are_valid_and_the_corpus_is_complete(results):
    seeds = [one for one in results if one["input"].startswith("seed")]
    assert len(seeds) > 60
    assert [one for one in seeds if one["error"]] == []
    stored = {f"{one['target']}/{one['input']}" for one in results} - {
        f"{one['target']}/{one['input']}" for one in seeds
    }
    assert stored == {str(file.relative_to(CORPUS)) for file in CORPUS.rglob("*") if file.is_file()}
    assert len(stored) > 20


@pytest.mark.parametrize(
    "data", [b'{"a": {"b": [1, 2]}}', b'{"a": 1}\n{"b": 2}\n', b"\x08\0\0\0\0\0\0\0" + b'{"a": 1}body']
)
def test_structured_mutation_changes_values_and_keeps_the_format(data):
    mutated = [mutate(data, random.Random(seed)) for seed in range(50)]
    assert len(set(mutated) - {None, data}) > 20
    assert mutate(b"no structure", random.Random(0)) is None
    assert [mutate(data, random.Random(seed)) for seed in range(50)] == mutated

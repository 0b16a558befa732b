"""Compiled kernels with and without numba."""

import subprocess
import sys

import pytest

from regard.kernels.cpu import support


def add_one(x):
    return x + 1


def test_functions_stay_plain_without_numba(monkeypatch):
    monkeypatch.setattr(support, "numba_available", lambda: False)
    assert support.jit(add_one) is add_one


def test_unusable_numba_is_not_available(monkeypatch):
    def fail(name):
        raise ImportError("Numba needs another NumPy")

    monkeypatch.setattr(support.importlib, "import_module", fail)
    assert not support.numba_available.__wrapped__()


def test_kernels_without_a_writable_folder_are_compiled_in_memory(monkeypatch):
    numba = pytest.importorskip("numba")
    njit = numba.njit

    def fail_to_store(*arguments, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*arguments, **options)

    monkeypatch.setattr(numba, "njit", fail_to_store)
    assert support.jit(add_one)(1) == 2


def test_compilation_is_announced_once():
    pytest.importorskip("numba")
    running, kernel = [], support.jit(lambda x: x + 2)
    support.compilation.on_start = lambda: running.append(support.compilation.running)
    for argument in (1, 1.5, 2):
        kernel(argument)
    assert running == [1]
    assert support.compilation.running == 0


def test_one_sentence_does_not_import_numba():
    code = """
import sys
from tests.decode.models import CONFIGS, decode_both, make_sources, transformer
decode_both(transformer(), make_sources(1), CONFIGS["greedy"])
assert "numba" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)

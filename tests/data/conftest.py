"""Fixtures of the data tests."""

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory, so that errors show relative file names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path

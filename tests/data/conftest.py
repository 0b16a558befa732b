"""What tests of reading share."""

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, in which the test runs: errors name files as they were given."""
    monkeypatch.chdir(tmp_path)
    return tmp_path

"""Fixtures that run commands as a user does."""

import pytest

from regard.cli import main


@pytest.fixture
def run(capsys):
    """Run a command that must succeed; returns its standard output."""

    def call(*argv: object) -> str:
        code = main([*map(str, argv), "--device", "cpu"])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return call


@pytest.fixture
def run_error(capsys):
    """Run a command that must fail; returns its standard error."""

    def call(*argv: object) -> str:
        assert main([*map(str, argv)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        return err

    return call

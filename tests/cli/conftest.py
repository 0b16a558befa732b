"""Commands as a user calls them: those that must succeed, and those that must be refused."""

import pytest

from regard.cli import main


@pytest.fixture
def run(capsys):
    """Runs a command that must succeed; gives what it wrote."""

    def call(*argv: object) -> str:
        code = main([*map(str, argv), "--device", "cpu"])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return call


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused; gives what was said."""

    def call(*argv: object) -> str:
        assert main([*map(str, argv)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        return err

    return call

"""The door of the command line: names, help, exit codes."""

import os
import subprocess
import sys

import pytest

from regard import cli
from regard.cli import COMMANDS, main
from regard.errors import RegardError


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_nothing_at_all_is_a_mistake(capsys):
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("regard 0.")


@pytest.mark.parametrize(("name", "hint"), [("tranlsate", "Did you mean translate?"), ("xyz", "There are demo,")])
def test_an_unknown_command_gets_the_nearest_known_one(capsys, name, hint):
    assert main([name]) == 2
    assert capsys.readouterr().err.startswith(f"regard: There is no command '{name}'. {hint}")


@pytest.mark.parametrize("name", ["translate", "score", "evaluate", "look", "info"])
def test_each_command_has_help(capsys, name):
    assert main([name, "--help"]) == 0
    assert f"usage: regard {name}" in capsys.readouterr().out


def test_help_is_quick_because_nothing_heavy_is_imported():
    code = (
        "import sys; from regard.cli import main; main(['--help']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'matplotlib', 'tokenizers', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_python_runs_the_package_as_the_command():
    done = subprocess.run([sys.executable, "-m", "regard", "tranlsate"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.split(".")[0]) == (2, "regard: There is no command 'tranlsate'")


@pytest.mark.parametrize(
    ("raised", "exit_code", "said"),
    [
        (RegardError("It broke.", "Mend it."), 2, "regard: It broke. Mend it.\n"),
        (KeyboardInterrupt(), 130, "regard: interrupted.\n"),
        (PermissionError(13, "Permission denied", "secret"), 2, "regard: secret: Permission denied.\n"),
    ],
)
def test_what_goes_wrong_is_one_line(monkeypatch, capsys, raised, exit_code, said):
    def fail(argv: list[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "_run", fail)
    assert main(["info"]) == exit_code
    assert capsys.readouterr().err == said


def test_a_reader_that_has_had_enough_hears_no_complaint(transformer_folder, tmp_path):
    """The other end of the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "import sys; from regard.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "translate", str(transformer_folder), "one two", "--device", "cpu"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")

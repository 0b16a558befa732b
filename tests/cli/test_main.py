"""The command line as a whole: names, help, exit codes."""

import os
import re
import subprocess
import sys

import pytest

from regard import cli
from regard.cli import COMMANDS, main
from regard.errors import Interrupted, RegardError


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


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(capsys, name):
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: regard {name}" in shown
    assert not re.search(r"\b(STR|INT|FLOAT)\b", shown)


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
        (Interrupted("Interrupted at step 7.", "Run it again."), 130, "regard: Interrupted at step 7. Run it again.\n"),
        (PermissionError(13, "Permission denied", "secret"), 2, "regard: secret: Permission denied.\n"),
    ],
)
def test_what_goes_wrong_is_one_line(monkeypatch, capsys, raised, exit_code, said):
    def fail(argv: list[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "_run", fail)
    assert main(["info"]) == exit_code
    assert capsys.readouterr().err == said


def test_an_interrupt_while_importing_is_one_line(tmp_path):
    """Wherever in the import of torch it arrives."""
    for delay in (0.2, 0.6, 1.0):
        program = (
            "import os, signal, sys, threading\n"
            f"threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
            "from regard.cli import main; sys.exit(main())"
        )
        command = [sys.executable, "-c", program, "info", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 2:  # it ended before the signal: there is no model in that folder
            assert (done.returncode, done.stderr) == (130, "regard: interrupted.\n")


def test_every_summary_is_in_the_imperative():
    for command in COMMANDS.values():
        first = command.summary.split()[0]
        assert first[0].isupper()
        assert not first.endswith("s")


SILENT = {"info", "bench", "recipes", "config", "completion"}


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - SILENT))
def test_each_command_that_remarks_can_be_quiet(capsys, name):
    assert main([name, "--help"]) == 0
    assert "--quiet" in capsys.readouterr().out


def test_quiet_leaves_results_and_errors(transformer_folder, tmp_path, capsys):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("one two\tun deux\n")
    for quiet in ([], ["--quiet"], []):  # it lasts for one command
        assert main(["score", str(transformer_folder), "--data", str(pairs), "--device", "cpu", *quiet]) == 0
        shown = capsys.readouterr()
        assert shown.out.count("\t") == 2
        assert ("perplexity" in shown.err) is not bool(quiet)
    assert main(["score", str(transformer_folder), "--data", "missing.tsv", "--quiet"]) == 2
    assert "missing.tsv" in capsys.readouterr().err


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
